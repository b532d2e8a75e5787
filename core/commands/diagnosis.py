"""Whether drafting pays: expected tokens and seconds of a step, break-even acceptance, speeds.

Arithmetic on the control's cost model and acceptance rates, and on runs that were timed; it runs
nothing and words nothing. A *step* here is one of a full batch in which every request may have the
same number of draft tokens; tokens are those of one request, seconds those of all. Of a tree draft
tokens are nodes, the best ones first, and acceptance is the share of them that lies on the path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from foresay.core.scheduling.acceptance import Rates
from foresay.core.scheduling.draft_choice import Chooser, Menu
from foresay.core.scheduling.step_cost import StepCost

_ROUNDS = 40  # of a bisection: closer than any measurement


@dataclass(frozen=True, slots=True)
class Expected:
    """A step, as the cost model and the acceptance rates have it."""

    ks: tuple[int, ...]  # draft tokens allowed, by member of the chain
    tokens: float  # of a request, the one that comes without a draft included
    rows: float  # of the target's pass, all requests together
    step_seconds: float  # of the target's pass and of all around it
    drafting_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.step_seconds + self.drafting_seconds

    @property
    def k(self) -> int:
        """The longest draft that is allowed."""
        return max(self.ks, default=0)


class Economy:
    """What drafting costs and brings an engine in steps of so many requests."""

    def __init__(
        self, members: Sequence[tuple[str, Rates]], cost: StepCost, num_requests: int
    ) -> None:
        """`members`: the chain's names in order, each with its rates, which say its own k.

        The seconds of plain steps must be known to `cost`.
        """
        self.cost = cost
        self.num_requests = num_requests
        self.names = [name for name, _ in members]
        self.rates = [rates for _, rates in members]
        self.most = max(len(rates.there) for rates in self.rates)  # draft tokens
        # What a draft is counted in.
        self.noun = "node" if all(rates.is_tree for rates in self.rates) else "token"
        self._chooser = Chooser(self.names, cost)
        self.plain = self.expect(0)

    def expect(self, k: int | Sequence[int], rates: Sequence[Rates] | None = None) -> Expected:
        """Return what `k` draft tokens bring, or so many of each member.

        `rates`: other ones than those that were found.
        """
        rates = self.rates if rates is None else rates
        ks = [k] * len(rates) if isinstance(k, int) else k
        choice = _menu(rates).choice(ks)
        plan = self._chooser.plan([choice] * self.num_requests, self.num_requests)
        rows = self.num_requests * (1 + choice.rows)
        step = self.cost.step(rows, self.num_requests)
        assert plan is not None
        assert step is not None
        return Expected(choice.num_draft_tokens, 1 + choice.tokens, rows, step, plan.seconds - step)

    def speedup(self, expected: Expected) -> float:
        """Return its tokens per second over those of plain steps."""
        return expected.tokens * self.plain.seconds / expected.seconds

    def best(self) -> Expected:
        """Return the best step that drafts: it may be worse than a plain one."""
        found = [self.expect(k) for k in range(1, self.most + 1)]
        menus = [_menu(self.rates)] * self.num_requests
        plan = self._chooser.best(menus, self.num_requests)
        if plan is not None:  # the members of a chain may differ
            found.append(self.expect(plan.choices[0].num_draft_tokens))
        return max(found, key=self.speedup)

    def easiest(self) -> Expected | None:
        """Return the step that needs the least acceptance to pay; None: there is none that would.

        Of the numbers of tokens that are the same for all members.
        """
        needs = []
        for k in range(1, self.most + 1):
            step = self.expect(k)
            rate = self.break_even(step.ks)
            if rate is not None:
                needs.append((rate, k, step))
        return min(needs)[2] if needs else None

    def first(self, ks: Sequence[int]) -> tuple[float, float]:
        """Return what part of the steps has a draft, and how often its first token holds.

        Of a tree that is its best node.
        """
        reached, holds = 1.0, 0.0
        for rates, k in zip(self.rates, ks, strict=True):
            if k:
                holds += reached * rates.accepted[0]
                reached *= 1 - rates.there[0]
        share = 1 - reached
        return share, holds / share if share else 0.0

    def row_share(self, expected: Expected) -> float:
        """Return what a row more of each request takes, as a part of a plain step."""
        more = expected.rows / self.num_requests - 1
        if not more:
            return 0.0
        return (expected.step_seconds - self.plain.step_seconds) / more / self.plain.seconds

    def break_even(self, ks: Sequence[int]) -> float | None:
        """Return the acceptance rate at which a step is as fast as a plain one.

        The rate is that of the draft tokens that there are, the same at every place. None: there
        are no drafts, or they would not pay if all of them were accepted.
        """
        return self._rate_for(ks, self.expect(ks).seconds / self.plain.seconds)

    def found(self, ks: Sequence[int]) -> float | None:
        """Return the acceptance rate, the same at every place, that brings what was found.

        None: there are no drafts.
        """
        tokens = self.expect(ks).tokens
        rate = self._rate_for(ks, tokens)
        return 1.0 if rate is None and self._is_drafting(ks) else rate

    def best_if(
        self, *, free_drafting: bool = False, free_rows: bool = False, always: bool = False
    ) -> float:
        """Return the best speedup there would be if one thing were otherwise.

        `free_drafting`, `free_rows`: if that took no time; `always`: if there were a draft in
        every step, as good as those that there are.
        """
        rates = [_always(own) for own in self.rates] if always else self.rates
        speedups = []
        for k in range(1, self.most + 1):
            step = self.expect(k, rates)
            seconds = self.plain.step_seconds if free_rows else step.step_seconds
            seconds += 0.0 if free_drafting else step.drafting_seconds
            speedups.append(step.tokens * self.plain.seconds / seconds)
        return max(speedups)

    def _is_drafting(self, ks: Sequence[int]) -> bool:
        return self.expect(ks).rows > self.num_requests

    def _rate_for(self, ks: Sequence[int], tokens: float) -> float | None:
        """Return the rate at which a step makes so many tokens; None: no rate is enough."""
        if not self._is_drafting(ks) or self._tokens_at(1.0, ks) < tokens:
            return None
        low, high = 0.0, 1.0
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            if self._tokens_at(middle, ks) < tokens:
                low = middle
            else:
                high = middle
        return high

    def _tokens_at(self, rate: float, ks: Sequence[int]) -> float:
        return self.expect(ks, [uniform(own, rate) for own in self.rates]).tokens


def _menu(rates: Sequence[Rates]) -> Menu:
    return Menu.of(rates, [len(own.there) for own in rates])


def uniform(rates: Rates, rate: float) -> Rates:
    """Return rates at which each draft token that there is holds with the same probability."""
    return Rates(rates.there, [there * rate for there in rates.there], rates.is_tree)


def _always(rates: Rates) -> Rates:
    """Return rates with a draft in every step, as good as those that there are."""
    if not rates.there or not rates.there[0]:
        return rates
    share = rates.there[0]
    if rates.is_tree:  # every rank's rates are those of all steps
        there, accepted = (
            [min(1.0, rate / share) for rate in own] for own in (rates.there, rates.accepted)
        )
        return Rates(there, accepted, is_tree=True)
    first = min(1.0, rates.accepted[0] / share)
    return Rates([1.0, *rates.there[1:]], [first, *rates.accepted[1:]])


@dataclass(frozen=True, slots=True)
class Timed:
    """Output tokens, and the seconds that they took."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts, answered by an engine that speculates and by a plain one."""

    repeat: int
    task: str  # "": of several
    own: Timed
    plain: Timed
    num_steps: int  # decode steps of the requests, with speculation


