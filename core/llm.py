"""`LLM`, what a user holds: a model, ready to generate.

It turns what a caller gives into requests and runs the engine until their outputs are there. It
does not know steps, the scheduler or the worker.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from foresay.core.config import SamplingParams
from foresay.core.engine import DraftControl, Engine
from foresay.core.errors import ConfigError, EngineError, RequestError
from foresay.core.generation import Generation, make_generation
from foresay.core.inputs import InputProcessor, Message, Prompt, engine_config
from foresay.core.outputs import RequestOutput, StreamChunk
from foresay.core.plugins import PluginManager
from foresay.core.runner import Runner
from foresay.core.stats import RunStats
from foresay.core.text import TokenDecoder

if TYPE_CHECKING:
    import torch


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

        Raises `ConfigError`, `ModelError` or `PluginError`; with worker="process" also
        `EngineError`, if the worker's process dies.
        """
        self.config = engine_config(model, proposer, settings)
        if plugins is not None and not isinstance(plugins, PluginManager):
            raise ConfigError(f"plugins={plugins!r}: expected a PluginManager, or None")
        if not (tokenizer is None or isinstance(tokenizer, str | Path)) and not hasattr(
            tokenizer, "decode"
        ):
            raise ConfigError(
                f"tokenizer={tokenizer!r}: expected a transformers tokenizer, or where to load one "
                "from"
            )
        plugins = plugins or PluginManager.load()
        runner = self._build_runner(plugins, model, proposer, tokenizer)
        engine = Engine(self.config, runner, plugins)
        self._engine: Engine | None = engine  # None: closed
        self._stats = engine.stats
        self._inputs = InputProcessor(
            tokenizer=runner.tokenizer,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            seed=self.config.seed,
            verification=self.config.speculative.verification,
            proposer_name=runner.proposer_name,
            takes_prediction=runner.takes_prediction,
        )
        self._decoder = TokenDecoder(runner.tokenizer) if runner.tokenizer is not None else None
        self._num_requests = 0
        self.tokenizer = runner.tokenizer
        self.summary = runner.summary
        self.proposer_name = runner.proposer_name
        self.takes_prediction = runner.takes_prediction  # whether `prediction` is of use
        self.max_model_len = runner.max_model_len

    def _build_runner(
        self,
        plugins: PluginManager,
        model: Any,
        proposer: str | type[Any] | None,
        tokenizer: Any,
    ) -> Runner:
        build: Callable[..., Runner]
        if self.config.worker == "process":
            from foresay.core.remote import start_worker

            build = start_worker
        else:
            from foresay.core.worker.build import build_runner  # here: it imports torch

            build = build_runner
        runner = build(
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
        each. With `n` > 1 a prompt's outputs share its seed, and differ; greedy ones are equal.
        Raises `RequestError` before anything is started.
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

        One output: `n` is 1. Raises `RequestError` at once; starts with the first `next`. Closing
        the generator (leaving its loop is enough) aborts the request.
        """
        self._running_engine()
        prompts = self._inputs.prompts(prompt)
        if len(prompts) != 1:
            raise RequestError(f"stream() takes one prompt, not {len(prompts)}")
        (checked,) = self._inputs.params(params, 1)
        if checked.n != 1:
            raise RequestError(
                f"stream() gives one output as it comes, not n={checked.n}: use generate(), or "
                "n=1 with one stream per output"
            )
        return self._stream(self._make(prompts[0], checked))

    def hidden_states(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], layers: Sequence[int]
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return the target's hidden states over a whole text, from the engine's own passes.

        `layers`: the residual streams *entering* these layers; the number of layers for the one
        leaving the last; -1 for the last hidden state, after the final norm, which the lm_head
        takes. Returns [num_tokens, len(layers), hidden_size], in the model's dtype on its device;
        for a list of texts a list of these, computed `max_num_batched_tokens` at a time. Texts that
        are being generated are not disturbed. Raises `RequestError`.
        """
        engine = self._running_engine()
        texts, are_several = self._inputs.texts(token_ids)
        states = engine.hidden_states(texts, self._inputs.layers(layers))
        return states if are_several else states[0]

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

    @property
    def draft_control(self) -> DraftControl | None:
        """What steps cost and how far drafts get, as far as it is known; None: nobody drafts."""
        return self._running_engine().control

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
        self._engine.check_worker()
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
        self._num_requests += 1
        return make_generation(
            str(self._num_requests - 1),
            prompt_token_ids,
            params,
            self._inputs.sampling_data(params),
            prediction_ids=self._inputs.prediction_ids(params),
            decoder=self._decoder,
        )
