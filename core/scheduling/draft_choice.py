"""Which drafts give the most tokens per second, when costs and rates are known. No state.

**What is sought** is the greatest number of tokens per second of a whole batch:

    sum over requests of (1 + expected accepted tokens) / (seconds of the step + of drafting)

A ratio of sums is maximised by looking, for a rate r, for what maximises tokens - r * seconds,
and putting the rate this has in the place of r, until it does not grow (Dinkelbach, 1967). For a
given r each request decides for itself, what a row costs being the slope of the step's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from foresay.core.scheduling.acceptance import Rates
from foresay.core.scheduling.step_cost import StepCost

_MOST_ROUNDS = 4
_MOST_CONFIDENCE = 0.9
_ROWS_FOR_SLOPE = 4.0  # fewer rows differ less in time than times vary
_TREE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes to choose from


@dataclass(frozen=True, slots=True)
class Offer:
    """What a member of the chain can do for a request: by k, from 0 on, what is expected."""

    tokens: Sequence[float]  # accepted
    rows: Sequence[float]  # drafted
    empty: float  # the probability that it has no draft
    sizes: Sequence[int]  # the k from 1 on that are worth looking at

    @classmethod
    def of(cls, rates: Rates, k: int) -> Offer:
        """Return what is expected at these rates of drafts up to `k` tokens."""
        tokens, rows = [0.0], [0.0]
        if rates.is_tree:
            for there, accepted in zip(rates.there[:k], rates.accepted[:k], strict=True):
                rows.append(rows[-1] + there)
                tokens.append(tokens[-1] + accepted)
            sizes = [size for size in _TREE_SIZES if size < k]
            return cls(tokens, rows, 1 - rates.there[0] if k else 1.0, [*sizes, k] if k else [])
        is_there = holds = 1.0
        for there, accepted in zip(rates.there[:k], rates.accepted[:k], strict=True):
            is_there *= there
            holds *= accepted
            rows.append(rows[-1] + is_there)
            tokens.append(tokens[-1] + holds)
        return cls(tokens, rows, 1 - rates.there[0] if k else 1.0, range(1, k + 1))

    def best(self, price: float) -> tuple[float, int]:
        """Return the gain in tokens of the best draft, and its k, a row being worth `price`."""
        tokens, rows = self.tokens, self.rows
        best, best_gain = 0, 0.0 if not self.sizes else -inf
        for k in self.sizes:
            gain = tokens[k] - price * rows[k]
            if gain > best_gain:
                best, best_gain = k, gain
        return best_gain, best


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done for a request, and what is expected of it."""

    num_draft_tokens: tuple[int, ...]  # by member
    tokens: float  # accepted
    rows: float  # drafted
    asked: tuple[float, ...]  # by member, the probability that it is called
    lengths: tuple[float, ...]  # by member, tokens drafted if it is called


