"""What an output did to the text it follows, so that it can be expected to do it again.

A renamed variable is renamed wherever it stands; a list that gets bullets gets one on each line.
Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Edit(NamedTuple):
    """The text has `old` where the output has `new`; one of the two may be empty."""

    old: tuple[int, ...]
    new: tuple[int, ...]


class Edits:
    """The edits of one text that are expected to recur.

    A replacement or deletion recurs wherever the text has the same `old`. What two edits in a row
    after the same token begin with is inserted after that token again, if what they replaced was
    not the same, or nothing. Of several that may recur in a place the most recent counts, and none
    when the output kept the text there.
    """

    __slots__ = ("_inserted", "_latest", "_replaced", "_text")

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._replaced: dict[int, Edit] = {}  # by the first token of `old`
        self._latest: dict[int, Edit] = {}  # by the token before
        self._inserted: dict[int, Edit] = {}  # what the last two of those have in common

    def learn(self, before: int | None, edit: Edit) -> None:
        """Take note of an edit after the output's token `before`, None: at its beginning."""
        if edit.old:
            self._replaced[edit.old[0]] = edit
        if before is None:
            return
        latest = self._latest.get(before)
        if latest is not None and (edit.old != latest.old or not edit.old):
            new = _common_prefix(latest.new, edit.new)
            if new:
                self._inserted[before] = Edit((), new)
            else:
                self._inserted.pop(before, None)
        self._latest[before] = edit

    def expected(self, start: int) -> Edit | None:
        """Return the edit to expect at a position of the text, if any."""
        if start >= len(self._text):
            return None
        edit = self._replaced.get(self._text[start])
        if edit is not None and tuple(self._text[start : start + len(edit.old)]) == edit.old:
            return edit
        return self._inserted.get(self._text[start - 1]) if start > 0 else None

    def forget(self, start: int, edit: Edit) -> None:
        """Expect the edit no more: it did not recur at `start`."""
        if edit.old:
            self._replaced.pop(edit.old[0], None)
        else:
            self._inserted.pop(self._text[start - 1], None)
            self._latest.pop(self._text[start - 1], None)


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]
