"""How far a match can be trusted: more if it is longer, and as it proved itself in this text.

Knows lengths of matches and whether they were right; no tokens. All is a function of the text, for
what counts is what would have been drafted at each of its tokens, not what was.
"""

from __future__ import annotations

# By match length, the last one for all that are longer. Measured on 400 greedy replies (README).
_ODDS = (0.0, 0.36, 1.3, 2.2, 2.6, 10.7)  # that what followed in one place, the latest, follows
_RIGHT = (0.0, 0.25, 0.54, 0.67, 0.7, 0.89)  # share of the most recent places that were right
_PRIOR = 20  # tokens that these shares count for
_LONGEST = len(_ODDS) - 1


class Odds:
    """The odds that a place's continuation is right rather than what was never seen, by match."""

    __slots__ = ("_right", "_seen", "_values")

    def __init__(self) -> None:
        self._right = [share * _PRIOR for share in _RIGHT]
        self._seen = [float(_PRIOR)] * len(_RIGHT)
        self._values = list(_ODDS)

    @property
    def values(self) -> list[float]:
        """The odds by match length; the last for all that are longer. Only to be read."""
        return self._values

    def see(self, match_length: int, is_right: bool) -> None:
        """Take in whether the token after the most recent place of the longest match was right."""
        length = min(match_length, _LONGEST)
        self._right[length] += is_right
        self._seen[length] += 1
        share, prior = self._right[length] / self._seen[length], _RIGHT[length]
        self._values[length] = _ODDS[length] * (share / (1 - share)) / (prior / (1 - prior))
