"""How far drafts get: of a request's drafts, and of all drafts of a proposer.

Knows counts, no seconds. What is estimated is what *allowing* k tokens brings: a draft that was
allowed k and has fewer, or none, counts at the places where it has nothing.

**Of a chain** there are two rates for each place: that there *is* a token, given the one before;
and that it is there *and accepted*, given that the one before was.

**Of a tree**, whose nodes are listed from the best one down, there are two for each rank: that
there is a node, and that there is one which lies on the accepted path. Both are unconditional:
which node hangs on which differs from one tree to the next, its rank says what it is worth. But
of a rank that was seldom allowed, the one before says more than its own few drafts, which may have
been made when all went badly: so how rates fall from rank to rank is counted as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol

_FIRST_GUESS = 0.75  # of a proposer that has never drafted: try it
_FIRST_NODE, _FALLING = 0.6, 0.7  # of a tree's best node, and from one rank to the next
_GUESS_WEIGHT = 2.0  # in drafts
_GUESS_TOKENS = 0.7  # accepted, that outweigh what the guess promises: how soon it is given up
_HISTORY_WEIGHT = 4.0  # how many drafts of its own a request must have to outweigh the history
_REQUEST_MEMORY = 0.93  # what a draft still counts after the next one
_HISTORY_MEMORY = 0.98
_MOST = 0.98  # a rate that is only hoped for
_LEAST = 1e-6
_LEAST_DRAFTS, _LEAST_REQUESTS = 4, 3.0  # for how much requests differ to be told
_SPREAD_MEMORY = 0.97
_SMALLEST_WEIGHT, _LARGEST_WEIGHT = 1.0, 8.0
_HEAVY = 1e12  # of a draft's weight: then all counts are scaled down


@dataclass(frozen=True, slots=True)
class Rates:
    """By place or rank: that a token is there, and that it is there and accepted; see above."""

    there: Sequence[float]
    accepted: Sequence[float]
    is_tree: bool = False

    def raised(self, by: float) -> Rates:
        """Return rates of which more is accepted: at every place, of a tree less by rank."""
        if not by:
            return self
        hoped = [
            min(rate + (by / (1 + place) if self.is_tree else by), _MOST)
            for place, rate in enumerate(self.accepted)
        ]
        return Rates(self.there, hoped, self.is_tree)


class Acceptance(Protocol):
    """Rates by place or rank; the newest drafts count most."""

    def add(self, k: int, num_drafted: int, accepted: Sequence[int]) -> None:
        """Take a draft: allowed `k` tokens, it had `num_drafted`; `accepted` places, ascending."""
        ...

    def rates(self, prior: Rates | None = None, weight: float | None = None) -> Rates:
        """Return the rates; `prior`: those of the history. Without one, a first guess.

        `weight`: how many drafts outweigh the prior; None: as it was made.
        """
        ...

    @property
    def num_drafts(self) -> int:
        """How many were taken."""
        ...

    @property
    def num_held(self) -> int:
        """Of how many drafts anything was accepted."""
        ...


class Spread:
    """How much requests differ: so much less does what others did say of a new one.

    The share of a request's drafts of which anything is accepted is taken to be Beta-distributed
    over requests; mean and variance are those of the requests that ended, less what chance alone
    makes shares of few drafts vary.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean = 0.0
        self._square = 0.0
        self._chance = 0.0

    def add(self, acceptance: Acceptance) -> None:
        """Take what is known of a request that ended."""
        number = acceptance.num_drafts
        if number < _LEAST_DRAFTS:
            return
        share = acceptance.num_held / number
        self._weight = self._weight * _SPREAD_MEMORY + 1
        part = 1 / self._weight
        self._mean += part * (share - self._mean)
        self._square += part * (share * share - self._square)
        self._chance += part * (share * (1 - share) / (number - 1) - self._chance)

    def weight(self) -> float:
        """Return how many drafts of its own a request must have to outweigh the history."""
        if self._weight < _LEAST_REQUESTS:
            return _HISTORY_WEIGHT
        variance = self._square - self._mean**2 - self._chance
        most = self._mean * (1 - self._mean)
        if variance * (_LARGEST_WEIGHT + 1) <= most:
            return _LARGEST_WEIGHT
        return max(most / variance - 1, _SMALLEST_WEIGHT)


class _Fading:
    """Counts that fade: instead of all old ones becoming less, each new one weighs more."""

    def __init__(self, k: int, memory: float, weight: float) -> None:
        """`weight`: how many drafts outweigh what is assumed before there are any."""
        self._growth = 1 / memory
        self._weight = weight
        self._one = 1.0  # what the last draft counts
        self.num_drafts = 0
        self.num_held = 0  # drafts of which anything was accepted
        self._may_be = [0.0] * k  # of a draft's places: a token could have been there
        self._is = [0.0] * k
        self._may_hold = [0.0] * k
        self._holds = [0.0] * k

    def _next(self, accepted: Sequence[int]) -> float:
        self.num_drafts += 1
        self.num_held += len(accepted) > 0
        self._one *= self._growth
        if self._one > _HEAVY:
            for counts in (self._may_be, self._is, self._may_hold, self._holds):
                counts[:] = [count / self._one for count in counts]
            self._one = 1.0
        return self._one


