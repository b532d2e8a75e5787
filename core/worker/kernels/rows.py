"""Rows of logits in Triton: loading, scores and weights, and their statistics in one pass.

Knows a row's logits, temperature, filters and draft probs. Does not know what is decided by them,
nor how top_k and top_p found their bounds, nor why a row is unusable. No [rows, vocab] tensor is
ever written.

A row is worked on by `num_splits` programs, each of which reads `chunk` logits in tiles of `block`.
A token's *weight* is exp(score - largest score), its probability relative to the likeliest's, or 0
if a filter drops it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

GREEDY = tl.constexpr(0)
DETERMINISTIC = tl.constexpr(1)
REJECTION = tl.constexpr(2)  # it and above: drafts drawn from probs that were kept
BLOCK = tl.constexpr(3)

_INF = tl.constexpr(float("inf"))
_NONE = tl.constexpr(2**31 - 1)  # above every id: ids are merged by the least


@triton.jit
def load_logits(
    logits_ptr, logits_stride, processed_ptr, processed_row, row, ids, vocab_size,
    has_processed: tl.constexpr,
):  # fmt: skip
    """Load logits as float32; -inf beyond the vocabulary. Processed rows have a buffer."""
    inside = (ids >= 0) & (ids < vocab_size)
    row_ptr = logits_ptr + row * logits_stride
    if has_processed:
        if processed_row >= 0:
            buffer_ptr = processed_ptr + processed_row * vocab_size
            logits = tl.load(buffer_ptr + ids, mask=inside, other=-_INF)
        else:
            logits = tl.load(row_ptr + ids, mask=inside, other=-_INF).to(tl.float32)
    else:
        logits = tl.load(row_ptr + ids, mask=inside, other=-_INF).to(tl.float32)
    return logits


@triton.jit
def scores(logits, temperature):
    """Divide as IEEE does, so that scores are the torch twin's."""
    if temperature != 1.0:
        logits = tl.div_rn(logits, temperature)
    return logits


@triton.jit
def load_bounds(bounds_ptr, cuts_ptr, row, has_bounds: tl.constexpr):
    """What top_k and top_p leave: logits above `high`, and from `low` on ids up to `cut`."""
    if has_bounds:
        low = tl.load(bounds_ptr + row * 2)
        high = tl.load(bounds_ptr + row * 2 + 1)
        cut = tl.load(cuts_ptr + row)
    else:
        low = -_INF
        high = -_INF
        cut = 0
    return low, high, cut


@triton.jit
def weigh(logits, ids, top_score, temperature, min_p, low, high, cut, has_bounds: tl.constexpr):
    """Return exp(score - top score) of the tokens that the filters leave, else 0."""
    is_kept = logits > -_INF
    if has_bounds:
        is_kept = is_kept & ((logits > high) | ((logits >= low) & (ids <= cut)))
    weights = tl.where(is_kept, tl.exp(scores(logits, temperature) - top_score), 0.0)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def load_draft_probs(
    probs_address, column_map_address, num_columns, ids, vocab_size, has_maps: tl.constexpr
):
    """Load the draft probs, float32, of target ids; 0 where the draft has no column."""
    probs_ptr = probs_address.to(tl.pointer_type(tl.float32))
    inside = (ids >= 0) & (ids < vocab_size)
    if has_maps:
        if column_map_address != 0:
            map_ptr = column_map_address.to(tl.pointer_type(tl.int32))
            columns = tl.load(map_ptr + ids, mask=inside, other=-1)
            probs = tl.load(probs_ptr + columns, mask=columns >= 0, other=0.0)
        else:
            probs = tl.load(probs_ptr + ids, mask=inside & (ids < num_columns), other=0.0)
    else:
        probs = tl.load(probs_ptr + ids, mask=inside & (ids < num_columns), other=0.0)
    return probs


