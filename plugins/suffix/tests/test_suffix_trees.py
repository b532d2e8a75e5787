"""Trees of the suffix plugin: what they have of the request's own text and of earlier outputs."""

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
from foresay_suffix import SuffixConfig
from foresay_suffix.proposer import SuffixProposer


def ways(
    by: SuffixProposer, history: Sequence[int], k: int = 16, req_id: str = "a", **asked: Any
) -> list[tuple[int, ...]]:
    """The ways from the root to each node."""
    request = DraftRequest(req_id, history, 1, k, num_prompt_tokens=1, **asked)
    draft = by.propose(DraftInput([request]))
    assert draft.parents is not None
    [token_ids], [parents] = draft.token_ids, draft.parents
    assert parents is not None
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        assert -1 <= parent < len(found)
        found.append((*(() if parent < 0 else found[parent]), token_id))
    assert len(set(found)) == len(found) <= k
    return found


def letters(
    by: SuffixProposer, text: str, k: int = 16, req_id: str = "a", **asked: Any
) -> list[str]:
    found = ways(by, [ord(c) for c in text], k, req_id, **asked)
    return ["".join(map(chr, way)) for way in found]


def trees(**config: Any) -> SuffixProposer:
    return SuffixProposer(SuffixConfig(**config))


def serve(by: SuffixProposer, text: str) -> None:
    """Let a request come, write a text after one token of prompt, and end."""
    letters(by, text, 0, "earlier")
    by.release("earlier")


# --- by hand


def test_what_followed_more_often_comes_first_and_the_rest_beside_it() -> None:
    found = letters(trees(), "pxyaqxyarxybsxy")
    assert found[0] == "a"
    assert "b" in found


def test_earlier_outputs_and_the_own_text_share_a_tree() -> None:
    by = trees()
    serve(by, "?the cat sat down")
    found = letters(by, "!the cat ran, the cat ")
    assert {"r", "ra", "s", "sa"} <= set(found)


def test_an_output_that_comes_again_is_drafted_as_deep_as_there_are_nodes() -> None:
    by = trees()
    serve(by, "?It is a lighthouse")
    assert letters(by, "?It is a ", 8)[-1] == "lighthou"
    assert "lig" in letters(by, "?It is a ", 8, max_depth=3)
    assert max(map(len, letters(by, "?It is a ", 8, max_depth=3))) == 3
    assert max(map(len, letters(trees(max_depth=2), "abcabcabc"))) == 2


def test_an_output_that_a_tree_follows_counts_as_used() -> None:
    by = trees(max_remembered_tokens=24)
    for text in ("?aAbBcCdDeE", "?fFgGhHiIjJ"):
        serve(by, text)
    letters(by, "!aAbB", req_id="b")
    serve(by, "?kKlLmMnNoO")  # one of the two must go
    assert letters(by, "!aAbB", 2, "c") == ["c", "cC"]
    assert letters(by, "!fFgG", 2, "d") == []


def test_less_likely_nodes_are_left_out() -> None:
    # After xy came a, a and b: a has 2.4 of 4.4 in its favour, b 0.9, the rest was never seen.
    text = "pxybqxyarxyasxy"
    assert "b" in letters(trees(), text)
    assert all(way[0] == "a" for way in letters(trees(min_probability=0.3), text))
    assert all(way[0] == "a" for way in letters(trees(), text, min_confidence=0.3))
    assert letters(trees(), text, min_confidence=0.9) == []


# --- properties


histories = st.lists(st.integers(0, 3), min_size=2, max_size=60)


@settings(max_examples=200, deadline=None)
@given(earlier=histories, history=histories, k=st.integers(6, 16), depth=st.integers(1, 9))
def test_the_chain_is_in_every_tree_with_room_for_more(
    earlier: list[int], history: list[int], k: int, depth: int
) -> None:
    by = trees(min_probability=0.0)
    chains = SuffixProposer(SuffixConfig(tree=False, min_probability=0.0))
    for proposer in (by, chains):
        proposer.propose(DraftInput([DraftRequest("e", earlier, 1, 0, num_prompt_tokens=1)]))
        proposer.release("e")
    asked = DraftRequest("a", history, 1, min(5, depth), num_prompt_tokens=1)
    [own] = chains.propose(DraftInput([asked])).token_ids
    found = ways(by, history, k, max_depth=depth)
    assert {tuple(own[: n + 1]) for n in range(len(own))} <= set(found)
    assert max(map(len, found), default=0) <= depth


# --- in an engine


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
def test_a_second_pass_gives_the_same_texts_in_far_fewer_steps(temperature: float) -> None:
    model = tiny_llama()
    numbers = random.Random(5)
    prompts = [numbers.choices(range(60), k=12) for _ in range(4)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(4)
    ]

    def texts(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    common: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "strict": True}
    with LLM(model, proposer=None, **common) as llm:
        plain = texts(llm)
    with LLM(model, proposer="suffix", **common, adaptive=False) as llm:
        first = texts(llm)
        one = llm.stats
        second = texts(llm)
        both = llm.stats
    assert first == second == plain
    assert (both.num_steps - one.num_steps) * 3 < one.num_steps
