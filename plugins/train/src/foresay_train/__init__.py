"""The train plugin's face: the command `foresay train`. Imports no torch.

What the command does is imported when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foresay import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def foresay_register_commands(app: typer.Typer) -> None:
    """Add `foresay train`."""
    from foresay_train.command import train

    app.command("train")(train)
