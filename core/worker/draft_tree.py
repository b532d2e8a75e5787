"""Draft trees: putting one together from candidates, and cutting it.

A tree verifies several continuations at once. Its nodes are draft tokens; the root is the last
committed token and is no node. Knows tokens, parents and probabilities; no model and no cache.

**Which nodes are worth a row** is a matter of how likely each is accepted: the probability of the
way from the root to it. A node is at most as likely as the one above it, so the best n nodes of all
candidates are a tree, and listed from the best down every parent comes before its children: what is
cut from the end is what is worth least (EAGLE-2, arXiv 2406.16858, does so for its last step).

Any tree is exact, however it was chosen and whatever it has seen: see `rejection_sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftTree:
    """The candidates of one request's draft, and the best of them.

    A candidate is known by its number, in the order of `add`; -1 stands for the root.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1: a child of the root
    log_probs: list[float] = field(default_factory=list)  # of the whole way from the root
    _numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def find(self, parent: int, token_id: int) -> int | None:
        """Return the number of a parent's child; None: it has none of that token."""
        return self._numbers.get((parent, token_id))

    def add(self, parent: int, token_id: int, log_prob: float) -> int:
        """Add a candidate, `log_prob` being that of the token after its parent; return its number.

        A child that is there already stays as it is, unless this makes it more likely.
        """
        above = 0.0 if parent < 0 else self.log_probs[parent]
        whole = above + min(log_prob, 0.0)
        number = self._numbers.get((parent, token_id))
        if number is not None:
            self.log_probs[number] = max(self.log_probs[number], whole)
            return number
        number = len(self.token_ids)
        self._numbers[parent, token_id] = number
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.log_probs.append(whole)
        return number

    def best(
        self, k: int, max_depth: int = 1 << 30, least_log_prob: float = -math.inf
    ) -> list[int]:
        """Return the numbers of the best nodes, at most `k`, the best first: a tree.

        Without those deeper than `max_depth`, or whose way is less likely than `least_log_prob`.
        Of equal ones those nearer to the root come first, then those added earlier.
        """
        allowed = [
            number
            for number, depth in enumerate(self.depths)
            if depth <= max_depth and self.log_probs[number] >= least_log_prob
        ]
        allowed.sort(key=lambda number: (-self.log_probs[number], self.depths[number], number))
        chosen: dict[int, None] = {}
        for number in allowed:
            if len(chosen) == k:
                break
            # Only a candidate made more likely later can be ahead of the one above it.
            if self.parents[number] < 0 or self.parents[number] in chosen:
                chosen[number] = None
        return list(chosen)

    def draft(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the token ids and the parents of some nodes, as `Draft` has them."""
        places = {number: place for place, number in enumerate(numbers)}
        token_ids = [self.token_ids[number] for number in numbers]
        return token_ids, [places.get(self.parents[number], -1) for number in numbers]


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node hangs on the one before it."""
    return all(parent == place - 1 for place, parent in enumerate(parents))


def subtree(parents: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return the parents of the nodes at some places, ascending, which are a tree themselves."""
    new = {-1: -1} | {place: number for number, place in enumerate(places)}
    return [new[parents[place]] for place in places]
