"""From token ids to text, one token at a time: characters, stop strings, and what may be shown.

`TokenDecoder` wraps a tokenizer; `OutputText` holds one request's text. They know tokens and
strings; nothing of requests, sampling or why an output ends.

The text of an output is what its tokens add to the text of the prompt before them: a tokenizer that
strips a leading space strips it from the prompt. For tokenizers that don't (all byte-level ones) it
equals `tokenizer.decode(output_ids, skip_special_tokens=True)`. Spaces are never "cleaned up":
that would rewrite text that was already shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what tokenizers print for bytes that are no (or no complete) character

# An incomplete UTF-8 character has at most three bytes, so at most the last three tokens can be
# waiting for its end. What stands before them is settled, even if it prints as U+FFFD.
_MOST_PENDING = 3
_MOST_WINDOW = 16  # tokens; the window is cut back to the last two clean points when it is longer
_PROMPT_TAIL = 8  # prompt tokens that the first output token is decoded after


class TokenDecoder:
    """A tokenizer as `OutputText` needs it; shared by all requests of an engine."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        special = set(getattr(tokenizer, "all_special_ids", ()))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special.update(token_id for token_id, token in added.items() if token.special)
        self.special_ids = frozenset(special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def prompt_tail(self, token_ids: Sequence[int]) -> list[int]:
        """Return the last few tokens that have text, cut between two characters if possible."""
        tail: list[int] = []
        for token_id in reversed(token_ids):
            if token_id not in self.special_ids:
                tail.append(token_id)
                if len(tail) == _PROMPT_TAIL:
                    break
        tail.reverse()
        for start in range(_MOST_PENDING + 1):
            if not self.decode(tail[start:]).startswith(REPLACEMENT):
                return tail[start:]
        return tail


class _Detokenizer:
    """Turns tokens into text as they come, each character when it is complete.

    Decodes a window of the last few tokens with every new one and takes what was added, so a token
    costs the same at any length. The window starts at a *clean point*: after a token with which the
    text did not end in U+FFFD; it always keeps one token before the ones it adds, since decoders
    treat the first token of a text differently.
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._ids = decoder.prompt_tail(prompt_token_ids)
        self._given = decoder.decode(self._ids) if self._ids else ""  # the window's text so far
        self._num_given = len(self._ids)  # tokens of the window that `_given` covers
        self._clean_points = (0, len(self._ids))  # the last two, as indices into the window

    def append(self, token_id: int) -> str:
        """Return the text that this token settles: often its own, `""` within a character."""
        if token_id in self._decoder.special_ids:
            return ""
        self._ids.append(token_id)
        window = self._decoder.decode(self._ids)
        if not window.endswith(REPLACEMENT):
            added = self._give(window, len(self._ids))
            self._clean_points = (self._clean_points[1], len(self._ids))
        elif len(self._ids) - self._num_given > _MOST_PENDING:
            settled = len(self._ids) - _MOST_PENDING
            added = self._give(self._decoder.decode(self._ids[:settled]), settled)
        else:
            return ""
        if len(self._ids) > _MOST_WINDOW:
            self._cut()
        return added

    def flush(self) -> str:
        """Return what is still held back, an unfinished character as the tokenizer prints it."""
        if self._num_given == len(self._ids):
            return ""
        return self._give(self._decoder.decode(self._ids), len(self._ids))

    def _give(self, window: str, num_tokens: int) -> str:
        given = self._given
        self._given, self._num_given = window, num_tokens
        if window.startswith(given):
            return window[len(given) :]
        # A character that the prompt left unfinished has been completed.
        kept = given.rstrip(REPLACEMENT)
        if window.startswith(kept) and kept != given:
            return window[len(kept) :]
        # Byte-fallback decoders print a whole run of bytes as U+FFFD if one of them is wrong. What
        # was shown stays; as many characters as there should be are added.
        return window[len(given) :]

    def _cut(self) -> None:
        start = self._clean_points[0]
        if self._num_given - start > _MOST_WINDOW:  # no clean point for long: all but noise
            start = self._num_given - _MOST_PENDING
        if start == 0:
            return
        del self._ids[:start]
        self._num_given -= start
        first, second = self._clean_points
        self._clean_points = (max(first - start, 0), max(second - start, 0))
        self._given = self._decoder.decode(self._ids[: self._num_given])


class OutputText:
    """The text of one request: appended to by token, cut at a stop string, read by piece.

    Of several stop strings the one that is complete first, character by character, wins, whatever
    the tokens' borders; of two that end together, the longer. Text is released as soon as it can't
    be part of a stop string any more; what is released is never taken back.
    """

    def __init__(
        self, decoder: TokenDecoder, prompt_token_ids: Sequence[int], stop: Iterable[str] = ()
    ) -> None:
        self._detokenizer = _Detokenizer(decoder, prompt_token_ids)
        self._stop = tuple(stop)
        self._longest_hold = max((len(string) for string in self._stop), default=1) - 1
        self._held = ""  # the longest end of the text that could begin a stop string
        self._released: list[str] = []
        self._num_taken = 0  # pieces of `_released` that `take` has returned
        self._finished = False

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token; return the stop string that it completes, if one counts.

        The text is then cut before the stop string and nothing may be appended any more. With
        `may_stop` False, a stop string that this token completes is ordinary text.
        """
        assert not self._finished
        added = self._detokenizer.append(token_id)
        if not added:
            return None
        text = self._held + added
        if may_stop:
            found = self._find_stop(text)
            if found is not None:
                start, string = found
                self._release(text[:start])
                self._held = ""
                self._finished = True
                return string
        hold = self._hold_length(text)
        self._release(text[: len(text) - hold])
        self._held = text[len(text) - hold :]
        return None

    def finish(self) -> None:
        """Release what is held back; the output has ended. Calling it again changes nothing."""
        if not self._finished:
            self._release(self._held + self._detokenizer.flush())
            self._held = ""
            self._finished = True

    def take(self) -> str:
        """Return the text released since the last call."""
        new = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return new

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Find the stop string that ends first, among those that end in the newly added text."""
        best: tuple[int, int, str] | None = None
        for string in self._stop:
            start = text.find(string, max(0, len(self._held) - len(string) + 1))
            if start >= 0 and (best is None or (start + len(string), start) < best[:2]):
                best = (start + len(string), start, string)
        return best[1:] if best is not None else None

    def _hold_length(self, text: str) -> int:
        for length in range(min(self._longest_hold, len(text)), 0, -1):
            end = text[-length:]
            if any(len(string) > length and string.startswith(end) for string in self._stop):
                return length
        return 0
