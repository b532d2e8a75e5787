"""`foresay plugins`: every plugin found, what it offers, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from foresay.core.commands.table import print_table
from foresay.core.offers import PluginRecord
from foresay.core.plugins import DISABLE_VARIABLE, PluginManager


def plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the installed plugins: what they offer, and what is wrong with them."""
    manager: PluginManager = context.obj
    if as_json:
        print(json.dumps([record.row() for record in manager.records], indent=2))
        return
    if not manager.records:
        print("no plugin is installed")
        return
    print_table(
        ["plugin", "distribution", "version", "status", "offers"],
        [
            [
                record.entry_point,
                record.distribution,
                record.version,
                record.status,
                _offers(record),
            ]
            for record in manager.records
        ],
    )
    for record in manager.records:
        if record.error:
            print(f"\n{record.entry_point}: {record.error}")
    if any(record.status == "disabled" for record in manager.records):
        print(f"\ndisabled: named in {DISABLE_VARIABLE}")


def _offers(record: PluginRecord) -> str:
    kinds = {
        "proposer": record.proposers,
        "model": record.models,
        "drafter": record.drafters,
        "command": record.commands,
    }
    return ", ".join(f"{kind} {name}" for kind, names in kinds.items() for name in names)
