"""Counter-based noise in Triton: Philox 4x32-10, and the exponentials of a race.

Knows seeds, counters and token ids. Does not know logits, rules or requests. The words are those of
the torch twin, bit for bit; the exponentials differ from it by the rounding of a logarithm.

Layout. key = (low, high 32 bits of the seed); counter = (token id // 4, position of the drawn
token, stream | offset << 8, sample index); a token's word is output number token id % 4. A uniform
uses token id 0.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

TARGET = tl.constexpr(0)
ACCEPT = tl.constexpr(2)
RECOVER = tl.constexpr(3)

_TWO_TO_MINUS_32 = tl.constexpr(2.0**-32)
# Below a uniform of 1/8 the series is used, above it the logarithm: there the logarithm's argument
# is far enough from 1 for its absolute error to be a small relative one.
_SERIES_BELOW = tl.constexpr(2**29)


@triton.jit
def philox_words(seed, c0, c1, c2, c3):
    """Return the four output words, uint32, of the counters (c0, c1, c2, c3) under a 64-bit seed.

    Each part of the counter is a scalar or a block of integers, of which the low 32 bits count.
    """
    return tl.philox(
        seed,
        tl.cast(c0, tl.uint32),
        tl.cast(c1, tl.uint32),
        tl.cast(c2, tl.uint32),
        tl.cast(c3, tl.uint32),
    )


@triton.jit
def block_words(seed, first_id, position, use, sample, block: tl.constexpr):
    """Return the words of the token ids first_id, ..., first_id + block - 1: [block] uint32.

    `first_id` and `block` are multiples of 4; `use` is stream | offset << 8.
    """
    groups = first_id // 4 + tl.arange(0, block // 4)
    w0, w1, w2, w3 = philox_words(seed, groups, position, use, sample)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def token_word(seed, token_id, position, use, sample):
    """Return the word of one token id: a uint32 scalar."""
    w0, w1, w2, w3 = philox_words(seed, token_id // 4, position, use, sample)
    place = token_id % 4
    low = tl.where(place == 0, w0, w1)
    high = tl.where(place == 2, w2, w3)
    return tl.where(place < 2, low, high)


@triton.jit
def uniform(word):
    """Turn a word into the float64 in (0, 1) that an acceptance compares with."""
    return (word.to(tl.float64) + 0.5) * _TWO_TO_MINUS_32


@triton.jit
def exponential(words):
    """Turn words into standard exponentials, float32: -log1p(-(word + 0.5) / 2**32)."""
    u = (words.to(tl.float32) + 0.5) * _TWO_TO_MINUS_32
    # 1 - u from the complement, which keeps the digits that a float32 near 1 has no room for.
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _TWO_TO_MINUS_32
    series = u * (1.0 / 8) + 1.0 / 7
    series = series * u + 1.0 / 6
    series = series * u + 1.0 / 5
    series = series * u + 1.0 / 4
    series = series * u + 1.0 / 3
    series = series * u + 1.0 / 2
    series = series * u * u + u
    return tl.where(words < _SERIES_BELOW, series, -tl.log(rest))


@triton.jit
def philox_kernel(counters_ptr, seeds_ptr, words_ptr, num_counters, block: tl.constexpr):
    """Write the words [num_counters, 4] of counters [num_counters, 4] under seeds [num_counters].

    All are int64; a word is in [0, 2**32).
    """
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < num_counters
    seeds = tl.load(seeds_ptr + index, mask=inside, other=0)
    c0 = tl.load(counters_ptr + index * 4, mask=inside, other=0)
    c1 = tl.load(counters_ptr + index * 4 + 1, mask=inside, other=0)
    c2 = tl.load(counters_ptr + index * 4 + 2, mask=inside, other=0)
    c3 = tl.load(counters_ptr + index * 4 + 3, mask=inside, other=0)
    w0, w1, w2, w3 = philox_words(seeds, c0, c1, c2, c3)
    tl.store(words_ptr + index * 4, w0.to(tl.int64), mask=inside)
    tl.store(words_ptr + index * 4 + 1, w1.to(tl.int64), mask=inside)
    tl.store(words_ptr + index * 4 + 2, w2.to(tl.int64), mask=inside)
    tl.store(words_ptr + index * 4 + 3, w3.to(tl.int64), mask=inside)


@triton.jit
def block_noise_kernel(words_ptr, times_ptr, key_ptr, num_tokens, block: tl.constexpr):
    """Write the words, int64, of the ids 0..num_tokens-1, and their exponentials, float32.

    `key` is int64: the seed, and the counter's words after the first.
    """
    first_id = tl.program_id(0) * block
    ids = first_id + tl.arange(0, block)
    words = block_words(
        tl.load(key_ptr), first_id, tl.load(key_ptr + 1), tl.load(key_ptr + 2),
        tl.load(key_ptr + 3), block,
    )  # fmt: skip
    tl.store(words_ptr + ids, words.to(tl.int64), mask=ids < num_tokens)
    tl.store(times_ptr + ids, exponential(words), mask=ids < num_tokens)


@triton.jit
def exponential_kernel(words_ptr, times_ptr, num_words, block: tl.constexpr):
    """Write the exponentials [num_words] float32 of words [num_words] int64."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    words = tl.load(words_ptr + index, mask=index < num_words, other=0).to(tl.uint32)
    tl.store(times_ptr + index, exponential(words), mask=index < num_words)
