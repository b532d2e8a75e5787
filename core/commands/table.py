"""A table and a progress bar for a person: fitted to a terminal, plain or silent in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_UNBROKEN = 10_000  # columns: in a pipe nothing is folded or cut, so that `grep` sees whole rows


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of plain text to stdout."""
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _UNBROKEN
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: brackets in a description are no markup
    console.print(table)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on stderr while the body runs; it vanishes afterwards.

    Yields a function that says what is under way ("" leaves it) and how many more are done.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("warming up", total=total)

        def advance(doing: str, num_done: int) -> None:
            if doing:
                bar.update(task, description=escape(doing))
            bar.advance(task, num_done)

        yield advance
