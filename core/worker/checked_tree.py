"""What is left of a draft tree that a plugin returned, once all that is wrong was cut off.

Knows the contract of `foresay.core.proposer.Draft.parents`. A fault takes the node with all that
hangs on it; what is left is a tree in the same order. Any tree may be verified, so this is exact.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any


def checked_tree(
    token_ids: Sequence[Any],
    parents: Sequence[Any],
    *,
    k: int,
    max_depth: int,
    vocab_size: int,
    as_index: Callable[[Any], int | None],
    fault: Callable[[str, str], None],
) -> tuple[list[int], list[int]]:
    """Return the token ids and the parents of the nodes that are as they should be.

    `as_index` makes an int of any kind of integer. `fault(kind, what)` is told of each that is not:
    "too_long" (more than `k` nodes), "bad_parent" (none of the nodes before it), "bad_id" (no id of
    the target), "too_deep", and "duplicate" (its parent has that token already).
    """
    ids: list[int] = []
    above: list[int] = []
    depths: list[int] = []
    place_of: dict[int, int] = {-1: -1}  # of the nodes kept, by their place in what was returned
    siblings: set[tuple[int, int]] = set()
    for place, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if place == k:
            fault("too_long", f"more nodes than the {k} wanted")
            break
        parent_place = as_index(parent)
        if parent_place is None or not -1 <= parent_place < place:
            shown = reprlib.repr(parent)
            fault("bad_parent", f"node {place} hangs on {shown}, not on one before it, or -1")
            continue
        if parent_place not in place_of:
            continue
        at = place_of[parent_place]
        index = as_index(token_id)
        depth = 1 if at < 0 else depths[at] + 1
        if index is None or not 0 <= index < vocab_size:
            shown = reprlib.repr(token_id)
            fault("bad_id", f"{shown} is no token id in range({vocab_size})")
        elif depth > max_depth:
            fault("too_deep", f"node {place} is {depth} deep, and {max_depth} are of use")
        elif (at, index) in siblings:
            fault("duplicate", f"node {place} is the token {index}, as one beside it is")
        else:
            siblings.add((at, index))
            place_of[place] = len(ids)
            ids.append(index)
            above.append(at)
            depths.append(depth)
    return ids, above
