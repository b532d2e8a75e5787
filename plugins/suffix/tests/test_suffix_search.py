"""The search, the continuation and the memory against their definitions, by brute force."""

from __future__ import annotations

from array import array
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.core.proposer import DraftInput, DraftRequest
from foresay_suffix import SuffixConfig
from foresay_suffix.contexts import LENGTHS, LONGEST, MOST_PLACES, Contexts
from foresay_suffix.expansion import Place, expand
from foresay_suffix.memory import Memory
from foresay_suffix.proposer import SuffixProposer

Text = list[int]
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), min_size=1, max_size=6)


def matching(text: Text, end: int, last: Text) -> int:
    """How many tokens before `end` equal the last ones of another text."""
    length = 0
    while length < min(end, len(last), LONGEST) and text[end - length - 1] == last[-length - 1]:
        length += 1
    return length


def found_by_definition(known: dict[int, Text], last: Text) -> tuple[int, list[tuple[int, int]]]:
    """Every place, one after the other; newer texts and later places first."""
    lengths = {
        (number, end): matching(text, end, last)
        for number, text in sorted(known.items(), reverse=True)
        for end in range(len(text) - 1, 0, -1)
    }
    looked_up = [n for n in LENGTHS if any(length >= n for length in lengths.values())]
    if not looked_up:
        return 0, []
    recent = [place for place, length in lengths.items() if length >= looked_up[-1]][:MOST_PLACES]
    longest = max(lengths[place] for place in recent)
    return longest, [place for place in recent if lengths[place] == longest]


def indexed(known: dict[int, Text]) -> Contexts:
    contexts = Contexts()
    for number, text in known.items():
        contexts.texts[number] = array("I", text)
        for end in range(1, len(text)):
            contexts.add(number, end)
    return contexts


def found(contexts: Contexts, last: Text) -> tuple[int, list[tuple[int, int]]]:
    length, places = contexts.find(array("I", last), 1)
    return length, [(place >> 32, place & 0xFFFFFFFF) for place in places]


