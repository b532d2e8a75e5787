"""Where in some texts did the last few tokens of another occur? Knows token ids only.

A *place* in a text is an end: the tokens before it are its context, the token at it is what went
on. The index is one hash table of contexts of the lengths in `LENGTHS`, grown lazily: a context
has longer ones only once it occurred twice. Most contexts of more than a few tokens occur once, so
this takes one to two entries a token, however long the longest contexts are; what a context that
occurred once would have said about longer ones is still there, in the text itself.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

LENGTHS = (1, 2, 4, 8, 16, 32)  # of the contexts that are looked up
LONGEST = LENGTHS[-1]
MOST_PLACES = 32  # looked at in one search: the most recent ones

_TEXT_SHIFT = 32  # a place: the number of its text, then the end in it
_END_MASK = (1 << _TEXT_SHIFT) - 1


class Contexts:
    """The places of texts, found by the tokens before them.

    Adding or removing a place takes a few hash-table operations per length that its context shares
    with an earlier one; searching takes at most one per length. Nothing depends on how much there
    is, but for a bisection. Numbers of texts must grow: the greatest is the most recent.
    """

    __slots__ = ("_places", "texts")

    def __init__(self) -> None:
        self.texts: dict[int, array[int]] = {}  # by number; whoever adds places keeps them
        # A context's tokens -> its place; in ascending order once it had more than one, and then
        # all of them have entries for the next longer context, too, if their text has it.
        self._places: dict[bytes, int | array[int]] = {}

    def __len__(self) -> int:
        """Return the number of contexts that are known."""
        return len(self._places)

    def add(self, number: int, end: int) -> None:
        """Add a place: the text has a token at `end`, and more places come after it only."""
        text = self.texts[number]
        place = number << _TEXT_SHIFT | end
        places = self._places
        for i, length in enumerate(LENGTHS):
            if length > end:
                return
            key = text[end - length : end].tobytes()
            known = places.get(key)
            if known is None:
                places[key] = place
                return
            if isinstance(known, int):
                # The second one: give the first the longer context it was spared so far.
                places[key] = array("q", (known, place))
                if i + 1 < len(LENGTHS):
                    first, first_end = self.at(known)
                    longer = LENGTHS[i + 1]
                    if longer <= first_end:
                        places[first[first_end - longer : first_end].tobytes()] = known
            else:
                known.append(place)

    def remove(self, number: int, end: int) -> None:
        """Remove a place that was added; its text is still there."""
        text = self.texts[number]
        place = number << _TEXT_SHIFT | end
        places = self._places
        for length in LENGTHS:
            if length > end:
                return
            key = text[end - length : end].tobytes()
            known = places[key]
            if isinstance(known, int):
                del places[key]
                return
            if len(known) == 1:
                del places[key]
            else:
                del known[bisect_left(known, place)]

    def find(self, text: array[int], shortest: int) -> tuple[int, list[int]]:
        """Return the length of the longest match of a text's last tokens, and its places.

        Of the longest of `LENGTHS` tokens that occur, the `MOST_PLACES` most recent places; of
        those, the ones that match longest, most recent first. Matches of fewer than `shortest` or
        more than `LONGEST` tokens do not count. No places: there is no match.
        """
        end = len(text)
        found: int | array[int] | None = None
        length = 0
        for longer in LENGTHS:
            if longer > end:
                break
            known = self._places.get(text[end - longer :].tobytes())
            if known is None:
                break
            found, length = known, longer
            if isinstance(known, int):
                break
        if found is None:
            return 0, []
        recent = [found] if isinstance(found, int) else found[-MOST_PLACES:].tolist()[::-1]
        limit = min(LONGEST, end)
        ends = [self.at(place) for place in recent]
        while length < limit:
            left = text[end - length - 1]
            longer_ones = [
                i for i, (t, e) in enumerate(ends) if e > length and t[e - length - 1] == left
            ]
            if not longer_ones:
                break
            if len(longer_ones) < len(ends):
                recent = [recent[i] for i in longer_ones]
                ends = [ends[i] for i in longer_ones]
            length += 1
        return (length, recent) if length >= shortest else (0, [])

    def at(self, place: int) -> tuple[array[int], int]:
        """Return a place's text and its end in it."""
        return self.texts[place >> _TEXT_SHIFT], place & _END_MASK


def number_of(place: int) -> int:
    """Return the number of a place's text."""
    return place >> _TEXT_SHIFT
