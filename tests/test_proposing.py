"""The error policy around a proposer: what it returns is checked, what it breaks is survived."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foresay.core.errors import ProposerError
from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay.core.worker.proposing import GuardedProposer

VOCAB_SIZE = 50
NAME = "proposer 'fake' (foresay-fake 1.2)"


class Fake:
    """Returns what it is told to, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[DraftInput] = []
        self.released: list[str] = []

    def propose(self, batch: DraftInput) -> Draft:
        self.calls.append(batch)
        answer: Any = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        found: Draft = answer(batch) if callable(answer) else answer
        return found

    def release(self, req_id: str) -> None:
        self.released.append(req_id)


def guarded(proposer: Any, *, strict: bool = False, may_branch: bool = False) -> GuardedProposer:
    return GuardedProposer(
        proposer,
        name="fake",
        owner="foresay-fake 1.2",
        vocab_size=VOCAB_SIZE,
        strict=strict,
        may_branch=may_branch,
    )


def batch_of(*ks: int) -> DraftInput:
    return DraftInput(tuple(DraftRequest(f"r{i}", [1, 2, 3], 1, k) for i, k in enumerate(ks)))


def drafted(ids: Any) -> Draft:
    """A draft for two requests, the second one sound."""
    return Draft([ids, [9]])


def test_sound_drafts_pass_as_they_are_short_empty_and_ragged() -> None:
    fake = Fake(Draft([[1, 2, 3], [], [0, VOCAB_SIZE - 1], [4]]))
    proposer = guarded(fake)
    asked = batch_of(3, 2, 2, 5)
    assert proposer.propose(asked) == Draft([[1, 2, 3], [], [0, 49], [4]])
    assert proposer.take_faults() == {}
    assert fake.calls == [asked]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param((3, 4), id="tuple"),
        pytest.param(range(3, 5), id="range"),
        pytest.param(deque([3, 4]), id="deque"),
        pytest.param(np.array([3, 4]), id="numpy"),
        pytest.param(np.array([3, 4], dtype=np.uint8), id="numpy uint8"),
        pytest.param([np.int64(3), np.int32(4)], id="numpy ints"),
        pytest.param(torch.tensor([3, 4]), id="torch"),
        pytest.param([torch.tensor(3), torch.tensor(4, dtype=torch.int32)], id="torch ints"),
    ],
)
def test_any_sequence_of_integers_is_a_draft(ids: Any) -> None:
    proposer = guarded(Fake(drafted(ids)), strict=True)
    (first, second) = proposer.propose(batch_of(2, 1)).token_ids
    assert (first, second) == ([3, 4], [9])
    assert [type(token_id) for token_id in first] == [int, int]


@pytest.mark.parametrize(
    "token_ids",
    [
        pytest.param(([3, 4], [9, 8]), id="tuple"),
        pytest.param(np.array([[3, 4], [9, 8]]), id="numpy"),
        pytest.param(torch.tensor([[3, 4], [9, 8]]), id="torch"),
    ],
)
def test_a_sequence_of_drafts_is_a_draft(token_ids: Any) -> None:
    proposer = guarded(Fake(Draft(token_ids)), strict=True)
    assert proposer.propose(batch_of(2, 2)).token_ids == [[3, 4], [9, 8]]


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        pytest.param([1, 2, 3], [1, 2], id="list"),
        pytest.param(np.arange(40), [0, 1], id="numpy"),
        pytest.param(range(10**12), [0, 1], id="endless"),
        pytest.param([1, 2, -1], [1, 2], id="a bad id behind"),
    ],
)
def test_too_long_a_draft_is_cut(ids: Any, kept: list[int]) -> None:
    proposer = guarded(Fake(drafted(ids)))
    assert proposer.propose(batch_of(2, 1)).token_ids == [kept, [9]]
    assert proposer.take_faults() == {"too_long": 1}


class BadIndex:
    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


BAD_IDS = {
    "negative": -1,
    "the vocabulary's size": VOCAB_SIZE,
    "huge": 10**30,
    "float": 3.0,
    "numpy float": np.float32(3),
    "nan": float("nan"),
    "None": None,
    "bool": True,
    "numpy bool": np.bool_(True),
    "str": "3",
    "list": [3],
    "numpy negative": np.int64(-1),
    "torch float": torch.tensor(3.0),
    "torch vector": torch.tensor([3, 4]),
    "what cannot even be shown": BadIndex(),
}


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=list(BAD_IDS))
def test_a_draft_ends_before_its_first_bad_id(bad: Any) -> None:
    proposer = guarded(Fake(drafted([5, bad, 6])))
    assert proposer.propose(batch_of(3, 1)).token_ids == [[5], [9]]
    assert proposer.take_faults() == {"bad_id": 1}
    strict = guarded(Fake(drafted([5, bad, 6])), strict=True)
    with pytest.raises(ProposerError, match=r"is no token id in range\(50\)"):
        strict.propose(batch_of(3, 1))


def generator() -> Iterator[int]:
    yield 5


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


