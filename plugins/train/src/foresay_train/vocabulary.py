"""Which tokens a drafter drafts: those most frequent in the replies. Knows counts only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foresay_train.replies import Reply


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The target ids to be drafted."""

    ids: list[int] | None  # ascending; None: all
    size: int
    coverage: float  # the part of the replies' tokens that is among them


def choose(replies: Sequence[Reply], size: int | None, vocab_size: int) -> DraftVocabulary:
    """Take the `size` most frequent tokens of the replies; None, or the vocabulary's size: all.

    Where the replies have fewer, those of the prompts come next, then the lowest ids, which are the
    earliest merges in most tokenizers.
    """
    if size is None or size >= vocab_size:
        return DraftVocabulary(None, vocab_size, 1.0)
    counts = _count(reply.reply_ids for reply in replies)
    asked = _count(reply.prompt_ids for reply in replies)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], -asked[token], token))
    ids = sorted(ranked[:size])
    covered = sum(counts[token] for token in ids)
    return DraftVocabulary(ids, size, covered / max(1, counts.total()))


def _count(texts: Iterable[Sequence[int]]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text)
    return counts
