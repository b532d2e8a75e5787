"""`foresay models`: the short names for target models, and where their files are."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from foresay.core.commands.table import print_table
from foresay.core.plugins import PluginManager


def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models that have a short name, and where they are on this machine."""
    manager: PluginManager = context.obj
    located = {name: manager.locate_model(name) for name in manager.models}
    if as_json:
        rows = [
            {
                "name": alias.name,
                "description": alias.description,
                "path": str(located[name]) if located[name] else None,
            }
            for name, alias in manager.models.items()
        ]
        print(json.dumps(rows, indent=2))
        return
    if not located:
        print("no model has a short name here; --model takes a folder, a GGUF file or a hub id")
        return
    print_table(
        ["model", "description", "path"],
        [
            [name, alias.description, str(located[name] or "(fetched when first used)")]
            for name, alias in manager.models.items()
        ],
    )
