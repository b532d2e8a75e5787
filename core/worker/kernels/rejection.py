"""The verification rules in Triton: from logits to accepted drafts and one token a request.

Knows rows' statistics, rules, draft probs and noise keys, all as tensors. Does not know requests'
parameters by name, nor what the columns of the output mean to an engine: the host side does
(`triton_sampler`). No [rows, vocab] tensor is ever written.

Row 0 of a request predicts what follows its committed tokens, row j + 1 what follows its draft
token j. Each draft token has a parent: -1, or an earlier one; in a chain it is the one before. One
step is a few launches:

1. `rows`: statistics of all rows in one pass, one merge a row; where min_p is on and the sum of the
   weights is needed, a second pass for that sum, since min_p's bound is relative to the maximum.
2. drawn drafts only: sums of the draft probs; for `block` the residual mass of the rows that need
   it: the second time that those are read, and the last but for a row that is drawn from.
3. a decision per request. Greedy ones are done with that.
4. the race, for rows that a token is drawn from: the one after a drawn draft's accepted prefix, and
   the rows of a deterministic draft: of a chain until one is known to differ from its draft token,
   of a tree all.
5. the merge of the races, and the end of the deterministic rule.

What a row holds beyond the first one that is not used decides nothing, whatever was computed of it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from foresay.core.worker.kernels.noise import (
    ACCEPT,
    RECOVER,
    TARGET,
    block_words,
    exponential,
    philox_words,
    token_word,
    uniform,
)
from foresay.core.worker.kernels.rows import (
    BLOCK,
    DETERMINISTIC,
    GREEDY,
    REJECTION,
    load_bounds,
    load_draft_probs,
    load_logits,
    scores,
    weigh,
)

# Columns of the output: the row after the accepted drafts (0: there are none; of a chain it is how
# many there are), the token it gives, whether it is unusable (there is no token then), two faults.
NUM_OUTPUTS = tl.constexpr(5)
LAST_ROW = tl.constexpr(0)
TOKEN = tl.constexpr(1)
FAILED = tl.constexpr(2)
BAD_DRAFT_PROBS = tl.constexpr(3)
ZERO_RESIDUAL = tl.constexpr(4)

_INF = tl.constexpr(float("inf"))
_NONE = tl.constexpr(2**31 - 1)  # above every id: ids are merged by the least
_SUM_TOLERANCE = tl.constexpr(1e-3)  # of a row of draft probs
# No exponential is less than this, so nothing below `this / time` can come home before `time`.
_LEAST_EXPONENTIAL = tl.constexpr(2.0**-33)


@triton.jit
def draft_sums_kernel(
    rules_ptr, requests_ptr, draft_indices_ptr, num_drafts_ptr,
    probs_ptr, probs_strides_ptr, num_columns_ptr,
    split_draft_sums_ptr,  # [num_rows, num_splits]
    column_chunk, num_splits, block: tl.constexpr,
):  # fmt: skip
    """Each split's sum of the probs that a row's draft token was drawn from; NaN or inf if any is.

    A negative one makes it NaN.
    """
    program = tl.program_id(0)
    row, split = (program // num_splits).to(tl.int64), program % num_splits
    request = tl.load(requests_ptr + row)
    index = tl.load(draft_indices_ptr + row)
    if (tl.load(rules_ptr + row) < REJECTION) | (index >= tl.load(num_drafts_ptr + request)):
        return
    address = tl.load(probs_ptr + request) + index * tl.load(probs_strides_ptr + request)
    row_ptr = address.to(tl.pointer_type(tl.float32))
    num_columns = tl.load(num_columns_ptr + request)
    sums = tl.zeros((block,), tl.float32)
    start = split * column_chunk
    for first in range(start, tl.minimum(start + column_chunk, num_columns), block):
        columns = first + tl.arange(0, block)
        probs = tl.load(row_ptr + columns, mask=columns < num_columns, other=0.0)
        sums += tl.where(probs < 0, float("nan"), probs)
    tl.store(split_draft_sums_ptr + row * num_splits + split, tl.sum(sums, axis=0))


@triton.jit
def _scale(ratios_ptr, first_row, num_tokens):
    """Return p_n of block verification: p_0 = 1, p_i = min(p_{i-1} * ratio_i, 1)."""
    scale = tl.full((), 1.0, tl.float64)
    for index in range(num_tokens):
        scale = tl.minimum(scale * tl.load(ratios_ptr + first_row + index), 1.0)
    return scale


@triton.jit
def _residual(weights, total, scale, draft_probs):
    """Return max(scale * target - draft, 0), 0 for tokens that the target's filters drop."""
    return tl.where(weights > 0, tl.maximum(weights / total * scale - draft_probs, 0.0), 0.0)


