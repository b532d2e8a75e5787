"""Feeds a proposer as the engine's worker would, without an engine; and watches one in an engine.

`Driver` is the only place in the suite that makes a `DraftInput`. It knows the proposer contract,
not the rules that are tested.
"""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from foresay.core.errors import one_line
from foresay.core.messages import SamplingData
from foresay.core.proposer import Draft, DraftInput, DraftRequest, Needs, Proposer, TargetView
from foresay.core.worker.request_state import TokenView

if TYPE_CHECKING:
    from foresay.core.testing.features import FeatureFeed

# Drafts are drawn with the noise of this seed, so the same history draws the same draft.
SEEDED = SamplingData(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11, min_tokens=0, stop_token_ids=()
)

_driver_numbers = itertools.count()


def fail(message: str, cause: BaseException | None = None) -> NoReturn:
    """Fail the test: what is wrong, and what to do about it."""
    __tracebackhide__ = True
    raise AssertionError(message) from cause


def check(condition: bool, message: str) -> None:
    """Fail the test with `message` unless the condition holds."""
    __tracebackhide__ = True
    if not condition:
        fail(message)


class History(TokenView):
    """A request's committed tokens as the worker shows them to a proposer; printed in short."""

    __slots__ = ()

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(list(tokens))

    def __repr__(self) -> str:
        return reprlib.repr(self._tokens)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a step: its name in the test, its committed tokens, and how many to draft."""

    name: str
    history: Sequence[int]
    k: int
    num_prompt_tokens: int | None = None  # None: all but the last token, where it is new
    num_new_tokens: int | None = None  # committed by this step; None: all that were not seen before
    is_chunk: bool = False  # of a prompt that is not complete yet: no new token
    prediction: Sequence[int] = ()


class Driver:
    """One proposer and the requests it holds. Names of requests are private to a driver.

    A proposer is handed what it declared to need, and nothing else.
    """

    def __init__(
        self,
        proposer: Proposer,
        target: TargetView,
        needs: Needs,
        *,
        sampling: SamplingData = SEEDED,
        same_ids: bool = False,
    ) -> None:
        """`same_ids`: use the tests' names as they are, so that two drivers can use one id."""
        self.proposer = proposer
        self.sampler: Any = None  # the last step's
        self.batch: DraftInput | None = None  # the last step's
        self._vocab_size = target.vocab_size
        self._needs = needs
        self._sampling = sampling
        self._prefix = "" if same_ids else f"{next(_driver_numbers)}:"
        self._lengths: dict[str, tuple[int, int]] = {}  # prompt, and history when last seen
        load = getattr(proposer, "load", None)
        if load is not None:
            try:
                known = load(target)
            except Exception as error:  # noqa: BLE001  # whatever a plugin raises
                fail(f"load(target) raised {one_line(error)}; it must take any TargetView", error)
            check(
                known is None or isinstance(known, Needs),
                f"load(target) returned {known!r}; it may return a Needs, in place of what the "
                "spec declared, or nothing",
            )
            self._needs = known or needs
        self._feed = _feed(self._needs, target)

    def step(self, *asks: Ask, as_lists: bool = False) -> list[list[int]]:
        """Ask for one step's drafts; they have the right form, but maybe wrong ids or lengths.

        `as_lists`: hand over lists, which a proposer could change, where it gets views otherwise.
        """
        __tracebackhide__ = True
        requests: Sequence[DraftRequest] = tuple(self._request(ask) for ask in asks)
        if as_lists:
            requests = [replace(r, token_ids=list(r.token_ids)) for r in requests]
        return self._propose(self._input(requests))

    def draft(self, ask: Ask) -> list[int]:
        """Ask for one request's draft, alone in its batch."""
        __tracebackhide__ = True
        return self.step(ask)[0]

    def _propose(self, batch: DraftInput) -> list[list[int]]:
        """Hand the proposer a batch, and take plain lists out of what it returns."""
        __tracebackhide__ = True
        self.batch = batch
        try:
            draft = self.proposer.propose(batch)
        except Exception as error:  # noqa: BLE001  # whatever a plugin raises
            asked = ", ".join(
                f"{r.req_id!r} (k={r.k}, {len(r.token_ids)} tokens, {r.num_new_tokens} of them new)"
                for r in batch.requests
            )
            fail(
                f"propose() raised {one_line(error)}, asked for {asked}; it must handle every "
                "request it is handed, if only with an empty draft",
                error,
            )
        missing = self._feed.missing() if self._feed is not None else None
        check(
            missing is None,
            f"{missing}: whoever declares KV layers stores every position that is handed over, "
            "also with k=0, or a prefix hit finds another request's keys there",
        )
        return plain_drafts(draft, batch.requests)

    def release(self, name: str) -> None:
        """Tell the proposer that a request ended or was preempted, if it wants to know."""
        __tracebackhide__ = True
        self._lengths.pop(name, None)
        if self._feed is not None:
            self._feed.release(self._prefix + name)
        release = getattr(self.proposer, "release", None)
        if release is None:
            return
        try:
            release(self._prefix + name)
        except Exception as error:  # noqa: BLE001  # whatever a plugin raises
            fail(
                f"release({self._prefix + name!r}) raised {one_line(error)}; it must accept any "
                "id, also one that it never drafted for: use `self.states.pop(req_id, None)`",
                error,
            )

    def _request(self, ask: Ask) -> DraftRequest:
        num_tokens = len(ask.history)
        own_prompt = num_tokens if ask.is_chunk else num_tokens - 1
        prompt = ask.num_prompt_tokens if ask.num_prompt_tokens is not None else own_prompt
        prompt, num_seen = self._lengths.get(ask.name, (prompt, num_tokens - 1))
        self._lengths[ask.name] = (prompt, num_tokens)
        num_new = num_tokens - num_seen if ask.num_new_tokens is None else ask.num_new_tokens
        return DraftRequest(
            req_id=self._prefix + ask.name,
            token_ids=History(ask.history),
            num_new_tokens=0 if ask.is_chunk else num_new,
            k=ask.k,
            prediction_ids=History(ask.prediction) if ask.prediction else (),
            num_prompt_tokens=prompt,
        )

    def _input(self, requests: Sequence[DraftRequest]) -> DraftInput:
        """Make the input of a step: the one place that knows what a proposer may need."""
        self.sampler = None
        if self._needs.sampled:
            # Here: it imports torch, which most proposers do without.
            from foresay.core.worker.draft_sampler import DrawRequest, StepSampler

            self.sampler = StepSampler(
                [
                    DrawRequest(
                        req_id=request.req_id,
                        sampling=self._sampling,
                        num_tokens=len(request.token_ids),
                        k=request.k,
                    )
                    for request in requests
                ],
                self._vocab_size,
            )
        batch = DraftInput(requests, self.sampler)
        return batch if self._feed is None else self._feed.add_to(batch)


