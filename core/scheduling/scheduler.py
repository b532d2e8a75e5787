"""Who runs this step, and how many tokens each.

There is no prefill, decode or verify step here, and no branch for speculation: every request has a
number of computed tokens that chases its number of tokens, drafts included, and drafts are counted
only in `Request.num_tokens_with_spec`. The scheduler knows blocks through the `BlockManager` and
the worker through messages; it knows neither models nor proposers nor text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, zip_longest

from foresay.core.errors import EngineError, RequestError
from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from foresay.core.scheduling.block_manager import BlockManager
from foresay.core.scheduling.limits import SchedulerConfig, num_draft_tokens
from foresay.core.scheduling.queues import RequestQueues
from foresay.core.scheduling.request import Request, RequestStatus
from foresay.core.scheduling.step_plan import LOOK_AHEAD, PASSED_OVER_LIMIT, StepPlan

__all__ = ["LOOK_AHEAD", "PASSED_OVER_LIMIT", "RequestUpdate", "Scheduler", "SchedulerConfig"]


@dataclass(slots=True)
class RequestUpdate:
    """What one step brought for a request that had output rows."""

    request: Request
    new_token_ids: list[int]  # committed, after the cut at a stop: what reaches the user
    num_draft_tokens: int  # drafts verified in this step
    accepted_drafts: Sequence[int]  # those accepted and among `new_token_ids`, by their place
    finished: bool

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts among `new_token_ids`."""
        return len(self.accepted_drafts)


