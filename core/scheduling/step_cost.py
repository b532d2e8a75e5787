"""What a step costs: seconds by rows verified, and by tokens drafted. Learned from steps that ran.

Knows numbers of rows, requests and tokens, and seconds; nothing of who is accepted, or of what to
do about it. Times on a shared machine are noisy, so that of each number of rows is the median of
the last few, or where costs are to be measured the lower quartile of many: what else runs only adds
to a time. More rows are never taken to be faster than fewer: where times say so, they are pooled
(isotonic regression). Between known points it is a straight line, before the first one it
is constant, behind the last it goes on as steeply as from the first to the last.

Drafting a tree levels off: more nodes lie beside others than below them, and what it takes is
mostly a matter of depth. There, behind what is known, it goes on half as steeply; and fewer nodes
than any that were timed are hoped to take less, or they would not be tried. Neither is assumed
where costs are to be measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

_WINDOW = 11  # times kept for each number of rows: what matters is how things are now
_LONG_WINDOW = 1999  # where they are to be measured
_FINE = 16  # numbers of rows are told apart up to this; above, those within about 6 % are pooled
_FIRST_BENDS = 3  # times of a number of rows before it counts by itself
_FOR_NONE = 0.2  # of a call's seconds, what one that drafts nothing is hoped to take
_LEVELLING = 0.5  # how steeply a curve that levels off goes on behind what is known


class Curve:
    """Seconds as a function of a whole number from 0 on: samples in, a rising line out."""

    def __init__(self, *, is_measuring: bool = False, levels_off: bool = False) -> None:
        """`is_measuring`: whether many times are kept, of which the lower quartile counts.

        `levels_off`: whether it goes on half as steeply behind what is known.
        """
        self._is_measuring = is_measuring
        self._beyond = _LEVELLING if levels_off else 1.0
        self._samples: dict[int, _Samples] = {}
        self._points: list[tuple[float, float]] | None = None  # None: to be made anew
        self._xs: list[float] = []  # of the points
        self.most = 0  # the largest number that a time was known for

    def add(self, x: int, seconds: float) -> None:
        """Take a measured time."""
        self.most = max(self.most, x)
        samples = self._samples.get(_bucket(x))
        if samples is None:
            samples = self._samples[_bucket(x)] = _Samples.of(self._is_measuring)
        samples.xs.append(x)
        samples.seconds.append(seconds)
        samples.point = None
        self._points = None

    def num_samples(self, x: int) -> int:
        """Return how many times are known for `x`, or for a number that is pooled with it."""
        samples = self._samples.get(_bucket(x))
        return 0 if samples is None else len(samples.seconds)

    def at(self, x: float) -> float | None:
        """Return the seconds at `x`; None: nothing is known."""
        points = self._points
        if points is None:
            points = self.points()
        if not points:
            return None
        place = bisect_left(self._xs, x)
        if place == 0:
            return points[0][1]
        if place == len(points):
            (first_x, first), (last_x, last) = points[0], points[-1]
            slope = (last - first) / (last_x - first_x) if last_x > first_x else 0.0
            return last + self._beyond * slope * (x - last_x)
        (low_x, low), (high_x, high) = points[place - 1], points[place]
        return low + (high - low) * (x - low_x) / (high_x - low_x)

    def points(self) -> list[tuple[float, float]]:
        """Return the line's corners (x, seconds), both rising."""
        if self._points is None:
            self._points = _rising(self._known())
            self._xs = [x for x, _ in self._points]
        return self._points

    def _known(self) -> list[tuple[float, float, int]]:
        """Return x, seconds and the number of times known; few ones are pooled with the next."""
        known: list[tuple[float, float, int]] = []
        few = _Samples.of(self._is_measuring)
        for x in sorted(self._samples):
            samples = self._samples[x]
            if few.seconds or len(samples.seconds) < _FIRST_BENDS:
                few.xs.extend(samples.xs)
                few.seconds.extend(samples.seconds)
                if len(few.seconds) < _FIRST_BENDS:
                    continue
                samples, few = few, _Samples.of(self._is_measuring)
            known.append(self._point(samples))
        if few.seconds and len(known) < 2:  # rather one time than none
            known.append(self._point(few))
        return known

    def _point(self, samples: _Samples) -> tuple[float, float, int]:
        if samples.point is None:
            xs, seconds = samples.xs, samples.seconds
            samples.point = (sum(xs) / len(xs), self._typical(seconds), len(seconds))
        return samples.point

    def _typical(self, seconds: Sequence[float]) -> float:
        if self._is_measuring:
            return sorted(seconds)[(len(seconds) - 1) // 4]
        return median(seconds)


@dataclass(slots=True)
class _Samples:
    xs: deque[int]
    seconds: deque[float]
    point: tuple[float, float, int] | None = None  # x, typical seconds, how many; None: make anew

    @classmethod
    def of(cls, is_measuring: bool) -> _Samples:
        window = _LONG_WINDOW if is_measuring else _WINDOW
        return cls(deque(maxlen=window), deque(maxlen=window))


def _bucket(x: int) -> int:
    """Return a number that stands for `x` and those close to it."""
    if x <= _FINE:
        return x
    step = 1 << (x.bit_length() - 5)  # 16 numbers from each power of two to the next
    return x - x % step


def _rising(points: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Pool neighbours (x, seconds, weight) until seconds nowhere fall; each keeps its x."""
    pools: list[tuple[list[float], float, int]] = []
    for x, seconds, weight in points:
        xs = [x]
        while pools and pools[-1][1] > seconds:
            more_xs, other, other_weight = pools.pop()
            seconds = (seconds * weight + other * other_weight) / (weight + other_weight)
            weight += other_weight
            xs = more_xs + xs
        pools.append((xs, seconds, weight))
    return [(x, seconds) for xs, seconds, _ in pools for x in xs]


class StepCost:
    """The cost model of an engine: its target's steps, and its proposers' drafting."""

    def __init__(self, *, is_measuring: bool = False, trees: Collection[str] = ()) -> None:
        """`is_measuring`: see `Curve`. `trees`: which proposers draft trees."""
        self._is_measuring = is_measuring
        self._trees = frozenset(() if is_measuring else trees)
        self.verifying = Curve(is_measuring=is_measuring)  # by rows of the target's pass
        self._drafting: dict[tuple[str, int], Curve] = {}  # by tokens; of a proposer and a bucket
        self._sizes: dict[str, list[int]] = {}  # buckets of requests seen, by proposer
        self._near: dict[tuple[str, int], Curve] = {}  # the one to go by, of a number of requests
        self.other = Curve(is_measuring=is_measuring)  # scheduling and committing, by requests

    def add_step(self, num_rows: int, num_requests: int, execute: float, other: float) -> None:
        """Take a step without any part of a prompt: seconds of the pass and of all around it."""
        self.verifying.add(num_rows, execute)
        self.other.add(num_requests, other)

    def add_drafting(
        self, proposer: str, num_requests: int, num_tokens: int, seconds: float
    ) -> None:
        """Take a proposer's call for `num_requests`; `num_tokens` of the longest draft."""
        key = (proposer, _bucket(num_requests))
        if key not in self._drafting:
            self._drafting[key] = Curve(
                is_measuring=self._is_measuring, levels_off=proposer in self._trees
            )
            self._sizes.setdefault(proposer, []).append(key[1])
            self._near.clear()
        self._drafting[key].add(num_tokens, seconds)

    def step(self, num_rows: float, num_requests: int) -> float | None:
        """Return the seconds of a step without drafting; None: not known yet."""
        execute = self.verifying.at(num_rows)
        return None if execute is None else execute + (self.other.at(num_requests) or 0.0)

    def drafting(self, proposer: str, num_requests: int, num_tokens: float) -> float:
        """Return the seconds of a proposer's call; 0 if it was never called.

        For a number of requests not seen, those of the nearest one.
        """
        curve = self._nearest(proposer, num_requests)
        points = () if curve is None else curve.points()
        if curve is None or not points:
            return 0.0
        least, seconds = points[0]
        if num_tokens < least and proposer in self._trees:
            return seconds * (_FOR_NONE + (1 - _FOR_NONE) * num_tokens / least)
        return curve.at(num_tokens) or 0.0

    def knows_lengths(self, proposer: str, num_requests: int) -> bool:
        """Return whether a proposer's calls were timed for two lengths of drafts or more."""
        curve = self._nearest(proposer, num_requests)
        return curve is not None and len(curve.points()) > 1

    def drafting_points(self, proposer: str, num_requests: int) -> list[tuple[float, float]]:
        """Return what is known of a proposer's calls for so many requests: tokens, seconds."""
        curve = self._nearest(proposer, num_requests)
        return [] if curve is None else curve.points()

    def _nearest(self, proposer: str, num_requests: int) -> Curve | None:
        key = (proposer, num_requests)
        curve = self._near.get(key)
        if curve is None and proposer in self._sizes:
            wanted = _bucket(num_requests)
            size = min(self._sizes[proposer], key=lambda size: abs(size - wanted))
            curve = self._near[key] = self._drafting[proposer, size]
        return curve
