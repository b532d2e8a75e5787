"""Paged attention in torch, batched over requests: the reference, and the CPU's only backend.

A step's rows are put into a few groups of requests with similar lengths; each group is one call of
`scaled_dot_product_attention` on padded queries and gathered keys, whatever the number of requests.
Everything that depends on lengths only is computed once per step, in `AttentionMetadata`.

Row invariance (a row's result must not depend on its batch) rests on what was measured of the
library kernels, see `AttentionRules`. It does not know which model runs or what a draft is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from foresay.core.worker.kv_cache import LayerCache

# Groups: requests whose query lengths fall between the same two of these share a call.
_QUERY_BUCKETS = (8, 32, 128, 512)
# Up to this many query rows the heads that share a key head are folded into rows of one matrix.
_FOLD_BELOW = 33
# The fused CPU kernel takes query rows in blocks of 32, 64 or 256, and keys in blocks of 512.
_QUERY_BLOCK = 32
_MIN_ROWS = 8
_KEY_BLOCK = 512
_KEY_STEP = 64


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """Paddings under which the kernels give each row the same bits in every batch.

    On a CPU: at least 8 query rows in the last block of rows too, an additive mask always, and keys
    padded so that the last block's length is one at which the product sums as over a whole block.
    """

    min_rows: int = 1  # rows in every block of query rows, at least
    query_group_size: int = 1  # query heads per key head: rows per token where they are folded
    key_lens: tuple[int, ...] = (16,)  # allowed lengths of the last key block, ascending
    compute_dtype: torch.dtype | None = None  # attend in this dtype; None: the inputs' own

    def padded_query_len(self, query_len: int) -> int:
        """Return the length that a request's query rows are padded to."""
        fold = self.query_group_size if query_len < _FOLD_BELOW else 1
        while 0 < query_len * fold % _QUERY_BLOCK < self.min_rows:
            query_len += 1
        return query_len

    def padded_key_len(self, num_keys: int) -> int:
        """Return the length that `num_keys` keys are padded to."""
        block = self.key_lens[-1]
        whole, rest = divmod(num_keys, block)
        if rest == 0:
            return num_keys
        return whole * block + next(length for length in self.key_lens if rest <= length)

    @staticmethod
    def choose(
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        row_invariant: bool,
    ) -> AttentionRules:
        """Return the rules for a device and a model's heads; on a CPU they are probed."""
        compute = compute_dtype if compute_dtype != dtype else None
        if device.type != "cpu" or not row_invariant:
            return AttentionRules(compute_dtype=compute)
        key_lens = _safe_key_lens(compute_dtype, _MIN_ROWS, num_kv_heads, head_dim)
        return AttentionRules(_MIN_ROWS, num_heads // num_kv_heads, key_lens, compute)


def _safe_key_lens(
    dtype: torch.dtype, num_rows: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Return the key lengths up to one block whose results equal the whole block's, bit for bit.

    A matrix product splits long sums, at places that depend on their length; masked keys add exact
    zeros, so a length is safe if it splits the real keys as the whole block does. Tried with few
    and many query rows, and with as many real keys as each length can have.
    """
    generator = torch.Generator().manual_seed(0)
    safe: list[int] = []
    for length in range(_KEY_STEP, _KEY_BLOCK, _KEY_STEP):
        shorter = safe[-1] if safe else 0
        tried = [
            (rows, real) for rows in (num_rows, 5 * num_rows) for real in (length, shorter + 1)
        ]
        if all(
            _same_bits(dtype, rows, num_kv_heads, head_dim, real, length, generator)
            for rows, real in tried
        ):
            safe.append(length)
    return (*safe, _KEY_BLOCK)


def _same_bits(
    dtype: torch.dtype,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    num_keys: int,
    length: int,
    generator: torch.Generator,
) -> bool:
    """Whether `num_keys` keys padded to `length` give the same bits as padded to a whole block.

    On random inputs; and on values that cancel out under equal weights, of which another order of
    summing leaves another remainder. What is rounded to a narrow dtype hides it otherwise: of sums
    in bfloat16 that differ in float32, three in four random trials showed nothing.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query = random(1, num_kv_heads, num_rows, head_dim).to(dtype)
    keys, values = (random(1, _KEY_BLOCK, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    exponents = torch.randint(-9, 10, values.shape, generator=generator)
    cancelling = random(*values.shape) * torch.exp2(exponents.float())
    order = torch.randperm(num_keys, generator=generator)
    half = num_keys // 2
    cancelling[:, order[half : 2 * half]] = -cancelling[:, order[:half]]
    cancelling[:, order[2 * half :]] = 0
    mask = torch.zeros(1, 1, num_rows, _KEY_BLOCK, dtype=dtype)
    mask[..., num_keys:] = float("-inf")
    for asked, given in ((query, values), (torch.zeros_like(query), cancelling.to(dtype))):
        padded, whole = (
            F.scaled_dot_product_attention(
                asked,
                keys[:, :size].contiguous().transpose(1, 2),
                given[:, :size].contiguous().transpose(1, 2),
                attn_mask=mask[..., :size].contiguous(),
            )
            for size in (length, _KEY_BLOCK)
        )
        if not torch.equal(padded, whole):
            return False
    return True


@dataclass(slots=True)
class _Group:
    """Requests attended to in one call: B of them, Q query rows and K keys each, padded."""

    query_rows: torch.Tensor | None  # [B * Q] token index of each padded row; None: all, in order
    taken: torch.Tensor | None  # [n] which of the B * Q rows are real; None: all
    tokens: torch.Tensor | None  # [n] the token each of them belongs to; None: all, in order
    key_slots: torch.Tensor  # [B * K]
    query_positions: torch.Tensor  # [B, Q]
    num_requests: int
    query_len: int
    key_len: int
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, fold: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [B, 1, Q * fold, K], made once per window and step."""
        key = (window, fold)
        if key not in self.masks:
            position = self.query_positions[:, :, None]  # [B, Q, 1]
            keys = torch.arange(self.key_len, device=position.device)
            hidden = keys > position  # [B, Q, K]
            if window is not None:
                hidden |= keys <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=position.device)
            mask.masked_fill_(hidden, float("-inf"))
            if fold > 1:
                mask = mask.repeat_interleave(fold, dim=1)
            self.masks[key] = mask[:, None]
        return self.masks[key]


@dataclass(slots=True)
class AttentionMetadata:
    """A step's batch as attention sees it. Rows are flat: request after request.

    `positions` [num_tokens] and `slot_mapping` [num_tokens] are int64 on the model's device.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    groups: list[_Group]
    rules: AttentionRules

    @staticmethod
    def build(
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        slot_mapping: np.ndarray,
        null_slot: int,
        rules: AttentionRules,
        device: torch.device,
    ) -> AttentionMetadata:
        """Lay out one step.

        positions: per request the positions of its query rows, ascending.
        slots: per request the slots of positions 0, 1, ... up to its last query position.
        slot_mapping: [num_tokens] where each row's key and value are written.
        """
        query_lens = [len(rows) for rows in positions]
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        buckets: dict[tuple[int, int], list[int]] = {}
        for index, (query_len, keys) in enumerate(zip(query_lens, slots, strict=True)):
            query_bucket = next((b for b in _QUERY_BUCKETS if query_len <= b), query_len)
            key_bucket = (rules.padded_key_len(len(keys)) - 1).bit_length()
            buckets.setdefault((query_bucket, key_bucket), []).append(index)
        groups = []
        for members in buckets.values():
            query_len = rules.padded_query_len(max(query_lens[i] for i in members))
            longest = max(len(slots[i]) for i in members)
            key_len = rules.padded_key_len(longest)
            # A padding row repeats token 0 at position 0: it sees one key, so it stays finite.
            rows = np.zeros((len(members), query_len), dtype=np.int64)
            row_positions = np.zeros((len(members), query_len), dtype=np.int64)
            key_slots = np.full((len(members), key_len), null_slot, dtype=np.int64)
            for at, i in enumerate(members):
                rows[at, : query_lens[i]] = np.arange(starts[i], starts[i + 1])
                row_positions[at, : query_lens[i]] = positions[i]
                key_slots[at, : len(slots[i])] = slots[i]
            padded = any(query_lens[i] != query_len for i in members)
            whole = len(buckets) == 1  # then the members are all requests, in order
            taken = np.concatenate(
                [np.arange(query_lens[i]) + at * query_len for at, i in enumerate(members)]
            )
            groups.append(
                _Group(
                    query_rows=None if whole and not padded else _tensor(rows.ravel(), device),
                    taken=_tensor(taken, device) if padded else None,
                    tokens=None if whole else _tensor(rows.ravel()[taken], device),
                    key_slots=_tensor(key_slots.ravel(), device),
                    query_positions=_tensor(row_positions, device),
                    num_requests=len(members),
                    query_len=query_len,
                    key_len=key_len,
                )
            )
        return AttentionMetadata(
            positions=_tensor(np.concatenate(positions), device),
            slot_mapping=_tensor(slot_mapping, device),
            groups=groups,
            rules=rules,
        )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


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
    cache.write(metadata.slot_mapping, key, value)
    if len(metadata.groups) == 1:
        return _attend(query, cache, metadata.groups[0], metadata.rules, scale, sliding_window,
                       softcap, sinks)  # fmt: skip
    out = query.new_empty(query.shape[0], query.shape[1], cache.value_dim)
    for group in metadata.groups:
        rows = _attend(query, cache, group, metadata.rules, scale, sliding_window, softcap, sinks)
        assert group.tokens is not None  # only a single group holds all tokens
        out.index_copy_(0, group.tokens, rows)
    return out


def _attend(
    query: torch.Tensor,
    cache: LayerCache,
    group: _Group,
    rules: AttentionRules,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for one group; returns [n, num_heads, value_dim], its real rows in order."""
    num_requests, query_len = group.num_requests, group.query_len
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, value_dim = cache.num_kv_heads, cache.value_dim
    fold = num_heads // num_kv_heads
    dtype = query.dtype
    compute = dtype if rules.compute_dtype is None else rules.compute_dtype
    if group.query_rows is not None:
        query = query.index_select(0, group.query_rows)
    if compute != dtype:
        query = query.to(compute)
    keys, values = cache.gather(group.key_slots, num_requests, compute)
    eager = softcap is not None or sinks is not None
    if query_len < _FOLD_BELOW or eager:
        # Query heads that share a key head become rows of one matrix: [B, Hkv, Q * fold, D].
        query = query.reshape(num_requests, query_len, num_kv_heads, fold, head_dim)
        query = query.transpose(1, 2).reshape(num_requests, num_kv_heads, -1, head_dim)
        mask = group.mask(window, fold, compute)
        if eager:
            out = _eager(query, keys, values, mask, scale, softcap, sinks)
        else:
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
        out = out.view(num_requests, num_kv_heads, query_len, fold, value_dim).transpose(1, 2)
    else:
        query = query.reshape(num_requests, query_len, num_heads, head_dim).transpose(1, 2)
        mask = group.mask(window, 1, compute)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=fold > 1
        ).transpose(1, 2)
    out = out.reshape(num_requests * query_len, num_heads, value_dim)
    if group.taken is not None:
        out = out.index_select(0, group.taken)
    return out if compute == dtype else out.to(dtype)


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
