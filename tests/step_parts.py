"""Looks into the steps of an engine in this process: seconds by part, the products of a forward.

It wraps functions while it is asked to, and restores them. Knows where the parts are, and not what
is measured with them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch

from foresay.core.scheduling.scheduler import Scheduler
from foresay.core.worker import model_runner
from foresay.core.worker.decoder import FastDecoder
from foresay.core.worker.linear import Linear
from foresay.core.worker.model_runner import ModelRunner
from foresay.core.worker.target import TargetModel

PARTS = ("schedule", "batch", "forward", "verify", "worker's rest", "commit", "draft", "rest")


# --- parts of a step


class Clock:
    """When the parts of the engine's steps began and ended, since it was last cleared."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def seconds(self, name: str) -> float:
        """Return how long a part took in all."""
        return sum(end - start for start, end in self.spans[name])

    def parts(self, step: float) -> dict[str, float]:
        """Return the seconds of the parts of a step that took `step` seconds."""
        batch = self.spans["forward"][0][0] - self.spans["execute"][0][0]
        found = {name: self.seconds(name) for name in ("schedule", "forward", "verify", "commit")}
        found |= {"batch": batch, "draft": self.seconds("draft")}
        found["worker's rest"] = (
            self.seconds("execute") - found["forward"] - found["verify"] - batch
        )
        return found | {"rest": step - sum(found.values())}


@contextmanager
def clocked() -> Iterator[Clock]:
    """Have every engine of this process timed, part by part."""
    clock = Clock()
    places: tuple[tuple[str, Any, str], ...] = (
        ("schedule", Scheduler, "schedule"),
        ("execute", ModelRunner, "execute"),
        ("forward", TargetModel, "forward"),
        ("verify", model_runner, "verify"),
        ("commit", Scheduler, "update_from_output"),
        ("draft", ModelRunner, "draft"),
    )

    def timed(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def outer(*arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments, **keywords)
            finally:
                clock.spans[name].append((start, time.perf_counter()))

        return outer

    with ExitStack() as stack:
        for name, owner, attribute in places:
            inner = getattr(owner, attribute)
            stack.callback(setattr, owner, attribute, inner)
            setattr(owner, attribute, timed(name, inner))
        yield clock


# --- the products


@contextmanager
def noted_products() -> Iterator[list[tuple[Linear, Callable[[], object]]]]:
    """Note every product made meanwhile: whose it is, and how to make it again."""
    calls: list[tuple[Linear, Callable[[], object]]] = []
    depth = [0]

    def noting(inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def outer(linear: Linear, *arguments: Any, **keywords: Any) -> Any:
            if not depth[0]:
                own = [_copied(value) for value in arguments]
                named = {name: _copied(value) for name, value in keywords.items()}
                calls.append((linear, partial(inner, linear, *own, **named)))
            depth[0] += 1  # one method may call another
            try:
                return inner(linear, *arguments, **keywords)
            finally:
                depth[0] -= 1

        return outer

    with ExitStack() as stack:
        # A layer in one call makes its products by itself: have it run in parts.
        whole = FastDecoder._whole_layers
        stack.callback(setattr, FastDecoder, "_whole_layers", whole)
        FastDecoder._whole_layers = lambda *_: None  # type: ignore[method-assign]
        for owner in (Linear, *Linear.__subclasses__()):
            for name, inner in list(vars(owner).items()):
                is_public = name == "__call__" or not name.startswith("_")
                if is_public and name != "rows" and callable(inner):
                    stack.callback(setattr, owner, name, inner)
                    setattr(owner, name, noting(inner))
        yield calls


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def linears_of(decoder: object) -> list[Linear]:
    """Return all products that a decoder holds, found in its attributes."""
    found: list[Linear] = []
    seen: set[int] = set()
    todo: list[Any] = [decoder]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Linear):
            found.append(value)
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
        elif type(value).__module__.startswith("foresay.core.worker"):
            todo += vars(value).values() if hasattr(value, "__dict__") else ()
    return found
