"""A worker in a process of its own, as the engine sees it: a `Runner` that asks across a border.

Starts the process, sends each call and waits for its answer, notices when the process is gone, and
ends it. It does not know what a worker does with a call. Imports no torch.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from foresay.core.border import Facts, Failure, HiddenStatesCall, Order
from foresay.core.channel import MARKER_BYTES, Channel, ChannelClosedError
from foresay.core.config import EngineConfig
from foresay.core.errors import (
    ConfigError,
    EngineError,
    PluginError,
    WorkerDiedError,
    one_line,
)
from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from foresay.core.plugins import PluginManager
from foresay.core.worker.serve import BEGUN, serve

if TYPE_CHECKING:
    import torch

INLINE = "or use worker='inline'"
_UNGUARDED = 78  # the exit code of a worker in which the user's script made an LLM
_GRACE_SECONDS = 3.0  # for a worker to end by itself


def start_worker(
    config: EngineConfig,
    plugins: PluginManager,
    *,
    model: Any = None,
    proposer_type: type[Any] | None = None,
    tokenizer: Any = None,
) -> RemoteRunner:
    """Build the worker in another process; arguments and errors are `build_runner`'s.

    Raises `ConfigError` for what cannot be taken to another process as well, and `EngineError` if
    that one does not live to tell.
    """
    _check_process()
    return RemoteRunner(
        make_order(config, plugins, model=model, proposer_type=proposer_type, tokenizer=tokenizer)
    )


def make_order(
    config: EngineConfig,
    plugins: PluginManager,
    *,
    model: Any = None,
    proposer_type: type[Any] | None = None,
    tokenizer: Any = None,
) -> Order:
    """Say what the worker is to load, or raise `ConfigError`."""
    if model is not None:
        raise ConfigError(
            f"model: worker='process' loads the model itself, and {type(model).__name__} is loaded "
            f"already; give a folder, a name or a hub id, {INLINE}"
        )
    if proposer_type is not None:
        _check_importable(proposer_type)
    offering = [r for r in plugins.registered if r.proposers or r.models or r.drafters]
    if offering:
        raise ConfigError(
            "worker='process' loads the installed plugins itself, and does not see what was "
            f"registered in this program: {', '.join(record.entry_point for record in offering)}; "
            f"install it, {INLINE}"
        )
    _check_picklable(tokenizer, "tokenizer")
    _check_picklable(config, "proposer_settings")
    return Order(
        config=config,
        tokenizer=tokenizer,
        entry_points=tuple(
            record.entry_point
            for record in plugins.records
            if record not in plugins.registered and record.status != "disabled"
        ),
        folder=os.getcwd(),
        log_level=logging.getLogger("foresay").getEffectiveLevel(),
    )


class RemoteRunner:
    """A `Runner` whose work is done by another process, which ends with this object at the latest.

    A call that is interrupted leaves the worker at work; its answer is dropped when the next one is
    awaited. Once the process is gone, every call raises `WorkerDiedError`.
    """

    def __init__(
        self, order: Order, worker: Callable[[socket.socket, bytes], None] = serve
    ) -> None:
        """Start the process and wait until it has loaded everything.

        `worker` is what the process runs, found there by its name. Raises what the worker raised,
        and `EngineError` if it could not begin or did not live to tell.
        """
        self._number = BEGUN  # of the call made last
        self._is_answered = True  # else it was interrupted, and the worker may be at work on it
        self._death: str | None = None
        self._owner = os.getpid()
        here, there = socket.socketpair()
        marker = os.urandom(MARKER_BYTES)
        context = multiprocessing.get_context("spawn")
        # No daemon: a proposer may have processes of its own.
        self._process = context.Process(target=worker, args=(there, marker), name="foresay-worker")
        self._channel = Channel(here, marker, self._process.is_alive)
        with _sigint_blocked(), _no_false_main():
            try:
                self._process.start()
            except OSError as error:
                here.close()
                raise EngineError(
                    f"cannot start a process for the worker: {one_line(error)}"
                ) from error
            finally:
                there.close()
            # At exit, multiprocessing waits for its processes: this comes before. It does nothing
            # in a process that forked from this one.
            self._end = Finalize(self, _end, args=(self._process, self._channel), exitpriority=10)
        try:
            facts = self._load(order)
        except BaseException as error:
            self._end.cancel()
            _end(self._process, self._channel, _GRACE_SECONDS * isinstance(error, Exception))
            raise
        self.tokenizer = order.tokenizer if facts.tokenizer is None else facts.tokenizer
        self.eos_token_ids = facts.eos_token_ids
        self.vocab_size = facts.vocab_size
        self.max_model_len = facts.max_model_len
        self.num_blocks = facts.num_blocks
        self.num_speculative_tokens = facts.num_speculative_tokens
        self.max_context = facts.max_context
        self.proposer_name = facts.proposer_name
        self.proposer_members = facts.proposer_members
        self.tree_members = facts.tree_members
        self.max_contexts = facts.max_contexts
        self.takes_prediction = facts.takes_prediction
        self.draft_slots = facts.draft_slots
        self.has_proposer_kv = facts.has_proposer_kv
        self.kv_reach = facts.kv_reach
        self.row_invariant = facts.row_invariant
        self.summary = f"{facts.summary}; worker: process {self._process.pid}"

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; it may hold nothing but news of requests that ended."""
        if not step.num_scheduled_tokens and not self._is_answered:
            # After Ctrl-C. The worker will read the news; nobody waits for the end of its work.
            self._send(step)
            return ModelRunnerOutput(step.step_id, {})
        output: ModelRunnerOutput = self._ask(step)
        return output

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        """Draft after the step executed last, but not for the finished; None: nothing to say."""
        drafts: DraftTokenIds | None = self._ask(list(finished_req_ids))
        return drafts

    def hidden_states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], max_tokens: int
    ) -> list[torch.Tensor]:
        """Run the target on whole texts on their own: for each [num_tokens, len(layers), H]."""
        call = HiddenStatesCall([list(text) for text in texts], tuple(layers), max_tokens)
        states: list[torch.Tensor] = self._ask(call)
        return states

    def close(self) -> None:
        """End the process. Calling it again changes nothing."""
        self._death = self._death or "the worker is closed"
        self._end()

    def _load(self, order: Order) -> Facts:
        """Wait for the process to begin, send it the order, and wait for the facts."""
        try:
            self._channel.receive(BEGUN)
        except ChannelClosedError as error:
            raise EngineError(self._unbegun()) from error
        try:
            facts: Facts = self._ask(order)
        except WorkerDiedError as error:
            raise EngineError(
                f"the worker died while it loaded {order.config.model!r} ({self._how()}); what it "
                "had to say is on stderr"
            ) from error
        except PluginError as error:
            if "__main__:" in str(order.config.speculative.proposer):
                error.add_note(
                    "The worker imports your script anew: the class must be defined outside of "
                    "`if __name__ == '__main__':`."
                )
            raise
        return facts

    def _ask(self, message: object) -> Any:
        """Send a call and return the worker's answer; raise what the worker raised."""
        number = self._send(message)
        try:
            data = self._channel.receive(number)
        except ChannelClosedError as error:
            raise self._died() from error
        answer = pickle.loads(data)  # noqa: S301  # from our own worker
        self._is_answered = True
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def _send(self, message: object) -> int:
        """Send a call; return its number."""
        if os.getpid() != self._owner:
            raise EngineError(
                f"this LLM belongs to process {self._owner}, which forked this one: make one here"
            )
        if self._death is not None:
            raise WorkerDiedError(self._death)
        self._number += 1
        self._is_answered = False
        try:
            self._channel.send(self._number, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except ChannelClosedError as error:
            raise self._died() from error
        return self._number

    def _died(self) -> WorkerDiedError:
        self._death = f"the worker's process died ({self._how()})"
        return WorkerDiedError(self._death)

    def _how(self) -> str:
        """Say how the process ended. End it, if it only closed the connection."""
        process = self._process
        process.join(_GRACE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            return "it closed the connection, and was killed"
        if process.exitcode >= 0:
            return f"it ended with exit code {process.exitcode}"
        try:
            name = signal.Signals(-process.exitcode).name
        except ValueError:
            name = f"signal {-process.exitcode}"
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")

    def _unbegun(self) -> str:
        """Say why the process ended before it ran anything of ours."""
        how = self._how()
        if self._process.exitcode == _UNGUARDED:
            return (
                "worker='process' starts a process that imports your script anew, and the script "
                "makes the LLM when it is imported; put what it does under "
                "`if __name__ == '__main__':`"
            )
        return (
            f"the worker's process ended before it began ({how}): it imports your script anew, and "
            "what went wrong is on stderr"
        )


def _check_process() -> None:
    """Refuse to start a worker where multiprocessing cannot, or must not."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        # This is a worker, importing the user's script, which has no guard. Without a traceback:
        # the engine's process says what is wrong.
        raise SystemExit(_UNGUARDED)
    if not hasattr(select, "poll"):
        raise ConfigError(f"worker='process' does not run on {sys.platform}; use worker='inline'")
    if multiprocessing.current_process().daemon:
        raise ConfigError(
            "worker='process': this process is a daemon of multiprocessing, and may start no "
            "other; use worker='inline'"
        )


def _check_importable(kind: type[Any]) -> None:
    """Refuse a class that the worker would not find by its name."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise ConfigError(
            f"proposer {name!r}: worker='process' imports the class by this name, and it is not "
            f"there; define it at the top level of a module, {INLINE}"
        )
    if kind.__module__ != "__main__":
        return
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_imported_anew = (
        not spec.name.endswith("__main__") if spec is not None else _main_file() is not None
    )
    if not is_imported_anew:
        raise ConfigError(
            f"proposer {name!r}: worker='process' imports the class, and what is typed in or run "
            f"by `-c` or as a package cannot be imported; define it in a module, {INLINE}"
        )


def _main_file() -> str | None:
    """Return the file of the user's script, if it is one."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file if file is not None and os.path.isfile(file) else None


@contextmanager
def _no_false_main() -> Iterator[None]:
    """Hide the name of a script that came from stdin: the new process would try to import it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _main_file() is not None:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _check_picklable(value: object, name: str) -> None:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to the worker's process ({one_line(error)}); give plain "
            f"values, or where to load it from, {INLINE}"
        ) from error


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread; a process started meanwhile begins with it blocked.

    The worker ignores it as soon as it runs, and must not be hit by it before.
    """
    resource_tracker.ensure_running()  # multiprocessing starts it, too, and unblocks after that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: SpawnProcess, channel: Channel, grace: float = _GRACE_SECONDS) -> None:
    """End a worker's process: it ends by itself when the connection closes; else it is killed."""
    channel.close()
    try:
        process.join(grace)
    finally:  # Ctrl-C does not leave it behind
        if process.exitcode is None:
            process.kill()
            process.join()
