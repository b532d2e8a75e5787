"""The engine: one step from top to bottom, and `LLM`, what a user holds.

`Engine` joins the two wings: it asks the scheduler what to run, the worker to run it, and hands
committed tokens on. It does not know how tokens are computed, drafted, verified or turned into
text, nor who runs when.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from foresay.core.config import SamplingParams
from foresay.core.errors import EngineError, RequestError
from foresay.core.generation import Generation
from foresay.core.inputs import InputProcessor, Message, Prompt, engine_config
from foresay.core.messages import DraftTokenIds, SchedulerOutput
from foresay.core.outputs import RequestOutput, StreamChunk
from foresay.core.plugins import PluginManager
from foresay.core.runner import Runner
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from foresay.core.stats import RunStats, StepStats
from foresay.core.text import OutputText, TokenDecoder

__all__ = ["LLM", "Engine", "RequestOutput", "StreamChunk"]


class Engine:
    """Steps over all unfinished requests, whoever waits for them. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, runner: Runner, plugins: PluginManager) -> None:
        self.stats = RunStats(row_invariant=runner.row_invariant)
        self._scheduler = scheduler
        self._runner = runner
        self._plugins = plugins
        self._generations: dict[str, Generation] = {}  # the unfinished
        self._step: Iterator[None] | None = None  # delivered its tokens, has yet to draft
        self._half_committed: list[str] = []  # requests of a step whose commit was cut short
        self._ended: list[str] = []  # finished since the worker last drafted
        self._running = False

    def add(self, generation: Generation) -> None:
        """Queue a request; it takes part from the next step on."""
        request = generation.request
        self._scheduler.add_request(request)
        generation.queued = time.perf_counter()
        self._generations[request.req_id] = generation
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += request.num_prompt_tokens

    def abort(self, req_id: str) -> bool:
        """End a request with what it has; return whether there was such an unfinished one."""
        if self._scheduler.abort_request(req_id) is None:
            return False
        self._finish(self._generations[req_id])
        return True

    def drop(self, generations: Iterable[Generation]) -> None:
        """Abort those of them that are unfinished, and leave nothing of them behind."""
        for generation in generations:
            self.abort(generation.request_id)
        self.settle()

    def close(self) -> None:
        """Abort everything."""
        self.drop(list(self._generations.values()))

    def advance(self) -> None:
        """Go on until a step has committed its tokens; it drafts when the engine goes on again."""
        self._end_step()
        step = self.step()
        self._run(step)
        self._step = step

    def settle(self) -> None:
        """Leave nothing half done: draft for the step delivered last, tell the worker who ended."""
        if self._running:  # an abandoned stream was collected in the middle of a step
            return
        self._end_step()
        if not self._generations and self._scheduler.has_pending_messages():
            self._runner.execute(self._scheduler.schedule())

    def step(self) -> Iterator[None]:
        """Run one step: schedule, execute, commit, pause while tokens reach the user, draft."""
        times = [time.perf_counter()]
        # 1. Who runs, and how many tokens each.
        scheduled = self._scheduler.schedule()
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
                self._finish(self._generations[update.request.req_id])
        times.append(time.perf_counter())
        # 4. Tokens reach the user before anything is drafted: the first one does not wait for it.
        yield
        times.append(time.perf_counter())
        # 5. Draft for the next step, except for who finished or was aborted meanwhile.
        ended, self._ended = self._ended, []
        drafts = self._runner.draft(ended)
        if drafts is not None:
            self._scheduler.update_draft_token_ids(drafts)
        times.append(time.perf_counter())
        self._report(scheduled, updates, drafts, times)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._run(step)

    def _run(self, step: Iterator[None]) -> None:
        """Run a step up to its pause or its end.

        If it is interrupted, by Ctrl-C or an error, what was in flight will be computed anew;
        requests whose commit was cut short are aborted.
        """
        if self._running:
            raise EngineError(
                "the engine is in the middle of a step: an observer or another thread may abort "
                "requests, but not generate"
            )
        self._running = True
        try:
            next(step, None)
        except BaseException:
            self._scheduler.abandon_step()
            half_committed, self._half_committed = self._half_committed, []
            for req_id in half_committed:
                # It may have finished in the commit, before its output was made.
                if not self.abort(req_id) and req_id in self._generations:
                    self._finish(self._generations[req_id])
            raise
        finally:
            self._running = False

    def _record(self, updates: Iterable[RequestUpdate]) -> None:
        now = time.perf_counter()
        for update in updates:
            generation = self._generations[update.request.req_id]
            num_emitted = len(update.new_token_ids)
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
                    self._runner.proposer_name,
                )

    def _finish(self, generation: Generation) -> None:
        """Make the output of a request that the scheduler has finished, and tell observers."""
        del self._generations[generation.request_id]
        self._ended.append(generation.request_id)
        output = generation.finish()
        self.stats.num_finished_requests += 1
        self._plugins.request_end(output)

    def _report(
        self,
        scheduled: SchedulerOutput,
        updates: Sequence[RequestUpdate],
        drafts: DraftTokenIds | None,
        times: Sequence[float],
    ) -> None:
        started, was_scheduled, executed, committed, resumed, drafted = times
        stats = StepStats(
            step_id=scheduled.step_id,
            req_ids=tuple(scheduled.num_scheduled_tokens),
            num_scheduled_tokens=sum(scheduled.num_scheduled_tokens.values()),
            num_draft_tokens=sum(update.num_draft_tokens for update in updates),
            num_accepted_tokens=sum(update.num_accepted_tokens for update in updates),
            num_emitted_tokens=sum(len(update.new_token_ids) for update in updates),
            num_proposed_tokens=sum(map(len, drafts.draft_token_ids.values())) if drafts else 0,
            faults=dict(drafts.faults) if drafts else {},
            schedule_seconds=was_scheduled - started,
            execute_seconds=executed - was_scheduled,
            commit_seconds=committed - executed,
            draft_seconds=drafted - resumed,
        )
        self.stats.record_engine_step(stats)
        self._plugins.step_end(stats)


