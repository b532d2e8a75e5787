"""Trees of the ngram plugin: by hand, and the places that they are made of by brute force."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay import LLM, SamplingParams
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.testing import tiny_llama
from foresay_ngram import NgramConfig
from foresay_ngram.index import SuffixIndex
from foresay_ngram.odds import Odds
from foresay_ngram.proposer import NgramProposer


def tree(
    history: Sequence[int] | str,
    k: int = 16,
    *,
    prediction: str = "",
    num_prompt: int = 1,
    asked: dict[str, Any] | None = None,
    **config: Any,
) -> list[str] | list[tuple[int, ...]]:
    """The ways from the root to each node that a fresh proposer drafts."""
    ids = [ord(c) for c in history] if isinstance(history, str) else history
    request = DraftRequest(
        "a", ids, 1, k, [ord(c) for c in prediction], num_prompt, **(asked or {})
    )
    draft = NgramProposer(NgramConfig(**config)).propose(DraftInput([request]))
    assert draft.parents is not None
    [token_ids], [parents] = draft.token_ids, draft.parents
    assert parents is not None
    ways: list[tuple[int, ...]] = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        assert -1 <= parent < len(ways)
        ways.append((*(() if parent < 0 else ways[parent]), token_id))
    assert len(set(ways)) == len(ways) <= k
    return ["".join(map(chr, way)) for way in ways] if isinstance(history, str) else ways


def chain(history: Sequence[int], k: int) -> tuple[int, ...]:
    proposer = NgramProposer(NgramConfig(tree=False))
    return tuple(proposer.propose(DraftInput([DraftRequest("a", history, 1, k)])).token_ids[0])


# --- by hand


def test_what_followed_in_several_places_is_drafted_side_by_side() -> None:
    ways = tree("xyAB.xyCD:xy", 9)
    assert {"A", "AB", "C", "CD"} <= set(ways)
    assert ways[0] == "C", "the most recent one first"


def test_what_followed_more_often_comes_before_what_followed_last() -> None:
    # Three places count 2, 1.2 and 0.9 of them here: the last one says b, the two before it a.
    assert tree("xa.xa:xb;x", 2) == ["a", "b"]


def test_a_longer_match_comes_before_shorter_ones() -> None:
    ways = tree("pqra.rb:rb;pqr", 9, max_depth=2)
    assert ways[0] == "a"
    assert "b" in ways


def test_a_sure_copy_goes_as_deep_as_there_are_nodes() -> None:
    text = "the quick brown fox."
    ways = tree(text + "#" + text[:8], 10)
    assert ways[-1] == text[8:18]
    assert max(map(len, tree(text + "#" + text[:8], 10, max_depth=3))) == 3
    assert max(map(len, tree(text + "#" + text[:8], 10, asked={"max_depth": 4}))) == 4


def test_a_prediction_is_in_the_tree_beside_history() -> None:
    ways = tree("?xyAB:xyCD;xy", 16, prediction="xyAB:xyCD;xyEF", num_prompt=1)
    assert ways[0] == "E"
    assert {"EF", "A", "C"} <= set(ways)


def test_nothing_matches_nothing_is_drafted() -> None:
    assert tree("abcdef") == []
    assert tree("abab", 0) == []


# --- properties


histories = st.lists(st.integers(0, 3), min_size=2, max_size=50)


@settings(max_examples=200, deadline=None)
@given(history=histories, k=st.integers(6, 16), depth=st.integers(1, 9))
def test_the_chain_is_in_every_tree_with_room_for_more(
    history: list[int], k: int, depth: int
) -> None:
    ways = set(tree(history, k, asked={"max_depth": depth}))
    own = chain(history, min(5, depth))
    assert {own[: n + 1] for n in range(len(own))} <= ways
    assert max(map(len, ways), default=0) <= depth


@settings(max_examples=100, deadline=None)
@given(history=histories, least=st.sampled_from([0.05, 0.2, 0.5]))
def test_the_less_is_asked_for_the_more_nodes_come_and_they_come_behind(
    history: list[int], least: float
) -> None:
    every = tree(history, 200, asked={"max_depth": 6})
    kept = tree(history, 200, asked={"max_depth": 6, "min_confidence": least})
    assert kept == every[: len(kept)]
    assert tree(history, 200, asked={"max_depth": 6, "min_confidence": 0.999}) == []


@settings(max_examples=100, deadline=None)
@given(data=st.data(), history=histories)
def test_a_tree_does_not_depend_on_how_the_history_arrived(
    data: st.DataObject, history: list[int]
) -> None:
    proposer = NgramProposer(NgramConfig())
    arrived = 1
    while arrived < len(history):
        arrived += data.draw(st.integers(1, len(history) - arrived))
        request = DraftRequest("a", history[:arrived], 1, data.draw(st.integers(0, 20)))
        at_once = NgramProposer(NgramConfig()).propose(DraftInput([request]))
        assert proposer.propose(DraftInput([request])) == at_once


@settings(max_examples=200, deadline=None)
@given(
    history=histories, shortest=st.integers(1, 3), more=st.integers(0, 3), most=st.integers(1, 9)
)
def test_places_are_those_of_a_brute_force_search(
    history: list[int], shortest: int, more: int, most: int
) -> None:
    longest = shortest + more
    index = SuffixIndex(shortest, longest, keeps_places=True)
    index.extend(history)
    expected = []
    size = len(history)
    for length in range(min(longest, size), shortest - 1, -1):
        for end in range(size - 1, length - 1, -1):
            matches = history[end - length : end] == history[size - length :]
            if matches and end not in dict(expected):
                expected.append((end, length))
    assert index.places(most) == expected[:most]


# --- how far a match is trusted


def test_matches_that_were_right_are_trusted_more_and_others_less() -> None:
    odds = Odds()
    before = list(odds.values)
    for _ in range(30):
        odds.see(1, is_right=True)
        odds.see(2, is_right=False)
        odds.see(9, is_right=True)
    after = odds.values
    assert after[1] > 2 * before[1]
    assert after[2] < before[2] / 2
    assert after[5] > before[5], "longer ones count as the longest that are told apart"
    assert after[3:5] == before[3:5]


def test_a_text_that_never_repeats_what_followed_is_drafted_for_less() -> None:
    numbers = random.Random(0)
    # After a 0 comes something else each time: what followed a match of one token is never right.
    noise = [token for i in range(60) for token in (0, i + 1)]
    repeats = [token for _ in range(60) for token in (0, numbers.choice((1, 1, 1, 2)))]
    asked = {"min_confidence": 0.1}
    assert tree([*noise, 0], 8, asked=asked) == []
    assert (1,) in tree([*repeats, 0], 8, asked=asked)


# --- in an engine


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_trees_change_no_text_and_save_steps(temperature: float) -> None:
    model = tiny_llama()
    numbers = random.Random(5)
    prompts = [numbers.choices(range(60), k=12) for _ in range(3)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(3)
    ]

    def run(**settings: Any) -> tuple[list[list[int]], int]:
        with LLM(model, max_model_len=64, block_size=4, strict=True, **settings) as llm:
            texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            return texts, llm.stats.num_steps

    plain, _ = run(proposer=None)
    common: dict[str, Any] = {"proposer": "ngram", "adaptive": False}
    trees, steps = run(num_speculative_tokens=16, **common)
    chains, chain_steps = run(num_speculative_tokens=5, proposer_settings={"tree": False}, **common)
    assert trees == chains == plain
    assert steps <= chain_steps