@triton.jit
def row_statistics_kernel(
    logits_ptr, logits_stride, processed_ptr, processed_rows_ptr, bounds_ptr, cuts_ptr,
    rules_ptr, temperatures_ptr,
    split_tops_ptr, split_top_ids_ptr, split_sums_ptr,  # [num_rows, num_splits]
    vocab_size, chunk, num_splits,
    block: tl.constexpr, has_processed: tl.constexpr, has_bounds: tl.constexpr,
    has_drawn: tl.constexpr,
):  # fmt: skip
    """Each split's largest logit, its lowest id, and for drawn drafts its sum of weights.

    A NaN counts as +inf: a row is unusable with either, and a maximum alone might hide a NaN. The
    weights are relative to the split's own maximum, and min_p is not yet applied.
    """
    program = tl.program_id(0)
    row, split = (program // num_splits).to(tl.int64), program % num_splits
    needs_sum = tl.load(rules_ptr + row) >= REJECTION if has_drawn else False
    temperature = tl.load(temperatures_ptr + row)
    processed_row = tl.load(processed_rows_ptr + row)
    low, high, cut = load_bounds(bounds_ptr, cuts_ptr, row, has_bounds)

    top = tl.full((), -_INF, tl.float32)
    top_id = tl.full((), 0, tl.int32)
    sums = tl.zeros((block,), tl.float32)
    start = split * chunk
    for first_id in range(start, tl.minimum(start + chunk, vocab_size), block):
        ids = first_id + tl.arange(0, block)
        logits = load_logits(
            logits_ptr, logits_stride, processed_ptr, processed_row, row, ids, vocab_size,
            has_processed,
        )  # fmt: skip
        logits = tl.where(logits < _INF, logits, _INF)
        tile_top = tl.max(logits, axis=0)
        if tile_top > top:
            if needs_sum:
                sums *= tl.exp(scores(top, temperature) - scores(tile_top, temperature))
            top = tile_top
            top_id = tl.min(tl.where(logits == tile_top, ids, _NONE), axis=0)
        if needs_sum:
            sums += weigh(
                logits, ids, scores(top, temperature), temperature, 0.0, low, high, cut, has_bounds
            )
    place = row * num_splits + split
    tl.store(split_tops_ptr + place, top)
    tl.store(split_top_ids_ptr + place, top_id)
    if has_drawn:
        tl.store(split_sums_ptr + place, tl.sum(sums, axis=0))


@triton.jit
def merge_statistics_kernel(
    logits_ptr, logits_stride, processed_ptr, processed_rows_ptr, bounds_ptr, cuts_ptr,
    rules_ptr, temperatures_ptr, min_ps_ptr, requests_ptr, draft_indices_ptr, draft_tokens_ptr,
    num_drafts_ptr, probs_ptr, probs_strides_ptr, column_maps_ptr, num_columns_ptr,
    split_tops_ptr, split_top_ids_ptr, split_sums_ptr,
    tops_ptr, top_ids_ptr, sums_ptr, bad_ptr, draft_probs_ptr, ratios_ptr,  # [num_rows]
    vocab_size, num_splits,
    max_splits: tl.constexpr, has_processed: tl.constexpr, has_bounds: tl.constexpr,
    has_drawn: tl.constexpr, has_maps: tl.constexpr,
):  # fmt: skip
    """A row's statistics; and of a drawn draft token, the target's prob over the draft's."""
    row = tl.program_id(0).to(tl.int64)
    rule = tl.load(rules_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    splits = tl.arange(0, max_splits)
    is_split = splits < num_splits
    places = row * num_splits + splits
    split_tops = tl.load(split_tops_ptr + places, mask=is_split, other=-_INF)
    split_top_ids = tl.load(split_top_ids_ptr + places, mask=is_split, other=_NONE)
    top = tl.max(split_tops, axis=0)
    top_id = tl.min(tl.where(split_tops == top, split_top_ids, _NONE), axis=0)
    top_score = scores(top, temperature)
    # -inf: no token is allowed; +inf: there is one in the row, or a NaN, or the score overflowed.
    is_bad = (top == -_INF) | (top_score == _INF)
    tl.store(tops_ptr + row, top)
    tl.store(top_ids_ptr + row, top_id)
    tl.store(bad_ptr + row, is_bad.to(tl.int32))

    if has_drawn:
        request = tl.load(requests_ptr + row)
        index = tl.load(draft_indices_ptr + row)
        if rule >= REJECTION:
            split_sums = tl.load(split_sums_ptr + places, mask=is_split, other=0.0)
            split_scores = scores(split_tops, temperature)
            factors = tl.where(split_tops > -_INF, tl.exp(split_scores - top_score), 0.0)
            total = tl.sum(split_sums * factors, axis=0)
            tl.store(sums_ptr + row, total)
            if index < tl.load(num_drafts_ptr + request):
                token_id = tl.load(draft_tokens_ptr + row)
                logit = load_logits(
                    logits_ptr, logits_stride, processed_ptr, tl.load(processed_rows_ptr + row),
                    row, token_id, vocab_size, has_processed,
                )  # fmt: skip
                low, high, cut = load_bounds(bounds_ptr, cuts_ptr, row, has_bounds)
                weight = weigh(
                    logit, token_id, top_score, temperature, tl.load(min_ps_ptr + row),
                    low, high, cut, has_bounds,
                )  # fmt: skip
                draft_prob = load_draft_probs(
                    tl.load(probs_ptr + request) + index * tl.load(probs_strides_ptr + request),
                    tl.load(column_maps_ptr + request), tl.load(num_columns_ptr + request),
                    token_id, vocab_size, has_maps,
                )  # fmt: skip
                target_prob = tl.div_rn(weight, total)
                ratio = target_prob.to(tl.float64) / draft_prob.to(tl.float64)
                tl.store(draft_probs_ptr + row, draft_prob)
                # Not the quotient if the target lacks the token: there may be no draft prob either.
                tl.store(ratios_ptr + row, tl.where(weight > 0, ratio, 0.0))


@triton.jit
def min_p_sums_kernel(
    logits_ptr, logits_stride, processed_ptr, processed_rows_ptr, bounds_ptr, cuts_ptr,
    rules_ptr, temperatures_ptr, min_ps_ptr, tops_ptr,
    split_tops_ptr, split_sums_ptr,
    vocab_size, chunk, num_splits,
    block: tl.constexpr, has_processed: tl.constexpr, has_bounds: tl.constexpr,
):  # fmt: skip
    """Each split's sum of weights once more, with min_p applied, relative to the row's maximum.

    Leaves the split's maximum as the row's, so that merging again gives the row's sum. (And not the
    maximum's id, which only greedy rows need.)
    """
    program = tl.program_id(0)
    row, split = (program // num_splits).to(tl.int64), program % num_splits
    min_p = tl.load(min_ps_ptr + row)
    if (tl.load(rules_ptr + row) < REJECTION) | (min_p <= 0):
        return
    temperature = tl.load(temperatures_ptr + row)
    processed_row = tl.load(processed_rows_ptr + row)
    low, high, cut = load_bounds(bounds_ptr, cuts_ptr, row, has_bounds)
    top = tl.load(tops_ptr + row)
    top_score = scores(top, temperature)
    sums = tl.zeros((block,), tl.float32)
    start = split * chunk
    for first_id in range(start, tl.minimum(start + chunk, vocab_size), block):
        ids = first_id + tl.arange(0, block)
        logits = load_logits(
            logits_ptr, logits_stride, processed_ptr, processed_row, row, ids, vocab_size,
            has_processed,
        )  # fmt: skip
        sums += weigh(logits, ids, top_score, temperature, min_p, low, high, cut, has_bounds)
    place = row * num_splits + split
    tl.store(split_tops_ptr + place, top)
    tl.store(split_sums_ptr + place, tl.sum(sums, axis=0))
