"""A world for the draft-length control: costs and acceptances are given, time is counted.

Requests decode, members draft, tokens are accepted at random, and every second that passes is told
to the control as an engine would. What a policy is worth can so be compared with what the best
fixed one would have been worth in the same world.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foresay.core.messages import DraftTokenIds, SamplingData, SchedulerOutput
from foresay.core.scheduling.draft_control import DraftControl
from foresay.core.scheduling.request import Request, RequestStatus


def greedy_request(req_id: str, max_tokens: int = 10**9, **settings: int | None) -> Request:
    sampling = SamplingData(0.0, 0, 1.0, 0.0, 0, 0, ())
    return Request(req_id, [1, 2, 3], sampling=sampling, max_tokens=max_tokens, **settings)  # type: ignore[arg-type]


@dataclass
class Drafter:
    """A member: what it costs, how often it has a draft, how often a token is right."""

    name: str
    k: int
    # Request, place in the draft -> probability that it is right: given that those before are, of
    # a chain; of a tree, that the node of this rank lies on the accepted path.
    right: Callable[[str, int], float]
    seconds: Callable[[int, int], float] = lambda requests, tokens: 0.0
    has_draft: float = 1.0
    is_tree: bool = False

    def accepted(self, req_id: str, length: int, chance: random.Random) -> list[int]:
        """Return the places of accepted drafts."""
        places = []
        for place in range(length):
            if chance.random() < self.right(req_id, place):
                places.append(place)
            elif not self.is_tree:
                break
        return places


@dataclass
class World:
    """Seconds of a step by its rows; `noise`: times vary by so much, either way."""

    step_seconds: Callable[[int], float]
    drafters: Sequence[Drafter]
    noise: float = 0.0
    seed: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_plain_steps: int = 0
    num_steps: int = 0
    asked: dict[str, int] = field(default_factory=dict)  # calls by member
    ends: dict[str, int] = field(default_factory=dict)  # output tokens at which a request stops
    completed: dict[str, float] = field(default_factory=dict)  # when requests ended

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._drafts: dict[str, tuple[Drafter, int]] = {}

    def control(self, table: dict[int, int] | None = None) -> DraftControl:
        """Return a control for these drafters."""
        trees = [drafter.name for drafter in self.drafters if drafter.is_tree]
        return DraftControl(self.members, table, trees)

    @property
    def members(self) -> list[tuple[str, int]]:
        return [(drafter.name, drafter.k) for drafter in self.drafters]

    def run(self, control: DraftControl | None, requests: Sequence[Request], steps: int) -> float:
        """Run all requests for so many steps; return tokens per second. None: always k."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(steps):
            self.step(control, requests)
        return (self.num_tokens - tokens) / (self.seconds - seconds)

    def drain(
        self, control: DraftControl | None, requests: Sequence[Request], seats: int = 1 << 30
    ) -> None:
        """Run requests until all have ended, at most so many at once."""
        queue = list(requests)
        while queue:
            running = queue[:seats]
            self.step(control, running, len(queue) - len(running))
            queue = [request for request in queue if not request.status.is_finished]

    def step(
        self, control: DraftControl | None, requests: Sequence[Request], num_waiting: int = 0
    ) -> None:
        if control is not None:
            control.decide(requests, num_waiting)
        plans = {r.req_id: self._plan(r) for r in requests if r.may_draft}
        limits = {req_id: max(plan) for req_id, plan in plans.items() if max(plan)}
        num_rows = {r.req_id: 1 for r in requests}
        self._drafts = {r: draft for r, draft in self._drafts.items() if r in num_rows}
        accepted: dict[str, list[int]] = {}
        for req_id, (drafter, length) in self._drafts.items():
            num_rows[req_id] += length
            accepted[req_id] = drafter.accepted(req_id, length, self.random)
        took = self._noisy(self.step_seconds(sum(num_rows.values())))
        self.num_steps += 1
        self.num_plain_steps += not self._drafts
        if control is not None:
            for request in requests:
                _, length = self._drafts.get(request.req_id, (None, 0))
                control.add_verified(request.req_id, length, accepted.get(request.req_id, []))
        for request in requests:
            self._commit(request, 1 + len(accepted.get(request.req_id, [])), took)
            if request.status.is_finished:
                plans.pop(request.req_id, None)
                if control is not None:
                    control.forget(request.req_id)
        drafts, drafting = self._draft(plans)
        self.seconds += took + sum(drafting.values())
        if control is not None:
            scheduled = SchedulerOutput(self.num_steps, num_rows, {}, num_rows, limits)
            scheduled.draft_plans.update(
                {r.req_id: r.draft_plan for r in requests if r.draft_plan is not None}
            )
            control.add_engine_step(scheduled, drafts, [0.0, 0.0, took, took])

    def _commit(self, request: Request, num_tokens: int, took: float) -> None:
        most = min(request.max_tokens, self.ends.get(request.req_id, 1 << 62))
        num_tokens = min(num_tokens, most - request.num_output_tokens)
        self.num_tokens += num_tokens
        request.token_ids.extend([0] * num_tokens)
        request.num_computed_tokens = len(request.token_ids) - 1
        if request.num_output_tokens == most:
            is_cut = most == request.max_tokens
            request.status = (
                RequestStatus.FINISHED_LENGTH if is_cut else RequestStatus.FINISHED_STOPPED
            )
            self.completed[request.req_id] = self.seconds + took

    def _draft(self, plans: dict[str, tuple[int, ...]]) -> tuple[DraftTokenIds, dict[str, float]]:
        self._drafts = {}
        seconds: dict[str, float] = {}
        for number, drafter in enumerate(self.drafters):
            called = [r for r, plan in plans.items() if plan[number] and r not in self._drafts]
            longest = 0
            for req_id in called:
                if self.random.random() < drafter.has_draft:
                    self._drafts[req_id] = (drafter, plans[req_id][number])
                    longest = max(longest, plans[req_id][number])
            if called:
                self.asked[drafter.name] = self.asked.get(drafter.name, 0) + 1
                seconds[drafter.name] = self._noisy(drafter.seconds(len(called), longest))
        ids = {req_id: [0] * length for req_id, (_, length) in self._drafts.items()}
        by = {req_id: drafter.name for req_id, (drafter, _) in self._drafts.items()}
        return DraftTokenIds(ids, {}, proposers=by, seconds=seconds), seconds

    def _plan(self, request: Request) -> tuple[int, ...]:
        room = request.max_tokens - request.num_output_tokens - 1
        if request.draft_plan is None:
            return tuple(min(drafter.k, room) for drafter in self.drafters)
        return tuple(min(k, room) for k in request.draft_plan.num_draft_tokens)

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.random.uniform(-self.noise, self.noise))
