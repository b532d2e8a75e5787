"""A draw as an exponential race: each token runs for `exponential(word) / weight`, the first wins.

The logarithm of 1 / time is log weight + Gumbel noise, so that the order of arrival is that of the
largest perturbed log probabilities (Kool et al. 2019, "Stochastic beams and where to find them",
arXiv 1903.06059): the first n are a draw of n tokens without replacement.

Knows noise, token ids and weights; not logits, requests, or what the token is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from foresay.core.worker.noise import NoiseKey, exponential, token_words, vocabulary_words

_FEW, _MANY = 48, 2048
_BLOCK = 64


class Race(NamedTuple):
    """One draw: who takes part, with what chances, under which noise."""

    key: NoiseKey
    token_ids: torch.Tensor | None  # [n] int64, ascending, distinct; None: 0..n-1
    weights: torch.Tensor  # [n] float32: not negative, not all 0; need not sum to 1

    @property
    def num_words(self) -> int | None:
        """How many ids' words are made at once, from 0 up; None: token by token is cheaper."""
        if self.token_ids is None:
            return self.weights.shape[0]
        # A counter gives the words of four neighbours: cheaper where most of them run.
        many = self.token_ids.shape[0] > _MANY
        size = int(self.token_ids[-1]) + 1 if many else 0
        return size if many and size < 4 * self.token_ids.shape[0] else None


class Arrivals(NamedTuple):
    """The first of a race, in the order of arrival: at most as many as were asked for."""

    token_ids: list[int]  # none of weight 0
    log_shares: list[float]  # log(1 / time), less the logarithm of the sum of all 1 / time


def draw(races: Sequence[Race]) -> list[int]:
    """Return the token id that each race draws.

    The noise is the token's own, so a result depends neither on the tokens of weight 0, nor on
    whether they are listed, nor on the other races.
    """
    drawn = [-1] * len(races)
    contested: list[int] = []
    for i, race in enumerate(races):
        key, token_ids, weights = race
        if token_ids is not None and token_ids.shape[0] == 1:
            drawn[i] = int(token_ids)
        elif (size := race.num_words) is None:
            contested.append(i)
        else:
            words = vocabulary_words(key, size, weights.device)
            if token_ids is None:
                drawn[i] = _winner(words, weights)
            else:
                drawn[i] = int(token_ids[_winner(words[token_ids], weights)])
    if contested:
        keys, listed, weighed = zip(*(races[i] for i in contested), strict=True)
        for i, ids, winner in zip(
            contested, listed, map(_winner, token_words(keys, listed), weighed), strict=True
        ):
            drawn[i] = int(ids[winner])
    return drawn


def first(races: Sequence[Race], width: int) -> list[Arrivals]:
    """Return the first `width` tokens home in each race; the first one is what `draw` draws.

    Races under one key, as of siblings in a tree, share the making of its noise.
    """
    sizes: dict[NoiseKey, int] = {}
    listed: dict[int, torch.Tensor] = {}
    for i, race in enumerate(races):
        if (size := race.num_words) is not None:
            sizes[race.key] = max(size, sizes.get(race.key, 0))
        elif race.token_ids is not None:
            listed[i] = race.token_ids
    some = {}
    if listed:
        keys = [races[i].key for i in listed]
        some = dict(zip(listed, map(_Noise, token_words(keys, [*listed.values()])), strict=True))
    whole: dict[NoiseKey, _Noise] = {}
    arrivals = []
    for i, (key, token_ids, weights) in enumerate(races):
        if i not in some and key not in whole:
            whole[key] = _Noise(vocabulary_words(key, sizes[key], weights.device))
        noise = some[i] if i in some else whole[key].of(token_ids, weights.shape[0])
        order, times = _first_home(noise, weights, width)
        rate = math.log((weights / noise.times).sum(dtype=torch.float64).item())
        ids = order if token_ids is None else token_ids[order].tolist()
        shares = [min(-math.log(time) - rate, 0.0) for time in times]
        arrivals.append(Arrivals(ids, shares))
    return arrivals


class _Noise:
    """The words of some tokens [n] int64, and what they come to in float32: rounded."""

    def __init__(self, words: torch.Tensor, bounds: torch.Tensor | None = None) -> None:
        self.words = words
        # Of the exponentials, from below: -log1p(-u) >= u; in units of 2**-32.
        self.bounds = words.to(torch.float32).add_(0.5) if bounds is None else bounds

    @cached_property
    def times(self) -> torch.Tensor:
        """The exponentials: for sums, not to tell who is first."""
        return self.bounds.mul(-(2.0**-32)).log1p_().neg_()

    def of(self, token_ids: torch.Tensor | None, size: int) -> _Noise:
        """Return the noise of the tokens of these ids, or (None) of the first `size`."""
        if token_ids is None and size == self.words.shape[0]:
            return self
        chosen = slice(size) if token_ids is None else token_ids
        return _Noise(self.words[chosen], self.bounds[chosen])


def _first_home(noise: _Noise, weights: torch.Tensor, width: int) -> tuple[list[int], list[float]]:
    """Return the indices of the `width` least `exponential(word) / weight`, and these, ascending.

    The lower indices first on ties; none whose weight is 0.
    """
    # As in `_winner`: those that the linear bound rules out need no logarithm.
    earliest = noise.bounds / weights  # [n]
    guesses = (earliest <= _bound(earliest, width)).nonzero().squeeze(1)  # `width` or more
    times = sorted(_times(noise.words[guesses], weights[guesses]))[:width]
    deadline = min(times[-1] * 2.0**32 * (1 + 1e-6), torch.finfo(torch.float32).max)
    contenders = (earliest <= deadline).nonzero().squeeze(1)
    times = _times(noise.words[contenders], weights[contenders])
    indices = contenders.tolist()
    order = sorted(range(len(times)), key=times.__getitem__)[:width]
    return [indices[i] for i in order], [times[i] for i in order]


def _bound(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return a value that at least `width` of these do not exceed, near the least such one."""
    num_blocks = values.shape[0] // _BLOCK
    if num_blocks >= 4 * width:  # faster than to look for the least of all of them
        values = values[: num_blocks * _BLOCK].view(num_blocks, _BLOCK).amin(dim=1)
    return values.topk(min(width, values.shape[0]), largest=False).values.amax()


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
    times = _times(words, weights)
    return times.index(min(times))


def _times(words: torch.Tensor, weights: torch.Tensor) -> list[float]:
    return [
        exponential(word) / weight if weight > 0 else math.inf
        for word, weight in zip(words.tolist(), weights.tolist(), strict=True)
    ]
