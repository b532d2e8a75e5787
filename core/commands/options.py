"""Options that several commands share: types for typer, and what becomes of them. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.core.errors import ConfigError
from foresay.core.plugins import PluginManager

if TYPE_CHECKING:
    from foresay.core.llm import LLM

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="An alias, a folder, a GGUF file, or a hub id."),
]
ProposerName = Annotated[
    str,
    typer.Option(
        "--proposer",
        "-p",
        help="A proposer's name, module:Class, a chain 'a,b', 'auto', or 'none'.",
    ),
]
Drafter = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help="The drafter's weights: a folder or a registered name, or a draft model as --model "
        "names one; NAME=... in a chain.",
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option("-k", help="Most draft tokens a step. Default: the proposer's own."),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Draft as much as pays, down to nothing, by what is measured; or always up to k.",
    ),
]
DraftTokensByBatch = Annotated[
    str | None,
    typer.Option(
        "--draft-tokens-by-batch",
        metavar="N:K,...",
        help="Draft tokens by the number of requests in a step, instead of what pays: 1:5,4:3,16:0 "
        "is up to 5 for fewer than 4 requests, none from 16 on.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the proposer; NAME.KEY=VALUE in a chain. Repeatable.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="'auto', 'float32', 'bfloat16' or 'float16'.")]
Device = Annotated[str, typer.Option("--device", help="'auto', 'cpu', 'cuda' or 'cuda:N'.")]
Quantization = Annotated[
    str,
    typer.Option(
        "--quantization",
        help="How a CPU keeps weights: 'int8', rounded to it; 'float16', where nothing is lost by "
        "it that counts; 'none', as they are; 'auto': 'float16' where it computes in float32.",
    ),
]
DrafterQuantization = Annotated[
    str,
    typer.Option(
        "--drafter-quantization",
        help="A drafter's weights: 'int8', 'none' (as they are), or 'auto': int8 where that pays.",
    ),
]
EnforceEager = Annotated[
    bool,
    typer.Option(
        "--enforce-eager", help="On a GPU, run every operation by itself: no CUDA graphs."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of the answer.")]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token always.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; -1: all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this times the best.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends the answer. Repeatable.")]
Stats = Annotated[bool, typer.Option("--stats/--no-stats", help="Print the figures to stderr.")]


def parse_settings(pairs: Sequence[str] | None, proposer: str) -> dict[str, Any]:
    """Turn `key=value` pairs into settings: a value that reads as JSON is that, else text.

    For a chain, whose pairs are `name.key=value`, the settings are by proposer.
    """
    flat = _parse_pairs(pairs)
    members = [member.strip() for member in proposer.split(",")]
    if len(members) == 1:
        return {key.removeprefix(f"{proposer}."): value for key, value in flat.items()}
    settings: dict[str, Any] = {}
    for key, value in flat.items():
        # By the longest name: that of a class has dots of its own.
        owners = [member for member in members if key.startswith(f"{member}.")]
        if not owners:
            raise ConfigError(
                f"--set {key!r}: in a chain, say whose setting it is: --set {members[0]}.{key}=... "
                f"(the chain: {', '.join(members)})"
            )
        owner = max(owners, key=len)
        settings.setdefault(owner, {})[key.removeprefix(f"{owner}.")] = value
    return settings


def _parse_pairs(pairs: Sequence[str] | None) -> dict[str, Any]:
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


def parse_drafters(drafters: Sequence[str] | None, proposer: str) -> str | dict[str, str] | None:
    """Turn what `--drafter` gave into a drafter; for a chain, into drafters by proposer."""
    if not drafters:
        return None
    if "," not in proposer:
        if len(drafters) > 1:
            raise ConfigError(f"--drafter is given {len(drafters)} times for one proposer")
        return drafters[0]
    by_name: dict[str, str] = {}
    for drafter in drafters:
        name, equals, path = drafter.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--drafter {drafter!r}: in a chain, say whose it is: --drafter NAME={drafter}"
            )
        if name in by_name:
            raise ConfigError(f"--drafter {drafter!r}: {name!r} has one already")
        by_name[name] = path
    return by_name


def parse_by_batch(text: str | None) -> dict[int, int] | None:
    """Turn `1:5,4:3` into draft tokens by numbers of requests; what they may be, LLM checks."""
    if text is None:
        return None
    try:
        pairs = [(int(number), int(k)) for number, k in (p.split(":") for p in text.split(","))]
    except ValueError:
        raise ConfigError(
            f"--draft-tokens-by-batch {text!r}: expected REQUESTS:TOKENS,..., e.g. 1:5,4:3,16:0"
        ) from None
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ConfigError(f"--draft-tokens-by-batch {text!r}: a number of requests is given twice")
    return table


def open_llm(
    model: str,
    *,
    plugins: PluginManager,
    proposer: str,
    drafter: Sequence[str] | None = None,
    k: int | None = None,
    settings: Sequence[str] | None = None,
    by_batch: str | None = None,
    **engine: Any,
) -> LLM:
    """Load a model as the options say. Imports torch; raises `ForesayError`."""
    parsed = parse_settings(settings, proposer)
    table = parse_by_batch(by_batch)
    drafters = parse_drafters(drafter, proposer)
    from foresay.core.llm import LLM

    return LLM(
        model=model,
        plugins=plugins,
        proposer=None if proposer == "none" else proposer,
        drafter=drafters,
        num_speculative_tokens=k,
        proposer_settings=parsed,
        draft_tokens_by_batch=table,
        **engine,
    )
