"""What is not known must be tried: when to draft otherwise than seems best, and for whom.

A trial is expected to lose some time. A small part of all time (`_FOR_TRIALS`) may be lost so, and
is saved up: what looks nearly as good is tried often, what looks bad seldom. A member whose trial
went well is tried again at once.

What is true of one request need not be of the next. So with a request that runs alone every member
is tried early, and on credit, as far as a step's time and what is saved for it (`_FOR_FIRST`) go.
That account is apart from the other, or where requests are short nothing else would be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foresay.core.scheduling.draft_choice import Chooser, Menu, Plan

_FOR_TRIALS, _FOR_FIRST = 0.005, 0.005  # of all time
_MOST_SAVED = 2.0  # seconds of so many steps
_AT_FIRST = 0.5  # of a step's seconds, saved before anything is known
_MOST_OWED = 1.0  # likewise; for the first trial with a request
_BETWEEN = 4  # steps, at least
_TRIAL_TOKENS, _TRIAL_NODES = 2, 4  # of a draft for one request: of a chain, of a tree
_FIRST_TOKENS = 1  # of a chain, where nothing is known with the request


class Trials:
    """Saves up time, and says what to spend it on."""

    def __init__(self, chooser: Chooser, members: Sequence[tuple[int, bool]]) -> None:
        """`members`: of each its most draft tokens, and whether they are trees."""
        self._chooser = chooser
        self._sizes = [min(k, _TRIAL_NODES if tree else _TRIAL_TOKENS) for k, tree in members]
        self._first_sizes = [min(k, _TRIAL_NODES if tree else _FIRST_TOKENS) for k, tree in members]
        self._num_idle = [0] * len(members)  # steps since each was called
        self._is_promising = [False] * len(members)
        self._num_since = 0
        self._saved: float | None = None  # seconds; None: no step was timed yet
        self._saved_for_first = 0.0  # seconds; below 0: owed
        self._turn = 0  # whose turn it is

    def add_step(self, seconds: float) -> None:
        """Take a step that ran."""
        self._num_since += 1
        before = _AT_FIRST * seconds if self._saved is None else self._saved
        self._saved = min(before + _FOR_TRIALS * seconds, _MOST_SAVED * seconds)
        saved = self._saved_for_first + _FOR_FIRST * seconds
        self._saved_for_first = min(saved, _MOST_SAVED * seconds)

    def add_called(self, member: int, *, called: bool) -> None:
        """Take whether a member was called in a step."""
        self._num_idle[member] = 0 if called else self._num_idle[member] + 1

    def add_verified(self, member: int, *, went_well: bool) -> None:
        """Take how a draft of a member did."""
        self._is_promising[member] = went_well

    def next(
        self,
        menus: Sequence[Menu],
        best: Plan,
        other: Plan,
        lost: Callable[[Plan], float],
        num_requests: int,
        untried: Sequence[int],
    ) -> Plan | None:
        """Return a plan worth trying in the place of the best one, if it is time for that.

        `other`: one that drafts if the best one does not, else one that does not. `lost`: what a
        step of a plan is expected to lose, in seconds. `untried`: members of which nothing is
        known with a request that runs alone.
        """
        alone = num_requests == 1
        for first in self._single(menus, untried, best, num_requests, self._first_sizes):
            price = max(lost(first), 0.0)
            if self._saved_for_first - price >= -_MOST_OWED * best.seconds:
                self._saved_for_first -= price
                self._num_since = 0
                return first
        missing = [
            number
            for number, idle in enumerate(self._num_idle)
            if not alone
            or idle >= _BETWEEN
            or (idle and not any(choice.asked[number] for choice in best.choices))
        ]
        again = alone and any(self._is_promising[number] for number in missing)
        if self._saved is None or (not again and self._num_since < _BETWEEN):
            return None
        trials = [other, *self._single(menus, missing, best, num_requests, self._sizes)]
        for number in range(len(trials)):
            trial = trials[(number + self._turn) % len(trials)]
            price = max(lost(trial), 0.0)
            is_going_on = again and trial is not other and self._saved > -best.seconds
            if price <= self._saved or is_going_on:
                self._saved -= price
                self._num_since = 0
                self._turn += number + 1
                self._is_promising = [False] * len(self._is_promising)
                return trial
        return None

    def _single(
        self,
        menus: Sequence[Menu],
        members: Sequence[int],
        best: Plan,
        num_requests: int,
        sizes: Sequence[int],
    ) -> list[Plan]:
        """Return for each of some members the best plan, but that it drafts for one request more.

        That request is drafted for by it alone. `sizes`: by member, with how many draft tokens.
        """
        found = []
        for number in members:
            which = [i for i, choice in enumerate(best.choices) if not choice.asked[number]]
            if not which:
                continue
            index = which[self._turn % len(which)]
            ks = [0] * len(sizes)
            ks[number] = sizes[number]
            choices = list(best.choices)
            choices[index] = menus[index].choice(ks)
            plan = self._chooser.plan(choices, num_requests)
            if plan is not None:
                found.append(plan)
        return found
