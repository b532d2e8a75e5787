"""The statistics of bench_pairs: against scipy's binomial, and against all ways signs can fall."""

from __future__ import annotations

import itertools
from typing import Any

import bench_pairs
import pytest
from scipy.stats import binom


@pytest.mark.parametrize(("num_pairs", "rank"), [(0, 0), (4, 0), (5, 1), (7, 1), (8, 2), (9, 2)])
def test_the_rank_of_the_bound_is_that_of_tables_of_the_sign_test(
    num_pairs: int, rank: int
) -> None:
    assert bench_pairs.rank_of_bound(num_pairs) == rank


def test_the_rank_is_the_greatest_whose_tail_the_confidence_leaves() -> None:
    for num_pairs in range(1, 120):
        tails = [binom.cdf(j - 1, num_pairs, 0.5) for j in range(num_pairs + 1)]
        allowed = [j for j, tail in enumerate(tails) if tail <= 0.05]
        assert bench_pairs.rank_of_bound(num_pairs) == max(allowed), num_pairs


@pytest.mark.parametrize("num_pairs", [5, 8, 9, 11])
def test_the_bounds_are_wrong_as_often_as_the_law_says(num_pairs: int) -> None:
    """Values around a median of 0: every pattern of signs is equally likely."""
    too_high = too_low = 0
    for signs in itertools.product((-1.0, 1.0), repeat=num_pairs):
        values = [sign * (1 + number) for number, sign in enumerate(signs)]
        lower, upper = bench_pairs.lower_bound(values), bench_pairs.upper_bound(values)
        assert lower is not None
        assert upper is not None
        too_high += lower > 0
        too_low += upper < 0
    # Wrong if fewer values than the rank are below the median.
    rank = max(j for j in range(num_pairs) if binom.cdf(j - 1, num_pairs, 0.5) <= 0.05)
    expected = round(2**num_pairs * binom.cdf(rank - 1, num_pairs, 0.5))
    assert too_high == too_low == expected
    assert 0 < expected / 2**num_pairs <= 0.05


def test_with_nine_values_the_bounds_are_the_second_from_either_end() -> None:
    values = [1.08, 0.91, 1.02, 1.05, 0.99, 1.03, 0.97, 1.07, 1.01]
    assert bench_pairs.lower_bound(values) == 0.97
    assert bench_pairs.upper_bound(values) == 1.07


def test_too_few_values_have_no_bound() -> None:
    assert bench_pairs.lower_bound([1.0, 1.1, 1.2, 1.3]) is None
    assert bench_pairs.upper_bound([1.0, 1.1, 1.2, 1.3]) is None


@pytest.mark.parametrize(
    ("condition", "own", "median", "bound", "verdict"),
    [
        ("batch1", [1.0] * 9, 1.0, 1.0, "shown"),
        ("batch1", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25], 1.0, 0.8, "met"),
        ("batch1", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.25], 1.0, 1.0, "shown"),
        ("batch1", [1.25] * 9, 0.8, 0.8, "missed"),
        ("batch1", [0.5] * 9, 2.0, 2.0, "shown"),
        ("ttft", [1.25] * 9, 1.25, 1.25, "missed"),
        ("ttft", [0.5] * 9, 0.5, 0.5, "shown"),
        ("ttft", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.25, 1.25], 1.0, 1.25, "met"),
        ("batch1", [1.0] * 4, 1.0, None, "met"),
    ],
)
def test_a_row_says_whether_the_median_and_its_bound_are_within_the_limit(
    condition: str, own: list[float], median: float, bound: float | None, verdict: str
) -> None:
    row = bench_pairs.judge(condition, "qa", "ngram", [(1.0, seconds) for seconds in own])
    assert (row.median, row.bound, row.verdict) == (median, bound, verdict)


