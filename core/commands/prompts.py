"""The prompts that `foresay bench` measures on: read from a JSON Lines file, each row checked.

A row is `{"id", "task", "turns": [...]}`, as Spec-Bench has it; `"prediction"`, a text that the
answer will resemble, is optional, and what else a row holds is left alone. Knows no model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from foresay.core.errors import ConfigError, RequestError, nearest
from foresay.core.inputs import check_text

ALL = "ALL"  # the rows that pool all tasks: no task may have the name


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt of a data file: its first turn."""

    id: str
    task: str
    text: str
    prediction: str | None


def read_prompts(file: Traversable) -> list[BenchPrompt]:
    """Return the prompts of a file; `ConfigError` names file and line."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--data {str(file)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--data {str(file)!r} is no UTF-8 text ({error.reason})") from None
    prompts = []
    # Not splitlines: a text in JSON may hold other line separators of Unicode as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            prompts.append(_prompt(line, f"--data {str(file)!r}, line {number}", number))
    if not prompts:
        raise ConfigError(f"--data {str(file)!r} has no prompts: it is empty")
    return prompts


def shipped(name: str) -> Traversable:
    """Return a file of prompts that comes with the commands."""
    return resources.files("foresay.core.commands").joinpath(name)


def select(
    prompts: Sequence[BenchPrompt], tasks: Sequence[str] | None, limit: int | None
) -> list[BenchPrompt]:
    """Keep the first `limit` prompts of each task, or of each of `tasks`; grouped by task."""
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    for task in tasks or ():
        if task not in known:
            raise ConfigError(
                f"--task {task!r}: no such task{nearest(task, known)} (tasks: {', '.join(known)})"
            )
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.task] += 1
        if (not tasks or prompt.task in tasks) and (limit is None or seen[prompt.task] <= limit):
            kept.append(prompt)
    return sorted(kept, key=lambda prompt: known.index(prompt.task))


def _prompt(line: str, where: str, number: int) -> BenchPrompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: expected {{"id", "task", "turns": [...]}}, not {_show(row)}')
    for key in ("task", "turns"):
        if key not in row:
            raise ConfigError(
                f'{where} has no {key!r}: expected {{"id", "task", "turns": [...]}} '
                f"(it has {', '.join(map(repr, row)) or 'nothing'})"
            )
    turns = row["turns"]
    if not (isinstance(turns, list) and turns and all(_is_text(turn) for turn in turns)):
        raise ConfigError(f"{where}: 'turns' is {_show(turns)}: expected a list of texts")
    task = row["task"]
    if not _is_text(task) or task == ALL:
        raise ConfigError(f"{where}: 'task' is {_show(task)}: expected a name other than {ALL!r}")
    prediction = row.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise ConfigError(f"{where}: 'prediction' is {_show(prediction)}: expected a text")
    try:
        check_text(turns[0], "the turn")
        check_text(task, "'task'")
        check_text(prediction or "", "'prediction'")
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from None
    return BenchPrompt(str(row.get("id", number)), task, turns[0], prediction or None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
