"""Continuations merged into a tree: by hand, and against asking all of them for every node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.core.proposer import draft_depths
from foresay.core.worker.draft_trie import NOTHING, Continuation, Merged, merge

ODDS = (0.0, 0.5, 1.0, 3.0)


def after(
    letters: str, match: int = 1, weight: float = 1.0, *, grows: bool = False
) -> Continuation:
    return Continuation([ord(c) for c in letters], 0, match, weight, grows)


def ways(merged: Merged) -> list[str]:
    """Each node as the letters from the root to it."""
    found: list[str] = []
    for token_id, parent in zip(merged.token_ids, merged.parents, strict=True):
        found.append(("" if parent < 0 else found[parent]) + chr(token_id))
    return found


# --- by hand


def test_what_begins_alike_shares_nodes_and_the_likeliest_come_first() -> None:
    merged = merge([after("ab"), after("ac", 2), after("x")], ODDS, 9)
    # At the root: a has the odds 0.5 + 1, x 0.5, the unseen 1. After a: b has 1 (two match), c 3.
    expected = {"a": 1.5 / 3, "x": 0.5 / 3, "ac": 0.5 * 3 / 5, "ab": 0.5 * 1 / 5}
    assert ways(merged) == sorted(expected, key=lambda way: -expected[way])
    assert merged.probabilities == pytest.approx(sorted(expected.values(), reverse=True))
    assert merged.followed == [0, 1]


def test_a_weight_multiplies_the_odds() -> None:
    merged = merge([after("a"), after("b", weight=3.0)], ODDS, 9)
    assert ways(merged) == ["b", "a"]
    assert merged.probabilities == pytest.approx([1.5 / 3, 0.5 / 3])


def test_what_is_said_often_is_likelier_than_what_is_said_once() -> None:
    assert ways(merge([after("x"), after("a"), after("a")], ODDS, 1)) == ["a"]


def test_of_equally_likely_ones_the_earlier_continuation_comes_first() -> None:
    assert ways(merge([after("b"), after("a")], ODDS, 2)) == ["b", "a"]


def test_a_text_that_grows_goes_on_with_what_is_drafted() -> None:
    text = [ord(c) for c in "abab"]
    assert ways(merge([Continuation(text, 2, 2, grows=True)], ODDS, 5))[-1] == "ababa"
    assert ways(merge([Continuation(text, 2, 2)], ODDS, 5))[-1] == "ab"


def test_a_chain_is_there_whatever_is_likelier() -> None:
    many = [after("xyz", 3), after("xyw", 3), after("xw", 3), after("abc")]
    chain = [ord(c) for c in "abc"]
    assert "a" not in ways(merge(many, ODDS, 5))
    assert ways(merge(many, ODDS, 5, chain=chain)) == ["x", "xy", "a", "ab", "abc"]
    # It gives way to the other bounds only.
    assert ways(merge(many, ODDS, 2, chain=chain)) == ["a", "ab"]
    assert ways(merge(many, ODDS, 5, chain=chain, max_depth=1)) == ["x", "a"]
    assert not any(
        way[0] == "a" for way in ways(merge(many, ODDS, 5, chain=chain, min_probability=0.1))
    )


@pytest.mark.parametrize(
    ("continuations", "k", "more"),
    [
        ([], 5, {}),
        ([after("ab")], 0, {}),
        ([after("ab")], 5, {"max_depth": 0}),
        ([after("ab")], 5, {"min_probability": 0.9}),
        ([after("")], 5, {}),
        ([after("ab", 0)], 5, {}),
    ],
    ids=["no continuation", "k 0", "depth 0", "nothing likely", "at its end", "no odds"],
)
def test_nothing_comes_of_nothing(
    continuations: list[Continuation], k: int, more: dict[str, Any]
) -> None:
    assert merge(continuations, ODDS, k, **more) == NOTHING


# --- against the definition


def by_definition(continuations: Sequence[Continuation], way: tuple[int, ...]) -> float:
    """The probability of a way from the root; 0: nobody goes so."""
    probability = 1.0
    for done in range(len(way)):
        said: dict[int, float] = {}
        for text, start, match_length, weight, grows in continuations:
            goes_on = [*text, *way] if grows else list(text)
            following = tuple(goes_on[start : start + done + 1])
            if len(following) == done + 1 and following[:-1] == way[:done]:
                length = min(match_length + done, len(ODDS) - 1)
                said[following[-1]] = said.get(following[-1], 0.0) + weight * ODDS[length]
        probability *= said.get(way[done], 0.0) / (1 + sum(said.values()))
    return probability


def all_ways(continuations: Sequence[Continuation], most: int) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(most):
        level = [(*way, token) for way in level for token in range(3)]
        likely = {way: by_definition(continuations, way) for way in level}
        found |= {way: p for way, p in likely.items() if p > 0}
        level = [way for way in level if likely[way] > 0]
    return found


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    k=st.integers(1, 10),
    max_depth=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.03, 0.1]),
    with_chain=st.booleans(),
)
def test_the_tree_has_the_likeliest_nodes_of_all(
    data: st.DataObject, k: int, max_depth: int, least: float, with_chain: bool
) -> None:
    own = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    continuations = []
    for _ in range(data.draw(st.integers(0, 5))):
        grows = data.draw(st.booleans())
        text = own if grows else data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
        start = data.draw(st.integers(0, len(text) - 1))
        weight = data.draw(st.floats(0.1, 3.0))
        continuations.append(Continuation(text, start, data.draw(st.integers(1, 4)), weight, grows))
    chain: list[int] = []
    if with_chain and continuations:
        text, start, *_ = continuations[-1]
        chain = list(text[start : start + 3])
    merged = merge(continuations, ODDS, k, max_depth=max_depth, min_probability=least, chain=chain)
    expected = {
        way: p for way, p in all_ways(continuations, max_depth).items() if p >= least + 1e-12
    }
    got: list[tuple[int, ...]] = []
    for token_id, parent in zip(merged.token_ids, merged.parents, strict=True):
        assert -1 <= parent < len(got)
        got.append((*(() if parent < 0 else got[parent]), token_id))
    assert len(set(got)) == len(got) <= k
    assert max(draft_depths(merged.parents), default=0) <= max_depth
    assert merged.probabilities == pytest.approx(sorted(merged.probabilities, reverse=True))
    for way, p in zip(got, merged.probabilities, strict=True):
        assert p == pytest.approx(by_definition(continuations, way))
    on_chain = [tuple(chain[:n]) for n in range(1, min(k, max_depth, len(chain)) + 1)]
    on_chain = [way for way in on_chain if way in expected]
    assert set(on_chain) <= set(got)
    # Beside the chain: no node that is left out is likelier than one that is in.
    free = [p for way, p in zip(got, merged.probabilities, strict=True) if way not in on_chain]
    left_out = [p for way, p in expected.items() if way not in got]
    if len(got) == k:
        assert max(left_out, default=0.0) <= min(free, default=math.inf) + 1e-9
    else:
        assert left_out == []
