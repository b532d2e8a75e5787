"""How far a drafter's probabilities can be trusted: learnt from what the target wrote instead.

A drafter says how likely a token follows what it drafted before it. Trained on one thing and asked
another, it is too sure or not sure enough. Here each such probability is compared with what came
true: whether, the way to the token being right, the token was. So a probability of the drafter
becomes that of being accepted, which is what a draft's rows are worth.

Probabilities are told apart by buckets of their logarithm. In each, what came true is divided by
what was promised; a few pairs of both are there from the start, so that nothing known means that
the drafter is believed. Less sure is never taken to be likelier: buckets that say so are pooled
(isotonic regression). Between the buckets' middles it is a straight line.

Knows log probabilities and whether tokens were right; no tokens, no requests, no model. Nothing
that is learnt can change a text: it chooses trees, and any tree is verified exactly
(`rejection_sampler`).
"""

from __future__ import annotations

import math

_NUM_BUCKETS = 12
# Bucket i holds the log probs from -((i + 1) / 4)**2 to -(i / 4)**2: finer for what is likely.
_FINENESS = 4.0
_MIDDLES = [-(((i + 0.5) / _FINENESS) ** 2) for i in range(_NUM_BUCKETS)]
_PRIOR = 4.0  # tokens promised, and right, in each bucket from the start
_MEMORY = 2000  # probabilities of a bucket that are remembered, roughly


class Calibration:
    """From the log probability that a drafter gives a token to the one that it is right."""

    def __init__(self) -> None:
        self._seen = [0] * _NUM_BUCKETS
        self._promised = [0.0] * _NUM_BUCKETS  # sums of probabilities
        self._right = [0.0] * _NUM_BUCKETS
        self._offsets = [0.0] * _NUM_BUCKETS  # what is added to a log prob in a bucket's middle
        self._is_fitted = True

    def see(self, log_prob: float, is_right: bool) -> None:
        """Take in whether a token was right that the drafter gave `log_prob`."""
        bucket = _bucket(log_prob)
        self._seen[bucket] += 1
        self._promised[bucket] += math.exp(min(log_prob, 0.0))
        self._right[bucket] += is_right
        if self._seen[bucket] >= _MEMORY:
            self._seen[bucket] //= 2
            self._promised[bucket] /= 2
            self._right[bucket] /= 2
        self._is_fitted = False

    def of(self, log_prob: float) -> float:
        """Return the log of the probability that a token is right which has `log_prob`; <= 0."""
        if not self._is_fitted:
            self._fit()
        offsets = self._offsets
        low = int(_FINENESS * math.sqrt(-log_prob) - 0.5) if log_prob < _MIDDLES[0] else -1
        if low < 0:
            return min(log_prob + offsets[0], 0.0)
        if low >= _NUM_BUCKETS - 1:
            return min(log_prob + offsets[-1], 0.0)
        share = (_MIDDLES[low] - log_prob) / (_MIDDLES[low] - _MIDDLES[low + 1])
        return min(log_prob + offsets[low] + share * (offsets[low + 1] - offsets[low]), 0.0)

    def _fit(self) -> None:
        """Work out the offsets, pooling neighbours until probabilities nowhere rise."""
        pools: list[tuple[int, float, float]] = []  # number of buckets, weight, probability
        for i, middle in enumerate(_MIDDLES):
            ratio = (_PRIOR + self._right[i]) / (_PRIOR + self._promised[i])
            num, weight, probability = 1, 1.0 + self._seen[i], math.exp(middle) * ratio
            while pools and pools[-1][2] < probability:
                other_num, other_weight, other = pools.pop()
                probability = (weight * probability + other_weight * other) / (
                    weight + other_weight
                )
                num, weight = num + other_num, weight + other_weight
            pools.append((num, weight, probability))
        fitted = [math.log(probability) for num, _, probability in pools for _ in range(num)]
        self._offsets = [
            0.0 if abs(log_prob - middle) < 1e-9 else log_prob - middle
            for log_prob, middle in zip(fitted, _MIDDLES, strict=True)
        ]
        self._is_fitted = True


def _bucket(log_prob: float) -> int:
    return min(int(_FINENESS * math.sqrt(max(-log_prob, 0.0))), _NUM_BUCKETS - 1)
