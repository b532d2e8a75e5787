"""Where the nodes of a draft tree lie among the keys of an attention call.

A row's sums over keys must be those of plain decoding, to the bit, where keys lie at the columns of
their positions. Keys that a row does not see add exact zeros, so a key may lie elsewhere as long as
the sums are split and ordered as before. What kernels were found to allow (see `attention_rules`):
columns ascend along a path, a column equals its position modulo `LANE`, and both lie in the same
block of `AttentionRules.tree_block` columns.

So a node at position p in *lane* m has column p + LANE * m, its lane being no lower than that of
the node above it. Nodes that find no room in one member of a batch get another member, with the
committed keys once more: at the worst one for each leaf, which is plain decoding's own layout.
Knows parents and columns; no slots, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foresay.core.worker.attention_rules import LANE, AttentionRules


@dataclass(frozen=True, slots=True)
class Columns:
    """A member's columns behind the first `first`, which hold the positions of their numbers.

    `nodes` [n] have keys here, at `columns` [n] for `positions` [n]. `seen` [num_nodes, n] bool:
    which of them a node's row sees. `computed` [num_nodes + 1] bool: whose rows this member
    computes, the last place standing for plain rows.
    """

    first: int
    num_columns: int
    nodes: np.ndarray
    columns: np.ndarray
    positions: np.ndarray
    seen: np.ndarray
    computed: np.ndarray


def tree_columns(
    first: int, parents: np.ndarray, nodes: np.ndarray, rules: AttentionRules
) -> list[Columns]:
    """Return the columns of the members that compute the rows `nodes` [num_rows]; -1: plain rows.

    Every node in `nodes` is computed by one of them, plain rows by the first.
    """
    num_nodes = len(parents)
    above = parents.tolist()
    depths: list[int] = []
    lineage = np.eye(num_nodes, dtype=bool)  # [node, ancestor or itself]
    for node, parent in enumerate(above):
        if parent >= 0:
            lineage[node] |= lineage[parent]
        depths.append(0 if parent < 0 else depths[parent] + 1)
    positions = first + np.array(depths, dtype=np.int64)
    wanted = sorted(set(nodes.tolist()) - {-1})
    if rules.tree_block is None:  # any order of sums will do: keys as the slots lie
        packed = [({node: first + node for node in range(num_nodes)}, wanted)]
    else:
        packed = _pack(positions.tolist(), above, wanted, rules.tree_block)
    members = []
    for place, (columns, computed) in enumerate(packed):
        has_rows = np.zeros(num_nodes + 1, dtype=bool)
        has_rows[computed] = True
        has_rows[-1] = place == 0
        held = np.fromiter(columns, dtype=np.int64, count=len(columns))
        members.append(
            Columns(
                first=first,
                num_columns=max(columns.values(), default=first - 1) + 1,
                nodes=held,
                columns=np.fromiter(columns.values(), dtype=np.int64, count=len(columns)),
                positions=positions[held],
                seen=lineage[:, held],
                computed=has_rows,
            )
        )
    return members


def within_members(
    first: int, parents: Sequence[int], num_members: int, rules: AttentionRules
) -> list[int]:
    """Return the nodes of a tree, ascending, whose rows take at most so many members.

    They are a tree: a node's row is computed no earlier than those of the nodes above it. `first`
    is the position of the root's children.
    """
    nodes = np.arange(len(parents))
    members = tree_columns(first, np.asarray(parents, dtype=np.int64), nodes, rules)
    if len(members) <= num_members:
        return nodes.tolist()
    computed = np.zeros(len(parents), dtype=bool)
    for member in members[:num_members]:
        computed |= member.computed[:-1]
    found: list[int] = computed.nonzero()[0].tolist()
    return found


def _pack(
    positions: list[int], parents: list[int], wanted: list[int], block: int
) -> list[tuple[dict[int, int], list[int]]]:
    """Return by member the columns of nodes, and the nodes whose rows it computes; one at least.

    Each node goes to the first free lane, after the nodes above it. `block` 0: lane 0 only. The
    first node of a member finds it empty: its path lies where plain decoding has it.
    """
    members: list[tuple[dict[int, int], list[int]]] = []
    left = wanted
    while left or not members:
        columns: dict[int, int] = {}
        used: set[int] = set()
        computed: list[int] = []
        rest: list[int] = []
        for node in left:
            path = []
            at = node
            while at >= 0 and at not in columns:
                path.append(at)
                at = parents[at]
            lane = columns[at] - positions[at] if at >= 0 else 0
            placed: dict[int, int] = {}
            for step in reversed(path):
                position = positions[step]
                end = (position // block + 1) * block if block else position + 1
                free = (c for c in range(position + lane, end, LANE) if c not in used)
                column = next(free, None)
                if column is None:
                    break
                placed[step] = column
                lane = column - position
            if len(placed) == len(path):
                columns.update(placed)
                used.update(placed.values())
                computed.append(node)
            else:
                rest.append(node)
        members.append((columns, computed))
        left = rest
    return members
