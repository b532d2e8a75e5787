"""Which requests wait, run, or wait again after a preemption: three queues in order of arrival.

Knows nothing of blocks, budgets or messages. A request's status says which queue it is in; one
that finishes leaves at once, except while a step with it is in flight.
"""

from __future__ import annotations

import bisect
import operator
from collections import OrderedDict
from itertools import takewhile

from foresay.core.errors import EngineError
from foresay.core.scheduling.request import Request, RequestStatus

# The samples of one prompt arrived together, though all but the first may be added later.
_by_arrival = operator.attrgetter("arrival", "sampling.sample_index")


class RequestQueues:
    """All unfinished requests, each in one queue."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        # Never started; a dict, so that aborts are O(1).
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.preempted: list[Request] = []
        self.running: list[Request] = []
        self._num_arrivals = 0

    def add(self, request: Request, after: Request | None = None) -> None:
        """Put a new request at the end of those that wait, or at its place `after` an earlier one.

        `after` is an earlier sample of the same prompt. The later sample comes before everyone who
        arrived after that prompt: it finds the prompt's blocks in the prefix cache before others
        need the room.
        """
        if after is None:
            request.arrival = self._num_arrivals
            self._num_arrivals += 1
        else:
            request.arrival = after.arrival
        place = _by_arrival(request)
        last = next(reversed(self.waiting.values()), None)
        self.requests[request.req_id] = request
        self.waiting[request.req_id] = request
        if last is not None and _by_arrival(last) > place:
            # `after` has started, so those that wait before it are few: they were passed over.
            earlier = takewhile(lambda other: _by_arrival(other) < place, self.waiting.values())
            for req_id in (request.req_id, *[other.req_id for other in earlier][::-1]):
                self.waiting.move_to_end(req_id, last=False)

    def start(self, request: Request) -> None:
        """Let a waiting or preempted request run."""
        self._leave(request)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=_by_arrival)

    def preempt(self, request: Request) -> None:
        """Put a running request among the preempted: nothing computed, no drafts, all output."""
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        bisect.insort(self.preempted, request, key=_by_arrival)

    def remove(self, request: Request) -> None:
        """Forget a request that has not finished yet."""
        self._leave(request)
        del self.requests[request.req_id]

    def drop_finished(self) -> None:
        """Forget the running requests that finished in this step; the others keep their order."""
        for request in self.running:
            if request.status.is_finished:
                del self.requests[request.req_id]
        self.running = [request for request in self.running if not request.status.is_finished]

    def check_integrity(self) -> None:
        """Raise `EngineError` unless every request is in its queue, each queue in order."""
        queues = {
            RequestStatus.WAITING: list(self.waiting.values()),
            RequestStatus.PREEMPTED: self.preempted,
            RequestStatus.RUNNING: self.running,
        }
        queued = [request.req_id for queue in queues.values() for request in queue]
        if sorted(queued) != sorted(self.requests):
            raise EngineError(f"queued {queued!r}, known {list(self.requests)!r}")
        for status, queue in queues.items():
            if queue != sorted(queue, key=_by_arrival):
                raise EngineError(f"the {status.name} queue is not in order of arrival: {queue!r}")
            for request in queue:
                if status is RequestStatus.RUNNING:
                    continue  # may have finished, if its step is in flight
                if request.status is not status:
                    raise EngineError(f"{request!r} is in the {status.name} queue")
                if request.block_ids or request.num_computed_tokens or request.spec_token_ids:
                    raise EngineError(f"{request!r} does not run and must hold nothing")

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING:
            del self.waiting[request.req_id]
        elif request.status is RequestStatus.PREEMPTED:
            self.preempted.remove(request)
        else:
            self.running.remove(request)
