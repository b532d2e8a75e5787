"""Progress for a person to see: a bar on a terminal, a plain line per step anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows one step at a time on `stream`, as long as it is entered."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: Bars | None = None
        if stream.isatty():
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                # The stream itself, not "stderr": that may be redirected while a step runs.
                console=Console(file=stream),
                transient=True,
            )

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def step(self, text: str) -> None:
        """Begin a step; the one before it is over."""
        if self._bars is None:
            print(f"smollm2: {text}", file=self._stream, flush=True)
            return
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._bars.add_task(f"smollm2: {text}", total=None)

    def update(self, completed: int, total: int) -> None:
        """Say how far the step is; on anything but a terminal this is not shown."""
        if self._bars is not None:
            for task in self._bars.task_ids:
                self._bars.update(task, completed=completed, total=total)
