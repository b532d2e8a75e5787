"""The RMSNorm/RoPE/GQA/SwiGLU decoder over a paged KV cache: the Llama family's fast path.

Its own forward instead of transformers' modules: fused QKV and gate/up products with packed
weights, one rotation for queries and keys together, few operations a layer. It knows weights and
rows; requests, drafts and sampling are others' business.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foresay.core.worker.attention import AttentionMetadata, AttentionRules, paged_attention
from foresay.core.worker.kv_cache import KVCache, LayerCache, LayerKV
from foresay.core.worker.linear import Linear, compute_dtype

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# RoPE types whose frequencies do not depend on the sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
# Up to this many rows cost about as much as one.
_FEW_ROWS = 4
# The rotary table grows by this many positions: a multiple of any vector width, so that the same
# position is always computed in the same lane of the same kernel.
_ROTARY_CHUNK = 4096
# torch shares an elementwise operation on more elements than this among threads.
_ELEMENTS_PER_THREAD = 32768


class RotaryTable:
    """cos and signed sin of every position, from the model's own rotary module.

    Signed, so that x * cos + roll(x, D / 2) * sin rotates: the first half carries -sin.
    """

    def __init__(
        self, rotary: Callable[..., Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rotary = rotary
        self._like = torch.zeros(1, dtype=dtype, device=device)
        self._cos, self._sin = self._compute(0, _ROTARY_CHUNK)

    def _compute(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, end, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions)  # [1, end - start, D]
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[0], signed[0]

    def reserve(self, num_positions: int) -> None:
        """Make sure positions below `num_positions` are there."""
        start = self._cos.shape[0]
        if num_positions <= start:
            return
        parts = [(self._cos, self._sin)]
        for at in range(start, num_positions, _ROTARY_CHUNK):
            parts.append(self._compute(at, at + _ROTARY_CHUNK))
        self._cos = torch.cat([cos for cos, _ in parts])
        self._sin = torch.cat([sin for _, sin in parts])

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin [num_tokens, 1, D] of `positions` [num_tokens]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [num_tokens, num_heads, D] by its positions' cos and signed sin.

    Products and sum are separate operations: a fused multiply-add may round one element
    differently in a vector loop and in its tail, and rows would no longer be equal to the bit.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(sin))


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x) of `x` [num_rows, width]; a row's bits do not depend on the others.

    On a CPU each thread gets an equal share of the elements, and what its vector loop leaves over
    is computed by scalar code, whose exp may round differently. Where shares would end within a
    row, the rows are computed in parts that split evenly.
    """
    if x.device.type != "cpu":
        return F.silu(x)
    sizes = _even_parts(*x.shape, torch.get_num_threads())
    if len(sizes) < 2:
        return F.silu(x)
    return torch.cat([F.silu(part) for part in x.split(sizes)])


