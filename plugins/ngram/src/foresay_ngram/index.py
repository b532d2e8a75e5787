"""An incremental index of one token history: where did its last few tokens occur before?

It knows token ids only: nothing of requests, drafts to verify, or models.

The index is a trie of contexts, read from right to left: a node stands for the last d tokens at
some place, its children for the same d tokens and one more to the left. Each node keeps the end
of its most recent occurrence. It is grown lazily: a context has children only once it occurred
twice. Most contexts of more than two tokens occur once, so this needs one or two nodes a token
where a table of all n-grams needs one a token and length; what a context that occurred once
would have said about longer ones is still there, in the history itself.

Earlier occurrences are found on demand: each position keeps, for each length, where the tokens
before it occurred last. So all places of a context hang together, the most recent one first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

_TOKEN_BITS = 32


class SuffixIndex:
    """The most recent earlier occurrence of the history's longest suffix that has one.

    Only suffixes of `shortest` to `longest` tokens count. Occurrences may overlap the suffix.
    `extend` costs at most three hash-table operations per new token and length, however long
    the history is.
    """

    __slots__ = (
        "_children",
        "_last_end",
        "_links",
        "_longest",
        "_match_end",
        "_match_length",
        "_no_links",
        "_repeated",
        "_roots",
        "_shortest",
        "_tokens",
        "_window",
        "_window_mask",
    )

    def __init__(self, shortest: int, longest: int, *, keeps_places: bool = False) -> None:
        """`keeps_places`: `places` will be asked for; takes 4 bytes more a token and length."""
        self._shortest = shortest
        self._longest = longest
        self._tokens = array("I")  # the history
        # Position and length -> where the tokens before it ended the last time; 0: nowhere.
        self._no_links = bytes(4 * self._num_lengths)
        self._links = array("I", self._no_links) if keeps_places else None
        self._roots: dict[int, int] = {}  # the last `shortest` tokens, packed -> node
        self._children: dict[int, int] = {}  # node and the next token to the left, packed -> node
        self._last_end = array("I")  # node -> end of its most recent occurrence
        self._repeated = bytearray()  # node -> 1 if it occurred more than once: it has children
        self._match_end = 0  # of the history's longest suffix; 0: it has no earlier occurrence
        self._match_length = 0  # of that suffix
        self._window = 0  # the last `shortest` tokens, packed
        self._window_mask = (1 << _TOKEN_BITS * shortest) - 1

    def __len__(self) -> int:
        """Return the number of tokens in the history."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the history."""
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the history."""
        tokens, last_end, repeated = self._tokens, self._last_end, self._repeated
        tokens.append(token)
        end = len(tokens)
        links = self._links
        if links is not None:
            links.frombytes(self._no_links)
        self._window = (self._window << _TOKEN_BITS | token) & self._window_mask
        self._match_end = self._match_length = 0
        depth = self._shortest
        if end < depth:
            return
        node = self._roots.get(self._window)
        if node is None:
            self._roots[self._window] = self._add_node(end)
            return
        # Walk from the shortest suffix to the longest known one, leaving `end` at every node: the
        # match is found and the new occurrence recorded in one pass.
        children = self._children
        while True:
            previous = self._match_end = last_end[node]
            self._match_length = depth
            last_end[node] = end
            if links is not None:
                links[end * self._num_lengths + depth - self._shortest] = previous
            if depth == self._longest:
                return
            if not repeated[node]:
                # The second occurrence: give the first one the child it was spared so far.
                repeated[node] = 1
                if previous > depth:
                    left = tokens[previous - depth - 1]
                    children[node << _TOKEN_BITS | left] = self._add_node(previous)
            if end == depth:  # the whole history: there is nothing to the left
                return
            key = node << _TOKEN_BITS | tokens[end - depth - 1]
            child = children.get(key)
            if child is None:
                children[key] = self._add_node(end)
                return
            node = child
            depth += 1

    @property
    def tokens(self) -> Sequence[int]:
        """The history, only to be read."""
        return self._tokens

    def places(self, most: int) -> list[tuple[int, int]]:
        """Return where the history's suffixes ended before, and how many tokens match there.

        At most `most` places, of which no two are the same: those of the longest match first, the
        most recent of these first; then those of one token less, and so on. The first one is the
        match. Costs at most `most` steps for each length.
        """
        links = self._links
        assert links is not None, "keeps_places"
        found: dict[int, int] = {}
        width = self._num_lengths
        for length in range(self._match_length, self._shortest - 1, -1):
            lane = length - self._shortest
            end = links[len(self._tokens) * width + lane]
            while end and len(found) < most:
                found.setdefault(end, length)
                end = links[end * width + lane]
            if len(found) >= most:
                break
        return list(found.items())

    @property
    def match_length(self) -> int:
        """How many tokens match, at most `longest`; 0 if nothing does."""
        return self._match_length

    @property
    def next_token(self) -> int | None:
        """The token that followed the match; None if nothing matches."""
        return self._tokens[self._match_end] if self._match_end else None

    def continuation(self, k: int) -> list[int]:
        """Return the `k` tokens that followed the match; none if nothing matches.

        Where they run off the end of the history they go on with themselves: what follows
        `a b a b` is `a b a b a ...`.
        """
        if not self._match_end:
            return []
        draft = self._tokens[self._match_end : self._match_end + k].tolist()
        period = len(self._tokens) - self._match_end
        while len(draft) < k:
            draft.append(draft[-period])
        return draft

    @property
    def _num_lengths(self) -> int:
        return self._longest - self._shortest + 1

    def _add_node(self, end: int) -> int:
        self._last_end.append(end)
        self._repeated.append(0)
        return len(self._repeated) - 1