MALFORMED: dict[str, tuple[Any, str]] = {
    "None": (None, "TypeError: propose() returned None, not a Draft"),
    "lists": ([[5], [9]], "TypeError: propose() returned [[5], [9]], not a Draft"),
    "an array": (np.zeros((2, 1), int), "TypeError: propose() returned "),
    "unprintable": (Unprintable(), "TypeError: propose() returned <Unprintable instance at "),
    "no lists": (Draft(5), "TypeError: Draft.token_ids is 5, not a list"),  # type: ignore[arg-type]
    "a dict": (
        Draft({"r0": [5], "r1": [9]}),  # type: ignore[arg-type]
        "TypeError: Draft.token_ids is {'r0': [5], 'r1': [9]}, not a list",
    ),
    "a generator of drafts": (Draft(generator()), "TypeError: Draft.token_ids is <generator"),  # type: ignore[arg-type]
    "one list": (Draft([5, 9]), "TypeError: Draft.token_ids[0] is 5, not a list"),  # type: ignore[list-item]
    "None for a draft": (drafted(None), "TypeError: Draft.token_ids[0] is None, not a list"),
    "a set": (drafted({5}), "TypeError: Draft.token_ids[0] is {5}, not a list"),
    "a string": (drafted("abc"), "TypeError: Draft.token_ids[0] is 'abc', not a list"),
    "a generator": (drafted(generator()), "TypeError: Draft.token_ids[0] is <generator"),
    "a number's array": (drafted(np.array(5)), "TypeError: "),
    "a number's tensor": (drafted(torch.tensor(5)), "TypeError: "),
    "too few": (Draft([[5]]), "ValueError: propose() drafted for 1 of 2 requests"),
    "too many": (Draft([[5]] * 3), "ValueError: propose() drafted for 3 of 2 requests"),
    "a tree": (
        Draft([[5], [9]], parents=[[-1], [-1]]),
        "ValueError: Draft.parents is set, and Needs.tree was not declared: set ",
    ),
    "an exception": (KeyError("weights"), "KeyError: 'weights'"),
    "a multi-line exception": (RuntimeError("one\n  two"), "RuntimeError: one two"),
}


@pytest.mark.parametrize(("answer", "words"), MALFORMED.values(), ids=list(MALFORMED))
def test_what_is_no_draft_counts_as_raised_and_drafts_nothing(
    answer: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    proposer = guarded(Fake(answer, drafted([5])))
    assert proposer.propose(batch_of(3, 1)).token_ids == [[], []]
    assert proposer.take_faults() == {"raised": 1}
    assert caplog.messages[0].startswith(f"{NAME}: {words}")
    assert proposer.propose(batch_of(3, 1)).token_ids == [[5], [9]]
    strict = guarded(Fake(answer), strict=True)
    with pytest.raises(ProposerError) as error:
        strict.propose(batch_of(3, 1))
    assert str(error.value).startswith(f"{NAME}: {words}")


def test_an_object_with_token_ids_passes_for_a_draft() -> None:
    proposer = guarded(Fake(SimpleNamespace(token_ids=[[5]])), strict=True)
    assert proposer.propose(batch_of(1)).token_ids == [[5]]


def test_faults_are_counted_by_kind_and_taken_once() -> None:
    proposer = guarded(Fake(Draft([[1, 2], [99], [1, None], [1, 2, 3]])))  # type: ignore[list-item]
    proposer.propose(batch_of(1, 1, 2, 2))
    proposer.propose(batch_of(1, 1, 2, 2))
    assert proposer.take_faults() == {"too_long": 4, "bad_id": 4}
    assert proposer.take_faults() == {}


def test_each_kind_of_fault_is_logged_once_naming_the_distribution(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = (drafted([1, 2, 3]), RuntimeError("no"), drafted([-1]))
    proposer = guarded(Fake(*faults, *faults))
    for _ in range(6):
        proposer.propose(batch_of(2, 1))
    assert caplog.record_tuples == [
        ("foresay", logging.WARNING, f"{NAME}: {what}; counted from now on, not logged again")
        for what in (
            "more drafts than the 2 wanted",
            "RuntimeError: no",
            "-1 is no token id in range(50)",
        )
    ]
    assert proposer.take_faults() == {"too_long": 2, "raised": 2, "bad_id": 2}


def test_three_failures_in_a_row_drop_the_proposer(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(RuntimeError("no"))
    proposer = guarded(fake)
    dropped = []
    for _ in range(3):
        proposer.propose(batch_of(1))
        dropped.append(proposer.dropped)
    assert dropped == [False, False, True]
    assert caplog.messages[1:] == [f"{NAME} failed 3 times in a row and is off for this engine"]
    assert proposer.take_faults() == {"raised": 3, "dropped": 1}
    proposer.release("r0")
    assert fake.released == []


def test_failures_with_a_success_between_them_do_not_drop_it() -> None:
    fail, work = RuntimeError("no"), drafted([5])
    proposer = guarded(Fake(fail, fail, work, fail, None, work))
    for _ in range(6):
        proposer.propose(batch_of(1, 1))
    assert not proposer.dropped
    assert proposer.take_faults() == {"raised": 4}


def test_mended_drafts_are_no_failures() -> None:
    proposer = guarded(Fake(drafted([-1, 5, 6])))
    for _ in range(5):
        proposer.propose(batch_of(1, 1))
    assert not proposer.dropped


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(lambda batch: batch.requests.clear(), id="emptied"),
        pytest.param(lambda batch: batch.requests.reverse(), id="reordered"),
        pytest.param(lambda batch: setattr(batch.requests[0], "k", 99), id="changed"),
    ],
)
def test_a_proposer_cannot_change_the_list_of_requests(
    disturb: Callable[[Any], None],
) -> None:
    def answer(batch: DraftInput) -> Draft:
        disturb(batch)
        return Draft([[5]] * len(batch.requests))

    proposer = guarded(Fake(answer))
    asked = batch_of(1, 2)
    assert proposer.propose(asked) == Draft([[], []])
    assert asked == batch_of(1, 2)
    assert proposer.take_faults() == {"raised": 1}


def test_a_list_that_the_proposer_goes_on_using_is_copied() -> None:
    mine = [[5, 6]]
    proposer = guarded(Fake(Draft(mine)))
    found = proposer.propose(batch_of(2)).token_ids
    mine[0].append(7)
    assert found == [[5, 6]]


def test_releases_reach_the_proposer() -> None:
    fake = Fake(drafted([5]))
    proposer = guarded(fake)
    proposer.release("a")
    proposer.release("b")
    assert fake.released == ["a", "b"]


def test_a_proposer_without_release_is_fine() -> None:
    class Bare:
        def propose(self, batch: DraftInput) -> Draft:
            return Draft([[5]])

    proposer = guarded(Bare(), strict=True)
    proposer.release("a")
    assert proposer.propose(batch_of(1)).token_ids == [[5]]


def test_a_release_that_raises_is_survived_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Fake):
        def release(self, req_id: str) -> None:
            raise KeyError(req_id)

    proposer = guarded(Forgetful(drafted([5])))
    for _ in range(4):
        proposer.release("a")
    assert not proposer.dropped
    assert caplog.messages == [
        f"{NAME}: release: KeyError: 'a'; counted from now on, not logged again"
    ]
    assert proposer.propose(batch_of(1, 1)).token_ids == [[5], [9]]
    assert proposer.take_faults() == {"raised": 4}
    with pytest.raises(ProposerError, match="release: KeyError: 'a'"):
        guarded(Forgetful(None), strict=True).release("a")