@functools.lru_cache(maxsize=1024)
def _even_parts(num_rows: int, width: int, num_threads: int) -> list[int]:
    """Return numbers of rows, in sum `num_rows`, each shared among threads at whole rows."""
    sizes = []
    while num_rows:
        size = num_rows
        while size > 1 and size % min(num_threads, -(-size * width // _ELEMENTS_PER_THREAD)):
            size -= 1
        sizes.append(size)
        num_rows -= size
    return sizes


class DecoderBlock:
    """One layer: attention and MLP, each behind an RMSNorm, each added to the residual stream."""

    def __init__(
        self,
        layer: nn.Module,
        config: Any,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None,
    ) -> None:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp

        def fused(*modules: nn.Linear) -> Linear:
            weight = torch.cat([m.weight.detach().to(device, dtype) for m in modules])
            bias = None
            if modules[0].bias is not None:
                bias = torch.cat([m.bias.detach().to(device, dtype) for m in modules])
            return Linear(weight, bias, dtype, pack=True)

        def vector(weight: torch.Tensor) -> torch.Tensor:
            return weight.detach().to(device, dtype).clone()

        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = fused(attention.o_proj)
        self.gate_up = fused(mlp.gate_proj, mlp.up_proj)
        self.down = fused(mlp.down_proj)
        normed: Any = layer
        self.attention_norm = vector(normed.input_layernorm.weight)
        self.mlp_norm = vector(normed.post_attention_layernorm.weight)
        self.query_key_norm = None
        if hasattr(attention, "q_norm"):
            self.query_key_norm = (
                vector(attention.q_norm.weight),
                vector(attention.k_norm.weight),
            )
        self.eps = float(config.rms_norm_eps)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(attention.head_dim)
        self.intermediate_size = int(mlp.gate_proj.out_features)
        self.scale = self.head_dim**-0.5
        self.window = window

    def __call__(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the residual stream after this layer; [num_tokens, hidden_size]."""
        num_tokens, hidden_size = residual.shape
        num_rotated = self.num_heads + self.num_kv_heads
        x = F.rms_norm(residual, (hidden_size,), self.attention_norm, self.eps)
        qkv = self.qkv(x).view(num_tokens, num_rotated + self.num_kv_heads, self.head_dim)
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.query_key_norm is not None:
            query_norm, key_norm = self.query_key_norm
            dim = (self.head_dim,)
            query_key = torch.cat(
                [
                    F.rms_norm(query_key[:, : self.num_heads], dim, query_norm, self.eps),
                    F.rms_norm(query_key[:, self.num_heads :], dim, key_norm, self.eps),
                ],
                dim=1,
            )
        query_key = rotate(query_key, cos, sin)
        attended = paged_attention(
            query_key[:, : self.num_heads],
            query_key[:, self.num_heads :],
            value,
            cache,
            metadata,
            scale=self.scale,
            sliding_window=self.window,
        )
        residual = self.out.add_to(residual, attended.reshape(num_tokens, -1))
        x = F.rms_norm(residual, (hidden_size,), self.mlp_norm, self.eps)
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        return self.down.add_to(residual, silu(gate).mul_(up))


class FastDecoder:
    """A Llama-family causal LM over the paged KV cache, its weights copied from a loaded model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        row_invariant: bool = True,
    ) -> None:
        """Copy and pack the weights of `model`, a transformers `...ForCausalLM` that `supports`."""
        causal: Any = model
        config = causal.config
        self.dtype, self.device = dtype, device
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.eps = float(config.rms_norm_eps)
        windows = _sliding_windows(config)
        self.layers = [
            DecoderBlock(layer, config, dtype, device, window)
            for layer, window in zip(causal.model.layers, windows, strict=True)
        ]
        self.embeddings = causal.model.embed_tokens.weight.detach().to(device, dtype)
        self.norm = causal.model.norm.weight.detach().to(device, dtype).clone()
        head = causal.lm_head
        self.lm_head = Linear(head.weight.detach().to(device, dtype), head.bias, dtype, pack=True)
        rotary = copy.deepcopy(causal.model.rotary_emb).to(device)  # the table goes on using it
        self.rotary = RotaryTable(rotary, dtype, device)
        self.kv_layout = [
            LayerKV(block.num_kv_heads, block.head_dim, block.head_dim) for block in self.layers
        ]
        self.attention_rules = AttentionRules.choose(
            device,
            dtype,
            compute_dtype(dtype, device),
            num_heads=self.layers[0].num_heads,
            num_kv_heads=self.layers[0].num_kv_heads,
            head_dim=self.layers[0].head_dim,
            row_invariant=row_invariant,
        )
        # Kernels pad a single row; to do that once per step is cheaper than in every operation.
        padded = self.attention_rules.padded_query_len(1)
        self.min_rows = padded if padded <= _FEW_ROWS else self.lm_head.min_rows

    def shallow(self) -> FastDecoder:
        """Return a decoder of one layer for each sliding window, sharing this one's weights."""
        decoder = copy.copy(self)
        decoder.layers = list({block.window: block for block in self.layers}.values())
        decoder.kv_layout = self.kv_layout[: len(decoder.layers)]
        return decoder

    @staticmethod
    def supports(config: Any) -> str | None:
        """Return None if this path runs the model, else the reason why it does not."""
        model_type = getattr(config, "model_type", None)
        if model_type not in SUPPORTED_MODEL_TYPES:
            return f"model type {model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        if config.hidden_act != "silu":
            return f"hidden_act {config.hidden_act!r} is not 'silu'"
        rope = config.rope_parameters["rope_type"]
        if rope not in _STATIC_ROPE:
            return f"rope type {rope!r} is not one of {', '.join(_STATIC_ROPE)}"
        if config.num_attention_heads % config.num_key_value_heads:
            return "the key heads do not divide the attention heads"
        return None

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens]
        output_rows: torch.Tensor,  # [num_output_rows], indices into the rows
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return logits [num_output_rows, vocab_size] in the model's dtype."""
        residual = F.embedding(input_ids, self.embeddings)
        cos, sin = self.rotary.rows(metadata.positions)
        for block, layer_cache in zip(self.layers, cache.layers, strict=True):
            residual = block(residual, cos, sin, layer_cache, metadata)
        residual = residual.index_select(0, output_rows)
        return self.lm_head(F.rms_norm(residual, (self.hidden_size,), self.norm, self.eps))


def _sliding_windows(config: Any) -> list[int | None]:
    """Return each layer's window; None: full attention."""
    window = getattr(config, "sliding_window", None)
    num_layers = int(config.num_hidden_layers)
    if config.model_type == "mistral":
        return [window] * num_layers
    if config.model_type == "llama":  # whatever its config says besides
        return [None] * num_layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]
