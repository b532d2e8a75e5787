"""LLMs whose worker is another process, around a fake model, for the tests of remote workers."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from typing import Any

from fake_engine import params
from remote_workers import fake_worker

from foresay import LLM
from foresay.core.border import Order
from foresay.core.config import EngineConfig
from foresay.core.outputs import RequestOutput
from foresay.core.plugins import PluginManager
from foresay.core.remote import RemoteRunner, make_order
from foresay.core.runner import Runner


def worker_pids() -> list[int | None]:
    """The workers of this process that live."""
    return [p.pid for p in multiprocessing.active_children() if p.name == "foresay-worker"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends_within(pid: int, seconds: float) -> bool:
    """Whether the process is gone in that time; for one that is no child of ours."""
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


def order(model: str = "fake", **changes: Any) -> Order:
    return dataclasses.replace(make_order(EngineConfig(model=model), PluginManager()), **changes)


class RemoteLLM(LLM):
    """An LLM around the fake model of `remote_workers`, which runs in another process."""

    def __init__(self, *plugins: object, runner: RemoteRunner | None = None) -> None:
        self.given_plugins = plugins
        self.runner = runner if runner is not None else RemoteRunner(order(), fake_worker)
        self.pid: int = self.runner._process.pid or 0
        super().__init__("fake", None, block_size=4, adaptive=False)

    def _build_runner(self, plugins: PluginManager, *loaded: Any) -> Runner:
        for index, plugin in enumerate(self.given_plugins):
            plugins.register(plugin, f"given{index}")
        return self.runner

    def check_empty(self) -> None:
        """Fail unless nothing of any request is left, here or in the worker."""
        scheduler = self._running_engine()._scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished_requests()
        assert not scheduler.has_pending_messages()
        assert scheduler.blocks.num_free_blocks == self.runner.num_blocks
        assert text(self.generate("held", params())[0]) == "1"  # the asking one


def text(output: RequestOutput) -> str:
    return output.outputs[0].text
