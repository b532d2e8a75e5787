"""How long it takes until all running requests have ended, if they go on as a plan has it.

Knows numbers of tokens, what a step brings each request and what it costs; no proposers, and
nothing of how plans are made. A fixed set of requests of which none is replaced ends with its last
one: tokens gained for the others make the steps dearer and the last one no faster. So a plan is
followed to its end here. They end one after another; a *phase* goes from one end to the next, and
the steps of a phase cost what those cost who still run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foresay.core.scheduling.draft_choice import Choice, Chooser, Menu, Plan
from foresay.core.scheduling.request import Request

_SAME_END = 0.02  # of all steps: ends so close together count as one
_MEMORY = 0.98  # what an output still counts after the next one

# Prices of a row, over that at which a second brings the most tokens: drafts may be worth more or
# less than there.
_PRICES = (0.5, 1.6, 3.0)
_LONGER = (1.0, 1.15, 1.4)  # than the least number of steps in which the last one could end


@dataclass(frozen=True, slots=True)
class Outlook:
    """When requests will have ended, in seconds from now."""

    last: float
    average: float

    @property
    def cost(self) -> float:
        """What there is to keep small where nobody waits: either counts as much, in proportion."""
        return self.last * self.average


class Lengths:
    """How long outputs get, learned from those that ended.

    An output is taken to stop with the same probability after every token: the most likely one is
    the number of stops over that of tokens. What its limit cut off has tokens and no stop.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._stops = 0.0

    def add(self, num_tokens: int, *, stopped: bool) -> None:
        """Take an output that ended."""
        self._tokens = self._tokens * _MEMORY + num_tokens
        self._stops = self._stops * _MEMORY + stopped

    def left(self, request: Request) -> float:
        """Return how many tokens a request is still expected to get."""
        most = max(1, request.max_tokens - request.num_output_tokens)
        if not self._stops or not self._tokens:
            return float(most)
        stop = min(1.0, self._stops / self._tokens)
        # The sum over the places up to the limit of the probability to get there.
        return float((1 - (1 - stop) ** most) / stop)


def look_ahead(chooser: Chooser, choices: Sequence[Choice], left: Sequence[float]) -> Outlook:
    """Return when requests will have ended if every step is as planned.

    `left`: how many tokens each still gets, first of those that there are `choices` for, then of
    others, which are not drafted for. The seconds of a step must be known.
    """
    steps = [tokens / (1 + choice.tokens) for tokens, choice in zip(left, choices, strict=False)]
    steps += left[len(choices) :]
    order = sorted(range(len(left)), key=steps.__getitem__, reverse=True)
    num_members = len(choices[0].asked) if choices else 0
    called, longest = [0.0] * num_members, [0.0] * num_members
    num_rows = 0.0
    until = steps[order[0]]
    same = until * _SAME_END
    last = total = 0.0
    # From the last phase, in which one request runs, back to the first one.
    for number, index in enumerate(order, start=1):
        num_rows += 1
        if index < len(choices) and choices[index].rows:
            choice = choices[index]
            num_rows += choice.rows
            for member, asked in enumerate(choice.asked):
                called[member] += asked
                longest[member] = max(longest[member], choice.lengths[member])
        since = steps[order[number]] if number < len(order) else 0.0
        if until - since > same or number == len(order):
            seconds = chooser.seconds(num_rows, number, called, longest)
            assert seconds is not None
            took = (until - since) * seconds
            last += took
            total += took * number
            until = since
    return Outlook(last, total / len(left))


def other_plans(
    chooser: Chooser, menus: Sequence[Menu], left: Sequence[float], found: Plan
) -> list[Sequence[Choice]]:
    """Return choices that may end all sooner than those with the most tokens per second do.

    `found`: the latter. Others draft as much as pays if a row is worth more or less than there; or
    as much for each request as lets it end in a given number of steps, and no more.
    """
    num_requests = len(left)
    num_rows = num_requests + sum(choice.rows for choice in found.choices)
    row = chooser.row_seconds(num_rows, num_requests)
    plans = [chooser.at(menus, found.rate * price, row) for price in _PRICES]
    # What there is for each request, from nothing to the most tokens.
    nothing = [menu.choice((0,) * len(menu.offers)) for menu in menus]
    ladders = [
        sorted({id(choice): choice for choice in rungs}.values(), key=lambda c: c.tokens)
        for rungs in zip(nothing, *plans, found.choices, strict=True)
    ]
    ends = [tokens / (1 + rungs[-1].tokens) for tokens, rungs in zip(left, ladders, strict=False)]
    least, most = max(ends), max(left)
    for longer in _LONGER:
        steps = least * longer
        if steps < most:
            plans.append(
                [
                    _enough(rungs, tokens / steps - 1)
                    for tokens, rungs in zip(left, ladders, strict=False)
                ]
            )
    return plans


def _enough(rungs: Sequence[Choice], tokens: float) -> Choice:
    """Return the first choice that brings so many tokens; else the last one."""
    return next((choice for choice in rungs if choice.tokens >= tokens), rungs[-1])
