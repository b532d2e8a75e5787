"""A scheduler and a loop around it, for the tests of its rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SamplingData, SchedulerOutput
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.scheduler import RequestUpdate, Scheduler, SchedulerConfig

EOS = 2
GREEDY = SamplingData(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, stop_token_ids=(EOS,)
)


def make_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "chunked_prefill_size": None,
        "max_model_len": 100,
        "enable_prefix_caching": False,
        "num_speculative_tokens": 3,
    }
    return SchedulerConfig(**(values | changes))


class Engine:
    """A scheduler and a loop around it; the "model" says what the test tells it to say."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler = Scheduler(make_config(**changes))
        self.scheduled = SchedulerOutput(0, {}, {}, {}, {})

    def add(self, req_id: str, prompt: int | Sequence[int], **options: Any) -> Request:
        """Add a request; a number is a prompt of that many tokens, like no other's."""
        if isinstance(prompt, int):
            first = 1000 * (1 + len(self.scheduler.requests))
            prompt = range(first, first + prompt)
        options = {"sampling": GREEDY, "max_tokens": 50} | options
        request = Request(req_id, prompt, **options)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        self.scheduled = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return self.scheduled

    def update(
        self,
        sampled: dict[str, list[int]] | None = None,
        failed: dict[str, str] | None = None,
    ) -> dict[str, RequestUpdate]:
        """Commit the step; who is not in `sampled` has its drafts rejected and token 7 sampled."""
        failed = failed or {}
        all_sampled = {
            req_id: [7]
            for req_id, num_rows in self.scheduled.num_output_rows.items()
            if num_rows and req_id not in failed
        }
        output = ModelRunnerOutput(self.scheduled.step_id, all_sampled | (sampled or {}), failed)
        updates = self.scheduler.update_from_output(self.scheduled, output)
        self.scheduler.check_integrity()
        return {update.request.req_id: update for update in updates}

    def step(
        self,
        sampled: dict[str, list[int]] | None = None,
        failed: dict[str, str] | None = None,
    ) -> SchedulerOutput:
        self.schedule()
        self.update(sampled, failed)
        return self.scheduled

    def draft(self, drafts: dict[str, list[int]]) -> None:
        lengths = {req_id: self.scheduler.requests[req_id].num_tokens for req_id in drafts}
        self.scheduler.update_draft_token_ids(DraftTokenIds(drafts, lengths))
        self.scheduler.check_integrity()
