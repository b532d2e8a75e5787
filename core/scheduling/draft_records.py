"""What is known of the proposers of a chain and of the requests they draft for.

Takes what was asked, drafted and accepted; says what each member may do for a request (`Menu`). It
knows counts, no seconds, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from foresay.core.messages import DraftTokenIds
from foresay.core.scheduling.acceptance import (
    Acceptance,
    Rates,
    Spread,
    of_all,
    of_proposer,
    of_request,
)
from foresay.core.scheduling.draft_choice import Menu
from foresay.core.scheduling.drain import Lengths
from foresay.core.scheduling.request import Request, RequestStatus

# What the first few drafts of a request may have where it is to be careful and requests differ: of
# one that is not worth it, more would be lost than others can make good.
_FIRST_DRAFTS, _CAREFUL = 2, 1
_DIFFERENT = 4.0  # if so few drafts of a request's own outweigh what others' did
_LAST_TOKENS = 3  # of a request, too few to gain anything by a trial
_SOME_DRAFTS = 8  # more or less of all requests: what is known of one stays what it is


@dataclass(slots=True)
class Member:
    """A proposer of the chain."""

    name: str
    k: int  # its most draft tokens, of a tree nodes
    is_tree: bool
    history: Acceptance
    spread: Spread
    max_context: int | None  # requests that are longer are not drafted for

    def reaches(self, request: Request) -> bool:
        """Whether a request is not too long for it."""
        return self.max_context is None or request.num_tokens < self.max_context


@dataclass(frozen=True, slots=True)
class Called:
    """A member's call for several requests."""

    num_requests: int
    longest: int  # draft


@dataclass(slots=True)
class _Known:
    """What is known of a request."""

    request: Request
    acceptance: tuple[Acceptance, ...]  # by member
    asked: tuple[int, ...] = ()  # k by member, of the draft that is to be verified
    drafter: int = -1  # which member made it
    num_drafted: int = 0
    num_verified: int = 0  # drafts
    menu: Menu | None = None  # as it was last found, and from what
    menu_of: tuple[float, ...] = ()


