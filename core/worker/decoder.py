"""The RMSNorm/RoPE/GQA/SwiGLU decoder over a paged KV cache: the Llama family's fast path.

Its own forward instead of transformers' modules: fused QKV and gate/up products with packed
weights, one rotation for queries and keys together, few operations a layer. It knows weights and
rows; requests, drafts and sampling are others' business.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from foresay.core.proposer import KVRows
from foresay.core.worker.attention import AttentionMetadata, AttentionRules, paged_attention
from foresay.core.worker.capture import Capture
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.linear import Linear as Linear  # drafters need it, too
from foresay.core.worker.linear import compute_dtype
from foresay.core.worker.norms import RMSNorm as RMSNorm

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


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Do as `rotate` does, in the place of `x`, and return it."""
    turned = x.roll(x.shape[-1] // 2, dims=-1).mul_(sin)
    return x.mul_(cos).add_(turned)


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


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> Heads:
        """Read the shape from a Llama-like config."""
        num_heads = int(config.num_attention_heads)
        return Heads(
            num_heads,
            int(getattr(config, "num_key_value_heads", None) or num_heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        )


class Attend(Protocol):
    """Stores keys and values and attends: `foresay.core.proposer.KVRows.attend` is one."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim], rope applied
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], rope applied
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, head_dim]."""
        ...


class SelfAttention:
    """Attention with rope and grouped heads, between its norm and the residual stream.

    `tensors` are named as in checkpoints: `q_proj.weight` [num_heads * head_dim, input_size],
    `k_proj.weight`, `v_proj.weight`, `o_proj.weight`; biases of these, `q_norm.weight` and
    `k_norm.weight` [head_dim] if there are any. The input may be wider than the output.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        heads: Heads,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
    ) -> None:
        self.heads = heads
        fused = functools.partial(_fused, tensors, dtype, device, row_invariant, linear)
        self.qkv = fused("q_proj", "k_proj", "v_proj")
        self.out = fused("o_proj")
        self.query_key_norm = None
        if "q_norm.weight" in tensors:
            self.query_key_norm = (
                RMSNorm(tensors["q_norm.weight"].to(device, dtype), eps),
                RMSNorm(tensors["k_norm.weight"].to(device, dtype), eps),
            )
        self.scale = heads.head_dim**-0.5
        self.window = window

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, input_size], normed
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return `residual` and what is attended to, added; [num_tokens, hidden_size]."""
        num_tokens, heads = x.shape[0], self.heads
        num_rotated = heads.num_heads + heads.num_kv_heads
        qkv = self.qkv(x).view(num_tokens, num_rotated + heads.num_kv_heads, heads.head_dim)
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.query_key_norm is not None:
            query_norm, key_norm = self.query_key_norm
            query_key = torch.cat(
                [
                    query_norm(query_key[:, : heads.num_heads]),
                    key_norm(query_key[:, heads.num_heads :]),
                ],
                dim=1,
            )
        rotate_(query_key, cos, sin)  # beside the values: they are stored together
        attended = attend(
            query_key[:, : heads.num_heads],
            query_key[:, heads.num_heads :],
            value,
            scale=self.scale,
            sliding_window=self.window,
        )
        return self.out.add_to(residual, attended.reshape(num_tokens, -1))


class MLP:
    """The gated MLP, between its norm and the residual stream.

    `tensors`: `gate_proj.weight` and `up_proj.weight` [intermediate_size, hidden_size],
    `down_proj.weight`, and biases of these if there are any.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
    ) -> None:
        fused = functools.partial(_fused, tensors, dtype, device, row_invariant, linear)
        self.gate_up = fused("gate_proj", "up_proj")
        self.down = fused("down_proj")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual` and the MLP's output of the normed `x`, added; the shape of both."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down.add_to(residual, silu(gate).mul_(up))


class DecoderBlock:
    """One layer: attention and MLP, each behind an RMSNorm, each added to the residual stream.

    `tensors` are named as in checkpoints: `input_layernorm.weight`,
    `post_attention_layernorm.weight`, and those of `SelfAttention` and `MLP` under `self_attn.`
    and `mlp.`. Without an `input_layernorm.weight` attention takes the residual stream as it is.
    `row_invariant`: see `Linear`; a drafter does without. `linear`: what makes the products.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        heads: Heads,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
    ) -> None:
        self.attention = SelfAttention(
            under(tensors, "self_attn."),
            heads,
            eps=eps,
            dtype=dtype,
            device=device,
            window=window,
            row_invariant=row_invariant,
            linear=linear,
        )
        self.mlp = MLP(
            under(tensors, "mlp."), dtype, device, row_invariant=row_invariant, linear=linear
        )
        self.attention_norm = None
        if "input_layernorm.weight" in tensors:
            self.attention_norm = RMSNorm(tensors["input_layernorm.weight"].to(device, dtype), eps)
        self.mlp_norm = RMSNorm(tensors["post_attention_layernorm.weight"].to(device, dtype), eps)
        self.window = window

    def __call__(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return the residual stream after this layer; [num_tokens, hidden_size]."""
        x = residual
        if self.attention_norm is not None:
            x = self.attention_norm(residual)
        residual = self.attention(x, residual, cos, sin, attend)
        return self.mlp(self.mlp_norm(residual), residual)


def under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _fused(
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    row_invariant: bool,
    linear: type[Linear],
    *names: str,
) -> Linear:
    """Return one product for several of the same input; either all have a bias or none has."""
    weight, bias = (
        [tensors[f"{name}.{kind}"].detach() for name in names if f"{name}.{kind}" in tensors]
        for kind in ("weight", "bias")
    )
    assert len(bias) in (0, len(weight))
    return linear(
        torch.cat([part.to(device, dtype) for part in weight]),
        torch.cat([part.to(device, dtype) for part in bias]) if bias else None,
        dtype,
        pack=True,
        row_invariant=row_invariant,
    )


class FastDecoder:
    """A Llama-family causal LM over the paged KV cache, its weights copied from a loaded model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
    ) -> None:
        """Copy and pack the weights of `model`, a transformers `...ForCausalLM` that `supports`.

        `linear` makes the products, the output head's too.
        """
        causal: Any = model
        config = causal.config
        self.dtype, self.device = dtype, device
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        eps = float(config.rms_norm_eps)
        heads = Heads.of(config)
        self.layers = [
            DecoderBlock(
                dict(layer.named_parameters()),
                heads,
                eps=eps,
                dtype=dtype,
                device=device,
                window=window,
                linear=linear,
            )
            for layer, window in zip(causal.model.layers, _sliding_windows(config), strict=True)
        ]
        self.embeddings = causal.model.embed_tokens.weight.detach().to(device, dtype)
        self.norm = RMSNorm(causal.model.norm.weight.to(device, dtype), eps)
        head = causal.lm_head
        self.lm_head = linear(head.weight.detach().to(device, dtype), head.bias, dtype, pack=True)
        rotary = copy.deepcopy(causal.model.rotary_emb).to(device)  # the table goes on using it
        self.rotary = RotaryTable(rotary, dtype, device)
        self.kv_layout = [LayerKV(heads.num_kv_heads, heads.head_dim, heads.head_dim)] * len(
            self.layers
        )
        self.attention_rules = AttentionRules.choose(
            device,
            dtype,
            compute_dtype(dtype, device),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            row_invariant=row_invariant,
        )
        # Kernels pad a single row; to do that once per step is cheaper than in every operation.
        padded = self.attention_rules.padded_query_len(1)
        self.min_rows = padded if padded <= _FEW_ROWS else self.lm_head.min_rows

    def lm_head_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output head's weight and bias for token ids; see `TargetView`."""
        return self.lm_head.rows(ids)

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
        capture: Capture | None = None,
    ) -> torch.Tensor:
        """Return logits [num_output_rows, vocab_size] in the model's dtype; fill `capture`."""
        attends = [
            functools.partial(paged_attention, cache=layer, metadata=metadata)
            for layer in cache.layers
        ]
        return self._run(input_ids, metadata.positions, output_rows, attends, capture)

    def forward_rows(
        self, input_ids: torch.Tensor, output_rows: torch.Tensor, rows: KVRows
    ) -> torch.Tensor:
        """Return the same as `forward`, over a proposer's own KV layers."""
        attends = [functools.partial(rows.attend, number) for number in range(len(self.layers))]
        return self._run(input_ids, rows.positions, output_rows, attends, None)

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        output_rows: torch.Tensor,
        attends: Sequence[Attend],  # by layer
        capture: Capture | None,
    ) -> torch.Tensor:
        residual = F.embedding(input_ids, self.embeddings)
        cos, sin = self.rotary.rows(positions)
        for number, (block, attend) in enumerate(zip(self.layers, attends, strict=True)):
            if capture is not None:
                capture.put_stream(number, residual)
            residual = block(residual, cos, sin, attend)
        if capture is not None:
            capture.put_stream(len(self.layers), residual)
            if capture.hidden_state:
                capture.put_hidden(self.norm(residual))
        return self.lm_head(self.norm(residual.index_select(0, output_rows)))


def _sliding_windows(config: Any) -> list[int | None]:
    """Return each layer's window; None: full attention."""
    window = getattr(config, "sliding_window", None)
    num_layers = int(config.num_hidden_layers)
    if config.model_type == "mistral":
        return [window] * num_layers
    if config.model_type == "llama":  # whatever its config says besides
        return [None] * num_layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]
