"""Prompts with the target's replies to them, as token ids: what drafters are trained on.

One JSON object a line: `{"p": [prompt ids], "o": [reply ids]}`. Knows files, no models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reply:
    """One text: a prompt, templated, and the target's own reply."""

    prompt_ids: list[int]
    reply_ids: list[int]  # at least one

    @property
    def token_ids(self) -> list[int]:
        """The whole text."""
        return self.prompt_ids + self.reply_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.reply_ids)


def read_replies(path: Path) -> list[Reply]:
    """Read a file of replies; empty ones are left out. Raises `ConfigError` naming the line."""
    replies = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    replies.append(_parsed(line, f"{str(path)!r}, line {number}"))
    except OSError as error:
        raise ConfigError(f"replies {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"replies {str(path)!r} is no UTF-8 text: {error}") from error
    found = [reply for reply in replies if reply.reply_ids]
    if not found:
        raise ConfigError(f"replies {str(path)!r} holds no reply")
    return found


def reply_line(reply: Reply) -> str:
    """Return a reply as a line of a file."""
    return json.dumps({"p": reply.prompt_ids, "o": reply.reply_ids}) + "\n"


def digest(texts: Iterable[Sequence[int]]) -> str:
    """Return a short digest of texts, for telling whether something was made of the same ones."""
    found = hashlib.sha256()
    for text in texts:
        found.update(json.dumps(list(text)).encode())
    return found.hexdigest()[:16]


def _parsed(line: str, where: str) -> Reply:
    try:
        row: Any = json.loads(line)
        if not isinstance(row, dict) or not {"p", "o"} <= row.keys():
            raise ValueError("no object with 'p' and 'o'")
        if not (_are_ids(row["p"]) and row["p"] and _are_ids(row["o"])):
            raise ValueError("'p' and 'o' must be lists of token ids, 'p' not empty")
    except ValueError as error:
        raise ConfigError(
            f'{where}: {error}; expected {{"p": [prompt ids], "o": [reply ids]}}'
        ) from error
    return Reply(row["p"], row["o"])


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
