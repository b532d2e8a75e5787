"""How often a head's candidates are right, by their rank; and what its probabilities promised.

Measured on replies that the heads were not trained on, kept beside their weights, and corrected by
what the target says while they draft. Knows numbers and ranks; no tokens, no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foresay.core.errors import ModelError

FILE = "accuracies.json"
NUM_CANDIDATES = 16  # of each head that are looked at: the likeliest
NUM_RANKS = 8  # that are told apart

# Of heads without a file: a guess, near to what the shipped ones have. It only says how many tokens
# are to be seen before what they show counts, for their probabilities are believed until then.
_GUESS = (0.35, 0.1, 0.06, 0.04, 0.03, 0.025, 0.02, 0.015)
_PRIOR = 300.0  # tokens that the file, or the guess, counts for at most
_REMADE_AFTER = 256  # tokens
_MEMORY = 20_000  # tokens of a head; then half of them are forgotten


class _Head:
    """What is known of one head: sums over the tokens at its place, by rank."""

    __slots__ = ("num_tokens", "promised", "right")

    def __init__(self, right: Sequence[float], promised: Sequence[float], weight: float) -> None:
        self.num_tokens = weight
        self.right = [weight * share for share in right]
        self.promised = [weight * share for share in promised]

    def halve(self) -> None:
        self.num_tokens /= 2
        self.right = [value / 2 for value in self.right]
        self.promised = [value / 2 for value in self.promised]

    def factors(self) -> list[float]:
        return [right / promised for right, promised in zip(self.right, self.promised, strict=True)]


class Accuracies:
    """What each head's probabilities are worth.

    Of head h, at the places where the heads before it had the target's tokens among their
    candidates: how often its candidate of rank r was the target's token, over the mean probability
    that it gave this candidate. That factor times a candidate's own probability is its value.
    """

    def __init__(self, heads: Sequence[_Head]) -> None:
        self._heads = list(heads)
        self._num_new = 0
        self._factors = [head.factors() for head in self._heads]

    @classmethod
    def guess(cls, num_heads: int) -> Accuracies:
        """Return those of heads of which nothing is known: all factors are 1."""
        return cls([_Head(_GUESS, _GUESS, _PRIOR) for _ in range(num_heads)])

    @classmethod
    def read(cls, folder: str, num_heads: int) -> Accuracies:
        """Read the file beside the heads' weights; heads that it lacks are guessed.

        Raises `ModelError` for a file that is of another form.
        """
        path = Path(folder) / FILE
        found = cls.guess(num_heads)
        if not path.is_file():
            return found
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            rows = zip(fields["heads"], fields["promised"], fields["tokens"], strict=True)
            heads = [
                _Head(_shares(right), _shares(promised), min(max(float(tokens), 1.0), _PRIOR))
                for right, promised, tokens in rows
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{str(path)!r} cannot be read: {error!r}; delete it, and what the heads' "
                "probabilities are worth is learnt while they draft"
            ) from error
        return cls([*heads, *found._heads[len(heads) :]][:num_heads])

    def values(self, head: int, probabilities: Sequence[float]) -> list[float]:
        """Return how probable each of a head's candidates is, the likeliest by itself first."""
        factors = self._factors[head]
        last = factors[-1]
        return [
            min(1.0, p * (factors[rank] if rank < NUM_RANKS else last))
            for rank, p in enumerate(probabilities)
        ]

    def see(self, head: int, probabilities: Sequence[float], rank: int | None) -> None:
        """Take in which of a head's candidates was right; None: none of them."""
        own = self._heads[head]
        own.num_tokens += 1
        for place, probability in enumerate(probabilities[:NUM_RANKS]):
            own.promised[place] += probability
        if rank is not None and rank < NUM_RANKS:
            own.right[rank] += 1
        if own.num_tokens > _MEMORY:
            own.halve()
        self._num_new += 1
        if self._num_new >= _REMADE_AFTER:
            self._num_new = 0
            self._factors = [head.factors() for head in self._heads]


def _shares(row: Any) -> list[float]:
    values = [float(value) for value in row]
    if len(values) != NUM_RANKS or not all(0.0 < value <= 1.0 for value in values):
        raise ValueError(f"{row}: expected {NUM_RANKS} numbers above 0, at most 1")
    return values
