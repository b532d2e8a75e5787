"""The ngram plugin against a brute-force search of the history, and by hand.

But for the conformance suite it runs no model: what a proposer drafts is a function of the token
ids alone.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foresay_ngram
from foresay.core.config import build_settings
from foresay.core.errors import ConfigError
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.testing import ProposerConformance
from foresay_ngram import NgramConfig
from foresay_ngram.index import SuffixIndex
from foresay_ngram.proposer import NgramProposer


class TestConformance(ProposerConformance):
    """All rules that foresay has for proposers, drafting trees."""

    proposer_name = "ngram"


class TestConformanceOfChains(ProposerConformance):
    """The same, drafting chains."""

    proposer_name = "ngram"
    settings: ClassVar = {"tree": False}


def chains(**config: Any) -> NgramProposer:
    """A proposer that drafts chains."""
    return NgramProposer(NgramConfig(tree=False, **config))


def request(token_ids: Sequence[int], k: int, req_id: str = "a") -> DraftRequest:
    return DraftRequest(req_id=req_id, token_ids=token_ids, num_new_tokens=1, k=k)


def draft(token_ids: Sequence[int], k: int, **config: Any) -> list[int]:
    """What a fresh proposer of chains drafts for one request."""
    proposer = chains(**config)
    return proposer.propose(DraftInput([request(token_ids, k)])).token_ids[0]


def brute_force(history: list[int], k: int, shortest: int, longest: int) -> list[int]:
    """The definition: longest suffix first, then the most recent occurrence, then copy."""
    size = len(history)
    for length in range(min(longest, size), shortest - 1, -1):
        for end in range(size - 1, length - 1, -1):
            if history[end - length : end] == history[size - length :]:
                text = list(history)
                for i in range(k):
                    text.append(text[end + i])
                return text[size:]
    return []


# --- against the definition


@settings(max_examples=400, deadline=None)
@given(data=st.data(), alphabet=st.integers(1, 4), shortest=st.integers(1, 4))
def test_drafts_equal_a_brute_force_search_however_the_history_arrives(
    data: st.DataObject, alphabet: int, shortest: int
) -> None:
    longest = data.draw(st.integers(shortest, shortest + 4))
    history = data.draw(st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=60))
    proposer = chains(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    arrived = 0
    while arrived < len(history):
        arrived += data.draw(st.integers(1, len(history) - arrived))
        k = data.draw(st.integers(0, 7))
        known = history[:arrived]
        batch = DraftInput([request(known, k)])
        assert proposer.propose(batch).token_ids == [brute_force(known, k, shortest, longest)]


@pytest.mark.parametrize("token", [0, 1, 49151, 2**31, 2**32 - 1], ids=str)
def test_any_32_bit_token_id_is_kept_apart_from_its_neighbours(token: int) -> None:
    others = [0, 1, 7, 2**16, 2**32 - 1]
    history = [*others, token, 5, *others, token]
    for shortest in (1, 2, 3):
        assert draft(history, 3, prompt_lookup_min=shortest) == brute_force(history, 3, shortest, 5)


# --- by hand


@pytest.mark.parametrize(
    ("history", "k", "expected"),
    [
        pytest.param("ab" * 2, 6, "ababab", id="a period of two goes on"),
        pytest.param("abcabc", 7, "abcabca", id="a period of three goes on"),
        pytest.param("xaa", 4, "aaaa", id="one token repeated"),
        pytest.param("xyabzab", 5, "zabza", id="runs off the end into its own draft"),
        pytest.param("abcdefab", 3, "cde", id="stops at k"),
        pytest.param("abcdef", 3, "", id="nothing repeats"),
        pytest.param("a", 3, "", id="one token"),
        pytest.param("abcda", 0, "", id="k is 0"),
    ],
)
def test_drafts_by_hand(history: str, k: int, expected: str) -> None:
    assert draft([ord(c) for c in history], k) == [ord(c) for c in expected]


def test_of_two_occurrences_the_most_recent_is_followed() -> None:
    # 1 2 was followed by 3, then by 4; both occurrences match two tokens.
    assert draft([1, 2, 3, 1, 2, 4, 9, 1, 2], 1) == [4]


def test_a_longer_match_beats_a_more_recent_one() -> None:
    # 7 1 2 was followed by 3; 1 2 alone was followed by 4 since.
    assert draft([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], 1) == [3]


def test_a_match_longer_than_prompt_lookup_max_counts_as_that_long() -> None:
    # The three-token match is cut to two tokens: now the two are equal, and the later one wins.
    history = [7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2]
    assert draft(history, 1, prompt_lookup_max=2) == [4]


@pytest.mark.parametrize(("shortest", "expected"), [(1, [3]), (2, [3]), (3, [])], ids=str)
def test_a_match_shorter_than_prompt_lookup_min_drafts_nothing(
    shortest: int, expected: list[int]
) -> None:
    assert draft([1, 2, 3, 9, 1, 2], 1, prompt_lookup_min=shortest) == expected


@pytest.mark.parametrize("k", range(1, 12))
def test_k_tokens_are_drafted_and_no_more(k: int) -> None:
    assert len(draft([1, 2, 3, 4, 1, 2], k)) == k


def test_without_an_explicit_number_all_that_the_engine_wants_is_drafted() -> None:
    assert NgramConfig().num_speculative_tokens is None
    assert draft([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_every_draft_consists_of_tokens_of_the_history() -> None:
    random_ids = random.Random(0)
    history = [random_ids.randrange(1000, 1050) for _ in range(500)]
    assert set(draft(history, 64)) <= set(history)


# --- state


def test_a_history_that_grew_by_several_tokens_is_caught_up_with() -> None:
    proposer = chains()
    history = [1, 2, 3]
    assert proposer.propose(DraftInput([request(history, 3)])).token_ids == [[]]
    history += [4, 5, 1, 2]
    assert proposer.propose(DraftInput([request(history, 3)])).token_ids == [[3, 4, 5]]


def test_steps_with_k_zero_lose_nothing() -> None:
    proposer = chains()
    history = [1, 2]
    for token in [3, 4, 1, 2]:
        history.append(token)
        assert proposer.propose(DraftInput([request(history, 0)])).token_ids == [[]]
    assert proposer.propose(DraftInput([request(history, 2)])).token_ids == [[3, 4]]


def test_rows_may_change_order_and_requests_come_and_go() -> None:
    proposer = chains()
    a, b = [1, 2, 3, 1], [1, 5, 6, 1]
    batch = DraftInput([request(a, 2, "a"), request(b, 2, "b")])
    assert proposer.propose(batch).token_ids == [[2, 3], [5, 6]]
    batch = DraftInput([request([*b, 5], 2, "b"), request([9, 8, 9], 1, "c"), request(a, 1, "a")])
    assert proposer.propose(batch).token_ids == [[6, 1], [8], [2]]


def test_a_released_request_is_forgotten_and_indexed_anew() -> None:
    proposer = chains()
    proposer.propose(DraftInput([request([1, 2, 1], 2)]))
    proposer.release("a")
    assert draft([7, 1], 2) == []
    assert proposer.propose(DraftInput([request([7, 1], 2)])).token_ids == [[]]
    assert proposer.propose(DraftInput([request([7, 1, 7], 2)])).token_ids == [[1, 7]]


def test_releasing_an_unknown_request_is_no_error() -> None:
    chains().release("never seen")


def test_two_proposers_given_the_same_history_draft_the_same() -> None:
    ids = random.Random(1)
    history = [ids.randrange(6) for _ in range(2000)]
    assert draft(history, 9) == draft(history, 9) != []


# --- cost


class Counting(dict[int, int]):
    """A dict that counts what the index does with it."""

    operations = 0

    def get(self, *args: Any) -> Any:
        Counting.operations += 1
        return super().get(*args)

    def __setitem__(self, key: int, value: int) -> None:
        Counting.operations += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("kind", ["random text", "one token", "a long period"])
def test_a_token_costs_the_same_hash_table_operations_at_100k_tokens_as_at_none(kind: str) -> None:
    shortest, longest = 2, 5
    index = SuffixIndex(shortest, longest)
    index._roots, index._children = Counting(), Counting()
    ids = random.Random(2)
    token = {
        "random text": lambda i: int(ids.paretovariate(0.7)) % 5000,
        "one token": lambda i: 3,
        "a long period": lambda i: i % 977,
    }[kind]
    most = 0
    for i in range(100_000):
        Counting.operations = 0
        index.extend([token(i)])
        most = max(most, Counting.operations)
    # Per length: one look-up, one entry for the new occurrence, one for the first one.
    assert 0 < most <= 3 * (longest - shortest + 1)


def test_a_step_reads_only_the_new_tokens_of_a_long_history() -> None:
    read: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, key: Any) -> Any:
            assert isinstance(key, slice)
            read.extend(range(*key.indices(len(self))))
            return super().__getitem__(key)

        def __iter__(self) -> Any:
            raise AssertionError("the whole history was read")

    proposer = chains()
    history = Watched(i % 50 for i in range(5000))
    proposer.propose(DraftInput([request(history, 3)]))
    read.clear()
    history.append(0)
    history.append(1)
    assert proposer.propose(DraftInput([request(history, 3)])).token_ids == [[2, 3, 4]]
    assert read == [5000, 5001]


# --- the plugin's face


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "ngram: prompt_lookup_min=4 must not exceed prompt_lookup_max=3",
        ),
        (
            {"prompt_lookup_min": 0},
            "ngram: prompt_lookup_min=0: input should be greater than or equal to 1",
        ),
        (
            {"num_speculative_tokens": 0},
            "ngram: num_speculative_tokens=0: input should be greater than or equal to 1",
        ),
        (
            {"drafter": "some/folder"},
            "ngram: drafter='some/folder': ngram drafts from the request's own history and loads "
            "no drafter",
        ),
    ],
    ids=["min above max", "min 0", "no tokens", "a drafter"],
)
def test_wrong_settings_are_refused_in_a_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_settings(NgramConfig, values, "ngram")
    assert str(caught.value) == message


def test_a_misspelt_setting_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'prompt_lookup_max'"):
        build_settings(NgramConfig, {"promt_lookup_max": 3}, "ngram")


def test_the_hook_offers_ngram_and_builds_it() -> None:
    (spec,) = foresay_ngram.foresay_register_proposers()
    assert spec.name == "ngram"
    proposer = spec.build(spec.config_type(prompt_lookup_min=2, tree=False))
    # One token matches, two are asked for: the settings arrived.
    assert proposer.propose(DraftInput([request([1, 2, 1], 2)])).token_ids == [[]]
    assert proposer.propose(DraftInput([request([1, 2, 1, 2], 2)])).token_ids == [[1, 2]]


def test_the_plugin_imports_no_torch_and_not_its_proposer() -> None:
    code = (
        "import sys, foresay_ngram; foresay_ngram.foresay_register_proposers(); "
        "print({'torch', 'transformers', 'foresay_ngram.proposer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
