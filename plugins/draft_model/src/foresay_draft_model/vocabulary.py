"""What the tokens of two tokenizers have in common. Knows tokenizers, no model and no request.

Tokens are compared by the bytes that they stand for, since tokenizers write them differently: a
leading space is "Ġ" in one and "▁" in another, a single byte "<0xE2>" or "â". Special tokens (end
of text and the like) are compared with special ones, by their names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACE = "▁"  # a space, as SentencePiece writes it
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MOSTLY = 0.99  # of the tokens: some have a few that were never meant to be read


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one tokenizer, by id."""

    names: Sequence[str | None]  # as the tokenizer writes them; None: an id without a token
    texts: Sequence[bytes | None]
    added_ids: frozenset[int]  # besides what the tokenizer was trained to; special ones among them
    special_ids: frozenset[int]
    byte_ids: frozenset[int]  # single bytes, for what has no other token
    bos_id: int | None
    eos_id: int | None

    @staticmethod
    def of(tokenizer: Any, size: int) -> Vocabulary | None:
        """Return the tokens with ids below `size`; None for no tokenizer."""
        if tokenizer is None:
            return None
        names: list[str | None] = [None] * size
        for name, token_id in tokenizer.get_vocab().items():
            if 0 <= token_id < size:
                names[token_id] = name
        # Added tokens are written as they are, whatever the tokenizer does to the others.
        added = dict(getattr(tokenizer, "added_tokens_decoder", None) or {})
        special = {i for i, token in added.items() if getattr(token, "special", True)}
        special.update(getattr(tokenizer, "all_special_ids", None) or ())
        plain = [name for i, name in enumerate(names) if name is not None and i not in added]
        of_bytes = _byte_alphabet()
        num_of_bytes = sum(all(char in of_bytes for char in name) for name in plain)
        is_byte_level = num_of_bytes >= _MOSTLY * len(plain)
        has_space_sign = not is_byte_level and any(name.startswith(_SPACE) for name in plain)
        texts: list[bytes | None] = []
        byte_ids = set()
        for token_id, name in enumerate(names):
            if name is None:
                texts.append(None)
            elif token_id in added or token_id in special:
                texts.append(name.encode())
            elif is_byte_level:
                texts.append(b"".join(of_bytes.get(char, char.encode()) for char in name))
            elif has_space_sign and (match := _BYTE_TOKEN.fullmatch(name)):
                texts.append(bytes.fromhex(match[1]))
                byte_ids.add(token_id)
            else:
                texts.append((name.replace(_SPACE, " ") if has_space_sign else name).encode())
        return Vocabulary(
            names,
            texts,
            frozenset({*added, *special}),
            frozenset(special),
            frozenset(byte_ids),
            _token_id(tokenizer, "bos_token_id", size),
            _token_id(tokenizer, "eos_token_id", size),
        )

    def first_difference(self, target: Vocabulary) -> str | None:
        """Say which id means something else in a target's tokenizer; None: it is the same one.

        Either may have more tokens than the other. But if the target has more that are no added
        ones, for control, then its tokenizer cuts texts into other tokens.
        """
        for token_id, its_text in enumerate(target.texts):
            text = self.texts[token_id] if token_id < len(self.texts) else None
            if its_text is None or text == its_text:
                continue
            there = f"and {target.names[token_id]!r} in the target"
            if text is not None:
                return f"token {token_id} is {self.names[token_id]!r} there, {there}"
            if token_id not in target.added_ids:
                return f"token {token_id} is missing there, {there}"
        return None

    def by_text(self, *, special: bool) -> dict[bytes, int]:
        """Return the ids of all texts; of several with one text a whole token's, the lowest."""
        found: dict[bytes, int] = {}
        for token_id, text in enumerate(self.texts):
            if text and (token_id in self.special_ids) == special:
                known = found.setdefault(text, token_id)
                if known in self.byte_ids and token_id not in self.byte_ids:
                    found[text] = token_id
        return found


class Intersection:
    """The tokens that a drafter and its target both have, and how the target's others are spelt.

    `draft_ids` are the drafter's tokens that the target has too, ascending, and `target_ids` what
    each of them is there. Several of one text are the same token of the target.
    """

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        to_target: dict[int, int] = {}
        to_draft: dict[int, int] = {}
        for special in (False, True):
            theirs, ours = target.by_text(special=special), draft.by_text(special=special)
            for draft_id, text in enumerate(draft.texts):
                if text in theirs and (draft_id in draft.special_ids) == special:
                    to_target[draft_id] = theirs[text]
            for target_id, text in enumerate(target.texts):
                if text in ours and (target_id in target.special_ids) == special:
                    to_draft[target_id] = ours[text]
        # The ends of a text correspond whatever they are called.
        for own, its in ((draft.eos_id, target.eos_id), (draft.bos_id, target.bos_id)):
            if own is not None and its is not None:
                to_target.setdefault(own, its)
                to_draft.setdefault(its, own)
        self.draft_ids = sorted(to_target)
        self.target_ids = [to_target[draft_id] for draft_id in self.draft_ids]
        self._draft, self._target = draft, target
        self._to_draft = to_draft
        self._draft_by_text = draft.by_text(special=False)
        self._longest = max(map(len, self._draft_by_text), default=0)
        self._spelt: dict[int, tuple[int, ...]] = {}  # no more than the target has tokens

    @property
    def coverage(self) -> str:
        """Say how much of either vocabulary is in both."""
        num_draft, num_target = (
            sum(text is not None for text in vocabulary.texts)
            for vocabulary in (self._draft, self._target)
        )
        shared = len(self.draft_ids)
        return (
            f"{shared:,} of its {num_draft:,} tokens ({_percent(shared, num_draft)}) are tokens of "
            f"the target, {_percent(len(self._to_draft), num_target)} of the target's "
            f"{num_target:,}"
        )

    def in_draft_tokens(self, target_id: int) -> tuple[int, ...]:
        """Return a token of the target in the drafter's: the same one, or its text spelt out.

        Spelt from left to right, each time the longest token that fits; a byte that the drafter
        has no token for is left out.
        """
        spelt = self._spelt.get(target_id)
        if spelt is None:
            draft_id = self._to_draft.get(target_id)
            spelt = self._spell(target_id) if draft_id is None else (draft_id,)
            self._spelt[target_id] = spelt
        return spelt

    def _spell(self, target_id: int) -> tuple[int, ...]:
        text = self._target.texts[target_id]
        spelt = []
        at, end = 0, len(text or b"")
        while text and at < end:
            for stop in range(min(end, at + self._longest), at, -1):
                draft_id = self._draft_by_text.get(text[at:stop])
                if draft_id is not None:
                    spelt.append(draft_id)
                    at = stop
                    break
            else:
                at += 1
        return tuple(spelt)


def added_bos(tokenizer: Any) -> int | None:
    """Return the token that a tokenizer puts before every text, if any."""
    ids = tokenizer("a")["input_ids"]
    bos = getattr(tokenizer, "bos_token_id", None)
    return int(bos) if bos is not None and ids[:1] == [bos] else None


def _token_id(tokenizer: Any, attribute: str, size: int) -> int | None:
    token_id = getattr(tokenizer, attribute, None)
    return token_id if isinstance(token_id, int) and 0 <= token_id < size else None


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "n/a"


@functools.cache
def _byte_alphabet() -> Mapping[str, bytes]:
    """Return the byte that each character of a byte-level token stands for, as in GPT-2."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    shown += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in set(shown)]
    alphabet = {chr(byte): bytes([byte]) for byte in shown}
    return alphabet | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}
