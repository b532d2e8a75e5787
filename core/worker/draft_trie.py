"""Several continuations of a text merged into a draft tree, the likeliest tokens first.

For drafters that find the end of a text elsewhere: each place where the last tokens occurred before
says how the text may go on, and those that begin alike share their nodes. Knows tokens and counts;
no model, no index and no torch.

**How likely a token is.** A continuation has *odds*: how many times likelier it is right than that
what follows was never seen in such a place, learnt by how many tokens before it match. A token's
probability, those before it being right, is the odds of the continuations that say it over the odds
of all that go on, plus 1. Those that went on otherwise have dropped out by then, and the match of
those left has grown by the tokens on the way. With odds equal to the length of the match it is the
estimate of `foresay-suffix`, c / (n + 1 / m), and its tree the greedy expansion of SuffixDecoding
(Oliaro et al., 2024, arXiv 2411.04975, section 4.2): node after node the likeliest that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from foresay.core.worker.draft_tree import DraftTree


class Continuation(NamedTuple):
    """What may come next: `text[start]`, `text[start + 1]`, ...

    `match_length` tokens before it equal the last ones of the text that is continued, at least 1.
    `weight` multiplies its odds. `grows`: `text` is the one that is continued, so where it ends it
    goes on with what is drafted: after `a b a b` comes `a b a ...`. Otherwise it has no more to say
    there.
    """

    text: Sequence[int]
    start: int
    match_length: int
    weight: float = 1.0
    grows: bool = False


class Merged(NamedTuple):
    """A draft tree, as `Draft` has it; the likeliest nodes come first."""

    token_ids: list[int]
    parents: list[int]
    probabilities: list[float]  # of each node's whole way from the root
    followed: list[int]  # indices of the continuations that begin with the first node


NOTHING = Merged([], [], [], [])


def merge(
    continuations: Sequence[Continuation],
    odds: Sequence[float],
    k: int,
    *,
    max_depth: int = 1 << 30,
    min_probability: float = 0.0,
    chain: Sequence[int] = (),
) -> Merged:
    """Merge continuations into a tree of up to `k` nodes, none deeper than `max_depth`.

    `odds[m]` are those of a match of m tokens; the last stands for all that are longer. Nodes less
    likely than `min_probability` are left out. Of equally likely ones those nearer to the root come
    first, then those of earlier continuations. `chain`: a beginning of a continuation that is in
    the tree whatever is likelier, as far as the other bounds allow. The cost is that of at most `k`
    + `len(chain)` looks at the continuations.
    """
    if k <= 0 or max_depth <= 0:
        return NOTHING
    growth = _Growth(continuations, odds)
    growth.expand(-1)
    tree, queue = growth.tree, growth.queue
    least = math.log(min_probability) if min_probability > 0 else -math.inf
    numbers: list[int] = []
    while queue and len(numbers) < k:
        least_likely, depth, number = heappop(queue)
        if -least_likely < least:
            break
        numbers.append(number)
        if depth < max_depth and len(numbers) < k:
            growth.expand(number)
    on_chain = []
    parent = -1
    for token_id in chain[: min(k, max_depth)]:
        child = growth.child(parent, token_id)
        if child is None or tree.log_probs[child] < least:
            break
        on_chain.append(child)
        parent = child
    kept = set(on_chain)
    missing = [number for number in on_chain if number not in set(numbers)]
    # What is dropped for them has no node below it that stays: that would be less likely yet.
    surplus = len(numbers) + len(missing) - k
    for number in reversed(numbers.copy() if surplus > 0 else ()):
        if surplus > 0 and number not in kept:
            numbers.remove(number)
            surplus -= 1
    numbers += missing
    if not numbers:
        return NOTHING
    token_ids, parents = tree.draft(numbers)
    probabilities = [math.exp(tree.log_probs[number]) for number in numbers]
    return Merged(token_ids, parents, probabilities, growth.followers[numbers[0]])


class _Growth:
    """Candidates, and which of the continuations go on with each."""

    def __init__(self, continuations: Sequence[Continuation], odds: Sequence[float]) -> None:
        self.tree = DraftTree()
        self.queue: list[tuple[float, int, int]] = []  # the likeliest first: see `merge`
        self.followers: list[list[int]] = []  # of each candidate
        self._continuations = continuations
        self._odds = odds
        self._expanded: set[int] = set()

    def child(self, parent: int, token_id: int) -> int | None:
        """Return a candidate's child, -1 being the root; None: no continuation goes on so."""
        if parent not in self._expanded:
            self.expand(parent)
        return self.tree.find(parent, token_id)

    def expand(self, parent: int) -> None:
        """Add the children of a candidate."""
        self._expanded.add(parent)
        live: Sequence[int] = range(len(self._continuations))
        offset = 0
        if parent >= 0:
            live, offset = self.followers[parent], self.tree.depths[parent]
        odds, last = self._odds, len(self._odds) - 1
        path: list[int] | None = None  # the tokens on the way; most trees need it nowhere
        total = 1.0  # what was never seen
        said: dict[int, tuple[float, list[int]]] = {}  # by token: its odds, and who says it
        for i in live:
            text, start, match_length, weight, grows = self._continuations[i]
            at = start + offset
            if at < len(text):
                token_id = text[at]
            elif grows:
                path = path or self._path(parent)
                token_id = path[at - len(text)]
            else:
                continue
            length = match_length + offset
            weight *= odds[length if length < last else last]
            total += weight
            known = said.get(token_id)
            if known is None:
                said[token_id] = weight, [i]
            else:
                known[1].append(i)
                said[token_id] = known[0] + weight, known[1]
        for token_id, (weight, followers) in said.items():
            if weight <= 0.0:
                continue
            number = self.tree.add(parent, token_id, math.log(weight / total))
            self.followers.append(followers)
            heappush(self.queue, (-self.tree.log_probs[number], offset + 1, number))

    def _path(self, number: int) -> list[int]:
        """Return the tokens from the root to a candidate."""
        found: list[int] = []
        while number >= 0:
            found.append(self.tree.token_ids[number])
            number = self.tree.parents[number]
        return found[::-1]
