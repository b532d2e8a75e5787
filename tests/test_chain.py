"""Chains: each request takes the draft of the first proposer that has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from foresay.core.messages import DraftPlan, SamplingData
from foresay.core.proposer import Draft, DraftInput, DraftRequest, Needs
from foresay.core.worker.chain import Drafted, Member, ProposerChain
from foresay.core.worker.proposing import GuardedProposer

VOCAB_SIZE = 50
SAMPLING = SamplingData(1.0, 0, 1.0, 0.0, 7, 0, (), verification="block")


class Fake:
    """Drafts what it is told for each request, and keeps what it was asked."""

    def __init__(self, drafts: Mapping[str, list[int]]) -> None:
        self.drafts = drafts
        self.asked: list[list[DraftRequest]] = []
        self.released: list[str] = []

    def propose(self, batch: DraftInput) -> Draft:
        self.asked.append(list(batch.requests))
        return Draft(
            [self.drafts.get(request.req_id, [])[: request.k] for request in batch.requests]
        )

    def release(self, req_id: str) -> None:
        self.released.append(req_id)

    @property
    def asked_for(self) -> list[list[str]]:
        return [[request.req_id for request in requests] for requests in self.asked]


class Failing(Fake):
    def propose(self, batch: DraftInput) -> Draft:
        super().propose(batch)
        raise RuntimeError("no draft today")


class Drawing(Fake):
    """Draws one token for each request; `favourite` is the only one its logits allow."""

    favourite = 4

    def propose(self, batch: DraftInput) -> Draft:
        super().propose(batch)
        assert batch.sampler is not None
        logits = torch.full((len(batch.requests), VOCAB_SIZE), -torch.inf)
        logits[:, self.favourite] = 0.0
        ids = batch.sampler.draw(logits, 0, range(len(batch.requests)))
        return self.answer(ids.tolist())

    def answer(self, ids: list[int]) -> Draft:
        return Draft([[token_id] for token_id in ids])


class DrawingThenFailing(Drawing):
    def answer(self, ids: list[int]) -> Draft:
        raise RuntimeError("after all")


class DrawingThenCutting(Drawing):
    def answer(self, ids: list[int]) -> Draft:
        return Draft([[] for _ in ids])


def chain(
    *proposers: Fake, needs: Mapping[int, Needs] | None = None, k: tuple[int, ...] = (5, 5, 5)
) -> ProposerChain:
    return ProposerChain(
        [
            Member(
                GuardedProposer(
                    proposer, name="abc"[i], owner="tests", vocab_size=VOCAB_SIZE, strict=False
                ),
                (needs or {}).get(i, Needs()),
                k[i],
            )
            for i, proposer in enumerate(proposers)
        ],
        VOCAB_SIZE,
    )


def requests(*req_ids: str, k: int = 3, num_tokens: int = 6) -> list[DraftRequest]:
    return [DraftRequest(r, list(range(num_tokens)), 1, k, prediction_ids=[9]) for r in req_ids]


def propose(proposers: ProposerChain, asked: list[DraftRequest]) -> dict[str, Drafted]:
    return proposers.propose(asked, {request.req_id: SAMPLING for request in asked})


def test_each_request_takes_the_first_draft_there_is() -> None:
    first, second = Fake({"y": [1, 2]}), Fake({"x": [3], "y": [4, 5, 6]})
    found = propose(chain(first, second), requests("x", "y", "z"))

    assert found == {"x": Drafted([3], "b", None), "y": Drafted([1, 2], "a", None)}
    assert (first.asked_for, second.asked_for) == ([["x", "y", "z"]], [["x", "z"]])


def test_nobody_is_asked_for_what_is_drafted() -> None:
    first, second = Fake({"x": [1]}), Fake({})
    propose(chain(first, second), requests("x"))
    assert second.asked == []


def test_a_member_that_fails_is_followed_by_the_next() -> None:
    first, second = Failing({}), Fake({"x": [3]})
    proposers = chain(first, second)
    for _ in range(4):
        assert propose(proposers, requests("x")) == {"x": Drafted([3], "b", None)}
    assert proposers.take_faults() == {"raised": 3, "dropped": 1}
    assert len(first.asked) == 3  # then it was dropped; the chain goes on
    assert not proposers.dropped


def test_a_chain_is_dropped_with_its_last_member() -> None:
    proposers = chain(Failing({}), Failing({}))
    for _ in range(3):
        assert propose(proposers, requests("x")) == {}
    assert proposers.dropped


def test_each_member_sees_its_own_k_and_limit() -> None:
    first, second = Fake({}), Fake({"x": [1] * 9})
    proposers = chain(first, second, k=(2, 4), needs={1: Needs(max_context=8)})
    assert (proposers.num_speculative_tokens, proposers.max_context) == (4, None)

    assert propose(proposers, requests("x", k=3))["x"].token_ids == [1, 1]  # up to 8 tokens
    assert [[request.k for request in asked] for asked in first.asked + second.asked] == [[2], [2]]
    propose(proposers, requests("x", num_tokens=8))
    assert (len(first.asked), len(second.asked)) == (2, 1)


def test_only_who_declares_it_sees_the_prediction() -> None:
    first, second = Fake({}), Fake({})
    proposers = chain(first, second, needs={1: Needs(prediction=True)})
    propose(proposers, requests("x"))
    assert (first.asked[0][0].prediction_ids, second.asked[0][0].prediction_ids) == ((), [9])
    assert proposers.takes_prediction
    assert not chain(first).takes_prediction


def test_everyone_is_told_who_ended() -> None:
    first, second = Fake({}), Fake({})
    chain(first, second).release("x")
    assert (first.released, second.released) == (["x"], ["x"])


def test_what_was_drawn_comes_with_its_distribution() -> None:
    first, second = Fake({"x": [1]}), Drawing({})
    found = propose(chain(first, second, needs={1: Needs(sampled=True)}), requests("x", "y"))

    assert found["x"] == Drafted([1], "a", None)
    assert (found["y"].token_ids, found["y"].proposer) == ([4], "b")
    probs = found["y"].probs
    assert probs is not None
    assert (probs.rule, probs.num_tokens, probs.probs.shape) == ("block", 6, (1, VOCAB_SIZE))
    assert probs.probs[0].nonzero().tolist() == [[4]]


def test_there_is_no_sampler_for_who_did_not_ask() -> None:
    class Looking(Fake):
        def propose(self, batch: DraftInput) -> Draft:
            assert batch.sampler is None
            return super().propose(batch)

    proposers = chain(Looking({"x": [1]}))
    assert propose(proposers, requests("x"))["x"].token_ids == [1]
    assert proposers.take_faults() == {}


@pytest.mark.parametrize(
    ("proposer", "fault"),
    [(DrawingThenFailing, "raised"), (DrawingThenCutting, "not_as_drawn")],
)
def test_what_was_drawn_is_the_draft_whatever_follows(proposer: Any, fault: str) -> None:
    proposers = chain(proposer({}), needs={0: Needs(sampled=True)})
    found = propose(proposers, requests("x"))
    assert found["x"].token_ids == [4]
    assert found["x"].probs is not None
    assert proposers.take_faults() == {fault: 1}


def test_beside_a_member_whose_trees_see_the_noise_drawn_drafts_are_coupled() -> None:
    seeing = Needs(sampled=True, tree=True)
    proposers = chain(Fake({}), Drawing({}), needs={0: seeing, 1: Needs(sampled=True)})
    assert propose(proposers, requests("x"))["x"] == Drafted([4], "b", None)
    blind = chain(Fake({}), Drawing({}), needs={0: Needs(tree=True), 1: Needs(sampled=True)})
    assert propose(blind, requests("x"))["x"].probs is not None


class Branching(Fake):
    def propose(self, batch: DraftInput) -> Draft:
        super().propose(batch)
        return Draft([[1, 2, 3] for _ in batch.requests], [[-1, -1, 1] for _ in batch.requests])


def test_a_tree_comes_with_its_parents_and_counts_nodes() -> None:
    first, second = Fake({}), Branching({})
    proposers = chain(first, second, needs={1: Needs(tree=True)})
    assert proposers.tree_members == ("b",)
    (asked,) = requests("x")
    asked = replace(asked, max_depth=2)
    plans = {"x": DraftPlan((3, 3, 3), min_confidence=(0.3, 0.4, 0.5))}
    found = proposers.propose([asked], {"x": SAMPLING}, plans=plans)
    assert found == {}  # it did not say that it branches
    assert proposers.take_faults() == {"raised": 1}
    # Of a chain so many tokens are of use as a path may have; of a tree more.
    assert [request.k for request in (first.asked[0][0], second.asked[0][0])] == [2, 3]
    # A chain that is sampled must not end for what it may draw; a tree may.
    assert [r.min_confidence for r in (first.asked[0][0], second.asked[0][0])] == [0.0, 0.4]


def test_who_branches_may_say_so() -> None:
    member = Member(
        GuardedProposer(
            Branching({}), name="b", owner="tests", vocab_size=VOCAB_SIZE, strict=True,
            may_branch=True,
        ),
        Needs(tree=True),
        5,
    )  # fmt: skip
    found = propose(ProposerChain([member], VOCAB_SIZE), requests("x"))
    assert found == {"x": Drafted([1, 2, 3], "b", None, [-1, -1, 1])}
