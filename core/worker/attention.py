"""Paged attention, batched over requests: its choice of backend, and in torch the reference.

On a GPU with triton its kernels serve (`triton_attention`), where a trial shows that they agree
with this (`triton_check`); on a CPU foresay's own (`cpu_kernels`), where the rules say so, but for
soft caps and sinks. Else it is done in torch:

A step's rows lie in a few groups, see `attention_layout`; each is one call of
`scaled_dot_product_attention` on padded queries and keys side by side, gathered or in a copy that
is kept (`dense_kv`), whatever the number of requests.

Row invariance (a row's result must not depend on its batch) rests on what was measured of the
library kernels, see `attention_rules`. It does not know which model runs or what a draft is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from foresay.core.worker import cpu_kernels
from foresay.core.worker.attention_backend import triton_backend
from foresay.core.worker.attention_layout import AttentionMetadata as AttentionMetadata
from foresay.core.worker.attention_layout import Group
from foresay.core.worker.attention_layout import TreeLayout as TreeLayout
from foresay.core.worker.attention_rules import FOLD_BELOW
from foresay.core.worker.attention_rules import AttentionRules as AttentionRules
from foresay.core.worker.kv_cache import LayerCache


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], rope applied
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], rope applied
    value: torch.Tensor,  # [num_tokens, num_kv_heads, value_dim]
    cache: LayerCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
) -> torch.Tensor:
    """Write the new keys and values to their slots, then attend causally by block table.

    A key is visible iff `pos_q - sliding_window < pos_k <= pos_q` (no lower bound without a
    window). `softcap` bounds the scores by softcap * tanh(score / softcap); `sinks` adds one
    logit per head to the softmax's denominator. Returns [num_tokens, num_heads, value_dim].
    """
    written = cache.write(metadata.slot_mapping, key, value)
    if metadata.triton is not None and (backend := triton_backend(query.device)):
        done: torch.Tensor | None = backend.attend_if_right(
            query, cache, metadata.triton, scale=scale, sliding_window=sliding_window,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
        if done is not None:
            return done
    if (
        metadata.cpu is not None
        and softcap is None
        and sinks is None
        and cpu_kernels.attends(query.shape[1], cache.num_kv_heads, query.shape[2], cache.value_dim)
    ):
        return cpu_kernels.attend(
            query, cache, metadata.cpu, scale=scale, sliding_window=sliding_window
        )
    dtype, compute = query.dtype, metadata.rules.compute_dtype
    if compute is not None:
        query = query.to(compute)
    if len(metadata.groups) == 1:
        out = _attend(query, cache, written, metadata.groups[0], scale, sliding_window, softcap,
                      sinks)  # fmt: skip
        return out.to(dtype)
    out = query.new_empty(query.shape[0], query.shape[1], cache.value_dim)
    for group in metadata.groups:
        rows = _attend(query, cache, written, group, scale, sliding_window, softcap, sinks)
        assert group.tokens is not None  # only a single group holds all tokens
        out.index_copy_(0, group.tokens, rows)
    return out.to(dtype)


def _attend(
    query: torch.Tensor,  # in the dtype to compute in
    cache: LayerCache,
    written: torch.Tensor,  # [num_tokens, width] what was stored
    group: Group,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for one group; returns [n, num_heads, value_dim], its real rows in order."""
    num_heads, num_kv_heads, value_dim = query.shape[1], cache.num_kv_heads, cache.value_dim
    fold = num_heads // num_kv_heads
    compute = query.dtype
    if group.dense is not None:
        keys, values = cache.dense(group.dense, compute, written)
    else:
        assert group.key_slots is not None
        keys, values = cache.gather(group.key_slots, group.num_requests, compute)
    eager = softcap is not None or sinks is not None
    if group.query_len < FOLD_BELOW or eager:
        # Query heads that share a key head become rows of one matrix: [B, Hkv, Q * fold, D].
        query = group.folded(query, num_kv_heads)
        mask = group.mask(window, fold, compute)
        if eager:
            out = _eager(query, keys, values, mask, scale, softcap, sinks)
        else:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        out = group.unfolded(out, num_heads)
    else:
        if group.query_rows is not None:
            query = query.index_select(0, group.query_rows)
        query = query.reshape(group.num_requests, group.query_len, num_heads, -1).transpose(1, 2)
        mask = group.mask(window, 1, compute)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=fold > 1
        )
        out = out.transpose(1, 2).reshape(-1, num_heads, value_dim)
        if group.taken is not None:
            out = out.index_select(0, group.taken)
    return out


def _eager(
    query: torch.Tensor,  # [B, Hkv, Q * fold, D]
    keys: torch.Tensor,  # [B, Hkv, K, D]
    values: torch.Tensor,  # [B, Hkv, K, Dv]
    mask: torch.Tensor,  # [B, 1, Q * fold, K]
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, which the fused kernel does not have."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float() + mask.float()
    if sinks is not None:
        num_requests, num_kv_heads, rows, _ = scores.shape
        fold = sinks.numel() // num_kv_heads
        sink = sinks.float().view(1, num_kv_heads, 1, fold, 1)
        sink = sink.expand(num_requests, -1, rows // fold, -1, -1)
        sink = sink.reshape(num_requests, num_kv_heads, rows, 1)
        probs = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs.to(values.dtype), values)
