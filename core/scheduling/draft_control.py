"""How much to draft for whom: as much as pays, by what steps cost and how far drafts get.

The engine tells it what steps and drafts took, and what was accepted; before each step it asks
what to draft after it. The wish for a request (`DraftPlan`) says how many tokens each member of
the chain of proposers may draft; 0 for all of them is a plain step. It knows seconds and counts, no
tokens, blocks or models, and imports no torch.

The wish is made from the past alone, before anything of the draft exists. So drafts stay exact
under every rule of verification (see `worker.rejection_sampler`), and a seeded request's text,
which depends on no draft, stays what it is.

**What is sought** is the greatest number of tokens per second of the whole batch:

    sum over requests of (1 + expected accepted tokens) / (seconds of the step + of drafting)

A ratio of sums is maximised by looking, for a rate r, for what maximises tokens - r * seconds,
and putting the rate this has in the place of r, until it does not grow (Dinkelbach, 1967). For a
given r each request decides for itself what a row costs it: the slope of the step's time.

**What is not known** must be tried. At first drafts are as long as they may be, and every fourth
step is a plain one, until both are measured; later each is tried now and then where the other is
preferred: a proposer that is not asked, the more rarely the less it gets right; a plain step, once
in `_PLAIN_EVERY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from foresay.core.messages import DraftPlan, DraftTokenIds, SchedulerOutput
from foresay.core.scheduling.acceptance import Acceptance, Rates, of_proposer, of_request
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.step_cost import StepCost

_ENOUGH = 3  # plain steps that must be known
_LEARNING_PLAIN_EVERY = 4  # until then
_PLAIN_EVERY = 192
_TRY_AFTER = (8, 256)  # steps without a member: the first time, and at most
_BEGIN_AT, _STAY_AT = 1.03, 1.0  # the gain from which drafting begins, and down to which it stays
_GREEDY_BELOW = 1e-5  # temperature: as `SamplingData` has it


@dataclass(slots=True)
class _Member:
    """A proposer of the chain."""

    name: str
    k: int
    history: Acceptance
    wait: int = _TRY_AFTER[0]  # steps without it until it is tried
    num_steps_idle: int = 0


@dataclass(slots=True)
class _Known:
    """What is known of a request."""

    acceptance: tuple[Acceptance, ...]  # by member
    asked: tuple[int, ...] = ()  # k by member, of the draft that is to be verified
    drafter: int = -1  # which member made it; -1: nobody had one
    num_drafted: int = 0


@dataclass(slots=True)
class _Offer:
    """What a member can do for a request: by k, from 0 on, what is expected."""

    tokens: list[float] = field(default_factory=lambda: [0.0])  # accepted
    rows: list[float] = field(default_factory=lambda: [0.0])  # drafted
    empty: float = 0.0  # the probability that it has no draft


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done for a request, and what is expected of it."""

    num_draft_tokens: tuple[int, ...]
    tokens: float  # accepted
    rows: float  # drafted
    asked: tuple[float, ...]  # by member, the probability that it is called
    lengths: tuple[float, ...]  # by member, tokens drafted when it is called


