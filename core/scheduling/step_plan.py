"""A step in the making: who runs, how many rows each, which blocks that takes.

There is no prefill, decode or verify step here, and no branch for speculation: every request has a
number of computed tokens that chases its number of tokens, drafts included, and drafts are counted
only in `Request.num_tokens_with_spec`. Knows blocks through the `BlockManager`; nothing of what a
step's outcome means.
"""

from __future__ import annotations

from itertools import islice

from foresay.core.messages import BlockTableUpdate, DraftPlan, NewRequest
from foresay.core.scheduling.block_manager import BlockManager
from foresay.core.scheduling.limits import (
    SchedulerConfig,
    num_draft_tokens,
    num_lookahead_slots,
)
from foresay.core.scheduling.queues import RequestQueues
from foresay.core.scheduling.request import Request, RequestStatus

PASSED_OVER_LIMIT = 100  # times a waiting request is passed over
LOOK_AHEAD = 8  # waiting requests that one step passes over, in search of one that fits


class StepPlan:
    """One step; `make` fills it in. The fields are those of `SchedulerOutput`."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, queues: RequestQueues
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._queues = queues
        self.budget = config.max_num_batched_tokens  # rows left
        self.num_scheduled_tokens: dict[str, int] = {}
        self.scheduled_spec_decode_tokens: dict[str, list[int]] = {}
        self.num_output_rows: dict[str, int] = {}
        self.num_draft_tokens: dict[str, int] = {}
        self.draft_plans: dict[str, DraftPlan] = {}
        self.new_requests: list[NewRequest] = []
        self.preempted_req_ids: list[str] = []
        # Running requests whose block table changed: how many leading blocks the worker may keep.
        self.num_kept_blocks: dict[str, int] = {}

    def make(self) -> None:
        """Decide who runs and reserve what that takes."""
        running = self._queues.running
        decoding = [request for request in running if request.num_lacking_tokens == 1]
        longer = [request for request in running if request.num_lacking_tokens > 1]

        # 1. Committed tokens get their blocks before any draft does, so that no draft causes a
        #    preemption. Only decoding requests can lack one: the others were given blocks for all
        #    their tokens when they were admitted.
        for request in decoding:
            self._reserve_next_slot(request)
        # 2. Rows, in the order of the budget: first who lacks one committed token. The list is
        #    sorted by what a request lacks now; nothing remembers it.
        for request in (*decoding, *longer):
            if request.status is RequestStatus.RUNNING:
                self._schedule_tokens(request)
        # 3. Room that a preemption made is not for newcomers.
        if not self.preempted_req_ids:
            self._admit()

    def block_table_updates(self) -> dict[str, BlockTableUpdate]:
        """What changed in the block tables of running requests."""
        requests = self._queues.requests
        return {
            req_id: BlockTableUpdate(num_kept, requests[req_id].block_ids[num_kept:])
            for req_id, num_kept in self.num_kept_blocks.items()
        }

    def _reserve_next_slot(self, request: Request) -> None:
        """Make room for the one committed token that `request` lacks; preempt if need be."""
        while request.status is RequestStatus.RUNNING:
            if self._extend(request, request.num_tokens):
                return
            if self._reclaim_spare_blocks():
                continue
            # The newest is never one that was served before `request` in this loop: these are all
            # older. It may be `request` itself. The oldest is never preempted by another one, and
            # the pool holds any single request, so there is always progress.
            victim = self._queues.running[-1]
            self.num_kept_blocks.pop(victim.req_id, None)
            self._blocks.free(victim)
            self._queues.preempt(victim)
            self.preempted_req_ids.append(victim.req_id)

    def _reclaim_spare_blocks(self) -> bool:
        """Take back blocks that only rejected drafts needed; return whether there were any.

        A request that was given a block in this step has none to spare.
        """
        num_free = self._blocks.num_free_blocks
        for request in self._queues.running:
            if len(request.block_ids) > self._blocks.num_blocks_for(request.num_tokens):
                num_kept = self._blocks.shrink(request, request.num_tokens)
                self.num_kept_blocks[request.req_id] = num_kept
        return self._blocks.num_free_blocks > num_free

    def _extend(self, request: Request, num_slots: int) -> bool:
        """Have at least `num_slots` slots; False, and nothing changed, if the pool is short."""
        num_held = len(request.block_ids)
        if num_held * self._config.block_size >= num_slots:
            return True
        if self._blocks.allocate(request, num_slots) is None:
            return False
        self.num_kept_blocks.setdefault(request.req_id, num_held)
        return True

    def _schedule_tokens(self, request: Request) -> None:
        """Schedule as many tokens of a request that holds its blocks as the limits allow."""
        config = self._config
        num_lacking = request.num_lacking_tokens
        num_new = request.num_tokens_with_spec - request.num_computed_tokens
        if config.chunked_prefill_size is not None and num_lacking > config.chunked_prefill_size:
            num_new = config.chunked_prefill_size
        num_fitting = len(request.block_ids) + self._blocks.num_free_blocks
        num_new = min(
            num_new,
            self.budget,
            config.max_model_len - request.num_computed_tokens - 1,
            num_fitting * config.block_size - request.num_computed_tokens,
        )
        if num_new <= 0:
            return
        self._extend(request, request.num_computed_tokens + num_new)
        num_drafts = max(num_new - num_lacking, 0)
        req_id = request.req_id
        self.budget -= num_new
        self.num_scheduled_tokens[req_id] = num_new
        if num_drafts:
            self.scheduled_spec_decode_tokens[req_id] = request.spec_token_ids[:num_drafts]
        self.num_output_rows[req_id] = 1 + num_drafts if num_new >= num_lacking else 0
        if num_new >= num_lacking:
            k = num_draft_tokens(config, request, request.num_tokens + 1)
            k = self._reserve_lookahead(request, request.num_computed_tokens + num_new, k)
            if k:
                self.num_draft_tokens[req_id] = k
                if request.draft_plan is not None:
                    self.draft_plans[req_id] = request.draft_plan
        # Optimistic; update_from_output gives back what is rejected.
        request.num_computed_tokens += num_new
        request.spec_token_ids = []

    def _reserve_lookahead(self, request: Request, num_slots: int, k: int) -> int:
        """Reserve what drafting needs beyond the rows of this step; return the k that it got.

        `num_slots`: the slots up to the step's last row. What drafting needs is taken from the
        free blocks and from the budget only: it preempts nobody.
        """
        config = self._config
        if not k or self.budget < config.draft_slots:
            return 0
        if config.has_proposer_kv:
            num_fitting = len(request.block_ids) + self._blocks.num_free_blocks
            num_free = num_fitting * config.block_size - num_slots
            k = min(k, num_free + 1 - config.draft_slots)
            if k < 1:
                return 0
            self._extend(request, num_slots + num_lookahead_slots(config, k))
        self.budget -= config.draft_slots
        return k

    def _admit(self) -> None:
        """Resume preempted requests, then start waiting ones, while there is room.

        A preempted request that does not fit holds back everyone. A waiting one is passed over by
        later, smaller ones, until that happened `PASSED_OVER_LIMIT` times.
        """
        queues = self._queues
        while queues.preempted:
            if not self.budget or not self._start(queues.preempted[0]):
                return
        passed_over: list[Request] = []
        for request in list(islice(queues.waiting.values(), self._config.max_num_seqs)):
            if len(queues.running) >= self._config.max_num_seqs or not self.budget:
                return
            if self._start(request):
                for other in passed_over:
                    other.num_times_passed_over += 1
            else:
                passed_over.append(request)
            if (
                not self._blocks.num_free_blocks
                or len(passed_over) > LOOK_AHEAD
                or any(other.num_times_passed_over >= PASSED_OVER_LIMIT for other in passed_over)
            ):
                return

    def _start(self, request: Request) -> bool:
        """Run `request` from this step on, if blocks for all its tokens can be had at once.

        All at once, though the first chunk may need few: half of a prompt in the pool helps
        nobody, and would be preempted for the other half.
        """
        config = self._config
        may_draft = config.num_speculative_tokens > 0 and request.may_draft
        prefix = self._blocks.find_prefix(request, stored=config.has_proposer_kv and may_draft)
        if self._blocks.allocate(request, request.num_tokens, prefix) is None:
            return False
        request.num_computed_tokens = len(prefix.block_ids) * config.block_size
        self._queues.start(request)
        self.new_requests.append(
            NewRequest(
                req_id=request.req_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=list(request.block_ids),
                sampling=request.sampling,
                prediction_ids=list(request.prediction_ids),
                may_draft=may_draft,
                max_num_tokens=min(
                    request.num_prompt_tokens + request.max_tokens, config.max_model_len
                ),
            )
        )
        self._schedule_tokens(request)
        return True
