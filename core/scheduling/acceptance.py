"""How far drafts get: of a request's drafts, and of all drafts of a proposer.

Knows counts, no seconds. For each place in the draft two rates: that there *is* a token, given the
one before; and that it is there *and accepted*, given that the one before was. A draft that was
allowed k tokens and ended earlier, or is empty, counts at the place where it ended: what is
estimated is what allowing k tokens brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_GUESS = 0.75  # of a proposer that has never drafted: try it
_GUESS_WEIGHT = 2.0  # in drafts
_HISTORY_WEIGHT = 4.0  # how many drafts of its own a request must have to outweigh the history
_REQUEST_MEMORY = 0.93  # what a draft still counts after the next one
_HISTORY_MEMORY = 0.98


class Acceptance:
    """Rates by place; the newest drafts count most."""

    def __init__(self, k: int, memory: float, weight: float) -> None:
        """`weight`: how many drafts outweigh what is assumed before there are any."""
        self._memory = memory
        self._weight = weight
        self._may_be = [0.0] * k  # a token stood before, and one might follow
        self._is = [0.0] * k
        self._may_hold = [0.0] * k  # the token before was accepted, and one might follow
        self._holds = [0.0] * k

    def add(self, k: int, num_drafted: int, num_accepted: int) -> None:
        """Take a draft: allowed `k` tokens, it had `num_drafted`."""
        memory = self._memory
        for counts in (self._may_be, self._is, self._may_hold, self._holds):
            counts[:] = [count * memory for count in counts]
        for place in range(min(k, num_drafted + 1)):
            self._may_be[place] += 1
            self._is[place] += place < num_drafted
        for place in range(min(k, num_accepted + 1)):
            self._may_hold[place] += 1
            self._holds[place] += place < num_accepted

    def rates(self, prior: Rates | None = None) -> Rates:
        """Return the rates; `prior`: those of the history. Without one, a first guess."""
        there: list[float] = []
        accepted: list[float] = []
        weight = self._weight
        for place in range(len(self._is)):
            if prior is not None:
                is_there, holds = prior.there[place], prior.accepted[place]
            elif place:  # as the place before
                is_there, holds = there[-1], accepted[-1]
            else:
                is_there, holds = 1.0, _FIRST_GUESS
            there.append((self._is[place] + weight * is_there) / (self._may_be[place] + weight))
            accepted.append(
                (self._holds[place] + weight * holds) / (self._may_hold[place] + weight)
            )
        return Rates(there, accepted)


@dataclass(frozen=True, slots=True)
class Rates:
    """By place: that a token is there, and that it is there and accepted; see above."""

    there: Sequence[float]
    accepted: Sequence[float]

    def raised(self, by: float) -> Rates:
        """Return rates of which more is accepted at every place."""
        return Rates(self.there, [min(rate + by, 0.98) for rate in self.accepted])


def of_proposer(k: int) -> Acceptance:
    """Return the empty history of a proposer that drafts up to `k` tokens."""
    return Acceptance(k, _HISTORY_MEMORY, _GUESS_WEIGHT)


def of_all(k: int) -> Acceptance:
    """Return the empty record of a proposer in which all drafts count the same."""
    return Acceptance(k, 1.0, _GUESS_WEIGHT)


def of_request(k: int) -> Acceptance:
    """Return the empty record of a request that may have drafts of up to `k` tokens."""
    return Acceptance(k, _REQUEST_MEMORY, _HISTORY_WEIGHT)