@settings(max_examples=200, deadline=None)
@given(texts=texts, last=st.lists(st.integers(0, 2), max_size=40))
def test_a_search_finds_what_the_definition_says(texts: list[Text], last: Text) -> None:
    known = dict(enumerate(texts, 1))
    for text in (last, *(text[: len(text) // 2] for text in texts)):
        assert found(indexed(known), text) == found_by_definition(known, text)


@settings(max_examples=200, deadline=None)
@given(texts=texts, data=st.data())
def test_texts_removed_in_any_order_are_as_if_they_had_never_been(
    texts: list[Text], data: st.DataObject
) -> None:
    known = dict(enumerate(texts, 1))
    contexts = indexed(known)
    for number in data.draw(st.permutations(list(known))):
        text = known.pop(number)
        for end in range(1, len(text)):
            contexts.remove(number, end)
        del contexts.texts[number]
        for last in texts:
            assert found(contexts, last) == found_by_definition(known, last)
    assert len(contexts) == 0


def test_more_places_than_are_looked_at_leave_the_most_recent() -> None:
    known = {1: [7, *([1, 2] * 100)]}
    length, places = found(indexed(known), [9, 1])
    assert length == 1
    assert places == [(1, end) for end in range(200, 200 - 2 * MOST_PLACES, -2)]


@pytest.mark.parametrize("token", [0, 1, 255, 256, 2**16, 2**31, 2**32 - 1], ids=str)
def test_any_32_bit_token_id_is_kept_apart_from_its_neighbours(token: int) -> None:
    others = [0, 1, 255, 256, 2**16, 2**31, 2**32 - 1]
    text = [*others, token, 5, *others, token]
    assert found(indexed({1: text}), text) == found_by_definition({1: text}, text)


# --- continuations


def expanded_by_definition(
    places: list[tuple[Text, int, int]], length: int, k: int, least: Fraction, growing: bool
) -> tuple[Text, Fraction]:
    """Ask every place anew, for every token, whether it went on like the draft so far."""
    draft: Text = []
    probability, score = Fraction(1), Fraction(0)
    while len(draft) < k:
        votes: dict[int, int] = {}
        for text, end, count in places:
            # Where a place is in the text that is continued, that text goes on with the draft.
            longer = text + draft if growing else text
            goes_on = longer[end : end + len(draft) + 1]
            if len(goes_on) == len(draft) + 1 and goes_on[:-1] == draft:
                votes[goes_on[-1]] = votes.get(goes_on[-1], 0) + count
        if not votes:
            break
        most = max(votes.values())
        token = next(token for token, count in votes.items() if count == most)
        probability *= Fraction(most) / (sum(votes.values()) + Fraction(1, length + len(draft)))
        if probability < least:
            break
        draft.append(token)
        score += probability
    return draft, score


@settings(max_examples=300, deadline=None)
@given(data=st.data(), k=st.integers(0, 12), length=st.integers(1, 9), growing=st.booleans())
def test_a_continuation_is_what_the_definition_says(
    data: st.DataObject, k: int, length: int, growing: bool
) -> None:
    text = st.lists(st.integers(0, 2), min_size=2, max_size=12)
    own = data.draw(text)
    places = []
    for _ in range(data.draw(st.integers(0, 6))):
        drawn = own if growing else data.draw(text)
        end = data.draw(st.integers(1, len(drawn) - 1))
        places.append((drawn, end, 1 if growing else data.draw(st.integers(1, 3))))
    # No product of the fractions above is exactly this one, so rounding decides nothing.
    least = Fraction(data.draw(st.integers(0, 9)), 10) + Fraction(1, 10**6 + 3)
    tokens, score = expanded_by_definition(places, length, k, least, growing)
    got = expand(
        [Place(array("I", text), end, count) for text, end, count in places],
        length,
        k,
        float(least),
        growing=growing,
    )
    assert got.tokens == tokens
    assert got.score == pytest.approx(float(score))
    if tokens and not growing:
        going_on = [
            i for i, (text, end, _) in enumerate(places) if text[end : end + len(tokens)] == tokens
        ]
        assert got.followed == going_on


# --- the memory


@settings(max_examples=50, deadline=None)
@given(data=st.data(), most=st.integers(1, 60))
def test_the_memory_holds_different_outputs_within_its_bound_and_indexes_just_those(
    data: st.DataObject, most: int
) -> None:
    memory = Memory(most)
    for step in range(data.draw(st.integers(1, 20))):
        text = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=20))
        num_prompt = data.draw(st.integers(1, 3))
        name = f"r{data.draw(st.integers(0, 5))}"
        if data.draw(st.booleans()):
            memory.remember(name, array("I", text), num_prompt)
        else:
            memory.take_back(name, array("I", text), num_prompt)
        held = {number: output.text.tolist() for number, output in memory._outputs.items()}
        assert memory.num_tokens == sum(map(len, held.values())) <= most, step
        assert memory.contexts.texts.keys() == held.keys()
        for output in memory._outputs.values():
            same = [o for o in memory._outputs.values() if o.num_prompt == output.num_prompt]
            assert sum(o.agrees_with(output.text) for o in same) == 1
        assert all(memory._outputs[n].owner == name for name, n in memory._by_owner.items())
        assert sorted(n for ns in memory._by_beginning.values() for n in ns) == sorted(held)
    for number in list(memory._outputs):
        memory._drop(number)
    left: list[Any] = [memory._outputs, memory._by_owner, memory._by_beginning, memory.contexts]
    assert [len(table) for table in left] == [0, 0, 0, 0]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), alphabet=st.integers(1, 3))
def test_drafts_do_not_depend_on_how_the_history_arrives(
    data: st.DataObject, alphabet: int
) -> None:
    history = data.draw(st.lists(st.integers(0, alphabet - 1), min_size=2, max_size=60))

    def batch(length: int, k: int) -> DraftInput:
        return DraftInput([DraftRequest("a", history[:length], 1, k, num_prompt_tokens=1)])

    slow = SuffixProposer(SuffixConfig())
    arrived = 1
    while arrived < len(history):
        arrived += data.draw(st.integers(1, len(history) - arrived))
        k = data.draw(st.integers(0, 7))
        at_once = SuffixProposer(SuffixConfig()).propose(batch(arrived, k))
        assert slow.propose(batch(arrived, k)) == at_once