@dataclass(frozen=True, slots=True)
class Speed:
    """Times as fast as plain decoding: over repeats."""

    median: float
    least: float
    most: float
    tokens_per_step: float  # of a request, with speculation

    @property
    def credible(self) -> float:
        """No more than the steps that were saved: what is above is a difference of the machine."""
        return min(self.median, self.tokens_per_step)


def speed(pairs: Iterable[Pair]) -> Speed | None:
    """Return how much faster speculation was; None: there is no pair.

    In each repeat tokens and seconds are pooled. A repeat with fewer pairs than another one, an
    interrupted one, does not count.
    """
    repeats: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        repeats[pair.repeat].append(pair)
    most = max(map(len, repeats.values()), default=0)
    complete = [each for each in repeats.values() if len(each) == most]
    if not complete:
        return None
    ratios = [
        _rate([pair.own for pair in each]) / _rate([pair.plain for pair in each])
        for each in complete
    ]
    counted = [pair for each in complete for pair in each]
    tokens = sum(pair.own.tokens for pair in counted)
    steps = sum(pair.num_steps for pair in counted)
    return Speed(median(ratios), min(ratios), max(ratios), tokens / steps)


def by_task(pairs: Sequence[Pair]) -> dict[str, Speed]:
    """Return the speeds of each task; none where prompts of several were answered together."""
    found = {}
    for task in dict.fromkeys(pair.task for pair in pairs if pair.task):
        own = speed(pair for pair in pairs if pair.task == task)
        if own is not None:
            found[task] = own
    return found


def _rate(timed: Sequence[Timed]) -> float:
    return sum(each.tokens for each in timed) / sum(each.seconds for each in timed)


def rate_ratio(own: Sequence[Timed], plain: Sequence[Timed]) -> float | None:
    """Return the tokens per second of some runs over those of others; None: there are none."""
    if not any(each.tokens for each in own) or not any(each.tokens for each in plain):
        return None
    return _rate(own) / _rate(plain)


def lengths(most: int) -> list[int]:
    """Return the numbers of draft tokens to try, from 0 up to `most`: not all where it is large."""
    found = [0, 1, 2, 3, 4, 5] if most <= 5 else [0, 1, 2, 3, 5]
    while found[-1] * 1.6 < most:
        found.append(round(found[-1] * 1.6))
    return [*(k for k in found if k < most), most]