class Scheduler:
    """Continuous batching with chunked prefill, preemption and a prefix cache.

    One step is `schedule()`, the worker's work, `update_from_output(...)`, and, if anything is
    to be drafted, `update_draft_token_ids(...)`. The worker forgets finished and preempted
    requests before it takes the new ones: an id may be in both.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_reach=config.kv_reach,
        )
        self._queues = RequestQueues()
        self._step_id = 0
        self._in_flight: SchedulerOutput | None = None
        self._finished_req_ids: list[str] = []  # not told to the worker yet
        self._preempted_req_ids: list[str] = []  # the same

    # -- Requests come and go ---------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """All unfinished requests by id."""
        return self._queues.requests

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for another one after a preemption."""
        return len(self._queues.waiting) + len(self._queues.preempted)

    def next_requests(self) -> list[Request]:
        """Return who may run in the next step: who runs, then who waits, as many as may run."""
        queues = self._queues
        waiting = chain(queues.preempted, queues.waiting.values())
        return list(islice(chain(queues.running, waiting), self.config.max_num_seqs))

    def has_unfinished_requests(self) -> bool:
        """Whether any request needs more steps."""
        return bool(self.requests)

    def has_pending_messages(self) -> bool:
        """Whether `schedule()` has news for the worker even if nothing is left to compute."""
        return bool(
            self._finished_req_ids or self._preempted_req_ids or self.blocks.has_blocks_to_zero
        )

    def add_request(self, request: Request, after: Request | None = None) -> None:
        """Queue a request, at its place `after` an earlier sample of its prompt if one is given.

        Raises `RequestError` if it can never run, or its id is in use.
        """
        max_model_len = self.config.max_model_len
        if request.req_id in self.requests:
            raise RequestError(f"request id {request.req_id!r} is in use by an unfinished request")
        if request.arrival >= 0:
            raise RequestError(f"{request!r} was added before; make a new Request")
        if not request.num_prompt_tokens:
            raise RequestError(f"request {request.req_id!r}: the prompt has no tokens")
        if request.num_prompt_tokens >= max_model_len:
            raise RequestError(
                f"request {request.req_id!r}: the prompt has {request.num_prompt_tokens} tokens, "
                f"which leaves no room for output in max_model_len={max_model_len!r}; shorten the "
                "prompt or raise max_model_len"
            )
        if request.max_tokens < 1:
            raise RequestError(
                f"request {request.req_id!r}: max_tokens={request.max_tokens!r} must be at least 1"
            )
        self._queues.add(request, after)

    def abort_request(self, req_id: str) -> Request | None:
        """End a request; return it, or None if there is no such unfinished request.

        Its blocks are freed at once, or, if a step with it is in flight, when that step's outcome
        is taken; what the step brings for it is discarded.
        """
        request = self.requests.get(req_id)
        if request is None or request.status.is_finished:
            return None
        if self._in_flight is None or req_id not in self._in_flight.num_scheduled_tokens:
            self._queues.remove(request)
            self._retire(request)
        request.status = RequestStatus.FINISHED_ABORTED
        return request

    def fail_request(self, request: Request, reason: str) -> None:
        """End a request with an error, though it may never have been added.

        What it has stays; a request that has finished is left as it is. In a step in flight it
        fares as an aborted one does.
        """
        if request.status.is_finished:
            return
        self.abort_request(request.req_id)
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = reason

    # -- One step ---------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: reserve its blocks, count its tokens, word it as a message.

        Raises `EngineError` if requests exist and none can be scheduled, or if the outcome of the
        step before was neither taken nor abandoned.
        """
        if self._in_flight is not None:
            raise EngineError(
                f"step {self._in_flight.step_id} is in flight: call update_from_output() or "
                "abandon_step() before schedule()"
            )
        step = StepPlan(self.config, self.blocks, self._queues)
        step.make()
        if not step.num_scheduled_tokens and self.requests:
            raise EngineError(
                f"nothing can be scheduled though {len(self.requests)} requests exist "
                f"({self.num_running} running, {self.num_waiting} waiting, "
                f"{self.blocks.num_free_blocks} of {self.config.num_blocks} blocks free)"
            )
        self._step_id += 1
        scheduled = SchedulerOutput(
            step_id=self._step_id,
            num_scheduled_tokens=step.num_scheduled_tokens,
            scheduled_spec_decode_tokens=step.scheduled_spec_decode_tokens,
            num_output_rows=step.num_output_rows,
            num_draft_tokens=step.num_draft_tokens,
            draft_plans=step.draft_plans,
            new_requests=step.new_requests,
            block_table_updates=step.block_table_updates(),
            block_ids_to_zero=self.blocks.take_block_ids_to_zero(),
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=self._preempted_req_ids + step.preempted_req_ids,
        )
        self._finished_req_ids = []
        self._preempted_req_ids = []
        if step.num_scheduled_tokens:
            self._in_flight = scheduled
        return scheduled

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[RequestUpdate]:
        """Take a step's outcome: give back what was rejected, commit tokens, apply stops.

        Returns one update for each request with output rows, failed ones included, in the step's
        order; requests aborted during the step have none. Raises `EngineError` if the worker's
        answer does not fit the step. If this or anything else is raised on the way, the step
        stays in flight: call `abandon_step()`.
        """
        if not scheduled.num_scheduled_tokens:
            return []
        in_flight = self._in_flight.step_id if self._in_flight is not None else None
        if not scheduled.step_id == output.step_id == in_flight:
            raise EngineError(
                f"the outcome of step {output.step_id} was given for step {scheduled.step_id}; "
                f"in flight is {in_flight}"
            )
        updates = []
        for req_id, num_rows in scheduled.num_output_rows.items():
            request = self.requests[req_id]
            failure = output.failed.get(req_id)
            if request.status.is_finished:  # aborted while the step was in flight
                self._retire(request, tainted=failure is not None)
                continue
            drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
            new_token_ids: list[int] = []
            accepted: Sequence[int] = ()
            if failure is not None:
                request.status = RequestStatus.FINISHED_ERROR
                request.stop_reason = failure
            elif num_rows:
                sampled = output.sampled_token_ids.get(req_id, [])
                accepted = output.accepted_drafts.get(req_id, range(len(sampled) - 1))
                if not _are_accepted(drafts, accepted, sampled):
                    raise EngineError(
                        f"request {req_id!r}, {num_rows} output rows, drafts {drafts!r}: the "
                        f"worker sampled {sampled!r} and accepted drafts {list(accepted)!r}"
                    )
                wants_logprobs = request.logprobs is not None
                logprobs = output.logprobs.get(req_id, []) if wants_logprobs else []
                if wants_logprobs and _first_ids(logprobs) != sampled:
                    raise EngineError(
                        f"request {req_id!r}: the worker sampled {sampled!r} and gave the "
                        f"logprobs of {_first_ids(logprobs)!r}"
                    )
                request.num_computed_tokens -= len(drafts) - len(accepted)
                new_token_ids = self._commit(request, sampled, logprobs)
            finished = request.status.is_finished
            if finished:
                # After a cut, the KV of what was discarded belongs to no token any more.
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
            if failure is None:
                self.blocks.cache_computed_blocks(request)
            if finished:
                self._retire(request, tainted=failure is not None)
            if num_rows or finished:
                accepted = accepted[: len(new_token_ids)]
                updates.append(
                    RequestUpdate(request, new_token_ids, len(drafts), accepted, finished)
                )
        self._queues.drop_finished()
        self._in_flight = None
        return updates

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Take the drafts to verify next, cut to each request's k.

        Dropped without a word: a draft made for another committed length, or for a request that
        has finished, is not running, or has tokens of its prompt to compute.
        """
        for req_id, token_ids in drafts.draft_token_ids.items():
            request = self.requests.get(req_id)
            if (
                request is not None
                and request.status is RequestStatus.RUNNING
                and drafts.num_tokens.get(req_id) == request.num_tokens
                and request.num_lacking_tokens == 1
            ):
                k = num_draft_tokens(self.config, request, request.num_tokens)
                request.spec_token_ids = list(token_ids[:k])
        for req_id, num_tokens in drafts.num_stored_tokens.items():
            request = self.requests.get(req_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                self.blocks.mark_stored(request, num_tokens)

    def abandon_step(self) -> None:
        """Give up the step in flight: it was interrupted, and no more of its outcome will come.

        How far the worker came is unknown, so every running request is preempted and will be sent
        anew, its blocks are zeroed, and what the step's message told is told again. If it was
        `update_from_output` that was interrupted, a request may have some of its new tokens
        committed and some not; those not will be computed again.
        """
        lost, self._in_flight = self._in_flight, None
        if lost is None:
            return
        for request in list(self._queues.running):
            if not request.status.is_finished:
                self._preempt(request, tainted=True)
                self._preempted_req_ids.append(request.req_id)
            elif request.block_ids:
                self._retire(request, tainted=True)
        self._queues.drop_finished()
        self._finished_req_ids[:0] = lost.finished_req_ids
        self._preempted_req_ids[:0] = lost.preempted_req_ids
        self.blocks.zero_again(lost.block_ids_to_zero)

    def check_integrity(self) -> None:
        """Recount queues, invariants and blocks; raise `EngineError`. Costs O(everything)."""
        running = self._queues.running
        self._queues.check_integrity()
        self.blocks.check_integrity(running)
        if len(running) > self.config.max_num_seqs:
            raise EngineError(f"{len(running)} run; max_num_seqs={self.config.max_num_seqs}")
        if self._in_flight is not None:
            return
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                raise EngineError(f"{request!r} is in the RUNNING queue")
            if request.num_lacking_tokens < 1:
                raise EngineError(f"{request!r} computed a token that is not committed")
            k = num_draft_tokens(self.config, request, request.num_tokens)
            if request.spec_token_ids and (
                request.num_lacking_tokens != 1 or len(request.spec_token_ids) > k
            ):
                raise EngineError(f"{request!r} may have {k} drafts, after its prompt only")

    # -- Parts of these ---------------------------------------------------------------------------

    def _commit(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> list[int]:
        """Append tokens up to and including the one that stops `request`; return those.

        `logprobs`: theirs, or nothing.
        """
        for count, (token_id, own) in enumerate(zip_longest(token_ids, logprobs), start=1):
            if request.append_output_token(token_id, self.config.max_model_len, own):
                return list(token_ids[:count])
        if request.num_lacking_tokens != 1:
            raise EngineError(f"{request!r} must lack exactly one token after a commit")
        return list(token_ids)

    def _preempt(self, request: Request, *, tainted: bool = False) -> None:
        """Let `request` wait for its recomputation. The caller tells the worker."""
        self.blocks.free(request, tainted=tainted)
        self._queues.preempt(request)

    def _retire(self, request: Request, *, tainted: bool = False) -> None:
        """Free what a finished request holds, and have the worker forget it."""
        request.spec_token_ids = []
        self.blocks.free(request, tainted=tainted)
        self._finished_req_ids.append(request.req_id)


def _are_accepted(drafts: Sequence[int], accepted: Sequence[int], sampled: Sequence[int]) -> bool:
    """Whether these places of drafts, ascending, hold the sampled tokens, all but the last."""
    return (
        len(accepted) == len(sampled) - 1 <= len(drafts)
        and all(low < high for low, high in pairwise((-1, *accepted, len(drafts))))
        and all(drafts[i] == token_id for i, token_id in zip(accepted, sampled, strict=False))
    )


def _first_ids(logprobs: Sequence[dict[int, float]]) -> list[int | None]:
    """Whose log probabilities these are: the sampled tokens come first."""
    return [next(iter(own), None) for own in logprobs]
