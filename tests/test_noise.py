"""Noise against Random123's vectors and against Philox written in Python's integers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import stats

from foresay.core.worker.noise import (
    NoiseKey,
    Stream,
    exponential,
    philox_words,
    token_words,
    vocabulary_words,
)

CPU = torch.device("cpu")
LARGEST = 2**32 - 1


def philox_in_integers(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox 4x32-10 as its paper writes it."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [x0, x1, x2, x3]


def word_in_integers(key: NoiseKey, token_id: int) -> int:
    """The layout: which counter, which key, which of the four words."""
    counter = (token_id // 4, key.position, key.stream + 256 * key.offset, key.sample)
    seed = key.seed % 2**64
    return philox_in_integers(counter, (seed % 2**32, seed // 2**32))[token_id % 4]


RANDOM123 = {
    "all zero": (
        [0, 0, 0, 0],
        [0, 0],
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    "all ones": (
        [LARGEST] * 4,
        [LARGEST] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    "digits of pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
}


@pytest.mark.parametrize(("counter", "key", "words"), RANDOM123.values(), ids=RANDOM123.keys())
def test_philox_gives_the_words_that_random123_publishes(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    assert philox_in_integers(tuple(counter), (key[0], key[1])) == words
    assert philox_words(torch.tensor(counter), torch.tensor(key)).tolist() == words


def test_philox_equals_integer_arithmetic_on_random_and_extreme_counters() -> None:
    rng = random.Random(7)
    edges = [0, 1, 2**31 - 1, 2**31, LARGEST - 1, LARGEST]
    cases = [[rng.choice(edges) for _ in range(6)] for _ in range(200)]
    cases += [[rng.randrange(2**32) for _ in range(6)] for _ in range(200)]
    inputs = torch.tensor(cases)
    words = philox_words(inputs[:, :4], inputs[:, 4:])
    assert words.tolist() == [philox_in_integers(tuple(c[:4]), (c[4], c[5])) for c in cases]


def test_philox_broadcasts_counters_and_keys_and_changes_neither() -> None:
    counter = torch.arange(12).reshape(3, 1, 4)
    key = torch.tensor([[1, 2], [3, 4]])
    copies = counter.clone(), key.clone()
    words = philox_words(counter, key)
    assert words.shape == (3, 2, 4)
    for i in range(3):
        for j in range(2):
            expected = philox_in_integers(tuple(range(4 * i, 4 * i + 4)), (2 * j + 1, 2 * j + 2))
            assert words[i, j].tolist() == expected
    assert torch.equal(counter, copies[0])
    assert torch.equal(key, copies[1])


KEYS = {
    "plain": NoiseKey(seed=0, position=0),
    "late position": NoiseKey(seed=1, position=130_000),
    "seed above 32 bits": NoiseKey(seed=2**40 + 5, position=17),
    "largest seed": NoiseKey(seed=2**64 - 1, position=3),
    "every coordinate": NoiseKey(9, 31, Stream.RECOVER, offset=6, sample=2),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
@pytest.mark.parametrize("vocab_size", [1, 7, 128, 129])
def test_each_token_of_a_vocabulary_has_the_word_of_its_own_counter(
    key: NoiseKey, vocab_size: int
) -> None:
    words = vocabulary_words(key, vocab_size, CPU)
    assert words.tolist() == [word_in_integers(key, i) for i in range(vocab_size)]


@pytest.mark.parametrize("vocab_size", [50_257, 151_936])
def test_a_large_vocabulary_has_the_same_layout(vocab_size: int) -> None:
    key = NoiseKey(seed=3, position=5)
    words = vocabulary_words(key, vocab_size, CPU)
    assert len(words) == vocab_size
    for token_id in [0, 1, 49_151, 49_152, 50_255, vocab_size - 1]:
        assert words[token_id].item() == word_in_integers(key, token_id)


def test_words_of_chosen_tokens_are_those_of_the_vocabulary_whatever_is_asked_along() -> None:
    keys = list(KEYS.values())
    ids = [torch.tensor([0, 5, 6, 1000]), torch.tensor([], dtype=torch.int64)]
    ids += [torch.tensor([999]), torch.arange(1001), torch.tensor([4, 3, 2])]
    together = token_words(keys, ids)
    for key, token_ids, words in zip(keys, ids, together, strict=True):
        expected = vocabulary_words(key, 1001, CPU)[token_ids]
        assert torch.equal(words, expected)
        assert torch.equal(token_words([key], [token_ids])[0], expected)


def test_many_tokens_at_once_have_the_words_they_have_apart() -> None:
    ids = torch.arange(40_000)
    keys = [NoiseKey(1, 2), NoiseKey(2, 1)]
    for key, words in zip(keys, token_words(keys, [ids, ids]), strict=True):
        assert torch.equal(words, vocabulary_words(key, 40_000, CPU))


@pytest.mark.parametrize("seed", [-1, 2**64 + 12, 7 - 2**64])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int) -> None:
    def words(some_seed: int) -> torch.Tensor:
        return vocabulary_words(NoiseKey(some_seed, 4), 64, CPU)

    assert torch.equal(words(seed), words(seed % 2**64))
    assert not torch.equal(words(seed), words((seed + 1) % 2**64))


def test_every_coordinate_changes_the_words() -> None:
    variants = [
        NoiseKey(1, 1),
        NoiseKey(2, 1),
        NoiseKey(1 + 2**32, 1),
        NoiseKey(1, 2),
        NoiseKey(1, 1, Stream.DRAFT),
        NoiseKey(1, 1, Stream.ACCEPT),
        NoiseKey(1, 1, Stream.RECOVER),
        NoiseKey(1, 1, Stream.DRAFT, offset=1),
        NoiseKey(1, 1, sample=1),
    ]
    words = torch.cat([vocabulary_words(key, 64, CPU) for key in variants])
    assert len(words.unique()) == 64 * len(variants)


def test_the_streams_are_numbered_as_the_layout_says() -> None:
    assert {stream.name: stream.value for stream in Stream} == {
        "TARGET": 0,
        "DRAFT": 1,
        "ACCEPT": 2,
        "RECOVER": 3,
    }


def test_exponentials_are_positive_and_finite_at_both_ends() -> None:
    assert exponential(0) == pytest.approx(2.0**-33, rel=1e-9)
    assert exponential(2**31) == pytest.approx(math.log(2), rel=1e-9)
    # 1 - u is 2**-33 at the other end, which a float32 would round to 0.
    assert exponential(LARGEST) == pytest.approx(33 * math.log(2), rel=1e-9)


def test_exponentials_of_consecutive_words_are_strictly_increasing_at_both_ends() -> None:
    for start in (0, 2**31, LARGEST - 3):
        values = [exponential(start + i) for i in range(4)]
        assert values == sorted(set(values))


def test_words_of_a_vocabulary_give_standard_exponentials() -> None:
    """A right generator fails this for 1 key in 10 000; the key is fixed."""
    words = vocabulary_words(NoiseKey(seed=11, position=12), 20_000, CPU)
    assert stats.kstest([exponential(word) for word in words.tolist()], "expon").pvalue > 1e-4