class LLM:
    """A model, ready to generate: the same output as plain decoding, sooner.

    All calls share one engine: a stream that is open goes on while `generate` runs. Not
    thread-safe. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: Any = "smollm2",
        proposer: str | type[Any] | None = "auto",
        *,
        tokenizer: Any = None,
        plugins: PluginManager | None = None,
        **settings: Any,
    ) -> None:
        """Load the model and its proposer.

        `model`: an alias, a folder, a GGUF file, a hub id, or a loaded transformers model, which
        takes its `tokenizer` along (None: token ids in, token ids out).
        `proposer`: a name, "module:Class", a class, "auto", or None for plain decoding.
        `plugins`: where names are looked up and who observes; None: all that are installed.
        `settings`: the fields of `EngineConfig` and `SpeculativeConfig`, by name.

        Raises `ConfigError`, `ModelError` or `PluginError`.
        """
        self.config = engine_config(model, proposer, settings)
        plugins = plugins or PluginManager.load()
        runner = self._build_runner(plugins, model, proposer, tokenizer)
        scheduler = Scheduler(
            SchedulerConfig(
                block_size=self.config.block_size,
                num_blocks=runner.num_blocks,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                chunked_prefill_size=self.config.chunked_prefill_size,
                max_model_len=runner.max_model_len,
                enable_prefix_caching=self.config.enable_prefix_caching,
                num_speculative_tokens=runner.num_speculative_tokens,
                max_context=runner.max_context,
            )
        )
        engine = Engine(scheduler, runner, plugins)
        self._engine: Engine | None = engine  # None: closed
        self._stats = engine.stats
        self._inputs = InputProcessor(
            tokenizer=runner.tokenizer,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            seed=self.config.seed,
        )
        self._decoder = TokenDecoder(runner.tokenizer) if runner.tokenizer is not None else None
        self._num_requests = 0
        self.tokenizer = runner.tokenizer
        self.summary = runner.summary
        self.proposer_name = runner.proposer_name
        self.max_model_len = runner.max_model_len

    def _build_runner(
        self,
        plugins: PluginManager,
        model: Any,
        proposer: str | type[Any] | None,
        tokenizer: Any,
    ) -> Runner:
        from foresay.core.worker.build import build_runner  # here: it imports torch

        runner: Runner = build_runner(
            self.config,
            plugins,
            model=None if isinstance(model, (str, Path)) else model,
            proposer_type=proposer if isinstance(proposer, type) else None,
            tokenizer=tokenizer,
        )
        print(runner.summary, file=sys.stderr)
        return runner

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, all together; return the outputs in the prompts' order.

        `prompts`: a text, a list of token ids, or a list of these. `params`: one for all, or one
        each. Raises `RequestError` before anything is started.
        """
        return self._generate(self._inputs.prompts(prompts), params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, through the model's chat template.

        A conversation is a list of `{"role": ..., "content": ...}`. Otherwise as `generate`.
        """
        return self._generate(self._inputs.conversations(messages), params)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return one conversation as the token ids that `chat` would continue, for `stream`."""
        return self._inputs.conversations([messages])[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Continue one prompt; yield text and token ids as they come, the last chunk at the end.

        Raises `RequestError` at once; starts with the first `next`. Closing the generator (leaving
        its loop is enough) aborts the request.
        """
        self._running_engine()
        prompts = self._inputs.prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"stream() takes one prompt, not {len(prompts)}")
        return self._stream(self._make(prompts[0], self._inputs.params(params, 1)[0]))

    def abort(self, request_id: str) -> bool:
        """End a request with what it has; return whether there was such an unfinished one.

        May be called between the chunks of a stream, and by observers. The request's output has
        `finish_reason` "abort".
        """
        return self._engine is not None and self._engine.abort(request_id)

    @property
    def stats(self) -> RunStats:
        """A copy of the figures of all requests so far."""
        return copy.deepcopy(self._stats)

    def close(self) -> None:
        """Abort what is unfinished and let go of the model. Calling it again changes nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("this LLM is closed; make a new one")
        return self._engine

    def _generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        engine = self._running_engine()
        each = self._inputs.params(params, len(prompts))
        generations = [self._make(*pair) for pair in zip(prompts, each, strict=True)]
        outputs = []
        try:
            for generation in generations:
                engine.add(generation)
            for generation in generations:
                while generation.output is None:
                    engine.advance()
                outputs.append(generation.output)
        finally:  # in Ctrl-C or an error too: nothing of this call stays behind
            engine.drop(generations)
        return outputs

    def _stream(self, generation: Generation) -> Generator[StreamChunk, None, None]:
        engine = self._running_engine()
        try:
            engine.add(generation)
            finish_reason = None
            while finish_reason is None:
                if generation.output is None:  # it may end in another call's step, or by an abort
                    engine.advance()
                chunk = generation.take_chunk()
                if chunk is not None:
                    finish_reason = chunk.finish_reason
                    yield chunk
        finally:
            engine.drop([generation])

    def _make(self, prompt_token_ids: list[int], params: SamplingParams) -> Generation:
        text = None
        if self._decoder is not None:
            text = OutputText(self._decoder, prompt_token_ids, params.stop)
        request = Request(
            req_id=str(self._num_requests),
            prompt_token_ids=prompt_token_ids,
            sampling=self._inputs.sampling_data(params),
            max_tokens=params.max_tokens,
            text=text,
            num_speculative_tokens=params.num_speculative_tokens,
        )
        self._num_requests += 1
        return Generation(request, text)
