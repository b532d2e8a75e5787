"""The life of a worker in a process of its own: build, answer each call, end with the engine.

Knows the border and how a worker is built; a step's messages it only hands on. Imports torch when
there is something to load.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from foresay.core.border import Facts, Failure, HiddenStatesCall, Order
from foresay.core.channel import Channel, ChannelClosedError
from foresay.core.errors import ConfigError, one_line
from foresay.core.messages import SchedulerOutput
from foresay.core.plugins import DISABLE_VARIABLE, GROUP, PluginManager
from foresay.core.runner import Runner

BEGUN = 0  # the number of the frame that says so; the engine's first call brings the order
_WATCH_SECONDS = 2.0


def build(order: Order) -> Runner:
    """Load what was ordered, with the plugins that the engine's process uses."""
    os.chdir(order.folder)
    logging.getLogger("foresay").setLevel(order.log_level)
    installed = {entry.name for entry in entry_points(group=GROUP)}
    disabled = sorted(installed.difference(order.entry_points))
    plugins = PluginManager.load({DISABLE_VARIABLE: ",".join(disabled)})
    from foresay.core.worker.build import build_runner  # here: it imports torch

    return build_runner(order.config, plugins, tokenizer=order.tokenizer)


def serve(end: socket.socket, marker: bytes, build: Callable[[Order], Runner] = build) -> None:
    """Answer the engine at the other end of a socket until it is closed.

    Ctrl-C is the engine's to handle: the terminal sends it to both processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    channel = Channel(end, marker)
    try:
        channel.send(BEGUN, b"")
        runner = _start(channel, build)
        while runner is not None:
            number, data = channel.receive_next()
            channel.send(number, _answer(runner, data))
    except ChannelClosedError:
        pass
    finally:
        sys.stdout.flush()  # what proposers printed


def _start(channel: Channel, build: Callable[[Order], Runner]) -> Runner | None:
    """Build the worker and tell the engine its facts; None: it failed, which was told instead."""
    number, data = channel.receive_next()
    try:
        order: Order = pickle.loads(data)  # noqa: S301  # from our own engine
        runner = build(order)
        facts = Facts.of(runner)
        if order.tokenizer is not None and not isinstance(order.tokenizer, str | os.PathLike):
            facts = replace(facts, tokenizer=None)
        answer = _pickled_facts(facts)
    except BaseException as error:  # noqa: BLE001  # whatever a plugin or a library raises
        channel.send(number, _pickled(Failure.of(error)))
        return None
    channel.send(number, answer)
    return runner


def _pickled_facts(facts: Facts) -> bytes:
    try:
        return _pickled(facts)
    except Exception as error:
        raise ConfigError(
            "worker='process': the model's tokenizer cannot be sent to the engine's process "
            f"({one_line(error)}); use worker='inline'"
        ) from error


def _answer(runner: Runner, data: bytes) -> bytes:
    """Do what one call asks for; what it raises is the answer, too."""
    try:
        message: Any = pickle.loads(data)  # noqa: S301  # from our own engine
        if isinstance(message, SchedulerOutput):
            return _pickled(runner.execute(message))
        if isinstance(message, HiddenStatesCall):
            states = runner.hidden_states(message.texts, message.layers, message.max_tokens)
            return _pickled([one.cpu() for one in states])
        return _pickled(runner.draft(message))
    except BaseException as error:  # noqa: BLE001  # the next call may well succeed, as inline
        return _pickled(Failure.of(error))


def _pickled(answer: object) -> bytes:
    return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)


def _end_with_the_engine() -> None:
    """End this process when the engine's is gone: also in the middle of a step without an end."""
    engine = multiprocessing.parent_process()
    if engine is None:
        return
    while engine.is_alive() and os.getppid() == engine.pid:
        engine.join(_WATCH_SECONDS)
    os._exit(1)
