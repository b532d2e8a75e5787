"""Which nodes a tree of Medusa's candidates has. Knows probabilities and ranks, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Node(NamedTuple):
    """A node of a tree."""

    parent: int  # its place in the tree; -1: the root
    depth: int  # 0: a child of the root
    rank: int  # which of its depth's candidates it is


def best_tree(values: Sequence[Sequence[float]], k: int, least: float = 0.0) -> list[Node]:
    """Return the `k` best nodes, the best first, so that its first n nodes are the best n.

    `values[d][r]` is how probable the candidate of rank r at depth d is, whatever came before it:
    heads do not see each other's tokens. A node's value is the product of those on its way (Cai et
    al., 2024, arXiv 2401.10774, section 2.3.3: the same greedy choice). Nodes that are worth less
    than `least`, or nothing, are left out. Of equal ones those nearer to the root come first.
    """
    ranked = [sorted(range(len(own)), key=lambda rank: -own[rank]) for own in values]
    nodes: list[Node] = []
    # What may come next: a popped node's first child, and the sibling after it.
    queue: list[tuple[float, int, int, int, float]] = []  # -value, depth, parent, place, above

    def offer(parent: int, depth: int, place: int, above: float) -> None:
        if depth < len(ranked) and place < len(ranked[depth]):
            value = above * values[depth][ranked[depth][place]]
            if value > 0.0 and value >= least:
                heappush(queue, (-value, depth, parent, place, above))

    offer(-1, 0, 0, 1.0)
    while queue and len(nodes) < k:
        value, depth, parent, place, above = heappop(queue)
        nodes.append(Node(parent, depth, ranked[depth][place]))
        offer(len(nodes) - 1, depth + 1, 0, -value)
        offer(parent, depth, place + 1, above)
    return nodes
