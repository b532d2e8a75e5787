"""The RMSNorm/RoPE/GQA/SwiGLU decoder over a paged KV cache: the Llama family's fast path.

Its own forward instead of transformers' modules, layer by layer (`decoder_layer`). It knows weights
and rows; requests, drafts and sampling are others' business.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from foresay.core.proposer import KVRows
from foresay.core.worker import cpu_kernels
from foresay.core.worker.attention import AttentionMetadata, AttentionRules, paged_attention
from foresay.core.worker.capture import Capture
from foresay.core.worker.cpu_layer import CPULayers, Layer

# Drafters of the same shape need the pieces, too.
from foresay.core.worker.decoder_layer import MLP as MLP
from foresay.core.worker.decoder_layer import Attend as Attend
from foresay.core.worker.decoder_layer import DecoderBlock as DecoderBlock
from foresay.core.worker.decoder_layer import Heads as Heads
from foresay.core.worker.decoder_layer import SelfAttention as SelfAttention
from foresay.core.worker.decoder_layer import silu as silu
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.linear import Linear as Linear
from foresay.core.worker.linear import compute_dtype
from foresay.core.worker.norms import RMSNorm as RMSNorm
from foresay.core.worker.rotary import RotaryTable as RotaryTable
from foresay.core.worker.rotary import rotate as rotate

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# RoPE types whose frequencies do not depend on the sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


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
            own_kernels=cpu_kernels.serves(dtype, device)
            and cpu_kernels.attends(
                heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim
            ),
        )
        # All in one, where the CPU's own kernels serve and attend.
        own = self.attention_rules.own_kernels
        self.cpu_layers = CPULayers.of(self.layers, dtype) if own else None
        self.min_rows = max(linear.min_rows for linear in self._linears())

    @property
    def is_half(self) -> bool:
        """Whether any product's weight is kept in float16."""
        return any(linear.is_half for linear in self._linears())

    def _linears(self) -> list[Linear]:
        found = [self.lm_head]
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            found += [attention.qkv, attention.out, mlp.gate_up, mlp.down]
        return found

    def lm_head_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output head's weight and bias for token ids; see `TargetView`."""
        return self.lm_head.rows(ids)

    def shallow(self) -> FastDecoder:
        """Return a decoder of one layer for each sliding window, sharing this one's weights."""
        decoder = copy.copy(self)
        decoder.layers = list({block.window: block for block in self.layers}.values())
        if self.cpu_layers is not None:
            decoder.cpu_layers = CPULayers.of(decoder.layers, self.dtype)
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
        layers = self._whole_layers(cache, metadata) or self._layers(
            functools.partial(paged_attention, cache=layer, metadata=metadata)
            for layer in cache.layers
        )
        return self._run(input_ids, metadata.positions, output_rows, layers, capture)

    def forward_rows(
        self, input_ids: torch.Tensor, output_rows: torch.Tensor, rows: KVRows
    ) -> torch.Tensor:
        """Return the same as `forward`, over a proposer's own KV layers."""
        layers = self._layers(
            functools.partial(rows.attend, number) for number in range(len(self.layers))
        )
        return self._run(input_ids, rows.positions, output_rows, layers, None)

    def _whole_layers(self, cache: KVCache, metadata: AttentionMetadata) -> list[Layer] | None:
        """Return the layers of a pass in one call each, if the CPU's own kernels serve it."""
        if self.cpu_layers is None or metadata.cpu is None:
            return None
        return self.cpu_layers.over(cache.layers, metadata.slot_mapping, metadata.cpu)

    def _layers(self, attends: Iterable[Attend]) -> list[Layer]:
        """Return the layers of a pass, each with its attention."""
        pairs = zip(self.layers, attends, strict=True)
        return [functools.partial(block, attend=attend) for block, attend in pairs]

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        output_rows: torch.Tensor,
        layers: Sequence[Layer],
        capture: Capture | None,
    ) -> torch.Tensor:
        residual = F.embedding(input_ids, self.embeddings)
        cos, sin = self.rotary.rows(positions)
        for number, layer in enumerate(layers):
            if capture is not None:
                capture.put_stream(number, residual)
            residual = layer(residual, cos, sin)
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