class Records:
    """The members' records, and those of requests until they are forgotten."""

    def __init__(
        self,
        members: Sequence[tuple[str, int]],
        trees: Collection[str],
        max_contexts: Mapping[str, int],
        *,
        is_measuring: bool,
    ) -> None:
        """`is_measuring`: whether old drafts count as much as new ones."""
        history = of_all if is_measuring else of_proposer
        self.members = [
            Member(
                name,
                k,
                name in trees,
                history(k, is_tree=name in trees),
                Spread(),
                max_contexts.get(name),
            )
            for name, k in members
        ]
        self.numbers = {name: number for number, (name, _) in enumerate(members)}
        self.lengths = Lengths()
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        """How many requests are known."""
        return len(self._known)

    def know(self, request: Request) -> None:
        """Take a request, if it is new."""
        if request.req_id not in self._known:
            acceptance = [of_request(member.k, is_tree=member.is_tree) for member in self.members]
            self._known[request.req_id] = _Known(request, tuple(acceptance))

    def forget(self, req_id: str) -> None:
        """Forget a request; what its drafts said of the proposers stays, and how long it got."""
        known = self._known.pop(req_id, None)
        if known is None:
            return
        for member, acceptance in zip(self.members, known.acceptance, strict=True):
            member.spread.add(acceptance)
        if known.request.num_output_tokens:
            stopped = known.request.status is RequestStatus.FINISHED_STOPPED
            self.lengths.add(known.request.num_output_tokens, stopped=stopped)

    def num_verified(self, request: Request) -> int:
        """Return how many drafts of a request were verified."""
        return self._known[request.req_id].num_verified

    def untried(self, request: Request) -> list[int]:
        """Return the members of which nothing is known with a request, and that may draft for it.

        There are none while it computes its prompt, as what is drafted in such steps, if anything
        is, is not timed; nor for its last tokens.
        """
        if request.num_lacking_tokens > 1 or not request.num_output_tokens:
            return []
        if request.num_output_tokens + _LAST_TOKENS > request.max_tokens:
            return []
        known = self._known[request.req_id]
        under_way = known.drafter if known.asked else -1  # its draft is yet to be verified
        return [
            number
            for number, member in enumerate(self.members)
            if not known.acceptance[number].num_drafts
            and number != under_way
            and member.reaches(request)
        ]

    def add_drafts(
        self, plans: Mapping[str, tuple[int, ...]], drafts: DraftTokenIds | None
    ) -> list[Called]:
        """Take what was drafted after a step; return the members' calls.

        `plans`: k by member, of the requests drafted for.
        """
        called = [0] * len(self.members)
        longest = [0] * len(self.members)
        for req_id, allowed in plans.items():
            known = self._known.get(req_id)
            if known is None:
                continue
            # Beyond its end nothing is drafted: of a chain no token, of a tree nothing so deep.
            room = known.request.max_tokens - known.request.num_output_tokens - 1
            asked = tuple(
                k if member.is_tree and room > 0 else max(0, min(k, room))
                for k, member in zip(allowed, self.members, strict=True)
            )
            num_drafted = 0 if drafts is None else len(drafts.draft_token_ids.get(req_id, ()))
            known.asked, known.num_drafted, known.drafter = asked, num_drafted, -1
            if drafts is not None and num_drafted:
                name = drafts.proposers.get(req_id, self.members[0].name)
                known.drafter = self.numbers[name]
            for number, k in enumerate(asked):
                if not k:
                    continue
                called[number] += 1
                if number == known.drafter:
                    longest[number] = max(longest[number], num_drafted)
                    break
                self._learn(known, number, k, 0, ())  # it had none
            if known.drafter < 0:
                known.asked = ()
        return [Called(*each) for each in zip(called, longest, strict=True)]

    def add_verified(self, req_id: str, num_judged: int, accepted: Sequence[int]) -> int | None:
        """Take how a request's draft did; return whose it was, None if nothing was judged."""
        known = self._known.get(req_id)
        if known is None or not known.asked:
            return None
        number = known.drafter
        known.num_verified += 1
        if num_judged:
            # What the scheduler cut off was not allowed.
            k = known.asked[number] if num_judged == known.num_drafted else num_judged
            self._learn(known, number, k, num_judged, accepted)
        known.asked = ()
        return number if num_judged else None

    def menus(self, requests: Sequence[Request], hope: float, *, is_careful: bool) -> list[Menu]:
        """Return what may be done for requests, which become known.

        `hope`: by how much they are taken to be better than others, until they were tried.
        """
        histories = [member.history.rates().raised(hope) for member in self.members]
        # What was found of a request holds while it, and all that it depends on, stays as it was.
        basis = (hope, *(member.history.num_drafts // _SOME_DRAFTS for member in self.members))
        return [self._menu(request, histories, basis, is_careful) for request in requests]

    def _menu(
        self,
        request: Request,
        histories: Sequence[Rates],
        basis: tuple[float, ...],
        is_careful: bool,
    ) -> Menu:
        self.know(request)
        known = self._known[request.req_id]
        is_careful = is_careful and known.num_verified < _FIRST_DRAFTS
        reaches = [member.reaches(request) for member in self.members]
        basis = (*basis, is_careful, *reaches, *(own.num_drafts for own in known.acceptance))
        if known.menu is not None and known.menu_of == basis:
            return known.menu
        most = request.num_speculative_tokens
        rates, ks = [], []
        for number, member in enumerate(self.members):
            weight = member.spread.weight()
            rates.append(known.acceptance[number].rates(histories[number], weight))
            k = member.k if most is None else min(member.k, most)
            if is_careful and weight < _DIFFERENT:
                k = min(k, _CAREFUL)
            ks.append(k if reaches[number] else 0)
        known.menu, known.menu_of = Menu.of(rates, ks), basis
        return known.menu

    def _learn(
        self, known: _Known, number: int, k: int, num_drafted: int, accepted: Sequence[int]
    ) -> None:
        for acceptance in (known.acceptance[number], self.members[number].history):
            acceptance.add(k, num_drafted, accepted)