@triton.jit
def block_residual_kernel(
    logits_ptr, logits_stride, processed_ptr, processed_rows_ptr, bounds_ptr, cuts_ptr,
    rules_ptr, temperatures_ptr, min_ps_ptr, requests_ptr, draft_indices_ptr,
    first_rows_ptr, num_drafts_ptr, probs_ptr, probs_strides_ptr, column_maps_ptr, num_columns_ptr,
    tops_ptr, sums_ptr, ratios_ptr,
    split_residuals_ptr,  # [num_rows, num_splits]
    vocab_size, chunk, num_splits,
    block: tl.constexpr, has_processed: tl.constexpr, has_bounds: tl.constexpr,
    has_maps: tl.constexpr,
):  # fmt: skip
    """Each split's part of S, the residual's mass, for the rows in which `block` looks at it."""
    program = tl.program_id(0)
    row, split = (program // num_splits).to(tl.int64), program % num_splits
    request = tl.load(requests_ptr + row)
    index = tl.load(draft_indices_ptr + row)
    is_within = (index >= 1) & (index < tl.load(num_drafts_ptr + request))
    if (tl.load(rules_ptr + row) != BLOCK) | (is_within == 0):
        return
    scale = _scale(ratios_ptr, tl.load(first_rows_ptr + request), index)
    if (scale >= 1) | (scale <= 0):  # passes, or does not, whatever the mass
        return
    scale32 = scale.to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    processed_row = tl.load(processed_rows_ptr + row)
    low, high, cut = load_bounds(bounds_ptr, cuts_ptr, row, has_bounds)
    top_score = scores(tl.load(tops_ptr + row), temperature)
    total = tl.load(sums_ptr + row)
    address = tl.load(probs_ptr + request) + index * tl.load(probs_strides_ptr + request)
    column_map = tl.load(column_maps_ptr + request)
    num_columns = tl.load(num_columns_ptr + request)
    masses = tl.zeros((block,), tl.float32)
    start = split * chunk
    for first_id in range(start, tl.minimum(start + chunk, vocab_size), block):
        ids = first_id + tl.arange(0, block)
        logits = load_logits(
            logits_ptr, logits_stride, processed_ptr, processed_row, row, ids, vocab_size,
            has_processed,
        )  # fmt: skip
        draft_probs = load_draft_probs(address, column_map, num_columns, ids, vocab_size, has_maps)
        weights = weigh(logits, ids, top_score, temperature, min_p, low, high, cut, has_bounds)
        masses += _residual(weights, total, scale32, draft_probs)
    tl.store(split_residuals_ptr + row * num_splits + split, tl.sum(masses, axis=0))


# -- decisions -----------------------------------------------------------------------------------


@triton.jit
def decide_kernel(
    rules_ptr, first_rows_ptr, num_drafts_ptr, seeds_ptr, positions_ptr, samples_ptr,
    draft_tokens_ptr, parents_ptr, top_ids_ptr, bad_ptr, draft_probs_ptr, ratios_ptr,
    split_draft_sums_ptr, split_residuals_ptr,
    used_rules_ptr, scales_ptr, limits_ptr,  # [num_requests]
    outputs_ptr,  # [num_requests, NUM_OUTPUTS]
    vocab_size, num_splits,
    max_splits: tl.constexpr, has_drawn: tl.constexpr,
):  # fmt: skip
    """How many draft tokens of a request are accepted, but for the deterministic rule.

    Greedy requests are done with it. A drawn draft whose probs are not what it can have been drawn
    from falls back to the deterministic rule, which is exact for any draft.
    """
    request = tl.program_id(0)
    first_row = tl.load(first_rows_ptr + request)
    num_drafts = tl.load(num_drafts_ptr + request)
    rule = tl.load(rules_ptr + first_row)
    accepted = tl.full((), 0, tl.int64)
    going = tl.full((), 1, tl.int32)
    scale = tl.full((), 1.0, tl.float64)  # of the residual that is drawn from
    output_ptr = outputs_ptr + request * NUM_OUTPUTS
    none = tl.full((), 0, tl.int64)
    tl.store(output_ptr + TOKEN, none)
    tl.store(output_ptr + BAD_DRAFT_PROBS, none)
    tl.store(output_ptr + ZERO_RESIDUAL, none)

    if rule == GREEDY:
        top_id = tl.load(top_ids_ptr + first_row)
        usable = tl.load(bad_ptr + first_row) == 0
        for index in range(num_drafts):
            row = first_row + index
            follows = tl.load(parents_ptr + row) + 1 == accepted
            if usable & follows & (tl.load(draft_tokens_ptr + row) == top_id):
                accepted = tl.full((), 1, tl.int64) + index
                top_id = tl.load(top_ids_ptr + row + 1)
                usable = tl.load(bad_ptr + row + 1) == 0
        tl.store(output_ptr + TOKEN, top_id.to(tl.int64))

    if has_drawn:
        if rule >= REJECTION:
            splits = tl.arange(0, max_splits)
            are_bad = tl.full((), 0, tl.int32)
            for index in range(num_drafts):
                row = first_row + index
                places = row * num_splits + splits
                mask = splits < num_splits
                total = tl.sum(tl.load(split_draft_sums_ptr + places, mask=mask, other=0.0), axis=0)
                token_id = tl.load(draft_tokens_ptr + row)
                is_known = (token_id >= 0) & (token_id < vocab_size)
                # What the target lacks is rejected, whatever its draft prob.
                can_be = (tl.load(draft_probs_ptr + row) > 0) | (is_known == 0)
                is_good = (tl.abs(total - 1.0) <= _SUM_TOLERANCE) & can_be  # NaN is not
                are_bad = tl.where(is_good, are_bad, 1)
            tl.store(output_ptr + BAD_DRAFT_PROBS, are_bad.to(tl.int64))
            rule = tl.where(are_bad != 0, DETERMINISTIC, rule)

        if rule >= REJECTION:
            seed = tl.load(seeds_ptr + request)
            position = tl.load(positions_ptr + request)
            sample = tl.load(samples_ptr + request)
            prefix_scale = tl.full((), 1.0, tl.float64)
            for index in range(num_drafts):
                row = first_row + index
                going = tl.where(tl.load(bad_ptr + row) == 0, going, 0)
                word, _1, _2, _3 = philox_words(
                    seed, tl.zeros_like(position), position + index, ACCEPT + index * 256, sample
                )
                u = uniform(word)
                if going != 0:
                    ratio = tl.load(ratios_ptr + row)
                    if rule == REJECTION:
                        going = (u < ratio).to(tl.int32)
                        accepted += going
                    else:
                        prefix_scale = tl.minimum(prefix_scale * ratio, 1.0)
                        passes = prefix_scale
                        is_last = index + 1 == num_drafts
                        if is_last == 0:  # a row that can't be used ends the draft before it
                            is_last = tl.load(bad_ptr + row + 1) != 0
                        if (is_last == 0) & (prefix_scale < 1) & (prefix_scale > 0):
                            places = (row + 1) * num_splits + tl.arange(0, max_splits)
                            mask = tl.arange(0, max_splits) < num_splits
                            residuals = tl.load(split_residuals_ptr + places, mask=mask, other=0.0)
                            mass = tl.sum(residuals, axis=0).to(tl.float64)
                            passes = mass / (mass + 1 - prefix_scale)
                        if u < passes:  # the longest prefix that passes counts
                            accepted = tl.full((), 1, tl.int64) + index
                            scale = prefix_scale

    tl.store(used_rules_ptr + request, rule)
    tl.store(scales_ptr + request, scale.to(tl.float32))
    tl.store(limits_ptr + request, num_drafts.to(tl.int32))
    tl.store(output_ptr + LAST_ROW, accepted)
    failed = tl.load(bad_ptr + first_row + accepted) != 0
    tl.store(output_ptr + FAILED, failed.to(tl.int64))


# -- races ---------------------------------------------------------------------------------------


@triton.jit
def race_kernel(
    logits_ptr, logits_stride, processed_ptr, processed_rows_ptr, bounds_ptr, cuts_ptr,
    temperatures_ptr, min_ps_ptr, order_ptr, requests_ptr, draft_indices_ptr, draft_tokens_ptr,
    depths_ptr, are_trees_ptr, num_drafts_ptr, seeds_ptr, positions_ptr, samples_ptr,
    probs_ptr, probs_strides_ptr, column_maps_ptr, num_columns_ptr,
    tops_ptr, sums_ptr, bad_ptr, used_rules_ptr, scales_ptr, limits_ptr, outputs_ptr,
    split_times_ptr, split_winners_ptr,  # [num_rows, num_splits]: by the target's probs
    split_residual_times_ptr, split_residual_winners_ptr,  # and by the residual, inf where it is 0
    vocab_size, chunk, num_splits,
    block: tl.constexpr, has_processed: tl.constexpr, has_bounds: tl.constexpr,
    has_drawn: tl.constexpr, has_maps: tl.constexpr,
):  # fmt: skip
    """Each split's first token home in the race of exponential / weight, the lowest id on ties.

    Rows run in the order of `order`, first rows first. A deterministic row's program that sees the
    draft token of a chain beaten lowers its request's limit, and rows above a limit are not begun:
    which of them are is a matter of chance, and of none that is used. In a tree a row may have
    several draft tokens, and what comes after it need not hang on it: all its rows run.
    """
    program = tl.program_id(0)
    row, split = tl.load(order_ptr + program // num_splits), program % num_splits
    request = tl.load(requests_ptr + row)
    index = tl.load(draft_indices_ptr + row)
    rule = tl.load(used_rules_ptr + request)
    is_used = tl.load(bad_ptr + row) == 0
    if rule == DETERMINISTIC:
        is_used = is_used & (index <= tl.load(limits_ptr + request, volatile=True))
    else:
        is_accepted = index == tl.load(outputs_ptr + request * NUM_OUTPUTS + LAST_ROW)
        is_used = is_used & (rule >= REJECTION) & is_accepted
    if is_used == 0:
        return
    has_draft = index < tl.load(num_drafts_ptr + request)
    use = tl.full((), TARGET, tl.int64)
    is_residual = has_draft & (rule >= REJECTION)
    if is_residual:
        use = RECOVER + index * 256
    seed = tl.load(seeds_ptr + request)
    position = tl.load(positions_ptr + request) + tl.load(depths_ptr + row)
    sample = tl.load(samples_ptr + request)
    temperature = tl.load(temperatures_ptr + row)
    min_p = tl.load(min_ps_ptr + row)
    processed_row = tl.load(processed_rows_ptr + row)
    low, high, cut = load_bounds(bounds_ptr, cuts_ptr, row, has_bounds)
    top_score = scores(tl.load(tops_ptr + row), temperature)

    # A draft token is known to be beaten by whoever comes home clearly before it: clearly, since
    # this time and those below need not be rounded alike.
    deadline = tl.full((), 0.0, tl.float32)
    if (rule == DETERMINISTIC) & has_draft & (tl.load(are_trees_ptr + request) == 0):
        token_id = tl.load(draft_tokens_ptr + row)
        logit = load_logits(
            logits_ptr, logits_stride, processed_ptr, processed_row, row, token_id, vocab_size,
            has_processed,
        )  # fmt: skip
        weight = weigh(logit, token_id, top_score, temperature, min_p, low, high, cut, has_bounds)
        deadline = tl.full((), _INF, tl.float32)
        if weight > 0:
            word = token_word(seed, token_id, position, use, sample)
            deadline = exponential(word) / weight * (1 - 1e-5)

    if has_drawn:
        total = tl.load(sums_ptr + row)
        scale = tl.load(scales_ptr + request)
        address = tl.load(probs_ptr + request) + index * tl.load(probs_strides_ptr + request)
        column_map = tl.load(column_maps_ptr + request)
        num_columns = tl.load(num_columns_ptr + request)

    time = tl.full((), _INF, tl.float32)
    winner = tl.full((), 0, tl.int32)
    residual_time = tl.full((), _INF, tl.float32)
    residual_winner = tl.full((), 0, tl.int32)
    start = split * chunk
    for first_id in range(start, tl.minimum(start + chunk, vocab_size), block):
        ids = first_id + tl.arange(0, block)
        logits = load_logits(
            logits_ptr, logits_stride, processed_ptr, processed_row, row, ids, vocab_size,
            has_processed,
        )  # fmt: skip
        weights = weigh(logits, ids, top_score, temperature, min_p, low, high, cut, has_bounds)
        heaviest = tl.max(weights, axis=0)
        # False for 0 * inf: no noise is made for tiles that the filters emptied.
        can_win = heaviest * time > _LEAST_EXPONENTIAL
        if can_win | (is_residual & (heaviest > 0)):
            noise = exponential(block_words(seed, first_id, position, use, sample, block))
            times = tl.where(weights > 0, noise / weights, _INF)
            tile_time = tl.min(times, axis=0)
            if tile_time < time:
                time = tile_time
                winner = tl.min(tl.where(times == tile_time, ids, _NONE), axis=0)
                if time < deadline:
                    tl.atomic_min(limits_ptr + request, index.to(tl.int32))
            if has_drawn:  # noqa: SIM102 (known when compiling, and the next is not)
                if is_residual:
                    draft_probs = load_draft_probs(
                        address, column_map, num_columns, ids, vocab_size, has_maps
                    )
                    residual = _residual(weights, total, scale, draft_probs)
                    times = tl.where(residual > 0, noise / residual, _INF)
                    tile_time = tl.min(times, axis=0)
                    if tile_time < residual_time:
                        residual_time = tile_time
                        residual_winner = tl.min(tl.where(times == tile_time, ids, _NONE), axis=0)
    place = row * num_splits + split
    tl.store(split_times_ptr + place, time)
    tl.store(split_winners_ptr + place, winner)
    if has_drawn:
        tl.store(split_residual_times_ptr + place, residual_time)
        tl.store(split_residual_winners_ptr + place, residual_winner)


# -- results -------------------------------------------------------------------------------------


@triton.jit
def _first_home(split_times_ptr, split_winners_ptr, row, num_splits, max_splits: tl.constexpr):
    splits = tl.arange(0, max_splits)
    places = row * num_splits + splits
    times = tl.load(split_times_ptr + places, mask=splits < num_splits, other=_INF)
    winners = tl.load(split_winners_ptr + places, mask=splits < num_splits, other=_NONE)
    time = tl.min(times, axis=0)
    return time, tl.min(tl.where(times == time, winners, _NONE), axis=0)


@triton.jit
def emit_kernel(
    first_rows_ptr, num_drafts_ptr, draft_tokens_ptr, parents_ptr, bad_ptr, used_rules_ptr,
    split_times_ptr, split_winners_ptr, split_residual_times_ptr, split_residual_winners_ptr,
    outputs_ptr,
    num_splits, max_splits: tl.constexpr, has_drawn: tl.constexpr,
):  # fmt: skip
    """The token of a request after its accepted draft tokens; of a deterministic draft, those too.

    A deterministic draft is walked from the root, along the draft tokens that equal their parent's
    row's: those rows all have run. Parents come before children, so one pass finds the way, and of
    equal siblings the first.
    """
    request = tl.program_id(0)
    rule = tl.load(used_rules_ptr + request)
    first_row = tl.load(first_rows_ptr + request)
    num_drafts = tl.load(num_drafts_ptr + request)
    output_ptr = outputs_ptr + request * NUM_OUTPUTS
    if rule == DETERMINISTIC:
        accepted = tl.full((), 0, tl.int64)
        failed = tl.load(bad_ptr + first_row)
        _, token_id = _first_home(
            split_times_ptr, split_winners_ptr, first_row, num_splits, max_splits
        )
        for index in range(num_drafts):
            row = first_row + index
            follows = tl.load(parents_ptr + row) + 1 == accepted
            if (failed == 0) & follows & (tl.load(draft_tokens_ptr + row) == token_id):
                accepted = tl.full((), 1, tl.int64) + index
                failed = tl.load(bad_ptr + row + 1)
                _, token_id = _first_home(
                    split_times_ptr, split_winners_ptr, row + 1, num_splits, max_splits
                )
        tl.store(output_ptr + LAST_ROW, accepted)
        tl.store(output_ptr + TOKEN, token_id.to(tl.int64))
        tl.store(output_ptr + FAILED, failed.to(tl.int64))
    if has_drawn:  # noqa: SIM102 (known when compiling, and the next is not)
        if rule >= REJECTION:
            accepted = tl.load(output_ptr + LAST_ROW)
            row = first_row + accepted
            _, token_id = _first_home(
                split_times_ptr, split_winners_ptr, row, num_splits, max_splits
            )
            if (accepted < num_drafts) & (tl.load(bad_ptr + row) == 0):
                time, recovered = _first_home(
                    split_residual_times_ptr, split_residual_winners_ptr, row, num_splits,
                    max_splits,
                )  # fmt: skip
                if time < _INF:
                    token_id = recovered
                else:  # target and draft differ by rounding only
                    tl.store(output_ptr + ZERO_RESIDUAL, tl.full((), 1, tl.int64))
            tl.store(output_ptr + TOKEN, token_id.to(tl.int64))
