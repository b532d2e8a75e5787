"""What the tests of remote workers run in another process: a fake model, and its accidents.

A prompt of the form "kind place number" has an accident: "kill execute 3" kills the worker in the
third step that has the request; at "draft" it happens when drafts are wanted for it. A prompt
"held" is answered with the number of requests that the worker holds; any other with the alphabet.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence

from fake_engine import ALPHABET, CharTokenizer, FakeRunner, text_of

from foresay.core.border import Order
from foresay.core.config import build_settings
from foresay.core.errors import ConfigError, ProposerError
from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SamplingData, SchedulerOutput
from foresay.core.proposer import ProposerConfig
from foresay.core.worker.serve import serve


class AccidentalRunner(FakeRunner):
    def __init__(self, tokenizer: CharTokenizer | None) -> None:
        super().__init__(self.reply, k=2, max_model_len=2000, num_blocks=1000, tokenizer=tokenizer)
        self.num_calls: Counter[tuple[str, str]] = Counter()

    def reply(self, prompt: str, sampling: SamplingData) -> str:
        return str(len(self.token_ids)) if prompt == "held" else ALPHABET

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(step)
        self.accidents("execute", list(step.num_scheduled_tokens))
        return output

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        drafts = super().draft(finished_req_ids)
        self.accidents("draft", list(drafts.draft_token_ids) if drafts is not None else [])
        return drafts

    def accidents(self, place: str, req_ids: list[str]) -> None:
        for req_id in req_ids:
            words = text_of(self.token_ids[req_id][: self._prompt_lengths[req_id]]).split()
            self.num_calls[req_id, place] += 1
            if words[1:] == [place, str(self.num_calls[req_id, place])]:
                have(words[0])


def have(accident: str) -> None:
    """Have an accident, or be part of one."""
    if accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif accident == "exit":
        os._exit(3)
    elif accident == "segfault":
        ctypes.string_at(0)
    elif accident == "fork":  # its child holds the connection open
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        os._exit(4)
    elif accident == "interrupt":  # the engine is waiting for us
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.05)
    elif accident == "hang":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1000)
    elif accident == "raise":
        raise RuntimeError("no more")
    elif accident == "fault":
        raise ProposerError("proposer 'script': not again")
    elif accident == "leave":
        sys.exit("enough")


class Unpicklable(CharTokenizer):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class OwnError(ConfigError):
    """A plugin's own kind, which the engine's process may not know."""


def _build(order: Order) -> AccidentalRunner:
    """Build what the model's name says."""
    if order.config.model == "setting":
        build_settings(ProposerConfig, {"reach": 3}, "proposer 'ngram'")
    if order.config.model == "own error":
        raise OwnError("not here")
    if order.config.model == "broken":
        raise RuntimeError("broken")
    if order.config.model in ("kill", "exit"):
        have(order.config.model)
    if order.config.model == "hang":
        have("hang")
    if order.config.model == "unpicklable":
        return AccidentalRunner(Unpicklable())
    return AccidentalRunner(order.tokenizer or CharTokenizer())


def fake_worker(end: socket.socket, marker: bytes) -> None:
    serve(end, marker, _build)


def absent_worker(end: socket.socket, marker: bytes) -> None:
    sys.exit(5)
