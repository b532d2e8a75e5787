"""`foresay chat`: a conversation in the terminal, or through a pipe.

The answers alone go to stdout; prompts, notes and figures to stderr. It knows the conversation and
the engine that answers; how lines become messages is `reading`'s, what fits the model `history`'s.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from foresay.core.commands import options
from foresay.core.commands.answer import Answer
from foresay.core.commands.history import Conversation
from foresay.core.commands.reading import Message, Reader
from foresay.core.commands.report import in_short, report
from foresay.core.config import SamplingParams, build_settings
from foresay.core.errors import (
    EngineError,
    ForesayError,
    PromptTooLongError,
    RequestError,
    nearest,
    one_line,
)
from foresay.core.inputs import check_text
from foresay.core.plugins import PluginManager
from foresay.core.stats import RunStats

if TYPE_CHECKING:
    from foresay.core.llm import LLM

_HELP = """\
/reset           forget the conversation; the system prompt stays
/system [TEXT]   show or replace the system prompt
/proposer [NAME] show or replace the proposer; the conversation stays
/stats           the figures of this session, and how full the model's context is
/help            this text
/quit            end (so does Ctrl-D)
//...            a message that starts with /
A line that ends with \\ goes on in the next; lines between two lines of \"\"\" are one message.
Ctrl-C stops an answer, or clears the line."""


def chat(
    context: typer.Context,
    model: options.Model = "smollm2",
    proposer: options.ProposerName = "auto",
    drafter: options.Drafter = None,
    k: options.NumDraftTokens = None,
    adaptive: options.Adaptive = True,
    by_batch: options.DraftTokensByBatch = None,
    settings: options.Settings = None,
    system: Annotated[
        str | None, typer.Option(help="The system prompt. Default: the chat template's own.")
    ] = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = -1,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    max_tokens: options.MaxTokens = 256,
    seed: options.Seed = None,
    stop: options.Stop = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "auto",
    drafter_quantization: options.DrafterQuantization = "auto",
    enforce_eager: options.EnforceEager = False,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Compute what earlier turns have in common with a prompt only once.",
        ),
    ] = True,
    stats: options.Stats = True,
) -> None:
    """Talk with a model. Type /help for the commands; Ctrl-D ends.

    From a pipe, each line is a message, and only the answers go to stdout.
    """
    params = build_settings(
        SamplingParams,
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop": stop or (),
        },
    )
    plugins: PluginManager = context.obj

    def open_engine(name: str) -> LLM:
        own = name == proposer  # the given settings are for the proposer they were given with
        return options.open_llm(
            model,
            plugins=plugins,
            proposer=name,
            drafter=drafter if own else None,
            k=k if own or name != "none" else None,
            adaptive=adaptive,
            by_batch=by_batch,
            settings=settings if own else None,
            max_num_seqs=1,
            dtype=dtype,
            device=device,
            quantization=quantization,
            drafter_quantization=drafter_quantization,
            enforce_eager=enforce_eager,
            enable_prefix_caching=prefix_caching,
        )

    session = _Session(open_engine, proposer, params, system, shows_stats=stats)
    try:
        code = session.run(Reader())
    finally:
        session.llm.close()
    if code:
        raise typer.Exit(code)


class _Session:
    """A conversation, the engine that answers at the moment, and the figures of all answers."""

    def __init__(
        self,
        open_engine: Callable[[str], LLM],
        proposer: str,
        params: SamplingParams,
        system: str | None,
        *,
        shows_stats: bool,
    ) -> None:
        self._open_engine = open_engine
        self._proposer = proposer
        self._params = params
        self._shows_stats = shows_stats
        self._conversation = Conversation()
        self._total = RunStats()  # of all answers, whoever drafted
        self._seconds = 0.0
        self._context_len = 0  # tokens of the last prompt and its answer
        self.llm = open_engine(proposer)
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/proposer": self._switch,
            "/stats": self._stats,
            "/help": lambda _: _say(_HELP),
        }
        try:
            self._check_model()
            if system is not None:
                self._set_system(system)
        except BaseException:
            self.llm.close()
            raise

    def run(self, reader: Reader) -> int:
        """Read and answer until the input ends; return the exit code."""
        if reader.interactive:
            _say("/help lists the commands; Ctrl-D ends")
        interrupted_at = None  # how many lines were read when Ctrl-C came at the prompt
        while True:
            try:
                message = reader.read()
            except KeyboardInterrupt:
                _say("")
                if not reader.interactive or interrupted_at == reader.num_lines:
                    return options.INTERRUPTED
                _say("(Ctrl-C once more ends the chat)")
                interrupted_at = reader.num_lines
                continue
            if message is None:
                return 0
            try:
                if not self._take(message):
                    return 0
            except ForesayError as error:
                _say(f"error: {error}")
            except KeyboardInterrupt:
                _say("(stopped)")

    def _take(self, message: Message) -> bool:
        """Answer a message or obey a command; return False if it ends the session."""
        text = message.text
        if not text.strip():
            return True
        check_text(text, "the message")
        if message.is_quoted or not text.startswith("/"):
            self._answer(text)
            return True
        if text.startswith("//"):
            self._answer(text[1:])
            return True
        command, _, argument = text.strip().partition(" ")
        if command in ("/quit", "/exit"):
            return False
        if command not in self._commands:
            known = [*self._commands, "/quit"]
            raise RequestError(
                f"no command {command!r}{nearest(command, known)} (commands: {', '.join(known)}; "
                "a message that starts with / is written with //)"
            )
        self._commands[command](argument.strip())
        return True

    def _answer(self, question: str) -> None:
        params = self._params
        prompt, num_dropped = self._fit(question)
        if num_dropped:
            what = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            _say(f"(the oldest {what} dropped: the model takes {self.llm.max_model_len} tokens)")
        num_cached = self.llm.stats.num_cached_tokens
        answer = Answer(shown=True)
        is_stopped = False
        try:
            with _one_interrupt():
                answer.follow(self.llm.stream(prompt, params))
        except KeyboardInterrupt:
            is_stopped = True
        answer.end()
        num_cached = self.llm.stats.num_cached_tokens - num_cached
        if answer.text or not is_stopped:
            self._conversation.turns.append((question, answer.text))
        if answer.token_ids:
            self._total.record_request(answer.stats)
            self._total.num_prompt_tokens += len(prompt)
            self._total.num_cached_tokens += num_cached
            self._seconds += answer.seconds
            self._context_len = len(prompt) + len(answer.token_ids)
        if is_stopped:
            kept = "what came is kept" if answer.text else "the question is taken back"
            _say(f"(stopped; {kept})")
        elif answer.finish_reason == "length":
            _say(f"(cut off after {len(answer.token_ids)} tokens)")
        if self._shows_stats and answer.token_ids:
            _say(f"[{in_short(answer.stats, answer.seconds, num_cached, len(prompt))}]")
        if answer.finish_reason == "error":
            raise RequestError(f"the answer ended early: {answer.stop_reason}")

    def _fit(self, question: str) -> tuple[list[int], int]:
        try:
            return self._conversation.fit(
                question,
                self.llm.chat_prompt,
                max_model_len=self.llm.max_model_len,
                max_tokens=self._params.max_tokens,
            )
        except PromptTooLongError as error:
            raise RequestError(f"the message is too long, even alone: {error}") from None

    def _reset(self, argument: str) -> None:
        _refuse_argument("/reset", argument)
        self._conversation.turns = []
        self._context_len = 0
        _say("(the conversation is forgotten)")

    def _system(self, argument: str) -> None:
        if argument:
            self._set_system(argument)
            _say("the system prompt was replaced")
        elif self._conversation.system is None:
            _say("system prompt: the chat template's own, if it has one")
        else:
            _say(f"system prompt: {self._conversation.system}")

    def _set_system(self, text: str) -> None:
        """Replace the system prompt, if the model's template takes one and it is not too long."""
        check_text(text, "the system prompt")
        try:
            self.llm.chat_prompt(Conversation(text).messages("?"))
        except PromptTooLongError as error:
            raise RequestError(f"the system prompt is too long: {error}") from None
        self._conversation.system = text

    def _switch(self, name: str) -> None:
        """Replace the proposer. The new engine is there before the old one is let go."""
        if not name:
            _say(f"proposer: {self.llm.proposer_name or 'none'}")
            return
        if name == self._proposer:
            _say(f"(the proposer is {name} already)")
            return
        try:
            new = self._open_engine(name)
        except (RuntimeError, MemoryError) as error:  # two models at once may be one too many
            raise EngineError(
                f"proposer {name!r} cannot be started beside the one that is there, which stays: "
                f"{one_line(error)}"
            ) from error
        old, self.llm = self.llm, new
        self._proposer = name
        old.close()

    def _stats(self, argument: str) -> None:
        _refuse_argument("/stats", argument)
        total, num_turns = self._total, len(self._conversation.turns)
        _say(
            f"proposer {self.llm.proposer_name or 'none'}; conversation of {num_turns} "
            f"turn{'' if num_turns == 1 else 's'}, {self._context_len} of "
            f"{self.llm.max_model_len} tokens"
        )
        if not total.num_requests:
            _say("nothing was answered yet")
            return
        for line in report(total, self._seconds):
            _say(line)
        _say(
            f"prompts: {total.num_prompt_tokens} tokens, {total.num_cached_tokens} of them from "
            "the prefix cache"
        )

    def _check_model(self) -> None:
        if self.llm.tokenizer is None or self.llm.tokenizer.chat_template is None:
            what = "tokenizer" if self.llm.tokenizer is None else "chat template"
            raise RequestError(
                f"foresay chat needs a model with a {what}, and this one has none; "
                "'foresay run --raw' continues a text"
            )


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the body once: a second one would disturb the engine while it clears up."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuse_argument(command: str, argument: str) -> None:
    if argument:
        raise RequestError(f"{command} takes nothing after it, not {argument!r}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
