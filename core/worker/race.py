"""A draw as an exponential race: each token runs for `exponential(word) / weight`, the first wins.

Knows noise, token ids and weights; not logits, requests, or what the token is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from foresay.core.worker.noise import NoiseKey, exponential, token_words, vocabulary_words

_FEW, _MANY = 48, 2048


class Race(NamedTuple):
    """One draw: who takes part, with what chances, under which noise."""

    key: NoiseKey
    token_ids: torch.Tensor | None  # [n] int64, ascending, distinct; None: 0..n-1
    weights: torch.Tensor  # [n] float32: not negative, not all 0; need not sum to 1


def draw(races: Sequence[Race]) -> list[int]:
    """Return the token id that each race draws.

    The noise is the token's own, so a result depends neither on the tokens of weight 0, nor on
    whether they are listed, nor on the other races.
    """
    drawn = [-1] * len(races)
    contested: list[int] = []
    for i, (key, token_ids, weights) in enumerate(races):
        if token_ids is None:
            drawn[i] = _winner(vocabulary_words(key, weights.shape[0], weights.device), weights)
        elif token_ids.shape[0] == 1:
            drawn[i] = int(token_ids)
        elif token_ids.shape[0] > _MANY and (size := int(token_ids[-1]) + 1) < 4 * len(token_ids):
            # A counter gives the words of four neighbours: cheaper where most of them run.
            words = vocabulary_words(key, size, weights.device)[token_ids]
            drawn[i] = int(token_ids[_winner(words, weights)])
        else:
            contested.append(i)
    if contested:
        keys, listed, weighed = zip(*(races[i] for i in contested), strict=True)
        for i, ids, winner in zip(
            contested, listed, map(_winner, token_words(keys, listed), weighed), strict=True
        ):
            drawn[i] = int(ids[winner])
    return drawn


def _winner(words: torch.Tensor, weights: torch.Tensor) -> int:
    """Return the index whose `exponential(word) / weight` is least; the lowest on ties."""
    if words.shape[0] <= _FEW:
        return _first(words, weights)
    # A logarithm is at least its linear bound, -log1p(-u) >= u, so only those whose u / weight is
    # within the time of the one with the least u / weight can win: a few, however many take part.
    earliest = words.to(torch.float32).add_(0.5).div_(weights)  # [n], in units of 2**-32
    guess = earliest.argmin()
    deadline = exponential(int(words[guess])) / weights[guess].item() * 2.0**32
    contenders = (earliest <= deadline * (1 + 1e-6)).nonzero().squeeze(1)  # float32 bounds: rounded
    return int(contenders[_first(words[contenders], weights[contenders])])


def _first(words: torch.Tensor, weights: torch.Tensor) -> int:
    times = [
        exponential(word) / weight if weight > 0 else math.inf
        for word, weight in zip(words.tolist(), weights.tolist(), strict=True)
    ]
    return times.index(min(times))
