"""One row at a time: filters against transformers' warpers, draws against a race written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foresay.core.messages import SamplingData
from foresay.core.worker.noise import NoiseKey, exponential, vocabulary_words
from foresay.core.worker.processors import Context
from foresay.core.worker.sampling import (
    Row,
    RowError,
    row_logprobs,
    sample,
    survivors,
    target_probs,
)

INF = float("inf")


def make_sampling(**changes: Any) -> SamplingData:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "min_tokens": 0,
        "stop_token_ids": (),
    }
    return SamplingData(**(values | changes))


def make_row(
    logits: torch.Tensor | list[float],
    position: int | None = None,
    output_index: int = 0,
    **changes: Any,
) -> Row:
    """A row at `position`; what the tokens before it are plays no part in this file."""
    tokens = range(output_index if position is None else position)
    context = Context(make_sampling(**changes), tokens, len(tokens) - output_index)
    return Row(torch.as_tensor(logits), context)


def random_logits(kind: str, size: int, seed: int) -> torch.Tensor:
    """Rows of the shapes that matter: ordinary, one token dominating, nearly flat, some banned."""
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        noise[seed % size] += 15
    scale = {"ordinary": 2.5, "peaked": 2.0, "flat": 0.01, "partly -inf": 2.5}[kind]
    logits = noise * scale
    if kind == "partly -inf":
        logits[1::3] = -INF
    return logits


def transformers_probs(logits: torch.Tensor, sampling: SamplingData) -> torch.Tensor:
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits.float().unsqueeze(0))
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(dim=-1)[0]


def kept_by(row: Row) -> torch.Tensor:
    """The mask of the tokens that `survivors` leaves."""
    left = survivors(row)
    if left.token_ids is None:
        return left.weights > 0
    mask = torch.zeros(len(row.logits), dtype=torch.bool)
    mask[left.token_ids] = True
    return mask


def word_race(row: Row) -> int:
    """The draw as it is defined: every token that `target_probs` keeps runs, the first one wins."""
    probs = target_probs(row)
    key = NoiseKey(row.sampling.seed, row.position)
    words = vocabulary_words(key, len(probs), probs.device).tolist()
    scores = (row.logits.float() / row.sampling.temperature).tolist()
    top = max(scores[i] for i in probs.nonzero().squeeze(1).tolist())
    times = {
        i: exponential(words[i]) * math.exp(top - scores[i])
        for i in probs.nonzero().squeeze(1).tolist()
        if top - scores[i] < 700
    }
    return min(times, key=lambda i: times[i])


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature .5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5, "temperature": 0.7},
    "top_k above V": {"top_k": 10_000},
    "top_p .9": {"top_p": 0.9},
    "top_p .5, hot": {"top_p": 0.5, "temperature": 2.0},
    "top_p .01": {"top_p": 0.01},
    "top_p .999": {"top_p": 0.999},
    "min_p .05": {"min_p": 0.05},
    "min_p .5": {"min_p": 0.5},
    "top_k 20, top_p .8": {"top_k": 20, "top_p": 0.8},
    "top_k 7, min_p .2": {"top_k": 7, "min_p": 0.2},
    "top_p .95, min_p .1": {"top_p": 0.95, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}
by_filter = pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())


@by_filter
@pytest.mark.parametrize("kind", ["ordinary", "peaked", "flat", "partly -inf"])
def test_probabilities_equal_those_of_transformers_warpers(
    kind: str, filters: dict[str, Any]
) -> None:
    for size in (12, 1000):
        for seed in range(5):
            row = make_row(random_logits(kind, size, seed), **filters)
            expected = transformers_probs(row.logits, row.sampling)
            probs = target_probs(row)
            assert torch.equal(probs > 0, expected > 0)
            torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-7)


@by_filter
def test_with_equal_logits_as_many_tokens_and_as_much_mass_stay_as_in_transformers(
    filters: dict[str, Any],
) -> None:
    for seed in range(20):
        logits = random_logits("ordinary", 200, seed).round()  # about ten values, 20 ids each
        row = make_row(logits, **filters)
        expected = transformers_probs(logits, row.sampling)
        torch.testing.assert_close(target_probs(row).sort().values, expected.sort().values)


@by_filter
@pytest.mark.parametrize("kind", ["ordinary", "peaked", "flat", "partly -inf"])
def test_the_fast_path_leaves_what_the_definition_leaves(
    kind: str, filters: dict[str, Any]
) -> None:
    for size in (1, 2, 300, 40_000):
        for seed in range(2):
            row = make_row(random_logits(kind, size, seed), **filters)
            left = survivors(row)
            weights = left.weights if left.token_ids is None else torch.zeros(size)
            if left.token_ids is not None:
                weights[left.token_ids] = left.weights
            probs = target_probs(row)
            expected = probs / probs.max()
            expected[expected < 2.0**-38] = 0  # can't win a race: not kept
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-11)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(
        st.integers(-6, 6).map(float) | st.floats(-40, 40, width=16) | st.just(-INF),
        min_size=1,
        max_size=40,
    ).filter(lambda values: max(values) > -INF),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(-1, 45),
    top_p=st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 200_000),
)
def test_a_draw_is_the_race_over_the_definitions_tokens(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> None:
    row = make_row(
        logits,
        position=position,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    probs = target_probs(row)
    assert torch.equal(kept_by(row), probs / probs.max() >= 2.0**-38)
    assert sample([row]) == [word_race(row)]


@by_filter
def test_a_draw_from_a_large_vocabulary_is_the_race_over_the_definitions_tokens(
    filters: dict[str, Any],
) -> None:
    for kind in ("ordinary", "peaked", "flat"):
        row = make_row(random_logits(kind, 20_000, 3), position=41, seed=2**63 + 9, **filters)
        assert sample([row]) == [word_race(row)]


def test_the_least_likely_survivor_could_win_the_race_and_a_dropped_token_could_not() -> None:
    fastest, slowest = exponential(0), exponential(2**32 - 1)
    assert fastest / 2.0**-38 > slowest
    assert fastest / 2.0**-37 < slowest


WORKED = {
    # logits, parameters, expected probabilities
    "temperature halves the odds' logarithm": (
        [math.log(16), 0.0],
        {"temperature": 2.0},
        [4 / 5, 1 / 5],
    ),
    "ties at the k-th are kept": (
        [math.log(4), math.log(2), math.log(2), 0.0],
        {"top_k": 2},
        [1 / 2, 1 / 4, 1 / 4, 0],
    ),
    "top_p keeps the token that reaches it": (
        [math.log(4), math.log(2), 0.0, 0.0],
        {"top_p": 0.7},
        [2 / 3, 1 / 3, 0, 0],
    ),
    "top_p 0.5 of four equals keeps the two lower ids": (
        [0.0] * 4,
        {"top_p": 0.5},
        [0.5, 0.5, 0, 0],
    ),
    "top_p keeps one token however small it is": ([0.0, 0.0], {"top_p": 1e-9}, [1, 0]),
    "top_p's cut among equals keeps lower ids": (
        [0.0, 1.0, 0.0, 0.0],
        {"top_p": math.e / (math.e + 3) + 0.01},
        [1 / (1 + math.e), math.e / (1 + math.e), 0, 0],
    ),
    "top_p counts the mass that top_k left": (
        [math.log(3), math.log(2), 0.0, 0.0],
        {"top_k": 2, "top_p": 0.55},  # the first holds 3/7 of all, but 3/5 of those two
        [1, 0, 0, 0],
    ),
    "top_p after top_k 1 keeps that one": ([1.0, 0.0, 0.0], {"top_k": 1, "top_p": 0.99}, [1, 0, 0]),
    "min_p is relative to the likeliest": (
        [math.log(10), math.log(5), math.log(0.9)],
        {"min_p": 0.1},
        [2 / 3, 1 / 3, 0],
    ),
    "min_p 1 keeps the likeliest and its equals": ([1.0, 1.0, 0.0], {"min_p": 1.0}, [0.5, 0.5, 0]),
    "a token of -inf has no chance": ([0.0, -INF, 0.0], {}, [0.5, 0, 0.5]),
}


@pytest.mark.parametrize(("logits", "changes", "expected"), WORKED.values(), ids=WORKED.keys())
def test_a_filter_leaves_what_was_worked_out_by_hand(
    logits: list[float], changes: dict[str, Any], expected: list[float]
) -> None:
    row = make_row(logits, **changes)
    probs = torch.tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(target_probs(row), probs)
    assert kept_by(row).tolist() == [p > 0 for p in expected]


@pytest.mark.parametrize("top_k", [0, -1, 6, 7, 2**40])
def test_a_top_k_that_is_off_or_covers_the_vocabulary_keeps_everything(top_k: int) -> None:
    row = make_row(random_logits("ordinary", 6, 1), top_k=top_k)
    torch.testing.assert_close(target_probs(row), row.logits.softmax(dim=-1))
    assert kept_by(row).all()


@pytest.mark.parametrize(
    ("output_index", "allowed"), [(0, [0, 2]), (1, [0, 2]), (2, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_min_tokens_masks_the_stop_ids_until_that_many_tokens_exist(
    output_index: int, allowed: list[int]
) -> None:
    row = make_row(
        [1.0, 9.0, 0.0, 2.0],
        output_index=output_index,
        min_tokens=2,
        stop_token_ids=(1, 3, 4, 1_000_000),  # a tokenizer may name ids that the model lacks
    )
    assert target_probs(row).nonzero().squeeze(1).tolist() == allowed
    assert kept_by(row).nonzero().squeeze(1).tolist() == allowed


def test_a_masked_stop_id_does_not_count_for_top_k_top_p_or_min_p() -> None:
    logits = [20.0, math.log(4), math.log(2), 0.0, 0.0]
    changes: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": (0,)}
    assert target_probs(make_row(logits, top_k=1, **changes)).tolist() == [0, 1, 0, 0, 0]
    expected = torch.tensor([0, 2 / 3, 1 / 3, 0, 0])
    torch.testing.assert_close(target_probs(make_row(logits, top_p=0.7, **changes)), expected)
    torch.testing.assert_close(target_probs(make_row(logits, min_p=0.3, **changes)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_gives_the_same_token_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    # An odd vocabulary, so that rows of the batch lie at every alignment.
    table = torch.stack([random_logits("ordinary", 5001, seed) for seed in range(24)]).to(dtype)
    rows = [
        make_row(logits, position=7 * i, seed=i, **list(FILTERS.values())[i % len(FILTERS)])
        for i, logits in enumerate(table)
    ]
    together = sample(rows)
    assert [sample([row])[0] for row in rows] == together
    assert sample(rows[::-1]) == together[::-1]
    copies = [Row(row.logits.clone(), row.context) for row in rows]
    assert sample(copies) == together
    assert len(set(together)) > 12


def test_what_is_left_of_a_row_does_not_depend_on_where_it_lies_nor_on_threads() -> None:
    table = torch.stack([random_logits("ordinary", 33_001, seed) for seed in range(9)])
    num_threads = torch.get_num_threads()
    try:
        for logits in table:
            masks = []
            for threads, place in ((1, logits), (1, logits.clone()), (2, logits)):
                torch.set_num_threads(threads)
                masks.append(kept_by(make_row(place, top_p=0.97, temperature=1.2)))
            assert 256 < masks[0].count_nonzero() < 33_001
            assert torch.equal(masks[0], masks[1])
            assert torch.equal(masks[0], masks[2])
    finally:
        torch.set_num_threads(num_threads)


@by_filter
def test_logits_are_only_read(filters: dict[str, Any]) -> None:
    for kind in ("ordinary", "flat"):
        logits = random_logits(kind, 500, 5)
        before = logits.clone()
        row = make_row(logits, **filters, min_tokens=3, stop_token_ids=(int(logits.argmax()),))
        sample([row])
        target_probs(row)
        assert torch.equal(logits, before)


UNUSABLE = {
    "NaN": ([0.0, float("nan"), 1.0], {}, "logits contain NaN"),
    "all NaN": ([float("nan")] * 3, {}, "logits contain NaN"),
    "NaN beside +inf": ([INF, float("nan"), 1.0], {}, "logits contain NaN"),
    "NaN on a masked stop id": (
        [0.0, float("nan"), 1.0],
        {"min_tokens": 1, "stop_token_ids": (1,)},
        "logits contain NaN",
    ),
    "+inf": ([0.0, INF, 1.0], {}, r"logits contain \+inf"),
    "all -inf": ([-INF] * 3, {}, "no token is allowed: every logit is -inf$"),
    "only a masked stop id is finite": (
        [-INF, 1.0, -INF],
        {"min_tokens": 1, "stop_token_ids": (1,)},
        r"no token is allowed: every logit is -inf, once min_tokens masks the stop ids \[1\]",
    ),
    "overflow": (
        [1e38, 0.0],
        {"temperature": 1e-4},
        r"largest logit, 9.99\d+e\+37, over the temperature 0.0001 exceeds float32",
    ),
    "negative overflow": (
        [-1e38, -2e38],
        {"temperature": 1e-4},
        r"largest logit, -9.99\d+e\+37, over the temperature 0.0001 exceeds float32",
    ),
}


@pytest.mark.parametrize(("logits", "changes", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_row_that_gives_no_token_says_why(
    logits: list[float], changes: dict[str, Any], message: str
) -> None:
    row = make_row(logits, **changes)
    with pytest.raises(RowError, match=message):
        target_probs(row)
    good = make_row([0.0, 5.0, 0.0], top_k=1)
    first, failed, last = sample([good, row, good])
    assert (first, last) == (1, 1)
    assert isinstance(failed, RowError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), INF], ids=["NaN", "+inf"])
def test_a_bad_value_is_found_wherever_it_stands(value: float, dtype: torch.dtype) -> None:
    for size in (1, 8, 67):
        for place in range(size):
            logits = torch.zeros(size, dtype=dtype)
            logits[place] = value
            assert isinstance(sample([make_row(logits, top_k=1)])[0], RowError)


def test_each_of_n_outputs_has_its_own_noise() -> None:
    logits = random_logits("ordinary", 500, 2)
    rows = [make_row(logits, position=3, seed=11, sample_index=index) for index in range(6)]
    expected = []
    for index in range(6):
        words = vocabulary_words(NoiseKey(11, 3, sample=index), 500, logits.device).tolist()
        times = [
            exponential(word) / probability
            for word, probability in zip(words, logits.softmax(dim=-1).tolist(), strict=True)
        ]
        expected.append(times.index(min(times)))
    assert sample(rows) == expected
    assert len(set(expected)) > 2


# -- logprobs ------------------------------------------------------------------------------------

LOG_PROBS = [math.log(p) for p in (0.125, 0.5, 0.125, 0.0625, 0.125, 0.0625)]


@pytest.mark.parametrize(
    ("token_id", "n", "expected"),
    [
        (3, 0, [3]),
        (3, 1, [3, 1]),
        (3, 2, [3, 1, 0]),
        (4, 3, [4, 1, 0, 2]),
        (1, 3, [1, 0, 2]),
        (2, 3, [2, 1, 0]),
        (5, 6, [5, 1, 0, 2, 4, 3]),
        (5, 99, [5, 1, 0, 2, 4, 3]),
    ],
    ids=["none", "likeliest", "tie", "ties", "is likeliest", "is among them", "all", "above V"],
)
@pytest.mark.parametrize("shift", [0.0, 7.0], ids=["normalised", "shifted"])
def test_logprobs_begin_with_the_token_and_go_on_with_the_likeliest_lower_ids_first(
    token_id: int, n: int, expected: list[int], shift: float
) -> None:
    logits = torch.tensor(LOG_PROBS) + shift
    found = row_logprobs(logits, token_id, n)
    assert list(found) == expected
    assert list(found.values()) == pytest.approx([LOG_PROBS[i] for i in expected], abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_the_log_softmax_of_the_row_in_float32(dtype: torch.dtype) -> None:
    logits = (random_logits("partly -inf", 30_001, 8) * 4).to(dtype)
    before = logits.clone()
    found = row_logprobs(logits, 17, 20)
    assert torch.equal(logits, before)
    exact = logits.double().log_softmax(dim=-1)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))[:20]
    assert list(found) == [17, *ranked]
    assert list(found.values()) == pytest.approx(exact[list(found)].tolist(), rel=1e-5, abs=1e-5)


def test_logprobs_do_not_depend_on_where_the_row_lies() -> None:
    table = torch.stack([random_logits("ordinary", 5001, seed) for seed in range(8)])
    for logits in table:
        assert row_logprobs(logits, 3, 10) == row_logprobs(logits.clone(), 3, 10)


def test_a_token_without_a_chance_has_the_log_probability_of_minus_infinity() -> None:
    assert row_logprobs(torch.tensor([0.0, -INF]), 1, 2) == {1: -INF, 0: 0.0}


def test_of_many_equals_logprobs_name_the_lowest_ids() -> None:
    logits = torch.zeros(5000)
    logits[::2] = 1.0
    assert list(row_logprobs(logits, 7, 60)) == [7, *range(0, 120, 2)]
    everything = list(row_logprobs(logits, 0, 5000))
    assert everything == [*range(0, 5000, 2), *range(1, 5000, 2)]