class ChainAcceptance(_Fading):
    """`Acceptance` of chains, by place."""

    def add(self, k: int, num_drafted: int, accepted: Sequence[int]) -> None:
        """See `Acceptance`; accepted are the first ones."""
        one = self._next(accepted)
        num_accepted = len(accepted)
        for place in range(min(k, num_drafted + 1)):
            self._may_be[place] += one
            if place < num_drafted:
                self._is[place] += one
        for place in range(min(k, num_accepted + 1)):
            self._may_hold[place] += one
            if place < num_accepted:
                self._holds[place] += one

    def rates(self, prior: Rates | None = None, weight: float | None = None) -> Rates:
        """See `Acceptance`."""
        there: list[float] = []
        accepted: list[float] = []
        weight = (self._weight if weight is None else weight) * self._one
        is_there, holds, worse = 1.0, _FIRST_GUESS, 1.0
        if prior is None and self._holds:
            holds *= _level(self._holds[0], self._may_hold[0] * _FIRST_GUESS, self._one)
        for place, count in enumerate(self._is):
            if prior is not None:
                # Drafts that get far are those of others, where this request's seldom do.
                is_there, holds = prior.there[place], prior.accepted[place] * worse
            # Without a prior, as the place before.
            is_there = (count + weight * is_there) / (self._may_be[place] + weight)
            holds = (self._holds[place] + weight * holds) / (self._may_hold[place] + weight)
            there.append(is_there)
            accepted.append(holds)
            if prior is not None:
                worse = min(1.0, holds / max(prior.accepted[place], _LEAST))
        return Rates(there, accepted)


class TreeAcceptance(_Fading):
    """`Acceptance` of trees, by rank.

    `_may_hold` counts the drafts in which the node of the rank before was accepted, and this rank
    was allowed.
    """

    def add(self, k: int, num_drafted: int, accepted: Sequence[int]) -> None:
        """See `Acceptance`; accepted are the nodes of a path."""
        one = self._next(accepted)
        for rank in range(k):
            self._may_be[rank] += one
            if rank < num_drafted:
                self._is[rank] += one
        for rank in accepted:
            self._holds[rank] += one
            if rank + 1 < k:
                self._may_hold[rank + 1] += one

    def rates(self, prior: Rates | None = None, weight: float | None = None) -> Rates:
        """See `Acceptance`."""
        weight = (self._weight if weight is None else weight) * self._one
        if prior is None:
            return self._by_falls(weight)
        there, accepted = [], []
        for rank, allowed in enumerate(self._may_be):
            all_of_it = allowed + weight
            there.append((self._is[rank] + weight * prior.there[rank]) / all_of_it)
            accepted.append((self._holds[rank] + weight * prior.accepted[rank]) / all_of_it)
        return Rates(there, accepted, is_tree=True)

    def _by_falls(self, weight: float) -> Rates:
        """Return the rates without a prior: where little is known of a rank, by the one before.

        The larger of two estimates, and so a bit too hopeful: by its own drafts, and by the rate of
        the rank before and how they fell from there to here.
        """
        guess = [_FIRST_NODE * _FALLING**rank for rank in range(len(self._is))]
        level = _level(sum(self._holds), sum(map(mul, guess, self._may_be)), self._one)
        there: list[float] = []
        accepted: list[float] = []
        for rank, (allowed, holds) in enumerate(zip(self._may_be, self._holds, strict=True)):
            rate = (holds + weight * level * guess[rank]) / (allowed + weight)
            if rank:
                fall = (holds + weight * _FALLING) / (self._may_hold[rank] + weight)
                rate = max(rate, accepted[-1] * min(fall, 1.0))
            there.append((self._is[rank] + weight) / (allowed + weight))
            accepted.append(rate)
        return Rates(there, accepted, is_tree=True)


def _level(accepted: float, promised: float, one: float) -> float:
    """Return what is left of a first guess: a drafter that is bad is so at every place.

    `accepted`, `promised`: tokens, by the drafts and by the guess; a draft counts `one`.
    """
    least = _GUESS_TOKENS * one
    return min(1.0, (accepted + least) / (promised + least))


def of_proposer(k: int, *, is_tree: bool = False) -> Acceptance:
    """Return the empty history of a proposer that drafts up to `k` tokens."""
    return _kind(is_tree)(k, _HISTORY_MEMORY, _GUESS_WEIGHT)


def of_all(k: int, *, is_tree: bool = False) -> Acceptance:
    """Return the empty record of a proposer in which all drafts count the same."""
    return _kind(is_tree)(k, 1.0, _GUESS_WEIGHT)


def of_request(k: int, *, is_tree: bool = False) -> Acceptance:
    """Return the empty record of a request that may have drafts of up to `k` tokens."""
    return _kind(is_tree)(k, _REQUEST_MEMORY, _HISTORY_WEIGHT)


def _kind(is_tree: bool) -> type[ChainAcceptance] | type[TreeAcceptance]:
    return TreeAcceptance if is_tree else ChainAcceptance
