"""Triton's noise: the words are Random123's and torch's, the exponentials are exact to an ulp."""

from __future__ import annotations

import math

import pytest
import torch
from interpreted import HAS_TRITON, block_noise, exponentials, interpreted, philox_words

from foresay.core.worker.noise import NoiseKey, Stream, exponential, vocabulary_words

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")

# Random123's known answers for philox4x32-10: counter, key, words.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_the_words_are_those_of_random123() -> None:
    counters = torch.tensor([counter for counter, _, _ in ANSWERS])
    seeds = [low | high << 32 for _, (low, high), _ in ANSWERS]
    signed = torch.tensor([seed - (seed >> 63 << 64) for seed in seeds])
    words = interpreted(philox_words, counters, signed)
    assert words.tolist() == [list(answer) for _, _, answer in ANSWERS]


@pytest.mark.parametrize(
    ("key", "num_tokens", "block"),
    [
        (NoiseKey(0, 0), 1, 4),
        (NoiseKey(7, 1), 129, 16),
        (NoiseKey(2**64 - 1, 2**20, Stream.RECOVER, offset=5, sample=3), 50257, 2**16),
        (NoiseKey(2**63, 12, Stream.ACCEPT, offset=1), 1000, 256),
    ],
    ids=["one token", "no multiple of the block", "all coordinates", "a seed's highest bit"],
)
def test_a_vocabulary_has_the_words_of_the_torch_twin(
    key: NoiseKey, num_tokens: int, block: int
) -> None:
    words, _ = interpreted(block_noise, key.seed, key.counter_tail, num_tokens, block)
    assert torch.equal(words, vocabulary_words(key, num_tokens, torch.device("cpu")))


def test_a_vocabularys_exponentials_are_those_of_its_words() -> None:
    words, times = interpreted(block_noise, 5, (9, 0, 0), 100, 16)
    expected = torch.tensor([exponential(word) for word in words.tolist()], dtype=torch.float64)
    torch.testing.assert_close(times.double(), expected, rtol=5e-7, atol=0)


def test_exponentials_are_exact_to_a_few_ulps_over_the_whole_range() -> None:
    """Around every power of two, where the series meets the logarithm, and at both ends."""
    words = sorted(
        {
            min(max((1 << bit) + step, 0), 2**32 - 1)
            for bit in range(33)
            for step in (-(2**20), -3, -1, 0, 1, 2, 12345)
        }
    )
    times = interpreted(exponentials, torch.tensor(words)).tolist()
    assert times[0] == pytest.approx(2.0**-33, rel=1e-6)  # word 0: never 0
    assert times[-1] == pytest.approx(33 * math.log(2), rel=1e-6)  # the last word: never infinite
    for word, time in zip(words, times, strict=True):
        exact = -math.log1p(-(word + 0.5) * 2.0**-32)
        assert time == pytest.approx(exact, rel=5e-7), word
    assert times == sorted(times)
