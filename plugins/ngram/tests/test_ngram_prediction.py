"""Drafting from a prediction: where the output stands in it, by hand and against the definitions.

Tokens are letters here. It runs no model: a decode is replayed whose greedy output is known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foresay_ngram
from foresay.core.proposer import DraftInput, DraftRequest
from foresay_ngram import NgramConfig
from foresay_ngram.alignment import Alignment
from foresay_ngram.edits import Edit, Edits
from foresay_ngram.occurrences import Match, Occurrences
from foresay_ngram.proposer import NgramProposer


def ids(letters: str) -> list[int]:
    return [ord(letter) for letter in letters]


def request(
    prediction: Sequence[int], prompt: Sequence[int], output: Sequence[int], k: int
) -> DraftRequest:
    return DraftRequest("a", [*prompt, *output], 1, k, prediction, len(prompt))


def draft(prediction: str, output: str, k: int = 4, prompt: str = "?") -> str:
    """What a fresh proposer drafts after a prompt and an output."""
    proposer = NgramProposer(NgramConfig(tree=False))
    batch = DraftInput([request(ids(prediction), ids(prompt), ids(output), k)])
    return "".join(map(chr, proposer.propose(batch).token_ids[0]))


def num_steps(
    prediction: Sequence[int], prompt: Sequence[int], output: Sequence[int], k: int
) -> int:
    """Steps after the first token until all of a known greedy output is committed."""
    proposer = NgramProposer(NgramConfig(tree=False))
    steps, done = 0, 1
    while done < len(output):
        wanted = min(k, len(output) - done - 1)
        batch = DraftInput([request(prediction, prompt, output[:done], wanted)])
        drafted = proposer.propose(batch).token_ids[0]
        assert len(drafted) <= wanted
        while drafted and drafted[0] == output[done]:
            del drafted[0]
            done += 1
        done += 1
        steps += 1
    return steps


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


# --- by hand


@pytest.mark.parametrize(
    ("prediction", "output", "expected"),
    [
        pytest.param("abcdefgh", "", "abcd", id="nothing output yet"),
        pytest.param("abcdefgh", "abc", "defg", id="as predicted so far"),
        pytest.param("abcdefgh", "abcdef", "gh", id="near the prediction's end"),
        pytest.param("abcdefgh", "abcdefgh", "", id="at the prediction's end"),
        pytest.param("abcdefgh", "X", "bcde", id="another first token"),
        pytest.param("abcdefgh", "Xb", "cdef", id="after another first token"),
        pytest.param("abcdefgh", "XYa", "bcde", id="a preamble"),
        pytest.param("abcdefgh", "abX", "defg", id="one token replaced"),
        pytest.param("abcdefgh", "abXd", "efgh", id="after one replaced token"),
        pytest.param("abcdefgh", "abXYe", "fgh", id="after two replaced tokens"),
        pytest.param("abcdefgh", "abXYZd", "efgh", id="one token became three"),
        pytest.param("abcdefgh", "abXYc", "defg", id="an insertion"),
        pytest.param("abcdefgh", "abe", "fgh", id="a deletion"),
        pytest.param("abcdefgh", "abXf", "gh", id="three tokens became one"),
        pytest.param("abcdefghijklmnopqrstuvwxyz", "abcdno", "pqrs", id="a long deletion"),
    ],
)
def test_drafts_go_on_where_the_output_stands_in_the_prediction(
    prediction: str, output: str, expected: str
) -> None:
    assert draft(prediction, output) == expected


def test_a_single_token_far_ahead_is_no_rejoining_yet() -> None:
    # n is ten tokens after the cursor: rather a replaced e than a deletion of efghijklm.
    assert draft(ALPHABET, "abcdn") == "fghi"


def test_a_moved_block_is_found_behind_the_cursor_by_three_tokens() -> None:
    moved = "abcd" + "nopqrstuvwxyz"  # then efghijklm
    assert draft(ALPHABET, moved) == ""  # the prediction's end
    assert draft(ALPHABET, moved + "ef") == ""
    assert draft(ALPHABET, moved + "efg") == "hijk"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param("aRSbQQQS", "cRSd", id="not the one before the cursor"),
        pytest.param("aRSbQQR", "ScRS", id="nor the one after the next"),
        pytest.param("aRSbRScQQQS", "d", id="the last one"),
    ],
)
def test_of_repeated_lines_the_nearest_after_the_cursor_is_followed(
    output: str, expected: str
) -> None:
    assert draft("aRSbRScRSd", output) == expected


def test_a_nearer_place_is_left_for_one_that_matches_more_tokens() -> None:
    # R stands in front of T and of U. After R alone the nearer place counts, after RU the other.
    prediction = "abcdRTefRUgh"
    assert draft(prediction, "abcdQQR") == "TefR"
    assert draft(prediction, "abcdQQRU") == "gh"


@pytest.mark.parametrize("k", range(1, 12))
def test_k_tokens_are_drafted_and_no_more(k: int) -> None:
    assert draft(ALPHABET, "ab", k) == ALPHABET[2 : 2 + k]


def test_k_zero_drafts_nothing_and_loses_nothing() -> None:
    proposer = NgramProposer(NgramConfig(tree=False))
    for output, k, expected in [("", 0, ""), ("ab", 0, ""), ("abX", 2, "de"), ("abXd", 1, "e")]:
        batch = DraftInput([request(ids("abcdefgh"), ids("?"), ids(output), k)])
        assert proposer.propose(batch).token_ids == [ids(expected)]


def test_history_is_searched_where_the_prediction_has_ended() -> None:
    assert draft("abc", "abcXYZabcX") == "YZab"


def test_history_is_searched_at_the_very_end_of_the_prediction() -> None:
    assert draft("abc", "abc", prompt="c!") == "!abc"


def test_tokens_before_the_last_certain_place_are_no_reason_to_jump() -> None:
    # Q is dropped. The text has ij further on, but that i was an i of the place left is known.
    assert draft("abcdefghiQjkl?ijmn", "abcdefghij") == "kl?i"


def test_the_prompt_is_no_part_of_the_output() -> None:
    # The prompt holds the text, too; the cursor starts at the beginning all the same.
    assert draft("abcdefgh", "a", prompt="abcdefgh?") == "bcde"


# --- what was done once is expected again


@pytest.mark.parametrize(
    ("prediction", "output", "expected"),
    [
        pytest.param("xabNcdNefNgh", "xabMc", "dNefNgh", id="a replacement, not yet over"),
        pytest.param("xabNcdNefNgh", "xabMcd", "MefMgh", id="a replacement"),
        pytest.param("xabNcdNefNgh", "xabMcdM", "efMgh", id="replaced again"),
        pytest.param("xabNcdNefNgh", "xabMcdN", "efNgh", id="kept this time"),
        pytest.param("xabNcdNefNgh", "xabMOPcd", "MOPefMOPgh", id="one token became three"),
        pytest.param("xabNcdNefNgh", "xabMOPcdMO", "PefMOPgh", id="in the midst of the three"),
        pytest.param("xabNcdNefNgh", "xabMOPcdMXef", "MXgh", id="another replacement"),
        pytest.param("abNOcdNXefNOgh", "abMcd", "NXefMgh", id="two tokens became one"),
        pytest.param("*ab*cd*ef*", "ab", "cdef", id="a deletion"),
        pytest.param("*ab*cd*ef*", "ab*", "cd*ef*", id="not deleted this time"),
        pytest.param("ab;cd;ef;gh;ij", "ab;-cd", ";ef;gh;ij", id="an insertion seen once"),
        pytest.param("ab;cd;ef;gh;ij", "ab;-cd;-ef", ";-gh;-ij", id="an insertion seen twice"),
        pytest.param("ab;cd;ef;gh;ij", "ab;-cd;-ef;g", "h;ij", id="nothing inserted this time"),
        pytest.param("ab;cde;fgh;ijk", "ab;-Cde;-Fgh", ";-ijk", id="what two replacements share"),
        pytest.param("ab;cde;fgh;ijk", "ab;-Cde;+Fgh", ";ijk", id="two that share nothing"),
        pytest.param(
            "ab;cde;fgh;ijk;lmn;opq", "ab;-Cde;-Fgh;-Ijk", ";-lmn;-opq", id="and what came after it"
        ),
        pytest.param(
            "ab;cd;ef;gh;ij;kl", "ab;-1cd;-1ef;-2gh", ";-ij;-kl", id="the third insertion differs"
        ),
        pytest.param("xabNcdeNfgh", "xabMcdY", "Mfgh", id="right behind another difference"),
        pytest.param("xabNcdeNfghekij", "xabMcdYMfgh", "Ykij", id="two side by side"),
    ],
)
def test_edits_recur_in_drafts(prediction: str, output: str, expected: str) -> None:
    assert draft(prediction, output, k=20) == expected


def test_the_same_replacement_twice_is_no_insertion() -> None:
    # N became M after b twice. That says what becomes of an N, nothing of another token after b.
    edits = Edits(ids("abNbQbN"))
    for _ in range(2):
        edits.learn(ord("b"), Edit((ord("N"),), (ord("M"),)))
    assert edits.expected(4) is None
    assert edits.expected(6) == Edit((ord("N"),), (ord("M"),))


def test_an_insertion_is_expected_of_what_the_last_two_had_in_common() -> None:
    edits = Edits(ids("a;b"))
    for inserted, expected in [("-1", None), ("-2", "-"), ("-2x", "-2"), ("+", None), ("+", "+")]:
        edits.learn(ord(";"), Edit((), tuple(ids(inserted))))
        assert edits.expected(2) == (expected and Edit((), tuple(ids(expected))))
    edits.forget(2, Edit((), tuple(ids("+"))))
    assert edits.expected(2) is None
    edits.learn(ord(";"), Edit((), tuple(ids("+"))))  # the first again
    assert edits.expected(2) is None


def test_long_changes_are_not_expected_again() -> None:
    # Eight inserted tokens recur after the next N; nine do not.
    prediction = "abcdNefghNijNkl"
    for new, recurs in [("12345678", True), ("123456789", False)]:
        output = "abcd" + new + "efgh"
        assert draft(prediction, output, k=8) == (new if recurs else "NijNkl")


# --- against history


def test_a_useless_prediction_gives_way_to_history() -> None:
    prompt, prediction = "_uvwxyz_", "uQwQyQzQ"
    assert draft(prediction, "u", prompt=prompt) == "QwQy"  # the beginning is as predicted
    assert draft(prediction, "uv", prompt=prompt) == "wxyz"  # history alone was right
    assert draft(prediction, "uvw", prompt=prompt) == "xyz_"  # although w is in the prediction


def test_a_match_of_the_same_length_goes_to_who_was_right_lately() -> None:
    # After P, history and prediction both match one token and go on with 1 and 2.
    prompt, prediction = "P1?", "abcdefghijP2"
    assert draft(prediction, "P", k=1, prompt=prompt) == "1"
    assert draft(prediction, "abcdefghijP", k=1, prompt=prompt) == "2"


def test_a_prediction_that_was_right_may_match_fewer_tokens_than_history() -> None:
    # After Mj history knows two tokens, the prediction one: M stands where it has N.
    assert draft("abcdefghNjklm", "abcdefghMj", prompt="Mj9?") == "klm"
    assert draft("Njklm", "Mj", prompt="Mj9?", k=1) == "9"


def test_a_long_agreement_does_not_outweigh_a_history_that_was_right_where_they_differed() -> None:
    prompt, prediction = "_uvwxyzabcdefghijK_", "uQwQyzabcdefghijL"
    assert draft(prediction, "uvwxyzabcdefghij", k=1, prompt=prompt) == "K"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param("abc", "XdXe", id="wrong as often as right"),
        pytest.param("abcd", "", id="wrong more often"),
        pytest.param("abcd-", "", id="so that nothing is guessed, either"),
    ],
)
def test_a_useless_prediction_is_given_up_where_history_has_nothing(
    output: str, expected: str
) -> None:
    assert draft("aXbXcXdXeX", output) == expected


def test_a_prediction_is_followed_where_history_would_repeat_what_it_saw_last() -> None:
    # History matches ";line" and goes on as it did the last time; the prediction knows better.
    prediction = "line1;line2;line3;line4;"
    assert draft(prediction, "line1;line2;line", k=3, prompt=prediction) == "3;l"
    assert draft("", "line1;line2;line", k=3, prompt="?") == "2;l"


def edited(text: list[int], share: float, rng: random.Random) -> list[int]:
    """The text with that share of its tokens replaced by others of it."""
    return [rng.choice(text) if rng.random() < share else token for token in text]


@pytest.mark.parametrize("k", [3, 5, 10])
@pytest.mark.parametrize(
    "prediction",
    ["another text", "shuffled", "reversed", "blocks of 5 shuffled", "15 % wrong", "half wrong"],
)
def test_a_useless_prediction_costs_little_of_what_history_gains(prediction: str, k: int) -> None:
    # The output is the text of the prompt, a token in 40 replaced: history alone does well. Five
    # texts of 400 tokens each; the prediction may cost a tenth of the steps.
    without = with_prediction = 0
    for seed in range(5):
        rng = random.Random(seed)
        words = [int(rng.paretovariate(0.8)) % 2000 for _ in range(2000)]
        text = rng.sample(words, 400)
        output = edited(text, 1 / 40, rng)
        blocks = [text[i : i + 5] for i in range(0, len(text), 5)]
        rng.shuffle(blocks)
        predicted = {
            "another text": rng.sample(words, 400),
            "shuffled": rng.sample(text, 400),
            "reversed": text[::-1],
            "blocks of 5 shuffled": [token for block in blocks for token in block],
            "15 % wrong": edited(text, 0.15, rng),
            "half wrong": edited(text, 0.5, rng),
        }[prediction]
        without += num_steps([], text, output, k)
        with_prediction += num_steps(predicted, text, output, k)
    assert with_prediction <= 1.1 * without


# --- replays: steps worked out by hand


@pytest.mark.parametrize(
    ("output", "k", "expected"),
    [
        # 60 tokens after the first: 6 a step.
        pytest.param(list(range(61)), 5, 10, id="identical"),
        # Tokens 1 to 24 in 4 steps; 25, 26 and the new 27 in one; 33 are left: 6 steps.
        pytest.param([*range(27), 99, *range(28, 61)], 5, 11, id="one token replaced"),
        # The same, then X2 alone (the guess was that 28 comes next), X3 alone, 28 alone (30 was
        # the guess), and 29 to 60 in 6 steps: 4 + 1 + 3 + 6.
        pytest.param([*range(27), 97, 98, 99, *range(28, 61)], 5, 14, id="one became three"),
        # 4 steps; 25, 26 and 30, which is near: 3 deleted; 31 to 60 in 5 steps.
        pytest.param([*range(27), *range(30, 61)], 5, 10, id="a deletion"),
        pytest.param(list(range(61)), 9, 6, id="identical, k of 9"),
    ],
)
def test_steps_by_hand(output: list[int], k: int, expected: int) -> None:
    assert num_steps(list(range(61)), [999], output, k) == expected
    # No token repeats: history alone takes a step for each.
    assert num_steps([], [999], output, k) == len(output) - 1


# --- state


def edits_of(data: st.DataObject, prediction: list[int]) -> list[int]:
    """An output that goes along the prediction, leaves it and comes back."""
    output: list[int] = []
    for _ in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, len(prediction)))
        output += prediction[start : start + data.draw(st.integers(0, 12))]
        output += data.draw(st.lists(st.integers(0, 5), max_size=3))
    return output


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shortest=st.integers(1, 3), longest=st.integers(3, 6))
def test_the_draft_depends_on_the_history_alone_not_on_how_it_arrived(
    data: st.DataObject, shortest: int, longest: int
) -> None:
    config = NgramConfig(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    prediction = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30))
    prompt = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    output = edits_of(data, prediction)
    proposer = NgramProposer(config)
    arrived = 0
    while arrived < len(output):
        arrived += data.draw(st.integers(1, len(output) - arrived))
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            proposer.release("a")
        k = data.draw(st.integers(0, 7))
        batch = DraftInput([request(prediction, prompt, output[:arrived], k)])
        got = proposer.propose(batch).token_ids[0]
        assert [got] == NgramProposer(config).propose(batch).token_ids
        assert len(got) <= k
        assert set(got) <= {*prediction, *prompt, *output}


@settings(max_examples=200, deadline=None)
@given(
    history=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    num_prompt_tokens=st.integers(0, 40),
)
def test_an_empty_prediction_changes_nothing(history: list[int], num_prompt_tokens: int) -> None:
    plain = DraftInput([DraftRequest("a", history, 1, 5)])
    empty = DraftInput([DraftRequest("a", history, 1, 5, [], min(num_prompt_tokens, len(history)))])
    proposers = NgramProposer(NgramConfig(tree=False)), NgramProposer(NgramConfig(tree=False))
    assert proposers[0].propose(plain).token_ids == proposers[1].propose(empty).token_ids


def test_requests_with_and_without_a_prediction_do_not_mix() -> None:
    proposer = NgramProposer(NgramConfig(tree=False))
    with_one = DraftRequest("a", ids("?ab"), 1, 2, ids("abcd"), 1)
    without = DraftRequest("b", ids("?ab"), 1, 2, (), 1)
    other = DraftRequest("c", ids("?ab"), 1, 2, ids("abXY"), 1)
    assert proposer.propose(DraftInput([with_one, without, other])).token_ids == [
        ids("cd"),
        [],
        ids("XY"),
    ]
    assert proposer.propose(DraftInput([other, without])).token_ids == [ids("XY"), []]


def test_a_released_request_may_come_back_with_another_prediction() -> None:
    proposer = NgramProposer(NgramConfig(tree=False))
    for prediction, expected in [("abcd", "cd"), ("abXY", "XY"), ("", "")]:
        batch = DraftInput([request(ids(prediction), ids("?"), ids("ab"), 4)])
        assert proposer.propose(batch).token_ids == [ids(expected)]
        proposer.release("a")


def test_the_plugin_declares_that_it_reads_predictions() -> None:
    (spec,) = foresay_ngram.foresay_register_proposers()
    needs = spec.needs(spec.config_type(), None)
    assert needs.prediction
    assert not needs.sampled
    assert needs.draft_slots == 0


# --- the index of the prediction


def best_match(ends: range, text: list[int], last: list[int], most: int, anchor: int) -> Match:
    """The definition: the longest, then the nearest to the anchor."""
    best = Match(0, 0)
    for end in sorted(ends, key=lambda end: abs(end - anchor)):
        length = 0
        while length < min(most, end) and text[end - 1 - length] == last[-1 - length]:
            length += 1
        if length > best.length:
            best = Match(end, length)
    return best


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    last=st.lists(st.integers(0, 3), max_size=6),
    anchor=st.integers(0, 40),
    longest=st.integers(1, 6),
    longest_after=st.integers(0, 6),
)
def test_the_best_matches_after_and_before_a_place_are_those_of_a_brute_force_search(
    text: list[int], last: list[int], anchor: int, longest: int, longest_after: int
) -> None:
    most = min(longest, len(last))
    after = best_match(
        range(anchor + 1, len(text) + 1), text, last, min(most, longest_after), anchor
    )
    before = best_match(range(1, min(anchor, len(text)) + 1), text, last, most, anchor)
    assert Occurrences(text, longest).find(last, anchor, longest_after) == (after, before)


class Counting(dict[int, int]):
    """A dict that counts its look-ups."""

    lookups = 0

    def get(self, *args: Any) -> Any:
        Counting.lookups += 1
        return super().get(*args)


@pytest.mark.parametrize("kind", ["random text", "one token", "a long period"])
def test_a_token_costs_a_search_of_a_few_look_ups_however_long_the_prediction(kind: str) -> None:
    longest, size = 5, 30_000
    rng = random.Random(3)
    text = {
        "random text": [int(rng.paretovariate(0.7)) % 5000 for _ in range(size)],
        "one token": [3] * size,
        "a long period": [i % 977 for i in range(size)],
    }[kind]
    alignment = Alignment(text, longest)
    assert len(alignment._occurrences._ends) <= longest * size
    alignment._occurrences._children = Counting(alignment._occurrences._children)
    most = 0
    for token in edited(text, 0.1, rng):
        Counting.lookups = 0
        alignment.append(token, None)
        most = max(most, Counting.lookups)
    assert most <= longest
    assert (most > 0) == (kind != "one token")  # that text never differs from itself
