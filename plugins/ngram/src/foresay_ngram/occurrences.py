"""Where in a fixed text the last few tokens of a growing one occur. Knows token ids only.

The index is a trie of contexts, read from right to left, like `SuffixIndex`; but the text is known
at once, and every occurrence is kept, not the last one alone: what is asked for is the one next to
a place. A context that occurs once has no children; what lies to its left is in the text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

_TOKEN_BITS = 32


class Match(NamedTuple):
    """The `length` tokens before `end` equal the last ones of the other text."""

    end: int
    length: int


NO_MATCH = Match(0, 0)


class Occurrences:
    """All places of a text's contexts of up to `longest` tokens.

    Built once, with at most `longest` operations a token; a search takes at most `longest`
    look-ups, each with a bisection.
    """

    __slots__ = ("_children", "_ends", "_first", "_longest", "_text")

    def __init__(self, text: Sequence[int], longest: int) -> None:
        self._text = text
        self._longest = longest
        self._children: dict[int, int] = {}  # node and the next token to the left, packed -> node
        self._ends = array("I")  # of all occurrences: node by node, ascending
        self._first = array("I", [0])  # node -> where its part of `_ends` begins; the root has none
        contexts: list[tuple[int, Sequence[int]]] = [(0, range(1, len(text) + 1))]
        for depth in range(longest):
            repeated: list[tuple[int, Sequence[int]]] = []
            for parent, ends in contexts:
                by_left: dict[int, list[int]] = {}
                for end in ends:
                    if end > depth:
                        by_left.setdefault(text[end - depth - 1], []).append(end)
                for left, longer in by_left.items():
                    node = len(self._first)
                    self._children[parent << _TOKEN_BITS | left] = node
                    self._first.append(len(self._ends))
                    self._ends.extend(longer)
                    if len(longer) > 1:
                        repeated.append((node, longer))
            contexts = repeated
        self._first.append(len(self._ends))

    def find(
        self, last_tokens: Sequence[int], anchor: int, longest_after: int
    ) -> tuple[Match, Match]:
        """Return the best match that ends after `anchor`, and the best that ends before or at it.

        The longest wins, then the nearest to `anchor`. After it, no more than the last
        `longest_after` tokens count. `NO_MATCH` where there is none.
        """
        text, ends = self._text, self._ends
        most = min(self._longest, len(last_tokens))
        after = before = NO_MATCH
        node = depth = 0
        while depth < most:
            child = self._children.get(node << _TOKEN_BITS | last_tokens[-depth - 1])
            if child is None:
                break
            node = child
            depth += 1
            start, stop = self._first[node], self._first[node + 1]
            if stop - start == 1:  # it has no children: compare with the text
                end = ends[start]
                counts_after = end > anchor and depth <= longest_after
                most = min(most, end)
                while depth < most and text[end - depth - 1] == last_tokens[-depth - 1]:
                    depth += 1
                if end <= anchor:
                    before = Match(end, depth)
                elif counts_after:
                    after = Match(end, min(depth, longest_after))
                break
            place = bisect_right(ends, anchor, start, stop)
            if place < stop and depth <= longest_after:
                after = Match(ends[place], depth)
            if place > start:
                before = Match(ends[place - 1], depth)
        return after, before