def _feed(needs: Needs, target: TargetView) -> FeatureFeed | None:
    """Return what hands over features to a proposer that needs some."""
    if not (needs.hidden_state or needs.aux_layers or needs.kv_layers):
        return None
    # Here: it imports torch, which most proposers do without.
    from foresay.core.testing.features import FeatureFeed

    return FeatureFeed(needs, target)


def plain_drafts(draft: Any, requests: Sequence[DraftRequest]) -> list[list[int]]:
    """Return drafts as lists of ints; fail if they have not the form that the contract asks for."""
    __tracebackhide__ = True
    if not hasattr(draft, "token_ids"):
        fail(
            f"propose() returned {reprlib.repr(draft)}; it must return a Draft: "
            "`return Draft([ids_of_first_request, ids_of_second_request, ...])`"
        )
    rows = _sequence(draft.token_ids, "Draft.token_ids")
    check(
        len(rows) == len(requests),
        f"Draft.token_ids has {len(rows)} lists for {len(requests)} requests; there must be one "
        "list per request, in their order, an empty one for a request without a draft",
    )
    drafts = [
        [_plain_id(token_id) for token_id in _sequence(ids, f"Draft.token_ids[{i}]")]
        for i, ids in enumerate(rows)
    ]
    if getattr(draft, "parents", None) is not None:
        trees = _sequence(draft.parents, "Draft.parents")
        check(
            len(trees) == len(drafts),
            f"Draft.parents has {len(trees)} items for {len(drafts)} requests; there must be one "
            "per request: a list, or None for a chain",
        )
        for i, (ids, tree) in enumerate(zip(drafts, trees, strict=True)):
            if tree is not None:
                _check_tree(ids, _sequence(tree, f"Draft.parents[{i}]"), i)
    return drafts


def _check_tree(ids: Sequence[int], parents: Sequence[Any], index: int) -> None:
    __tracebackhide__ = True
    what = f"Draft.parents[{index}]"
    check(
        len(parents) == len(ids),
        f"{what} has {len(parents)} items for {len(ids)} tokens; there must be one per token",
    )
    siblings = set()
    for place, (token_id, parent) in enumerate(zip(ids, map(_plain_id, parents), strict=True)):
        check(
            -1 <= parent < place,
            f"{what}[{place}] is {parent}; a node's parent is the place of a node before it, or -1",
        )
        check(
            (parent, token_id) not in siblings,
            f"node {place} of draft {index} is the token {token_id}, as one beside it is; "
            "siblings must differ",
        )
        siblings.add((parent, token_id))


def _sequence(value: Any, what: str) -> Any:
    is_sized = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not is_sized or isinstance(value, str | bytes | Mapping | Set):
        fail(f"{what} is {reprlib.repr(value)}; it must be a list, a tuple, an array or a tensor")
    return value


def _plain_id(token_id: Any) -> int:
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)
    except Exception:  # noqa: BLE001,S110  # a plugin's own type; said below
        pass
    fail(f"a draft holds {reprlib.repr(token_id)}, which is no integer; drafts are token ids")


@dataclass(slots=True)
class Watched:
    """A proposer in an engine, unchanged but for notes on what it was asked and what it drafted."""

    proposer: Proposer
    drafts: dict[tuple[tuple[int, ...], int], list[list[int]]] = field(default_factory=dict)
    chunk_drafts: list[list[int]] = field(default_factory=list)  # for prompts not complete yet

    def propose(self, batch: DraftInput) -> Draft:
        """Let the proposer draft, and note by history and k what came of it."""
        histories = [tuple(request.token_ids) for request in batch.requests]
        draft = self.proposer.propose(batch)
        try:
            drafted = plain_drafts(draft, batch.requests)
        except AssertionError:  # the engine, which is strict, will say so
            return draft
        for request, history, ids in zip(batch.requests, histories, drafted, strict=True):
            if request.num_new_tokens == 0:
                self.chunk_drafts.append(ids)
            else:
                known = self.drafts.setdefault((history, request.k), [])
                if ids not in known:
                    known.append(ids)
        return draft

    def __getattr__(self, name: str) -> Any:
        """The optional methods are there if the proposer has them."""
        return getattr(self.proposer, name)
