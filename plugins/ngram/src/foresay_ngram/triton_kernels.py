"""The n-gram search in Triton: takes in new tokens, finds the end's occurrences, drafts.

Knows histories, rows of one tensor, and what of each is wanted. Does not know requests, nor how
programs are shared out: the host side does (`triton_lookup`). `index` is the reference.

An *occurrence* is a place before the history's end, `end` tokens from its beginning, before which
the last tokens stand as they do at the end: `length` of them, at most `longest`. The longest is
wanted, and of these the most recent, so `length * 2**32 + end` orders them, and whatever part of a
history a program searched, the largest of these numbers is the one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a request. Rows are multiples of 16 bytes, so what follows them is aligned.
ROW = tl.constexpr(0)  # of its history
NUM_KNOWN = tl.constexpr(1)  # tokens that are there
NUM_TOKENS = tl.constexpr(2)  # tokens of its history, the new ones among them
FIRST_NEW = tl.constexpr(3)  # the first new one's place among all new tokens of the step
NUM_WANTED = tl.constexpr(4)  # draft tokens
NUM_FIELDS = tl.constexpr(8)

MAX_SPLITS = tl.constexpr(64)  # of a history: so many maxima one program merges


@triton.jit(do_not_specialize=["width"])
def append_kernel(
    requests_ptr,  # [num_requests, NUM_FIELDS]
    new_tokens_ptr,  # [num_new in all]
    history_ptr,  # [num_rows, width]
    width,
    block: tl.constexpr,
):  # fmt: skip
    """Write a block of a request's new tokens behind those that its history has."""
    request_ptr = requests_ptr + tl.program_id(0) * NUM_FIELDS
    num_known = tl.load(request_ptr + NUM_KNOWN)
    num_new = tl.load(request_ptr + NUM_TOKENS) - num_known
    places = tl.program_id(1) * block + tl.arange(0, block)
    is_new = places < num_new
    tokens = tl.load(new_tokens_ptr + tl.load(request_ptr + FIRST_NEW) + places, mask=is_new)
    row_ptr = history_ptr + tl.load(request_ptr + ROW).to(tl.int64) * width
    tl.store(row_ptr + num_known + places, tokens, mask=is_new)


@triton.jit(do_not_specialize=["width", "num_splits", "shortest", "longest"])
def search_kernel(
    requests_ptr,
    history_ptr,
    best_ptr,  # [num_requests, num_splits] int64
    width, num_splits, shortest, longest,
    block: tl.constexpr,
):  # fmt: skip
    """The best occurrence in one split of a history, every `num_splits`-th block; 0: there is none.

    Occurrences of fewer than `shortest` tokens are none.
    """
    request, split = tl.program_id(0), tl.program_id(1)
    request_ptr = requests_ptr + request * NUM_FIELDS
    num_tokens = tl.load(request_ptr + NUM_TOKENS)
    row_ptr = history_ptr + tl.load(request_ptr + ROW).to(tl.int64) * width
    last_ptr = row_ptr + num_tokens - 1
    best = tl.full((block,), 0, tl.int64)
    first = split * block + 1
    while first < num_tokens:
        ends = first + tl.arange(0, block)
        before_ptr = row_ptr + ends - 1
        lengths = tl.full((block,), 0, tl.int32)
        matches = ends < num_tokens
        length = 0
        num_matching = 1
        # Most blocks have no end that matches in even one token; few go on for long.
        while (length < longest) & (num_matching > 0):
            matches = matches & (ends > length)
            tokens = tl.load(before_ptr - length, mask=matches, other=0)
            matches = matches & (tokens == tl.load(last_ptr - length))
            lengths += matches.to(tl.int32)
            num_matching = tl.max(matches.to(tl.int32), axis=0)
            length += 1
        found = (lengths.to(tl.int64) << 32) | ends
        best = tl.maximum(best, tl.where(lengths >= shortest, found, 0))
        first += num_splits * block
    tl.store(best_ptr + request * num_splits + split, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["width", "num_splits", "out_width"])
def draft_kernel(
    requests_ptr,
    history_ptr,
    best_ptr,
    out_ptr,  # [num_requests, out_width] int32: how many tokens, then the tokens
    width, num_splits, out_width,
    block: tl.constexpr,
):  # fmt: skip
    """What followed a request's best occurrence; off the history's end it goes on with itself."""
    request = tl.program_id(0)
    request_ptr = requests_ptr + request * NUM_FIELDS
    splits = tl.arange(0, MAX_SPLITS)
    of_splits = tl.load(best_ptr + request * num_splits + splits, mask=splits < num_splits, other=0)
    best = tl.max(of_splits, axis=0)
    num_drafts = tl.where(best > 0, tl.load(request_ptr + NUM_WANTED), 0)
    end = best.to(tl.int32)  # its low half
    period = tl.load(request_ptr + NUM_TOKENS) - end
    followed_ptr = history_ptr + tl.load(request_ptr + ROW).to(tl.int64) * width + end
    draft_ptr = out_ptr + request * out_width
    tl.store(draft_ptr, num_drafts)
    first = 0
    while first < num_drafts:
        places = first + tl.arange(0, block)
        is_wanted = places < num_drafts
        tokens = tl.load(followed_ptr + places % period, mask=is_wanted)
        tl.store(draft_ptr + 1 + places, tokens, mask=is_wanted)
        first += block