class Menu:
    """What the members of the chain can do for a request, and the choices made of it."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        """`offers`: by member."""
        self.offers = offers
        self._choices: dict[tuple[int, ...], Choice] = {}

    @classmethod
    def of(cls, rates: Iterable[Rates], ks: Iterable[int]) -> Menu:
        """Return what members with these rates can do with up to so many tokens each."""
        return cls([Offer.of(own, k) for own, k in zip(rates, ks, strict=True)])

    def choice(self, ks: Sequence[int]) -> Choice:
        """Return what comes of asking members, in their order, until one has a draft.

        `ks`: their draft tokens, at most; 0: a member is not asked.
        """
        wanted = tuple(ks)
        choice = self._choices.get(wanted)
        if choice is None:
            choice = self._choices[wanted] = self._weigh(wanted)
        return choice

    def _weigh(self, ks: Sequence[int]) -> Choice:
        tokens = rows = 0.0
        reached = 1.0
        asked, lengths = [], []
        own = tuple(min(k, len(offer.tokens) - 1) for offer, k in zip(self.offers, ks, strict=True))
        for offer, k in zip(self.offers, own, strict=True):
            tokens += reached * offer.tokens[k]
            rows += reached * offer.rows[k]
            asked.append(reached if k else 0.0)
            lengths.append(offer.rows[k])
            if k:
                reached *= offer.empty
        return Choice(own, tokens, rows, tuple(asked), tuple(lengths))


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices for a batch and what they bring."""

    choices: Sequence[Choice]
    tokens: float  # of the step, those included that come without drafts
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def drafts(self) -> bool:
        """Whether it drafts for anyone."""
        return any(choice.rows for choice in self.choices)


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

    def seconds(
        self,
        num_rows: float,
        num_requests: int,
        called: Sequence[float],
        longest: Sequence[float],
    ) -> float | None:
        """Return the seconds of a step with drafting; None: they are not known yet.

        `called`, `longest`: by member, for how many requests, and the most tokens of one of them.
        """
        seconds = self._cost.step(num_rows, num_requests)
        if seconds is None:
            return None
        for name, number, length in zip(self._names, called, longest, strict=True):
            if number:
                took = self._cost.drafting(name, max(1, round(number)), length)
                seconds += took * min(1.0, number)
        return seconds

    def plan(self, choices: Sequence[Choice], num_requests: int) -> Plan | None:
        """Return what some choices bring; None: the seconds of a step are not known yet.

        `num_requests` may be more than there are choices: some may not be drafted for.
        """
        num_rows = num_requests + sum(choice.rows for choice in choices)
        members = range(len(self._names))
        called = [sum(choice.asked[number] for choice in choices) for number in members]
        longest = [
            max((choice.lengths[number] for choice in choices), default=0.0) for number in members
        ]
        seconds = self.seconds(num_rows, num_requests, called, longest)
        if seconds is None:
            return None
        tokens = num_requests + sum(choice.tokens for choice in choices)
        return Plan(choices, tokens, seconds)

    def best(self, menus: Sequence[Menu], num_requests: int) -> Plan | None:
        """Return the best plan that drafts; None: no draft has any prospect, or nothing is known.

        It may be worse than not to draft.
        """
        plain = self.plan([], num_requests)
        if plain is None:
            return None
        rate, found = plain.rate, None
        num_rows = float(num_requests)
        for _ in range(_MOST_ROUNDS):
            row = self.row_seconds(num_rows, num_requests)
            tried = self.plan(self.at(menus, rate, row), num_requests)
            if tried is None or not tried.drafts:
                break
            if found is not None and tried.rate <= found.rate * 1.001:
                break
            found = tried
            rate = max(rate, found.rate)
            num_rows = num_requests + sum(choice.rows for choice in found.choices)
        # All one token, and all as many as there may be: a slope hides what lies beyond a step.
        most = max(len(offer.tokens) for menu in menus for offer in menu.offers) - 1
        for k in (1, most):
            every = [menu.choice([k] * len(self._names)) for menu in menus]
            tried = self.plan(every, num_requests)
            if tried is not None and tried.drafts and (found is None or tried.rate > found.rate):
                found = tried
        return found

    def confidence(self, plan: Plan, trees: Sequence[bool], num_requests: int) -> tuple[float, ...]:
        """Return by member the confidence below which its drafts should end, or lose a node.

        A token more takes its row and its part of the drafting; while those seconds last, the plan
        as a whole makes so many tokens. Of a tree it takes its row only: what drafting takes is a
        matter of passes, which it shares with others.
        """
        num_drafted = sum(choice.rows for choice in plan.choices)
        row = self.row_seconds(num_requests + max(num_drafted, _ROWS_FOR_SLOPE), num_requests)
        found = []
        for number, is_tree in enumerate(trees):
            seconds = row
            called = sum(choice.asked[number] for choice in plan.choices)
            if called and not is_tree:
                k = max(choice.num_draft_tokens[number] for choice in plan.choices)
                _, each = self._call(number, max(1, round(called)), k)
                seconds += each / max(1.0, called)
            found.append(min(plan.rate * seconds, _MOST_CONFIDENCE))
        return tuple(found)

    def at(self, menus: Sequence[Menu], rate: float, row: float) -> Sequence[Choice]:
        """Return what is best for each request if a second is worth `rate` tokens.

        `row`: what a row more takes.
        """
        share = len(menus)
        most = max(len(offer.tokens) for menu in menus for offer in menu.offers) - 1
        calls = [self._call(number, share, most) for number in range(len(self._names))]
        prices = [rate * (row + another / share) for _, another in calls]
        fixed = [rate * first / share for first, _ in calls]
        numbers = range(len(self._names))
        nothing = (0,) * len(self._names)
        chosen = []
        for menu in menus:
            gains = []
            for offer, price, first in zip(menu.offers, prices, fixed, strict=True):
                gain, k = offer.best(price)
                gains.append((gain - first, k, offer.empty))
            best, best_gain = nothing, 0.0
            for order in self._orders:
                gain, reached = 0.0, 1.0
                for number in order:
                    own, _, empty = gains[number]
                    gain += reached * own
                    reached *= empty
                if gain > best_gain:
                    best_gain = gain
                    best = tuple([gains[n][1] if n in order else 0 for n in numbers])
            chosen.append(menu.choice(best))
        return chosen

    def row_seconds(self, num_rows: float, num_requests: int) -> float:
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
