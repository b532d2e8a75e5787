"""Our attention inside transformers' models: the function their modules call, and its two names.

A call is handed, as one object, to whatever came as `paged` with the call of the model: the KV
cache in a real pass, a probe in a trial one. Knows nothing of any particular model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from foresay.core.proposer import KVRows
from foresay.core.worker.attention import AttentionMetadata, paged_attention
from foresay.core.worker.kv_cache import KVCache

# The same attention under two names. transformers makes masks for the second name only.
PAGED = "foresay_paged"
PROBED = "foresay_probed"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of one layer's attention, for the rows of one forward pass."""

    layer: Any  # the module's layer_idx
    query: torch.Tensor  # [num_tokens, num_heads, head_dim], rope applied
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim], rope applied
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    mask: Any  # None under `PAGED`
    scaling: float | None  # None: 1 / sqrt(head_dim)
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    keywords: dict[str, Any]  # what else the module said

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling


class Attention(Protocol):
    """What answers the attention calls of a forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return [num_tokens, num_heads, value_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attends over the KV cache."""

    cache: KVCache
    metadata: AttentionMetadata
    windows: Sequence[int | None]  # by layer; what masks would have said

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Write the call's keys and values to the cache and attend by block table."""
        layer = self.cache.layers[call.layer]
        dtype = layer.key.dtype
        rows = paged_attention(
            call.query.to(dtype),
            call.key.to(dtype),
            call.value.to(dtype),
            layer,
            self.metadata,
            scale=call.scale,
            sliding_window=self.windows[call.layer],
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return rows.to(call.query.dtype)


@dataclass(frozen=True, slots=True)
class RowsAttention:
    """Attends over a proposer's own KV layers."""

    rows: KVRows
    windows: Sequence[int | None]  # by layer

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Store the call's keys and values and attend."""
        return self.rows.attend(
            call.layer,
            call.query,
            call.key,
            call.value,
            scale=call.scale,
            sliding_window=self.windows[call.layer],
            softcap=call.softcap,
            sinks=call.sinks,
        )


def _attention(
    module: Any,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]: the new tokens only
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    paged: Attention | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call; returns [1, num_tokens, num_heads, value_dim]."""
    if paged is None:
        raise TypeError("the model does not hand its keywords down to its attention")
    rows = paged.attend(
        AttentionCall(
            layer=getattr(module, "layer_idx", None),
            query=query[0].transpose(0, 1),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            mask=attention_mask,
            scaling=scaling,
            softcap=softcap,
            sinks=s_aux,
            keywords=keywords,
        )
    )
    return rows[None], None


def _mask_with_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Make a mask whose attribute `rule` says what a real one would show.

    `rule(batch, head, query, key)`, on indices, is true where the key is visible.
    """
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


transformers.AttentionInterface.register(PAGED, _attention)
transformers.AttentionInterface.register(PROBED, _attention)
AttentionMaskInterface.register(PROBED, _mask_with_rule)
