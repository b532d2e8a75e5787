"""Paged attention in Triton: rows of texts and of trees, prompts and single tokens, in one launch.

Knows query rows, the slots of their requests' keys, positions, and for nodes of a tree which nodes
they see, as bits. Does not know requests, nor how rows were shared out among programs: the host
side does (`triton_attention`).

Query heads that share a key head are folded into rows of one matrix: a *tile* holds the heads of
one key head for a few consecutive query rows of one request, `block_m` in all. Its keys are taken
in blocks of `block_n`, which begin at multiples of `block_n`, and in *splits* of `split_len`, which
begin at multiples of `split_len`. Each split has its own maximum, sum of weights and sum of values;
splits are merged in ascending order, by the same instructions whether one program has all of a
tile's splits (`attention_kernel`) or several share them (then `merge_kernel` does it).

A launch may have more work items, and rows to merge, than the step has: those of no tokens and no
parts do nothing. So one launch, captured in a CUDA graph, serves many steps. How many items it has
does not follow the lengths of contexts, so there an item may be any range of a tile's splits, and
all splits are left to `merge_kernel` (`all_parts`), which is launched anyway. (To merge some here
and store others would take more registers than there are.)

So what a row gets depends on the row and its keys alone: block and split are counted from its
request's first key, tile mates share no arithmetic with it, and what it does not see adds exact
zeros at every stage. That holds as far as `tl.dot` gives a row of its result the same bits whatever
is in the others, which matrix units do: a reason for one `block_m` for all rows, be they of a
prompt or a decode step, since another shape may be another instruction. Nodes of a tree see the
same keys in other columns than the same tokens in a text do, so their sums are rounded otherwise:
for them nothing of the kind is claimed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a work item: a tile, and which of its splits.
FIRST_TOKEN = tl.constexpr(0)  # of its query rows, which are consecutive
NUM_TOKENS = tl.constexpr(1)
FIRST_KEY = tl.constexpr(2)  # its request's place among all key slots
KEY_END = tl.constexpr(3)  # no row of the tile sees this key of the request, or one after it
TEXT_END = tl.constexpr(4)  # keys before it hold the positions 0, 1, ...; from it on, nodes
FIRST_NODE = tl.constexpr(5)  # its request's place among all nodes
FIRST_SPLIT = tl.constexpr(6)
SPLIT_END = tl.constexpr(7)
IS_PART = tl.constexpr(8)  # whether other programs have splits of the tile, too
NUM_FIELDS = tl.constexpr(9)

# Columns of a row whose parts are to be merged.
TOKEN = tl.constexpr(0)
FIRST_PART = tl.constexpr(1)
NUM_PARTS = tl.constexpr(2)
NUM_MERGED_FIELDS = tl.constexpr(3)

_INF = tl.constexpr(float("inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(2**30)


@triton.jit
def _decay(top, new_top):
    """What weights relative to `top` count relative to `new_top`: 0 if there were none."""
    return tl.where(top == -_INF, 0.0, tl.exp2(top - new_top))


@triton.jit
def _sum(old, old_decay, new, new_decay):
    """Add what two splits have. With an explicit fma, so that both kernels round alike."""
    return tl.fma(new, new_decay, old * old_decay)


@triton.jit
def _divisor(top, total, sinks, has_sinks: tl.constexpr):
    """Return what the values' sum is multiplied by and then divided by."""
    decay = tl.full(top.shape, 1.0, tl.float32)
    if has_sinks:
        sinks *= _LOG2_E
        new_top = tl.maximum(top, sinks)
        decay = _decay(top, new_top)
        total = tl.fma(total, decay, tl.exp2(sinks - new_top))
    return decay, total  # 0 in rows beyond the tile's, which are never stored


