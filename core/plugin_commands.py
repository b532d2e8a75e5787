"""Add the commands of plugins to the command line, so that no plugin can break it.

Each plugin fills an app of its own, which is built once to see that it can be: what typer cannot
build, it would otherwise refuse while building the whole command line. What is sound and claimed
by one plugin only is then moved to foresay's app. Knows typer's public objects and nothing of
hooks; does not know what the commands do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import typer
from typer.main import get_group
from typer.models import CommandInfo, TyperInfo

from foresay.core.errors import PluginError, one_line
from foresay.core.offers import Offers, PluginRecord

Fill = Callable[[typer.Typer], None]


@dataclass(frozen=True, slots=True)
class _Command:
    """One command, or one sub-app with commands of its own."""

    info: CommandInfo | TyperInfo

    def add_to(self, app: typer.Typer) -> None:
        if isinstance(self.info, CommandInfo):
            app.registered_commands.append(self.info)
        else:
            app.registered_groups.append(self.info)

    def names(self) -> list[str]:
        """The names it takes: one, or for a nameless sub-app those of its commands."""
        alone = typer.Typer()
        self.add_to(alone)
        return list(get_group(alone).commands)


def add_commands(app: typer.Typer, plugins: Iterable[tuple[PluginRecord, Fill]]) -> None:
    """Let every plugin add its commands to `app`, and note what cannot be added in its record."""
    own = set(get_group(app).commands)
    offers: Offers[_Command] = Offers("command")
    for record, fill in plugins:
        try:
            commands = _commands_of(fill)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a plugin may raise
            record.fail("commands", f"foresay_register_commands raised {one_line(error)}")
            continue
        for command in commands:
            record.commands += command.names()
            taken = own.intersection(command.names())
            for name in taken:
                record.fail(f"command {name}", f"command {name!r} exists already in foresay itself")
            for name in command.names() if not taken else ():
                offers.add(name, command, record)
    usable = offers.usable()
    for command in dict.fromkeys(usable.values()):
        if all(usable.get(name) is command for name in command.names()):
            command.add_to(app)
    for name, clash in offers.clashes().items():
        _refuse(app, name, clash)


def _refuse(app: typer.Typer, name: str, error: str) -> None:
    """Answer a command that several plugins offer with an error that names them."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command(name, hidden=True, add_help_option=False, context_settings=anything)
    def refused() -> None:
        raise PluginError(error)


def _commands_of(fill: Fill) -> list[_Command]:
    scratch = typer.Typer()
    fill(scratch)
    if scratch.registered_callback is not None:
        raise ValueError("a plugin can add commands to the app, not a callback")
    commands = [_Command(info) for info in scratch.registered_commands]
    commands += [_Command(info) for info in scratch.registered_groups]
    for command in commands:
        command.names()  # builds it
    return commands
