"""Prompts in a JSON Lines file, in the forms that such files have. Knows no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.core.errors import ConfigError

Message = dict[str, str]
_FORMS = '{"prompt": text}, {"turns": [text, ...]} or {"messages": [{"role", "content"}, ...]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a row asks, as a conversation whose next turn is the model's."""

    messages: list[Message]
    where: str  # the file and line, for messages


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts; `ConfigError` names the line of a bad row. Blank lines are skipped.

    Of several turns the first is taken; of messages, those up to the last of the user's.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--prompts {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {str(path)!r} is no UTF-8 text ({error.reason})") from None
    prompts = []
    # Not splitlines: a text in JSON may hold other line separators of Unicode as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"--prompts {str(path)!r}, line {number}"
            prompts.append(Prompt(_messages(line, where), where))
    if not prompts:
        raise ConfigError(f"--prompts {str(path)!r} has no prompts: it is empty")
    return prompts


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Return a short digest of what is asked."""
    asked = json.dumps([prompt.messages for prompt in prompts])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def _messages(line: str, where: str) -> list[Message]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected {_FORMS}, not {_show(row)}")
    if "messages" in row:
        return _conversation(row["messages"], where)
    if "prompt" in row:
        return [{"role": "user", "content": _text(row["prompt"], f"{where}: 'prompt'")}]
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{where}: 'turns' is {_show(turns)}: expected a list of texts")
        return [{"role": "user", "content": _text(turns[0], f"{where}: 'turns'")}]
    raise ConfigError(
        f"{where}: expected {_FORMS} (it has {', '.join(map(repr, row)) or 'nothing'})"
    )


def _conversation(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(f"{where}: 'messages' is {_show(messages)}: expected a list of messages")
    found = [
        {
            "role": _text(message.get("role"), f"{where}: 'role' of message {index}"),
            "content": _text(message.get("content"), f"{where}: 'content' of message {index}"),
        }
        for index, message in enumerate(messages)
    ]
    last = max((i for i, message in enumerate(found) if message["role"] == "user"), default=None)
    if last is None:
        raise ConfigError(f"{where}: 'messages' has none of the role 'user' to answer")
    return found[: last + 1]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{what} is {_show(value)}: expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is {_show(value)}: no valid text, half of a pair") from None
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