def test_every_proposer_is_first_as_often_as_last() -> None:
    for names in (["none", "a"], ["none", "a", "b", "c"]):
        orders = [bench_pairs.in_turn(names, turn) for turn in range(4 * len(names))]
        assert all(sorted(order) == sorted(names) for order in orders)
        for name in names:
            assert sum(order[0] == name for order in orders) == 4
            assert sum(order[-1] == name for order in orders) == 4


def test_engines_take_turns_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(llm: str, call: list[str], name: str) -> bench_pairs.Answers:
        assert llm == f"engine {name}"
        asked.append((name, *call))
        return bench_pairs.Answers(len(asked), [0.5 * len(asked)], {call[0]: [len(asked)]})

    monkeypatch.setattr(bench_pairs, "answer", answer)
    workload: Any = bench_pairs.Workload("mixed", [["a"], ["b"], ["c"]])  # type: ignore[list-item]
    engines: Any = {"none": "engine none", "ngram": "engine ngram"}
    found = bench_pairs.answer_in_turn(engines, workload, 1)
    assert [call for _, call in asked] == list("aabbcc")
    firsts = [name for name, _ in asked[::2]]
    assert firsts == [bench_pairs.in_turn(list(engines), turn)[0] for turn in (1, 2, 3)]
    assert set(firsts) == set(engines)
    assert sum(answers.seconds for answers in found.values()) == 1 + 2 + 3 + 4 + 5 + 6
    for name, answers in found.items():
        mine = [place + 1 for place, (who, _) in enumerate(asked) if who == name]
        assert answers.seconds == sum(mine)
        assert answers.first_tokens == [0.5 * place for place in mine]
        assert list(answers.token_ids.values()) == [[place] for place in mine]


def test_the_estimate_is_of_all_calls_of_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([9.0, 1.28, 2.88] * 2)  # 10 ms a token of 128, 100 ms a step
    monkeypatch.setattr(
        bench_pairs,
        "answer",
        lambda llm, call, name: bench_pairs.Answers(next(seconds), [], {}),
    )
    prompts = {"t": [("a", [5] * 10), ("b", [6] * 20), ("c", [7] * 40)]}
    source = bench_pairs.Source(prompts, 300, limit=2, max_tokens=8, prompt_cap=None)
    for names in (["ngram"], ["ngram", "suffix", "eagle"]):
        todo = bench_pairs.phases(["batch1"], names)
        found = bench_pairs.estimate(None, source, todo, 3)  # type: ignore[arg-type]
        assert found == pytest.approx(3 * (1 + len(names)) * (0.3 + 2 * 0.8))


def test_a_prompt_with_other_ids_than_plain_decodings_is_named() -> None:
    plain = bench_pairs.Answers(1.0, [0.1, 0.1], {"81": [1, 2], "83": [3]})
    own = bench_pairs.Answers(1.0, [0.1, 0.1], {"81": [1, 2], "83": [4]})
    rounds = [{"qa": {"none": plain, "ngram": own, "suffix": plain}}] * 2
    assert bench_pairs.differences(rounds, "batch1") == ["batch1 qa 83 with ngram"]


def test_tasks_are_pooled_and_first_tokens_are_medians_over_prompts() -> None:
    def done(seconds: float, first: list[float]) -> bench_pairs.Answers:
        return bench_pairs.Answers(seconds, first, {})

    rounds = [
        {
            "qa": {"none": done(2.0, [1.0, 5.0]), "ngram": done(1.0, [1.0, 3.0])},
            "rag": {"none": done(4.0, [2.0]), "ngram": done(2.0, [4.0])},
        }
    ] * 5
    rows = bench_pairs.make_rows(rounds, ["ngram"], ["batch1", "ttft"])
    assert [(row.condition, row.task, row.plain_seconds, row.median) for row in rows] == [
        ("batch1", "qa", 2.0, 2.0),
        ("batch1", "rag", 4.0, 2.0),
        ("batch1", "ALL", 6.0, 2.0),
        ("ttft", "ALL", 2.0, 1.5),
    ]
