"""The engine: one step from top to bottom.

It joins the two wings: it asks the scheduler what to run, the worker to run it, and hands committed
tokens on. It does not know how tokens are computed, drafted, verified or turned into text, nor who
runs when.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from foresay.core.config import EngineConfig, SpeculativeConfig
from foresay.core.errors import ConfigError, EngineError, WorkerDiedError
from foresay.core.generation import Generation
from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from foresay.core.plugins import PluginManager
from foresay.core.proposer import draft_depths
from foresay.core.runner import Runner
from foresay.core.scheduling.draft_control import DraftControl
from foresay.core.scheduling.request import RequestStatus
from foresay.core.scheduling.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from foresay.core.stats import RunStats, StepStats

if TYPE_CHECKING:
    import torch


__all__ = ["DraftControl", "Engine"]


class Engine:
    """Steps over all unfinished requests, whoever waits for them. Not thread-safe."""

    def __init__(self, config: EngineConfig, runner: Runner, plugins: PluginManager) -> None:
        """`plugins` observe. Raises `ConfigError` for limits that can't work together."""
        self.stats = RunStats(row_invariant=runner.row_invariant)
        self._scheduler = Scheduler(
            SchedulerConfig(
                block_size=config.block_size,
                num_blocks=runner.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                chunked_prefill_size=config.chunked_prefill_size,
                max_model_len=runner.max_model_len,
                enable_prefix_caching=config.enable_prefix_caching,
                num_speculative_tokens=runner.num_speculative_tokens,
                has_draft_trees=bool(runner.tree_members),
                max_context=runner.max_context,
                has_proposer_kv=runner.has_proposer_kv,
                draft_slots=runner.draft_slots,
                kv_reach=runner.kv_reach,
            )
        )
        self._runner = runner
        self.control = _control(config.speculative, runner)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._plugins = plugins
        self._generations: dict[str, Generation] = {}  # the unfinished, by the caller's id
        self._incomplete: dict[str, Generation] = {}  # of them: later samples wait for the first
        self._owners: dict[str, Generation] = {}  # by the scheduler's id of each unfinished sample
        self._proposers: dict[str, str] = {}  # by the same: who made the draft to verify next
        self._parents: dict[str, list[int]] = {}  # by the same: of that draft, if it is a tree
        self._step: Iterator[None] | None = None  # delivered its tokens, has yet to draft
        self._half_committed: list[str] = []  # requests of a step whose commit was cut short
        self._ended: list[str] = []  # finished since the worker last drafted
        self._running = False
        self._closed = False
        self._death: str | None = None  # why there is no worker any more

    def check_worker(self) -> None:
        """Raise `WorkerDiedError` if nothing can be generated any more."""
        if self._death is not None:
            raise WorkerDiedError(f"{self._death}; make a new LLM")

    def hidden_states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run the target on whole texts, between two steps: see `Runner`."""
        return self._runner.hidden_states(texts, layers, self._max_num_batched_tokens)

    def add(self, generation: Generation) -> None:
        """Queue a prompt; it takes part from the next step on.

        Where samples can share what one of them has computed of the prompt, the others are queued
        once the first one has a token.
        """
        generation.queued = time.perf_counter()
        self._generations[generation.request_id] = generation
        self._incomplete[generation.request_id] = generation
        self._add_sample(generation, 0)
        config, first = self._scheduler.config, generation.first
        if not (config.enable_prefix_caching and first.num_prompt_tokens > config.block_size):
            self._add_other_samples(generation)
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += first.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        """End all samples with what they have; return whether one of them was unfinished."""
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        was_unfinished = not generation.is_finished
        for sample in generation.samples:
            request = sample.request
            known = self._scheduler.abort_request(request.req_id) is not None
            if not known and not request.status.is_finished:  # it was never queued
                request.status = RequestStatus.FINISHED_ABORTED
        self._finish(generation)
        return was_unfinished

    def drop(self, generations: Iterable[Generation]) -> None:
        """Abort those of them that are unfinished, and leave nothing of them behind."""
        for generation in generations:
            self.abort(generation.request_id)
        self.settle()

    def close(self) -> None:
        """Abort everything and let go of the worker, after the step that may be under way."""
        self._closed = True
        try:
            self.drop(list(self._generations.values()))
        finally:
            if not self._running:
                self._runner.close()

    def advance(self) -> None:
        """Go on until a step has committed its tokens; it drafts when the engine goes on again."""
        self._end_step()
        if self._death is not None:  # and every request has ended
            return
        step = self.step()
        self._run(step)
        self._step = step

    def settle(self) -> None:
        """Leave nothing half done: draft for the step delivered last, tell the worker who ended."""
        if self._running:  # an abandoned stream was collected in the middle of a step
            return
        self._end_step()
        if self._death is None and not self._generations and self._scheduler.has_pending_messages():
            try:
                self._runner.execute(self._scheduler.schedule())
            except WorkerDiedError as error:  # whoever asks for more will be told
                self._fail(str(error))
        if self._closed:
            self._runner.close()

    def step(self) -> Iterator[None]:
        """Run one step: schedule, execute, commit, pause while tokens reach the user, draft."""
        times = [time.perf_counter()]
        # 1. Who runs, and how many tokens each.
        for generation in list(self._incomplete.values()):
            if generation.first.num_output_tokens or generation.first.status.is_finished:
                self._add_other_samples(generation)
        if self.control is not None:
            coming = self._scheduler.next_requests()
            num_others = len(self._scheduler.requests) - len(coming)
            self.control.decide(coming, num_waiting=num_others)
        scheduled = self._scheduler.schedule()
        request_ids = [self._owners[r].request_id for r in scheduled.num_scheduled_tokens]
        times.append(time.perf_counter())
        # 2. The target model's forward, and the verification of drafts.
        output = self._runner.execute(scheduled)
        times.append(time.perf_counter())
        # 3. Commit what was accepted, up to a stop. From here on it can't be taken back.
        self._half_committed = list(scheduled.num_scheduled_tokens)
        updates = self._scheduler.update_from_output(scheduled, output)
        self._record(updates)
        self._half_committed = []
        self.stats.num_preemptions += len(scheduled.preempted_req_ids)
        self.stats.num_cached_tokens += sum(r.num_computed_tokens for r in scheduled.new_requests)
        for update in updates:
            if update.finished:
                self._end_sample(update.request.req_id)
        times.append(time.perf_counter())
        # 4. Tokens reach the user before anything is drafted: the first one does not wait for it.
        yield
        times.append(time.perf_counter())
        # 5. Draft for the next step, except for who finished or was aborted meanwhile.
        ended, self._ended = self._ended, []
        drafts = self._runner.draft(ended)
        if drafts is not None:
            self._proposers |= drafts.proposers
            self._parents |= drafts.parents
            self._scheduler.update_draft_token_ids(drafts)
        times.append(time.perf_counter())
        if self.control is not None:
            self.control.add_engine_step(scheduled, drafts, times)
        self._report(request_ids, scheduled, output, updates, drafts, times)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._run(step)

    def _run(self, step: Iterator[None]) -> None:
        """Run a step up to its pause or its end.

        If it is interrupted, by Ctrl-C or an error, what was in flight will be computed anew;
        requests whose commit was cut short are aborted. If the worker dies, all end with an error.
        """
        if self._running:
            raise EngineError(
                "the engine is in the middle of a step: an observer or another thread may abort "
                "requests, but not generate"
            )
        self._running = True
        try:
            next(step, None)
        except WorkerDiedError as error:
            self._fail(str(error))
        except BaseException:
            self._scheduler.abandon_step()
            half_committed, self._half_committed = self._half_committed, []
            for req_id in half_committed:
                if req_id in self._owners:
                    self.abort(self._owners[req_id].request_id)
            for generation in list(self._generations.values()):
                if generation.is_finished:  # in the commit, before its output was made
                    self._finish(generation)
            raise
        finally:
            self._running = False

    def _fail(self, reason: str) -> None:
        """End every request with an error: there is no worker any more."""
        self._death = reason
        self._scheduler.abandon_step()
        for generation in list(self._generations.values()):
            for sample in generation.samples:
                self._scheduler.fail_request(sample.request, reason)
            self._finish(generation)
        self._runner.close()

    def _add_sample(self, generation: Generation, index: int) -> None:
        request = generation.samples[index].request
        self._owners[request.req_id] = generation
        self._scheduler.add_request(request, after=generation.first if index else None)

    def _add_other_samples(self, generation: Generation) -> None:
        for index, sample in enumerate(generation.samples):
            if sample.request.arrival < 0:  # not added before, by a call that was interrupted
                self._add_sample(generation, index)
        del self._incomplete[generation.request_id]

    def _record(self, updates: Iterable[RequestUpdate]) -> None:
        now = time.perf_counter()
        for update in updates:
            req_id = update.request.req_id
            generation = self._owners[req_id]
            proposer = self._proposers.pop(req_id, self._runner.proposer_name)
            parents = self._parents.pop(req_id, None)
            depth = None
            if parents is not None:
                depth = max(draft_depths(parents[: update.num_draft_tokens]), default=0)
            num_emitted = len(update.new_token_ids)
            if self.control is not None:
                self.control.add_verified(req_id, update.num_draft_tokens, update.accepted_drafts)
            if not num_emitted:  # it failed
                continue
            if generation.stats.time_to_first_token is None:
                seconds = now - generation.queued
                generation.stats.time_to_first_token = seconds
                self.stats.record_first_token(seconds)
            for stats in (generation.stats, self.stats):
                stats.record_step(
                    update.num_draft_tokens,
                    update.num_accepted_tokens,
                    num_emitted,
                    proposer,
                    depth,
                )

    def _end_sample(self, req_id: str) -> None:
        """Note that the scheduler has finished a sample; finish the request with its last one."""
        generation = self._owners.get(req_id)
        if generation is None:  # an observer of this step has aborted the others of its request
            return
        if generation.is_finished:
            self._finish(generation)
        else:
            self._forget_sample(req_id)

    def _forget_sample(self, req_id: str) -> None:
        if self._owners.pop(req_id, None) is not None:
            self._ended.append(req_id)
            if self.control is not None:
                self.control.forget(req_id)
            self._proposers.pop(req_id, None)
            self._parents.pop(req_id, None)

    def _finish(self, generation: Generation) -> None:
        """Make the output of a request whose samples have all finished, and tell observers."""
        if generation.request_id not in self._generations:  # an observer of another aborted it
            return
        output = generation.finish()
        for sample in generation.samples:
            self._forget_sample(sample.request.req_id)
        self._incomplete.pop(generation.request_id, None)
        del self._generations[generation.request_id]
        self.stats.num_finished_requests += 1
        self._plugins.request_end(output)

    def _report(
        self,
        request_ids: Iterable[str],
        scheduled: SchedulerOutput,
        output: ModelRunnerOutput,
        updates: Sequence[RequestUpdate],
        drafts: DraftTokenIds | None,
        times: Sequence[float],
    ) -> None:
        started, was_scheduled, executed, committed, resumed, drafted = times
        stats = StepStats(
            step_id=scheduled.step_id,
            req_ids=tuple(dict.fromkeys(request_ids)),
            num_scheduled_tokens=sum(scheduled.num_scheduled_tokens.values()),
            num_draft_tokens=sum(update.num_draft_tokens for update in updates),
            num_accepted_tokens=sum(update.num_accepted_tokens for update in updates),
            num_emitted_tokens=sum(len(update.new_token_ids) for update in updates),
            num_proposed_tokens=sum(map(len, drafts.draft_token_ids.values())) if drafts else 0,
            faults=dict(Counter(output.faults) + Counter(drafts.faults if drafts else {})),
            schedule_seconds=was_scheduled - started,
            execute_seconds=executed - was_scheduled,
            commit_seconds=committed - executed,
            draft_seconds=drafted - resumed,
        )
        self.stats.record_engine_step(stats)
        self._plugins.step_end(stats)


def _control(speculative: SpeculativeConfig, runner: Runner) -> DraftControl | None:
    """Return who decides how much is drafted; None: nobody drafts."""
    members = runner.proposer_members
    most = runner.num_speculative_tokens
    if not members or not most:
        return None
    table = speculative.draft_tokens_by_batch
    if table is None and not speculative.adaptive:
        table = {1: most}
    elif table is not None and max(table.values()) > most:
        raise ConfigError(
            f"draft_tokens_by_batch={table!r}: the proposers draft at most {most} tokens a step; "
            "raise num_speculative_tokens, or lower the table"
        )
    return DraftControl(members, table, trees=runner.tree_members, max_contexts=runner.max_contexts)