class DraftControl:
    """Decides for one engine; not thread-safe."""

    def __init__(self, members: Sequence[tuple[str, int]], cost: StepCost | None = None) -> None:
        """`members`: the chain's names, each with its own most draft tokens."""
        self.cost = cost or StepCost()
        self._members = [_Member(name, k, of_proposer(k)) for name, k in members]
        self._numbers = {name: number for number, (name, _) in enumerate(members)}
        chain = range(len(self._members))
        self._orders = [
            order for size in range(1, len(chain) + 1) for order in combinations(chain, size)
        ]
        self._known: dict[str, _Known] = {}
        self._is_drafting = True  # whether the last step that could choose chose to draft
        self._num_steps = 0  # that drafted since the last plain one
        self._turn = 0  # whose request is the next to try a member that is not asked

    # -- What the engine tells --------------------------------------------------------------------

    def add_engine_step(
        self, scheduled: SchedulerOutput, drafts: DraftTokenIds | None, times: Sequence[float]
    ) -> None:
        """Take a step that ran.

        `times`: when it began, was scheduled, executed and committed, in seconds.
        """
        began, was_scheduled, executed, committed = times[:4]
        num_requests = len(scheduled.num_scheduled_tokens)
        num_rows = sum(scheduled.num_scheduled_tokens.values())
        # Not with parts of prompts: there a row is another thing, and drafters take all of them in.
        is_timed = num_requests > 0 and scheduled.num_scheduled_tokens == scheduled.num_output_rows
        if is_timed:
            around = was_scheduled - began + committed - executed
            self.cost.add_step(num_rows, num_requests, executed - was_scheduled, around)
        everyone = tuple(member.k for member in self._members)
        plans = {}
        for req_id, k in scheduled.num_draft_tokens.items():
            plan = scheduled.draft_plans.get(req_id)
            wished = everyone if plan is None else plan.num_draft_tokens
            plans[req_id] = tuple(min(own, k) for own in wished)
        made = {} if drafts is None else drafts.draft_token_ids
        by = {} if drafts is None else drafts.proposers
        self.add_drafts(
            plans,
            {
                req_id: (by.get(req_id, self._members[0].name), len(token_ids))
                for req_id, token_ids in made.items()
            },
            drafts.seconds if is_timed and drafts is not None else None,
        )

    def add_drafts(
        self,
        plans: Mapping[str, tuple[int, ...]],
        drafts: Mapping[str, tuple[str, int]],
        seconds: Mapping[str, float] | None,
    ) -> None:
        """Take what was drafted after a step.

        `plans`: k by member, of the requests drafted for; `drafts`: who drafted and how many
        tokens, of those with a draft. `seconds` by proposer; None: they say nothing.
        """
        called = [0] * len(self._members)
        longest = [0] * len(self._members)
        for req_id, asked in plans.items():
            known = self._known.get(req_id)
            if known is None:
                continue
            name, num_drafted = drafts.get(req_id, ("", 0))
            known.asked, known.num_drafted = asked, num_drafted
            known.drafter = self._numbers.get(name, -1) if num_drafted else -1
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
            took = None if seconds is None else seconds.get(member.name)
            if called[number] and took is not None:
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
            member = self._members[number]
            # Where it is tried only now and then, success brings the next try forward.
            low, high = _TRY_AFTER
            if num_accepted == num_judged:
                member.wait = max(low, member.wait // 4)
            elif not num_accepted:
                member.wait = min(high, member.wait * 2)
        known.asked = ()

    def forget(self, req_id: str) -> None:
        """Forget a request; what its drafts said of the proposer stays."""
        self._known.pop(req_id, None)

    def _learn(
        self, known: _Known, number: int, k: int, num_drafted: int, num_accepted: int
    ) -> None:
        for acceptance in (known.acceptance[number], self._members[number].history):
            acceptance.add(k, num_drafted, num_accepted)

    # -- What it decides --------------------------------------------------------------------------

    def decide(self, requests: Sequence[Request]) -> None:
        """Set the `draft_plan` of the requests that the next step runs."""
        drafting = [request for request in requests if request.may_draft]
        if not drafting:
            return
        num_requests = len(requests)
        histories = [member.history.rates() for member in self._members]
        offers = [self._offers(request, histories) for request in drafting]
        if self._must_learn_plain(num_requests):
            choices = [self._nothing] * len(drafting)
            self._num_steps = 0
            confidence = 0.0
        else:
            choices, confidence = self._best(offers, num_requests)
            if self._num_steps % 3 == 1:
                choices = self._learn_lengths(offers, choices)
            self._num_steps += any(choice.rows for choice in choices)
        for request, choice in zip(drafting, choices, strict=True):
            request.draft_plan = DraftPlan(
                choice.num_draft_tokens,
                confidence if request.sampling.temperature < _GREEDY_BELOW else 0.0,
            )
        self._try(drafting)

    def expected_rate(self, num_requests: int, k: int | None = None) -> float | None:
        """Return tokens per second for new requests at the best k, or at a given one.

        None: not enough was measured.
        """
        offers = [[self._offer(member.history.rates(), member.k) for member in self._members]]
        offers *= num_requests
        if k is None:
            choices, _ = self._best(offers, num_requests)
        else:
            everyone = tuple(min(k, member.k) for member in self._members)
            choices = [self._chosen(offers[0], everyone)] * num_requests
        return self._rate(choices, num_requests)

    def _must_learn_plain(self, num_requests: int) -> bool:
        num_known = self.cost.verifying.num_samples(num_requests)
        every = _PLAIN_EVERY if num_known >= _ENOUGH else _LEARNING_PLAIN_EVERY
        return self._num_steps >= every - 1

    def _learn_lengths(
        self, offers: Sequence[list[_Offer]], choices: Sequence[Choice]
    ) -> list[Choice]:
        """Have members draft one token each whose time is known for one length only."""
        caps = [
            member.k if self.cost.knows_lengths(member.name, len(choices)) else 1
            for member in self._members
        ]
        return [
            self._chosen(offer, tuple(map(min, choice.num_draft_tokens, caps)))
            for offer, choice in zip(offers, choices, strict=True)
        ]

    @property
    def _nothing(self) -> Choice:
        none = (0.0,) * len(self._members)
        return Choice((0,) * len(self._members), 0.0, 0.0, none, none)

    def _offers(self, request: Request, histories: Sequence[Rates]) -> list[_Offer]:
        known = self._known.get(request.req_id)
        if known is None:
            known = _Known(tuple(of_request(member.k) for member in self._members))
            self._known[request.req_id] = known
        own = request.num_speculative_tokens
        return [
            self._offer(acceptance.rates(history), k if own is None else min(k, own))
            for acceptance, history, k in zip(
                known.acceptance, histories, (m.k for m in self._members), strict=True
            )
        ]

    @staticmethod
    def _offer(rates: Rates, k: int) -> _Offer:
        offer = _Offer()
        there = held = 1.0
        for place in range(k):
            there *= rates.there[place]
            held *= rates.accepted[place]
            offer.rows.append(offer.rows[-1] + there)
            offer.tokens.append(offer.tokens[-1] + held)
        offer.empty = 1 - rates.there[0] if k else 1.0
        return offer

    def _best(
        self, offers: Sequence[list[_Offer]], num_requests: int
    ) -> tuple[list[Choice], float]:
        """Return each request's choice, and the confidence below which its draft should end."""
        nothing = [self._nothing] * len(offers)
        plain = self._rate(nothing, num_requests)
        if plain is None:  # at the very start
            return [self._chosen(offer, tuple(m.k for m in self._members)) for offer in offers], 0.0
        rate, choices, row = plain, nothing, 0.0
        for _ in range(4):
            num_rows = num_requests + sum(choice.rows for choice in choices)
            row = self._row_seconds(num_rows, num_requests)
            tried = self._choose(offers, rate, row)
            found = self._rate(tried, num_requests) or 0.0
            if found <= rate * 1.001:
                break
            rate, choices = found, tried
        if choices is nothing:
            # The slope at a plain step's rows may hide what lies farther.
            tried = [self._chosen(offer, tuple(m.k for m in self._members)) for offer in offers]
            found = self._rate(tried, num_requests) or 0.0
            if found > rate:
                rate, choices = found, tried
        self._is_drafting = rate >= plain * (_STAY_AT if self._is_drafting else _BEGIN_AT)
        if not self._is_drafting or choices is nothing:
            return nothing, 0.0
        return choices, min(rate * (row + self._token_seconds(choices)), 0.9)

    def _choose(self, offers: Sequence[list[_Offer]], rate: float, row: float) -> list[Choice]:
        """Return what is best for each request if a second is worth `rate` tokens.

        `row`: what a row more takes.
        """
        share = max(1, len(offers))
        calls = [self._call(number, share) for number in range(len(self._members))]
        chosen = []
        for offer in offers:
            best, best_gain = self._nothing, 0.0
            for order in self._orders:
                ks = [0] * len(self._members)
                gain, reached = 0.0, 1.0
                for number in order:
                    first, each = calls[number]
                    own = offer[number]
                    # Every token drafted takes its time, and its row.
                    values = [
                        tokens - rate * (row * rows + (each * rows + first) / share)
                        for tokens, rows in zip(own.tokens[1:], own.rows[1:], strict=True)
                    ]
                    if not values:
                        continue
                    value = max(values)
                    ks[number] = values.index(value) + 1
                    gain += reached * value
                    reached *= own.empty
                if gain > best_gain:
                    best, best_gain = self._chosen(offer, tuple(ks)), gain
            chosen.append(best)
        return chosen

    @staticmethod
    def _chosen(offer: Sequence[_Offer], ks: tuple[int, ...]) -> Choice:
        tokens = rows = 0.0
        reached = 1.0
        asked, lengths = [], []
        for own, k in zip(offer, ks, strict=True):
            k = min(k, len(own.tokens) - 1)
            tokens += reached * own.tokens[k]
            rows += reached * own.rows[k]
            asked.append(reached if k else 0.0)
            lengths.append(own.rows[k])
            if k:
                reached *= own.empty
        return Choice(ks, tokens, rows, tuple(asked), tuple(lengths))

    def _rate(self, choices: Sequence[Choice], num_requests: int) -> float | None:
        """Return tokens per second of a step with these choices and the drafting before it."""
        num_rows = num_requests + sum(choice.rows for choice in choices)
        seconds = self.cost.step(num_rows, num_requests)
        if seconds is None:
            return None
        for number, member in enumerate(self._members):
            called = sum(choice.asked[number] for choice in choices)
            if called:
                longest = max(choice.lengths[number] for choice in choices)
                took = self.cost.drafting(member.name, max(1, round(called)), longest)
                seconds += took * min(1.0, called)
        return (num_requests + sum(choice.tokens for choice in choices)) / seconds

    def _row_seconds(self, num_rows: float, num_requests: int) -> float:
        """Return what a row more takes: the slope from a plain step to at least a row each."""
        most = max(num_rows, num_requests * 2.0)
        plain, full = self.cost.step(num_requests, num_requests), self.cost.step(most, num_requests)
        assert plain is not None
        assert full is not None
        return (full - plain) / (most - num_requests)

    def _call(self, number: int, num_requests: int) -> tuple[float, float]:
        """Return a member's seconds for a call, and those for each token more."""
        member = self._members[number]
        first = self.cost.drafting(member.name, num_requests, 0)
        full = self.cost.drafting(member.name, num_requests, member.k)
        return first, (full - first) / member.k

    def _token_seconds(self, choices: Sequence[Choice]) -> float:
        """Return what a draft token more takes a request, drafting apart from verifying."""
        most = 0.0
        for number in range(len(self._members)):
            called = sum(choice.asked[number] for choice in choices)
            if called:
                most = max(most, self._call(number, max(1, round(called)))[1] / max(1.0, called))
        return most

    def _try(self, requests: Sequence[Request]) -> None:
        """Have a member that nobody asks draft for one request, if its time has come."""
        for number, member in enumerate(self._members):
            if member.num_steps_idle < member.wait:
                continue
            self._turn += 1
            request = requests[self._turn % len(requests)]
            plan = request.draft_plan
            assert plan is not None
            ks = tuple(member.k if m == number else 0 for m in range(len(self._members)))
            request.draft_plan = DraftPlan(ks, plan.min_confidence)
            member.num_steps_idle = 0
            return


class BatchTable:
    """The number of draft tokens by the number of requests in a step, as somebody fixed it."""

    def __init__(self, members: Sequence[tuple[str, int]], table: Mapping[int, int]) -> None:
        """`table`: the entry of the largest number of requests not above a step's holds."""
        self._members = members
        self._table = sorted(table.items())

    def decide(self, requests: Sequence[Request]) -> None:
        """Set the `draft_plan` of the requests that the next step runs."""
        k = next((k for number, k in reversed(self._table) if number <= len(requests)), None)
        if k is None:
            k = self._table[0][1]
        plan = DraftPlan(tuple(min(k, own) for _, own in self._members))
        for request in requests:
            request.draft_plan = plan

    def add_engine_step(
        self, scheduled: SchedulerOutput, drafts: DraftTokenIds | None, times: Sequence[float]
    ) -> None:
        """Take a step that ran: it changes nothing."""

    def add_verified(self, req_id: str, num_judged: int, num_accepted: int) -> None:
        """Take how a request's draft did: it changes nothing."""

    def forget(self, req_id: str) -> None:
        """Forget a request: nothing is known of it."""