@triton.jit
def _store_part(
    sums_ptr, values_ptr, first_parts_ptr, split, tokens, heads, value_dims, is_row, top, total,
    values, num_heads: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """Store what a split has of a tile's rows, for `merge_kernel`."""
    places = tl.load(first_parts_ptr + tokens, mask=is_row, other=0).to(tl.int64) + split
    places = places * num_heads + heads
    tl.store(sums_ptr + places * 2, top, mask=is_row)
    tl.store(sums_ptr + places * 2 + 1, total, mask=is_row)
    tl.store(
        values_ptr + places[:, None] * value_dim + value_dims[None, :],
        values,
        mask=is_row[:, None] & (value_dims < value_dim)[None, :],
    )


@triton.jit(do_not_specialize=["num_words", "window"])
def attention_kernel(
    query_ptr, query_stride, head_stride,  # [num_tokens, num_heads, head_dim]
    cache_ptr, cache_stride,  # [num_slots, width]: all key heads, then all value heads
    out_ptr,  # [num_tokens, num_heads, value_dim]
    sinks_ptr,  # [num_heads] float32
    items_ptr,  # [num_items, NUM_FIELDS] int32
    key_slots_ptr,  # int32, request after request
    positions_ptr,  # [num_tokens] int32
    node_positions_ptr,  # int32, request after request
    seen_ptr,  # [num_tokens, num_words] int32: bit i of a node's words: it sees node i
    first_parts_ptr,  # [num_tokens] int32: where the parts of a row begin
    part_sums_ptr, part_values_ptr,  # float32 [num_parts, num_heads, 2], [.., value_dim]
    num_words, window, scale, softcap,
    num_heads: tl.constexpr, fold: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_v: tl.constexpr,
    split_len: tl.constexpr, precision: tl.constexpr,  # of float32 products
    has_window: tl.constexpr, has_softcap: tl.constexpr, has_sinks: tl.constexpr,
    all_parts: tl.constexpr,
):  # fmt: skip
    """Attend for one tile: store its rows, or those of splits for `merge_kernel`.

    The latter with `all_parts` for each split of the item; else for an item of one split that is
    marked so.

    Scores are kept in units of log(2). What is not seen scores -inf, whatever its key holds; but
    its value is multiplied by 0, so it must be finite.
    """
    item_ptr = items_ptr + tl.program_id(0) * NUM_FIELDS
    num_tokens = tl.load(item_ptr + NUM_TOKENS)
    if num_tokens == 0:
        return
    kv_head = tl.program_id(1)
    first_key = tl.load(item_ptr + FIRST_KEY)
    key_end = tl.load(item_ptr + KEY_END)
    text_end = tl.load(item_ptr + TEXT_END)
    first_node = tl.load(item_ptr + FIRST_NODE)

    rows = tl.arange(0, block_m)
    is_row = rows // fold < num_tokens
    tokens = (tl.load(item_ptr + FIRST_TOKEN) + rows // fold).to(tl.int64)
    heads = kv_head * fold + rows % fold
    dims = tl.arange(0, block_d)
    value_dims = tl.arange(0, block_v)
    query = tl.load(
        query_ptr + tokens[:, None] * query_stride + heads[:, None] * head_stride + dims[None, :],
        mask=is_row[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    )
    position = tl.load(positions_ptr + tokens, mask=is_row, other=-1)
    lowest = tl.full((), 0, tl.int32)  # no row sees a key before it
    if has_window:
        least = tl.min(tl.where(is_row, position, _FAR), axis=0)
        # A node's place among the keys is never below its position.
        lowest = tl.maximum(least - window + 1, 0) // block_n * block_n

    top = tl.full((block_m,), -_INF, tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    values = tl.zeros((block_m, block_v), tl.float32)
    for split in range(tl.load(item_ptr + FIRST_SPLIT), tl.load(item_ptr + SPLIT_END)):
        split_top = tl.full((block_m,), -_INF, tl.float32)
        split_total = tl.zeros((block_m,), tl.float32)
        split_values = tl.zeros((block_m, block_v), tl.float32)
        split_end = tl.minimum(split * split_len + split_len, key_end)
        for start in range(tl.maximum(split * split_len, lowest), split_end, block_n):
            keys = start + tl.arange(0, block_n)
            is_key = keys < split_end
            slots = tl.load(key_slots_ptr + first_key + keys, mask=is_key, other=0).to(tl.int64)
            slot_ptrs = cache_ptr + slots * cache_stride
            key = tl.load(
                slot_ptrs[None, :] + kv_head * head_dim + dims[:, None],
                mask=is_key[None, :] & (dims < head_dim)[:, None],
                other=0.0,
            )
            value = tl.load(
                slot_ptrs[:, None]
                + (num_heads // fold) * head_dim
                + kv_head * value_dim
                + value_dims[None, :],
                mask=is_key[:, None] & (value_dims < value_dim)[None, :],
                other=0.0,
            )
            scores = tl.dot(query, key, input_precision=precision) * scale
            if has_softcap:
                # tanh(x) = 1 - 2 / (e^2x + 1), of a score / softcap
                growth = tl.exp2(scores * (2 * _LOG2_E / softcap))
                scores = softcap * (1.0 - 2.0 / (growth + 1.0))

            is_seen = is_key[None, :] & (keys[None, :] <= position[:, None])
            if has_window:
                is_seen = is_seen & (keys[None, :] > position[:, None] - window)
            if start + block_n > text_end:
                nodes = keys - text_end
                is_node = is_key & (nodes >= 0)
                words = tl.load(
                    seen_ptr + tokens[:, None] * num_words + (nodes >> 5)[None, :],
                    mask=is_row[:, None] & is_node[None, :],
                    other=0,
                )
                is_above = ((words >> (nodes & 31)[None, :]) & 1) != 0
                if has_window:
                    above = tl.load(node_positions_ptr + first_node + nodes, mask=is_node, other=0)
                    is_above = is_above & (above[None, :] > position[:, None] - window)
                is_seen = tl.where(is_node[None, :], is_above, is_seen)

            scores = tl.where(is_seen, scores * _LOG2_E, -_INF)
            new_top = tl.maximum(split_top, tl.max(scores, axis=1))
            weights = tl.exp2(scores - tl.where(new_top > -_INF, new_top, 0.0)[:, None])
            decay = _decay(split_top, new_top)
            split_total = split_total * decay + tl.sum(weights, axis=1)
            split_values = tl.dot(
                weights.to(value.dtype), value, split_values * decay[:, None],
                input_precision=precision,
            )  # fmt: skip
            split_top = new_top

        if all_parts:
            _store_part(
                part_sums_ptr, part_values_ptr, first_parts_ptr, split, tokens, heads, value_dims,
                is_row, split_top, split_total, split_values, num_heads, value_dim,
            )  # fmt: skip
        else:
            new_top = tl.maximum(top, split_top)
            decay = _decay(top, new_top)
            split_decay = _decay(split_top, new_top)
            total = _sum(total, decay, split_total, split_decay)
            values = _sum(values, decay[:, None], split_values, split_decay[:, None])
            top = new_top

    if all_parts:
        return
    if tl.load(item_ptr + IS_PART) != 0:
        _store_part(
            part_sums_ptr, part_values_ptr, first_parts_ptr, tl.load(item_ptr + FIRST_SPLIT),
            tokens, heads, value_dims, is_row, top, total, values, num_heads, value_dim,
        )  # fmt: skip
    else:
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) if has_sinks else 0.0
        decay, divisor = _divisor(top, total, sinks, has_sinks)
        tl.store(
            out_ptr + (tokens * num_heads + heads)[:, None] * value_dim + value_dims[None, :],
            (values * decay[:, None] / divisor[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (value_dims < value_dim)[None, :],
        )


@triton.jit
def merge_kernel(
    out_ptr, sinks_ptr, merged_ptr,  # [num_merged, NUM_MERGED_FIELDS] int32
    part_sums_ptr, part_values_ptr,
    num_heads: tl.constexpr, value_dim: tl.constexpr, block_v: tl.constexpr,
    has_sinks: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row's head, in ascending order, and store it."""
    row_ptr = merged_ptr + tl.program_id(0) * NUM_MERGED_FIELDS
    num_parts = tl.load(row_ptr + NUM_PARTS)
    if num_parts == 0:
        return
    head = tl.program_id(1)
    token = tl.load(row_ptr + TOKEN).to(tl.int64)
    first_part = tl.load(row_ptr + FIRST_PART).to(tl.int64)
    value_dims = tl.arange(0, block_v)
    is_value = value_dims < value_dim

    top = tl.full((), -_INF, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    values = tl.zeros((block_v,), tl.float32)
    for part in range(num_parts):
        place = (first_part + part) * num_heads + head
        split_top = tl.load(part_sums_ptr + place * 2)
        split_total = tl.load(part_sums_ptr + place * 2 + 1)
        split_values = tl.load(
            part_values_ptr + place * value_dim + value_dims, mask=is_value, other=0.0
        )
        new_top = tl.maximum(top, split_top)
        decay = _decay(top, new_top)
        split_decay = _decay(split_top, new_top)
        total = _sum(total, decay, split_total, split_decay)
        values = _sum(values, decay, split_values, split_decay)
        top = new_top

    sink = tl.load(sinks_ptr + head) if has_sinks else 0.0
    decay, divisor = _divisor(top, total, sink, has_sinks)
    tl.store(
        out_ptr + (token * num_heads + head) * value_dim + value_dims,
        (values * decay / divisor).to(out_ptr.dtype.element_ty),
        mask=is_value,
    )
