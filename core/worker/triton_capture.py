"""Captures passes as CUDA graphs, bucket by bucket, and measures the memory that they take.

A *bucket* is a number of rows: a graph is always the same, so a pass over fewer rows is run in the
smallest one that holds them. Knows pieces of work; neither a model nor rows.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from foresay.core.errors import EngineError, one_line
from foresay.core.worker.memory import free_memory

logger = logging.getLogger("foresay")

_WARM_UPS = 2  # passes before a capture: kernels are compiled, libraries take their workspaces

# Runs some work a few times, captures it, and returns what runs it again.
Capturing = Callable[[Callable[[], None]], Callable[[], None]]


class StaticWork(Protocol):
    """A pass over static memory. `launch` runs `work`: by itself, or as a graph of it."""

    launch: Callable[[], None]

    def work(self) -> None:
        """Run the pass: reads and writes static memory only."""
        ...

    def is_right(self) -> bool:
        """Whether `launch` does for a row what `work` does: both are run."""
        ...


Work = TypeVar("Work", bound=StaticWork)


def capture_buckets(
    make: Callable[[int, Work | None], Work],
    buckets: Sequence[int],
    device: torch.device,
    *,
    of: str = "",
    capturing: Capturing | None = None,
    num_graphs: int | None = None,
) -> list[Work] | None:
    """Capture a pass for each of `buckets`, ascending, the largest first; return them ascending.

    make: given a number of rows and the largest bucket's pass, whose buffers serve all, or None,
    returns a pass. of: whose passes they are, for messages. capturing: None for CUDA's. num_graphs:
    of the largest buckets only; None: all. Returns None after a warning if something cannot be
    captured, or a CUDA graph does something else when it is replayed.
    """
    made: list[Work] = []
    is_tried = capturing is None
    try:
        capturing = capturing or in_cuda(device)
        for num_rows in buckets[::-1][:num_graphs]:
            work = make(num_rows, made[0] if made else None)
            work.launch = capturing(work.work)
            if is_tried and not work.is_right():
                raise EngineError(f"a graph of {num_rows} rows does not do what it was captured of")
            made.append(work)
    except Exception as error:  # noqa: BLE001  # whatever a driver or a library may raise
        warn(of, error)
        return None
    return made[::-1]


def warn(of: str, error: Exception) -> None:
    """Say why there are no graphs `of` something: its passes run operation by operation."""
    logger.warning("no CUDA graphs%s: %s", of and f" of {of}", one_line(error))


def memory_of_buckets(
    capture: Callable[[int], object | None],
    num_buckets: int,
    device: torch.device,
    *,
    of: str = "",
) -> int | None:
    """Return the bytes that graphs of so many buckets take.

    capture: captures as many graphs as it is told, of the largest buckets, and returns them, or
    None if that fails. The largest graph's memory serves the others, each of which takes as much
    more as the second. Returns None if it fails.
    """
    # What libraries keep from the first time on is not a graph's.
    if _measured(capture, 1, device, of) is None:
        return None
    largest = _measured(capture, 1, device, of)
    both = None if largest is None else _measured(capture, 2, device, of)
    if largest is None or both is None:
        return None
    return largest + max(both - largest, 0) * (num_buckets - 1)


def _measured(
    capture: Callable[[int], object | None], num_graphs: int, device: torch.device, of: str
) -> int | None:
    """Return the bytes that so many graphs take, the largest ones; None if it fails."""
    try:
        _tidy(device)  # a capture does so, too: what it frees would be taken for its own
        before = free_memory(device)
        graphs = capture(num_graphs)
        taken = None if graphs is None else max(before - free_memory(device), 0)
        del graphs
        _tidy(device)
    except RuntimeError as error:  # a capture that broke off may leave the allocator in its midst
        warn(of, error)
        return None
    return taken


def _tidy(device: torch.device) -> None:
    """Give back all memory that is not in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that graphs are captured on: libraries keep memory for each."""
    return torch.cuda.Stream(device)


def in_cuda(device: torch.device) -> Capturing:
    """Return what captures CUDA graphs that share their memory: one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    stream = _capture_stream(device)

    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    work()
            finally:
                torch.cuda.set_stream(before)  # which a capture that broke off does not restore
        replay: Callable[[], None] = graph.replay
        return replay

    return capturing
