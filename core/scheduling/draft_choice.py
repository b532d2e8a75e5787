"""Which drafts give the most tokens per second, when costs and rates are known. No state.

**What is sought** is the greatest number of tokens per second of a whole batch:

    sum over requests of (1 + expected accepted tokens) / (seconds of the step + of drafting)

A ratio of sums is maximised by looking, for a rate r, for what maximises tokens - r * seconds,
and putting the rate this has in the place of r, until it does not grow (Dinkelbach, 1967). For a
given r each request decides for itself, what a row costs being the slope of the step's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from foresay.core.scheduling.acceptance import Rates
from foresay.core.scheduling.step_cost import StepCost

_MOST_ROUNDS = 4
_MOST_CONFIDENCE = 0.9


@dataclass(slots=True)
class Offer:
    """What a member of the chain can do for a request: by k, from 0 on, what is expected."""

    tokens: list[float] = field(default_factory=lambda: [0.0])  # accepted
    rows: list[float] = field(default_factory=lambda: [0.0])  # drafted
    empty: float = 1.0  # the probability that it has no draft

    @classmethod
    def of(cls, rates: Rates, k: int) -> Offer:
        """Return what is expected at these rates of drafts up to `k` tokens."""
        offer = cls()
        there = accepted = 1.0
        for place in range(k):
            there *= rates.there[place]
            accepted *= rates.accepted[place]
            offer.rows.append(offer.rows[-1] + there)
            offer.tokens.append(offer.tokens[-1] + accepted)
        if k:
            offer.empty = 1 - rates.there[0]
        return offer


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done for a request, and what is expected of it."""

    num_draft_tokens: tuple[int, ...]  # by member
    tokens: float  # accepted
    rows: float  # drafted
    asked: tuple[float, ...]  # by member, the probability that it is called
    lengths: tuple[float, ...]  # by member, tokens drafted if it is called

    @classmethod
    def of(cls, offers: Sequence[Offer], ks: Sequence[int]) -> Choice:
        """Return what comes of asking members, in their order, until one has a draft."""
        tokens = rows = 0.0
        reached = 1.0
        asked, lengths = [], []
        ks = tuple(min(k, len(offer.tokens) - 1) for offer, k in zip(offers, ks, strict=True))
        for offer, k in zip(offers, ks, strict=True):
            tokens += reached * offer.tokens[k]
            rows += reached * offer.rows[k]
            asked.append(reached if k else 0.0)
            lengths.append(offer.rows[k])
            if k:
                reached *= offer.empty
        return cls(ks, tokens, rows, tuple(asked), tuple(lengths))


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices for a batch and what they bring."""

    choices: Sequence[Choice]
    tokens: float  # of the step, those included that come without drafts
    seconds: float
    row_seconds: float = 0.0  # what a row more takes

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Chooser:
    """Weighs what an engine's proposers offer against what it costs."""

    def __init__(self, members: Sequence[str], cost: StepCost) -> None:
        """`members`: the chain's names, in their order."""
        self._names = members
        self._cost = cost
        numbers = range(len(members))
        self._orders = [
            order for size in range(1, len(members) + 1) for order in combinations(numbers, size)
        ]

    def plan(self, choices: Sequence[Choice], num_requests: int) -> Plan | None:
        """Return what some choices bring; None: the seconds of a step are not known yet.

        `num_requests` may be more than there are choices: some may not be drafted for.
        """
        num_rows = num_requests + sum(choice.rows for choice in choices)
        seconds = self._cost.step(num_rows, num_requests)
        if seconds is None:
            return None
        for number, name in enumerate(self._names):
            called = sum(choice.asked[number] for choice in choices)
            if called:
                longest = max(choice.lengths[number] for choice in choices)
                took = self._cost.drafting(name, max(1, round(called)), longest)
                seconds += took * min(1.0, called)
        tokens = num_requests + sum(choice.tokens for choice in choices)
        return Plan(choices, tokens, seconds)

    def best(self, offers: Sequence[Sequence[Offer]], num_requests: int) -> Plan | None:
        """Return the best plan that drafts; None: no draft has any prospect, or nothing is known.

        It may be worse than not to draft.
        """
        plain = self.plan([], num_requests)
        if plain is None:
            return None
        rate, found = plain.rate, None
        num_rows = float(num_requests)
        for _ in range(_MOST_ROUNDS):
            row = self._row_seconds(num_rows, num_requests)
            tried = self._weighed(self._choose(offers, rate, row), num_requests, row)
            if tried is None or (found is not None and tried.rate <= found.rate * 1.001):
                break
            found = tried
            rate = max(rate, tried.rate)
            num_rows = num_requests + sum(choice.rows for choice in tried.choices)
        # All one token, and all as many as there may be: a slope hides what lies beyond a step.
        for k in (1, max(len(offer.tokens) for each in offers for offer in each) - 1):
            every = [Choice.of(each, [k] * len(self._names)) for each in offers]
            row = self._row_seconds(num_requests + len(offers) * k, num_requests)
            tried = self._weighed(every, num_requests, row)
            if tried is not None and (found is None or tried.rate > found.rate):
                found = tried
        return found

    def confidence(self, plan: Plan) -> float:
        """Return the confidence below which a draft of a plan should end.

        A token more takes its row and its part of the drafting; while those seconds last, the plan
        as a whole makes so many tokens.
        """
        most = 0.0
        for number in range(len(self._names)):
            called = sum(choice.asked[number] for choice in plan.choices)
            if called:
                k = max(choice.num_draft_tokens[number] for choice in plan.choices)
                _, each = self._call(number, max(1, round(called)), k)
                most = max(most, each / max(1.0, called))
        return min(plan.rate * (plan.row_seconds + most), _MOST_CONFIDENCE)

    def _weighed(self, choices: Sequence[Choice], num_requests: int, row: float) -> Plan | None:
        if not any(choice.rows for choice in choices):
            return None
        plan = self.plan(choices, num_requests)
        return None if plan is None else Plan(choices, plan.tokens, plan.seconds, row)

    def _choose(
        self, offers: Sequence[Sequence[Offer]], rate: float, row: float
    ) -> Sequence[Choice]:
        """Return what is best for each request if a second is worth `rate` tokens.

        `row`: what a row more takes.
        """
        share = len(offers)
        most = max(len(offer.tokens) for each in offers for offer in each) - 1
        calls = [self._call(number, share, most) for number in range(len(self._names))]
        nothing = (0,) * len(self._names)
        chosen = []
        for each in offers:
            best, best_gain = nothing, 0.0
            for order in self._orders:
                ks = list(nothing)
                gain, reached = 0.0, 1.0
                for number in order:
                    first, another = calls[number]
                    offer = each[number]
                    values = [
                        tokens - rate * (row * rows + (first + another * rows) / share)
                        for tokens, rows in zip(offer.tokens[1:], offer.rows[1:], strict=True)
                    ]
                    if values:
                        value = max(values)
                        ks[number] = values.index(value) + 1
                        gain += reached * value
                        reached *= offer.empty
                if gain > best_gain:
                    best, best_gain = tuple(ks), gain
            chosen.append(Choice.of(each, best))
        return chosen

    def _row_seconds(self, num_rows: float, num_requests: int) -> float:
        """Return what a row more takes: the slope from a plain step to at least a row each."""
        most = max(num_rows, num_requests * 2.0)
        plain = self._cost.step(num_requests, num_requests)
        full = self._cost.step(most, num_requests)
        assert plain is not None
        assert full is not None
        return (full - plain) / (most - num_requests)

    def _call(self, number: int, num_requests: int, k: int) -> tuple[float, float]:
        """Return a member's seconds for a call that drafts nothing, and for each token of `k`."""
        name = self._names[number]
        first = self._cost.drafting(name, num_requests, 0)
        full = self._cost.drafting(name, num_requests, k)
        return first, (full - first) / max(1, k)
