"""Options that several commands share: types for typer, and what becomes of them. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.core.errors import ConfigError
from foresay.core.plugins import PluginManager

if TYPE_CHECKING:
    from foresay.core.engine import LLM

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="An alias, a folder, a GGUF file, or a hub id."),
]
ProposerName = Annotated[
    str,
    typer.Option("--proposer", "-p", help="A proposer's name, module:Class, 'auto', or 'none'."),
]
Drafter = Annotated[
    str | None,
    typer.Option("--drafter", help="The drafter's weights: a folder or a registered name."),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option("-k", help="Most draft tokens a step. Default: the proposer's own."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the proposer. Repeatable."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="'auto', 'float32', 'bfloat16' or 'float16'.")]
Device = Annotated[str, typer.Option("--device", help="'auto', 'cpu', 'cuda' or 'cuda:N'.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of the answer.")]


def parse_settings(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Turn `key=value` pairs into settings: a value that reads as JSON is that, else text."""
    settings: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {pair!r}: expected key=value")
        if key in settings:
            raise ConfigError(f"--set {pair!r}: {key!r} is given twice")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def open_llm(
    model: str,
    *,
    plugins: PluginManager,
    proposer: str,
    drafter: str | None = None,
    k: int | None = None,
    settings: Sequence[str] | None = None,
    **engine: Any,
) -> LLM:
    """Load a model as the options say. Imports torch; raises `ForesayError`."""
    parsed = parse_settings(settings)
    from foresay.core.engine import LLM

    return LLM(
        model=model,
        plugins=plugins,
        proposer=None if proposer == "none" else proposer,
        drafter=drafter,
        num_speculative_tokens=k,
        proposer_settings=parsed,
        **engine,
    )
