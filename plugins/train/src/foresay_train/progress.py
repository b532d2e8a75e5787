"""What a person sees while it goes on: a line a stage, and a bar on a terminal. All on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def say(text: str) -> None:
    """Print a line."""
    print(f"train: {text}", file=sys.stderr, flush=True)


@contextmanager
def bar(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar while the body runs, if stderr is a terminal; it vanishes afterwards.

    Yields a function that is told how many of `total` are done.
    """
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task(what, total=total, completed=done)

        def update(num_done: int) -> None:
            progress.update(task, completed=num_done)

        yield update