def test_strict_mode_raises_at_each_fault_naming_its_cause() -> None:
    cause = RuntimeError("no")
    with pytest.raises(ProposerError) as error:
        guarded(Fake(cause), strict=True).propose(batch_of(1))
    assert error.value.__cause__ is cause
    with pytest.raises(ProposerError, match="more drafts than the 1 wanted"):
        guarded(Fake(drafted([1, 2])), strict=True).propose(batch_of(1, 1))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_not_survived(stop: type[BaseException]) -> None:
    def answer(batch: DraftInput) -> Draft:
        raise stop

    with pytest.raises(stop):
        guarded(Fake(answer)).propose(batch_of(1))


def test_trees_pass_chains_have_no_parents_and_faults_are_cut_with_their_subtree() -> None:
    answer = Draft(
        [[5, 6, 7], [9, 8], [1, 99, 2], [4, 4]], [[-1, -1, 0], [-1, 0], [-1, -1, 1], None]
    )
    proposer = guarded(Fake(answer), may_branch=True)
    asked = batch_of(3, 2, 3, 2)
    assert proposer.propose(asked) == Draft(
        [[5, 6, 7], [9, 8], [1], [4, 4]], [[-1, -1, 0], None, None, None]
    )
    assert proposer.take_faults() == {"bad_id": 1}
    with pytest.raises(ProposerError, match="99 is no token id"):
        guarded(Fake(answer), may_branch=True, strict=True).propose(asked)


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ([[-1]], "Draft.parents has 1 items for 2 requests"),
        ([[-1, 0], [-1]], "Draft.parents[0] has 2 items for 1 tokens"),
        ([5, [-1]], "Draft.parents[0] is 5, not a list"),
    ],
)
def test_parents_that_do_not_fit_their_tokens_are_no_draft(parents: Any, said: str) -> None:
    proposer = guarded(Fake(Draft([[5], [9]], parents)), strict=True, may_branch=True)
    with pytest.raises(ProposerError, match=re.escape(said)):
        proposer.propose(batch_of(1, 1))


def test_a_list_of_none_means_chains_whoever_gives_it() -> None:
    proposer = guarded(Fake(Draft([[5, 6], [9]], [None, None])), strict=True)
    assert proposer.propose(batch_of(2, 1)) == Draft([[5, 6], [9]])


def test_a_chain_is_no_longer_than_a_path_may_be() -> None:
    proposer = guarded(Fake(Draft([[5, 6, 7, 8]])), strict=True, may_branch=True)
    (asked,) = batch_of(4).requests
    assert proposer.propose(DraftInput((replace(asked, max_depth=2),))) == Draft([[5, 6]])
