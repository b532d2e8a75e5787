"""An LLM without a model: a worker that answers from a script, and a tokenizer of characters.

The worker keeps its own copies of requests from the messages alone and fails on any that does not
fit, so a test on top of it also checks what the engine tells the worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import foresay
from foresay import LLM, SamplingParams
from foresay.core.engine import Engine
from foresay.core.messages import (
    DraftTokenIds,
    ModelRunnerOutput,
    NewRequest,
    SamplingData,
    SchedulerOutput,
)
from foresay.core.outputs import RequestOutput
from foresay.core.plugins import PluginManager
from foresay.core.runner import Runner
from foresay.core.stats import StepStats

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
EOS, BOS = 0, 1
VOCAB_SIZE = 300
FAILING = "fail"  # a prompt whose fourth token, if not told otherwise, is a "non-finite row"


class CharTokenizer:
    """A token is a character; BOS is put before text, EOS has no text."""

    all_special_ids = (EOS, BOS)
    chat_template: str | None = "{{ simple }}"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [BOS] * add_special_tokens + [*map(ord, text)]}

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        assert options["skip_special_tokens"]
        return "".join(chr(token_id) for token_id in token_ids if token_id not in (EOS, BOS))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options["add_generation_prompt"]
        if messages[-1]["role"] != "user":
            raise ValueError("the last message must be the user's")
        turns = "".join(f"{message['role']}:{message['content']};" for message in messages)
        return [BOS, *map(ord, turns + "assistant:")]


def text_of(prompt: Sequence[int]) -> str:
    return "".join(chr(token_id) for token_id in prompt if token_id not in (EOS, BOS))


def logprobs_at(position: int, token_id: int, num_likeliest: int) -> dict[int, float]:
    """What the fake model says of output token `position`; the likeliest are never the token."""
    others = {200 + rank: -1.0 - rank for rank in range(num_likeliest)}
    return {token_id: -0.01 * (1 + position), **others}


class FakeRunner:
    """Answers a request with `answer(prompt text, sampling)` and EOS; drafts that, wrong if told.

    Output position j of a request is drafted wrongly if `wrong(j)`, and by `proposer_at(j)`.
    """

    def __init__(
        self,
        answer: Callable[[str, SamplingData], str],
        *,
        k: int = 0,
        wrong: Callable[[int], bool] = lambda position: False,
        max_model_len: int = 200,
        num_blocks: int = 200,
        tokenizer: CharTokenizer | None = None,
        takes_prediction: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.takes_prediction = takes_prediction
        self.draft_slots = 0
        self.has_proposer_kv = False
        self.kv_reach = 1
        self.eos_token_ids = frozenset([EOS])
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.num_speculative_tokens = k
        self.max_context = None
        self.proposer_name = "script" if k else None
        self.proposer_members = (("script", k),) if k else ()
        self.tree_members: tuple[str, ...] = ()
        self.max_contexts: dict[str, int] = {}
        self.row_invariant = True
        self.summary = "a fake model"
        self.answer = answer
        self.wrong = wrong
        self.proposer_at: Callable[[int], str] | None = None
        self.fails: Callable[[SamplingData, int], bool] = lambda sampling, position: position >= 3
        self.log: list[str] = []
        self.closed = False
        self.received: list[NewRequest] = []
        self.sampling: dict[str, SamplingData] = {}
        self.token_ids: dict[str, list[int]] = {}  # of the requests the worker holds
        self.before_execute: Callable[[SchedulerOutput], None] = lambda step: None
        self.before_draft: Callable[[], None] = lambda: None
        self.faults: dict[str, int] = {}  # of each call that drafts
        self.verification_faults: dict[str, int] = {}  # of each step
        self._prompt_lengths: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self._step: SchedulerOutput | None = None

    def next_token(self, req_id: str, num_output_tokens: int) -> int:
        prompt = text_of(self.token_ids[req_id][: self._prompt_lengths[req_id]])
        answer = self.answer(prompt, self.sampling[req_id])
        return ord(answer[num_output_tokens]) if num_output_tokens < len(answer) else EOS

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert not self.closed
        self.log.append("execute")
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._forget(req_id)
        for request in step.new_requests:
            self._take(request)
        self.before_execute(step)
        self._step = step
        sampled: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        logprobs: dict[str, list[dict[int, float]]] = {}
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
            token_ids = self.token_ids[req_id]
            num_computed = self._num_computed[req_id]
            num_left = len(token_ids) + len(drafts) - num_computed - num_scheduled
            assert (num_left == 0) == (step.num_output_rows[req_id] == 1 + len(drafts))
            self._num_computed[req_id] += num_scheduled
            if num_left:
                continue
            num_output = len(token_ids) - self._prompt_lengths[req_id]
            is_failing = text_of(token_ids[: self._prompt_lengths[req_id]]) == FAILING
            if is_failing and self.fails(self.sampling[req_id], num_output + len(drafts)):
                failed[req_id] = "a row is not finite"
                continue
            tokens = [self.next_token(req_id, num_output)]
            for position, draft in enumerate(drafts):
                if draft != tokens[-1]:
                    break
                tokens.append(self.next_token(req_id, num_output + position + 1))
            self._num_computed[req_id] -= len(drafts) - (len(tokens) - 1)
            token_ids += tokens
            sampled[req_id] = tokens
            num_likeliest = self.sampling[req_id].logprobs
            if num_likeliest is not None:
                logprobs[req_id] = [
                    logprobs_at(num_output + index, token_id, num_likeliest)
                    for index, token_id in enumerate(tokens)
                ]
        faults = dict(self.verification_faults) if step.num_scheduled_tokens else {}
        return ModelRunnerOutput(step.step_id, sampled, failed, logprobs, faults)

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        assert not self.closed
        self.log.append("draft")
        self.before_draft()
        for req_id in finished_req_ids:
            self._forget(req_id)
        step, self._step = self._step, None
        assert step is not None
        drafts: dict[str, list[int]] = {}
        proposers: dict[str, str] = {}
        for req_id, k in step.num_draft_tokens.items():
            if req_id in self.token_ids:
                start = len(self.token_ids[req_id]) - self._prompt_lengths[req_id]
                drafts[req_id] = [
                    2 if self.wrong(position) else self.next_token(req_id, position)
                    for position in range(start, start + k)
                ]
                if self.proposer_at is not None:
                    proposers[req_id] = self.proposer_at(start)
        if not drafts:
            return None
        lengths = {req_id: len(self.token_ids[req_id]) for req_id in drafts}
        return DraftTokenIds(drafts, lengths, dict(self.faults), proposers)

    def hidden_states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], max_tokens: int
    ) -> list[Any]:
        """Not what a model would give: what was asked for, in place of it."""
        assert not self.closed
        return [(list(text), tuple(layers), max_tokens) for text in texts]

    def close(self) -> None:
        self.closed = True

    def _take(self, request: NewRequest) -> None:
        assert request.req_id not in self.token_ids
        self.token_ids[request.req_id] = list(request.token_ids)
        self._prompt_lengths[request.req_id] = request.num_prompt_tokens
        self._num_computed[request.req_id] = request.num_computed_tokens
        self.sampling[request.req_id] = request.sampling
        self.received.append(request)

    def _forget(self, req_id: str) -> None:
        self.token_ids.pop(req_id, None)


class FakeLLM(LLM):
    """An LLM around a `FakeRunner`; plugins given here are observed, installed ones too."""

    def __init__(self, runner: FakeRunner, *plugins: object, **settings: Any) -> None:
        self.runner = runner
        self.given_plugins = plugins
        settings.setdefault("block_size", 4)
        settings.setdefault("adaptive", False)
        super().__init__("fake", None, **settings)

    def _build_runner(self, plugins: PluginManager, *loaded: Any) -> Runner:
        for index, plugin in enumerate(self.given_plugins):
            plugins.register(plugin, f"given{index}")
        return self.runner

    @property
    def engine(self) -> Engine:
        return self._running_engine()

    def check_empty(self) -> None:
        """Fail unless nothing of any request is left, here or in the worker."""
        scheduler = self.engine._scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished_requests()
        assert not scheduler.has_pending_messages()
        assert scheduler.blocks.num_free_blocks == self.runner.num_blocks
        assert self.runner.token_ids == {}
        engine = self.engine
        left = (engine._generations, engine._owners, engine._incomplete, engine._proposers)
        assert left == ({}, {}, {}, {})
        assert engine.control is None or not engine.control._records


def fake_llm(
    answer: str | Callable[[str], str] | Callable[[str, SamplingData], str] = "abcdefgh",
    *plugins: object,
    tokenizer: CharTokenizer | None = None,
    has_tokenizer: bool = True,
    k: int = 0,
    wrong: Callable[[int], bool] = lambda position: False,
    max_model_len: int = 200,
    num_blocks: int = 200,
    takes_prediction: bool = False,
    **settings: Any,
) -> FakeLLM:
    """An LLM that answers as told: always the same, by prompt, or by prompt and sampling."""
    if tokenizer is None and has_tokenizer:
        tokenizer = CharTokenizer()
    runner = FakeRunner(
        _reply(answer),
        k=k,
        wrong=wrong,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        tokenizer=tokenizer,
        takes_prediction=takes_prediction,
    )
    return FakeLLM(runner, *plugins, **settings)


def _reply(answer: str | Callable[..., str]) -> Callable[[str, SamplingData], str]:
    if isinstance(answer, str):
        return lambda prompt, sampling: answer
    if len(inspect.signature(answer).parameters) == 1:
        return lambda prompt, sampling: answer(prompt)
    return answer


def params(max_tokens: int = 100, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **values)


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def observer(
    on_step: Callable[[StepStats], None] = lambda stats: None,
    on_request: Callable[[RequestOutput], object] = lambda output: None,
) -> object:
    class Observer:
        @foresay.hookimpl
        def foresay_step_end(self, stats: StepStats) -> None:
            on_step(stats)

        @foresay.hookimpl
        def foresay_request_end(self, output: RequestOutput) -> None:
            on_request(output)

    return Observer()
