"""How much to draft for whom: as much as pays, by what steps cost and how far drafts get.

The engine tells it what steps and drafts took, and what was accepted; before each step it asks
what to draft after it. The wish for a request (`DraftPlan`) says how many tokens each member of
the chain of proposers may draft; 0 for all of them is a plain step. It knows seconds and counts, no
tokens, blocks or models, and imports no torch.

The wish is made from the past alone, before anything of the draft exists. So drafts stay exact
under every rule of verification (see `worker.rejection_sampler`), and a seeded request's text,
which depends on no draft, stays what it is.

**What is not known must be tried.** At first drafts are as long as they may be, and every fourth
step is a plain one, until both are measured. Later what looks worse is tried now and then: not to
draft; to draft for all; to have one request drafted for by a member that was not asked for a while.
A trial is expected to lose some time. A small part of all time (`_FOR_TRIALS`) may be lost so, and
is saved up: what looks nearly as good is tried often, what looks bad seldom. A member whose trial
went well is tried again at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foresay.core.messages import DraftPlan, DraftTokenIds, SchedulerOutput
from foresay.core.scheduling.acceptance import Acceptance, Rates, of_all, of_proposer, of_request
from foresay.core.scheduling.draft_choice import Choice, Chooser, Offer, Plan
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.step_cost import StepCost

_ENOUGH = 3  # plain steps that must be known
_LEARNING_PLAIN_EVERY = 4  # steps, until then
_FOR_TRIALS = 0.008  # of all time
_MOST_SAVED = 2.0  # for trials: seconds of so many steps
_BETWEEN_TRIALS = 4  # steps, at least
_HOPE = 0.1  # by how much a request alone is taken to be better than others, until it was tried
_TRIAL_TOKENS = 2  # of a draft for one request
# The gain from which drafting begins, and down to which it goes on. Where requests run together,
# the one that ends last sets the time of all, and more tokens for others are of no use to it.
_BEGIN_AT, _STAY_AT = 1.02, 1.0
_BEGIN_TOGETHER_AT, _STAY_TOGETHER_AT = 1.3, 1.2
_REST = 3  # steps of several requests that are plain like one before, without another look
_GREEDY_BELOW = 1e-5  # temperature: as `SamplingData` has it


@dataclass(slots=True)
class _Member:
    """A proposer of the chain."""

    name: str
    k: int
    history: Acceptance
    num_steps_idle: int = 0
    is_promising: bool = False  # the whole of its last draft was accepted


@dataclass(slots=True)
class _Known:
    """What is known of a request."""

    acceptance: tuple[Acceptance, ...]  # by member
    asked: tuple[int, ...] = ()  # k by member, of the draft that is to be verified
    drafter: int = -1  # which member made it
    num_drafted: int = 0


class DraftControl:
    """Decides for one engine; not thread-safe."""

    def __init__(
        self, members: Sequence[tuple[str, int]], table: Mapping[int, int] | None = None
    ) -> None:
        """`members`: the chain's names, each with its own most draft tokens.

        `table`: draft tokens by the number of requests in a step, instead of what pays; the entry
        of the largest number that is not above it counts, else the first one. Nothing is decided
        by what is learnt then: it is for whoever asks, and more is kept of it.
        """
        self.cost = StepCost(is_measuring=table is not None)
        history = of_proposer if table is None else of_all
        self._table = None if table is None else sorted(table.items())
        self._members = [_Member(name, k, history(k)) for name, k in members]
        self._numbers = {name: number for number, (name, _) in enumerate(members)}
        self._chooser = Chooser([name for name, _ in members], self.cost)
        self._known: dict[str, _Known] = {}
        self._is_drafting = True  # whether to draft was found to be better
        self._num_since_plain = 0  # steps that drafted since the last that did not
        self._num_since_trial = 0
        self._saved = 0.0  # seconds that may be lost by trials
        self._step_seconds = 0.0  # of the last step
        self._turn = 0  # whose turn it is to be tried
        self._rest = 0  # plain steps to come without another look

    # -- What the engine tells --------------------------------------------------------------------

    def add_engine_step(
        self, scheduled: SchedulerOutput, drafts: DraftTokenIds | None, times: Sequence[float]
    ) -> None:
        """Take a step that ran.

        `times`: when it began, was scheduled, executed and committed, in seconds.
        """
        began, was_scheduled, executed, committed = times[:4]
        num_requests = len(scheduled.num_scheduled_tokens)
        # Not with parts of prompts: there a row is another thing, and drafters take all of them in.
        is_timed = num_requests > 0 and scheduled.num_scheduled_tokens == scheduled.num_output_rows
        seconds = {} if drafts is None else drafts.seconds
        self._step_seconds = 0.0
        if is_timed:
            num_rows = sum(scheduled.num_scheduled_tokens.values())
            around = was_scheduled - began + committed - executed
            self.cost.add_step(num_rows, num_requests, executed - was_scheduled, around)
            self._step_seconds = committed - began + sum(seconds.values())
        everyone = tuple(member.k for member in self._members)
        plans = {}
        for req_id, k in scheduled.num_draft_tokens.items():
            plan = scheduled.draft_plans.get(req_id)
            wished = everyone if plan is None else plan.num_draft_tokens
            plans[req_id] = tuple(min(own, k) for own in wished)
        self._add_drafts(plans, drafts, seconds if is_timed else {})

    def _add_drafts(
        self,
        plans: Mapping[str, tuple[int, ...]],
        drafts: DraftTokenIds | None,
        seconds: Mapping[str, float],
    ) -> None:
        """Take what was drafted after a step. `plans`: k by member, of the requests drafted for."""
        called = [0] * len(self._members)
        longest = [0] * len(self._members)
        for req_id, asked in plans.items():
            known = self._known.get(req_id)
            if known is None:
                continue
            num_drafted = 0 if drafts is None else len(drafts.draft_token_ids.get(req_id, ()))
            known.asked, known.num_drafted, known.drafter = asked, num_drafted, -1
            if drafts is not None and num_drafted:
                name = drafts.proposers.get(req_id, self._members[0].name)
                known.drafter = self._numbers[name]
            for number, k in enumerate(asked):
                if not k:
                    continue
                called[number] += 1
                if number == known.drafter:
                    longest[number] = max(longest[number], num_drafted)
                    break
                self._learn(known, number, k, 0, 0)  # it had none
            if known.drafter < 0:
                known.asked = ()
        for number, member in enumerate(self._members):
            member.num_steps_idle = 0 if called[number] else member.num_steps_idle + 1
            if called[number] and member.name in seconds:
                took = seconds[member.name]
                self.cost.add_drafting(member.name, called[number], longest[number], took)

    def add_verified(self, req_id: str, num_judged: int, num_accepted: int) -> None:
        """Take how a request's draft did; `num_judged` of its tokens were verified."""
        known = self._known.get(req_id)
        if known is None or not known.asked:
            return
        number = known.drafter
        if num_judged:
            # What the scheduler cut off was not allowed.
            k = known.asked[number] if num_judged == known.num_drafted else num_judged
            self._learn(known, number, k, num_judged, num_accepted)
            self._members[number].is_promising = num_accepted == num_judged
        known.asked = ()

    def forget(self, req_id: str) -> None:
        """Forget a request; what its drafts said of the proposers stays."""
        self._known.pop(req_id, None)

    def _learn(
        self, known: _Known, number: int, k: int, num_drafted: int, num_accepted: int
    ) -> None:
        for acceptance in (known.acceptance[number], self._members[number].history):
            acceptance.add(k, num_drafted, num_accepted)

    # -- What it decides --------------------------------------------------------------------------

    def decide(self, requests: Sequence[Request]) -> None:
        """Set the `draft_plan` of the requests that may run in the next step."""
        drafting = [request for request in requests if request.may_draft]
        if not drafting:
            return
        if self._table is not None:
            self._look_up(drafting, len(requests))
            return
        if self._rest and len(requests) > 1:
            self._rest -= 1
            self._set_plain(drafting)
            return
        hope = _HOPE if len(requests) == 1 else 0.0
        histories = [member.history.rates().raised(hope) for member in self._members]
        offers = [self._offers(request, histories) for request in drafting]
        choices, confidence = self._choose(offers, len(requests))
        drafts = any(choice.rows for choice in choices)
        self._num_since_plain = self._num_since_plain + 1 if drafts else 0
        self._rest = 0 if drafts or self._is_drafting else _REST
        for request, choice in zip(drafting, choices, strict=True):
            is_greedy = request.sampling.temperature < _GREEDY_BELOW
            request.draft_plan = DraftPlan(
                choice.num_draft_tokens, confidence if is_greedy else 0.0
            )

    def expected(self, num_requests: int, k: int | None = None) -> Plan | None:
        """Return what drafting brings new requests at the best length, or at a given one.

        None: not enough was measured.
        """
        own = [Offer.of(member.history.rates(), member.k) for member in self._members]
        if k is None:
            return self._chooser.best([own] * num_requests, num_requests)
        return self._chooser.plan([Choice.of(own, [k] * len(own))] * num_requests, num_requests)

    @property
    def members(self) -> list[tuple[str, int]]:
        """The chain's names in their order, each with its own most draft tokens."""
        return [(member.name, member.k) for member in self._members]

    def rates(self, proposer: str) -> Rates:
        """Return how far a proposer's drafts get."""
        return self._members[self._numbers[proposer]].history.rates()

    def _look_up(self, requests: Sequence[Request], num_requests: int) -> None:
        assert self._table is not None
        k = self._table[0][1]
        for number, entry in self._table:
            if number <= num_requests:
                k = entry
        plan = DraftPlan(tuple(min(k, member.k) for member in self._members))
        for request in requests:
            self._know(request)
            request.draft_plan = plan

    def _set_plain(self, requests: Sequence[Request]) -> None:
        plan = DraftPlan((0,) * len(self._members))
        for request in requests:
            self._know(request)
            request.draft_plan = plan

    def _know(self, request: Request) -> _Known:
        known = self._known.get(request.req_id)
        if known is None:
            known = _Known(tuple(of_request(member.k) for member in self._members))
            self._known[request.req_id] = known
        return known

    def _offers(self, request: Request, histories: Sequence[Rates]) -> list[Offer]:
        known = self._know(request)
        most = request.num_speculative_tokens
        return [
            Offer.of(acceptance.rates(history), member.k if most is None else min(member.k, most))
            for acceptance, history, member in zip(
                known.acceptance, histories, self._members, strict=True
            )
        ]

    def _choose(
        self, offers: Sequence[list[Offer]], num_requests: int
    ) -> tuple[Sequence[Choice], float]:
        """Return what to do for each request, and below which confidence a draft should end."""
        nothing = [Choice.of(offer, [0] * len(offer)) for offer in offers]
        plain = self._chooser.plan(nothing, num_requests)
        if plain is None:  # at the very start
            return [Choice.of(offer, [m.k for m in self._members]) for offer in offers], 0.0
        learnt = self.cost.verifying.num_samples(num_requests) >= _ENOUGH
        if not learnt and self._num_since_plain >= _LEARNING_PLAIN_EVERY - 1:
            return nothing, 0.0
        found = self._chooser.best(offers, num_requests)
        if found is None:
            return nothing, 0.0
        begin, stay = (_BEGIN_AT, _STAY_AT)
        if num_requests > 1:
            begin, stay = (_BEGIN_TOGETHER_AT, _STAY_TOGETHER_AT)
        self._is_drafting = found.rate / plain.rate >= (stay if self._is_drafting else begin)
        best, other = (found, plain) if self._is_drafting else (plain, found)
        trial = self._trial(offers, best, other, num_requests) if learnt else None
        chosen = trial or best
        if chosen is plain:
            return nothing, 0.0
        choices = chosen.choices
        if chosen is found and self._num_since_plain % 3 == 1:
            choices = self._short(offers, choices)
        return choices, self._chooser.confidence(found)

    def _short(self, offers: Sequence[list[Offer]], choices: Sequence[Choice]) -> Sequence[Choice]:
        """Have members draft one token each whose time is known for one length only."""
        most = [
            member.k if self.cost.knows_lengths(member.name, len(choices)) else 1
            for member in self._members
        ]
        if all(k == member.k for k, member in zip(most, self._members, strict=True)):
            return choices
        return [
            Choice.of(offer, [*map(min, choice.num_draft_tokens, most)])
            for offer, choice in zip(offers, choices, strict=True)
        ]

    def _trial(
        self, offers: Sequence[list[Offer]], best: Plan, other: Plan, num_requests: int
    ) -> Plan | None:
        """Return a plan worth trying in the place of the best one, if it is time for that."""
        seconds = self._step_seconds or best.seconds
        self._saved = min(self._saved + _FOR_TRIALS * seconds, _MOST_SAVED * seconds)
        self._num_since_trial += 1
        missing = [
            number
            for number, member in enumerate(self._members)
            if member.num_steps_idle >= _BETWEEN_TRIALS
            or (member.num_steps_idle and not any(c.asked[number] for c in best.choices))
        ]
        again = any(self._members[number].is_promising for number in missing)
        if not again and self._num_since_trial < _BETWEEN_TRIALS:
            return None
        trials = [other, *self._single_trials(offers, missing, num_requests)]
        for number in range(len(trials)):
            trial = trials[(number + self._turn) % len(trials)]
            lost = max(trial.seconds - trial.tokens / best.rate, 0.0)
            if lost <= self._saved or (again and trial is not other and self._saved > -seconds):
                self._saved -= lost
                self._num_since_trial = 0
                self._turn += number + 1
                for member in self._members:
                    member.is_promising = False
                return trial
        return None

    def _single_trials(
        self, offers: Sequence[list[Offer]], members: Sequence[int], num_requests: int
    ) -> list[Plan]:
        """Return for each of some members a plan in which it alone drafts, for one request."""
        found = []
        for number in members:
            k = min(_TRIAL_TOKENS, self._members[number].k)
            ks = [k if number == other else 0 for other in range(len(self._members))]
            which = self._turn % len(offers)
            choices = [
                Choice.of(offer, ks if request == which else [0] * len(ks))
                for request, offer in enumerate(offers)
            ]
            plan = self._chooser.plan(choices, num_requests)
            if plan is not None:
                found.append(plan)
        return found
