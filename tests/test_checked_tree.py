"""What is cut off a draft tree that a plugin returned, and how it is counted."""

from __future__ import annotations

import operator
import random
from collections import Counter
from typing import Any

import pytest

from foresay.core.worker.checked_tree import checked_tree


def as_index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def check(
    ids: list[Any], parents: list[Any], k: int = 99, max_depth: int = 99
) -> tuple[list[int], list[int], dict[str, int]]:
    faults: Counter[str] = Counter()
    kept, above = checked_tree(
        ids,
        parents,
        k=k,
        max_depth=max_depth,
        vocab_size=50,
        as_index=as_index,
        fault=lambda kind, what: faults.update([kind]),
    )
    return kept, above, dict(faults)


def test_a_tree_as_it_should_be_stays_as_it_is() -> None:
    assert check([1, 2, 1, 3], [-1, -1, 0, 1]) == ([1, 2, 1, 3], [-1, -1, 0, 1], {})
    assert check([], []) == ([], [], {})


@pytest.mark.parametrize(
    ("ids", "parents", "expected"),
    [
        # An id that is none takes what hangs on it; places of the others close up.
        ([1, 50, 7, 2, 3], [-1, -1, 1, 0, 3], ([1, 2, 3], [-1, 0, 1], {"bad_id": 1})),
        ([1, -1, None, 2], [-1, -1, 0, -1], ([1, 2], [-1, -1], {"bad_id": 2})),
        # A parent that is none, or does not come first.
        ([1, 2, 3], [-1, 1, 1], ([1], [-1], {"bad_parent": 1})),
        ([1, 2, 3], [-2, -1, 2], ([2], [-1], {"bad_parent": 2})),
        ([1, 2], [-1, "0"], ([1], [-1], {"bad_parent": 1})),
        # Of siblings that are alike the first stays.
        ([4, 4, 5, 6], [-1, -1, 1, 0], ([4, 6], [-1, 0], {"duplicate": 1})),
        ([4, 5, 4, 4], [-1, 0, 0, 1], ([4, 5, 4, 4], [-1, 0, 0, 1], {})),
    ],
)
def test_a_fault_takes_its_subtree(
    ids: list[Any], parents: list[Any], expected: tuple[list[int], list[int], dict[str, int]]
) -> None:
    assert check(ids, parents) == expected


def test_nodes_are_cut_from_the_end_and_below() -> None:
    assert check([1, 2, 3, 4], [-1, 0, 1, 2], k=2) == ([1, 2], [-1, 0], {"too_long": 1})
    assert check([1, 2, 3, 4, 5], [-1, 0, 1, 2, -1], max_depth=2) == (
        [1, 2, 5],
        [-1, 0, -1],
        {"too_deep": 1},
    )


def test_what_is_left_of_rubbish_is_a_tree() -> None:
    rng = random.Random(0)
    for _ in range(300):
        n = rng.randrange(12)
        ids = [rng.choice([0, 1, 2, 49, 50, -1, 2.5]) for _ in range(n)]
        parents = [rng.randrange(-2, n + 1) for _ in range(n)]
        kept, above, faults = check(ids, parents, k=8, max_depth=3)
        depths: list[int] = []
        for place, parent in enumerate(above):
            assert -1 <= parent < place
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert all(depth <= 3 for depth in depths)
        assert len(set(zip(above, kept, strict=True))) == len(kept) <= 8
        assert all(0 <= token_id < 50 for token_id in kept)
        assert bool(faults) or (kept, above) == (ids, parents)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_cannot_be_printed_is_a_fault_like_others() -> None:
    assert check([1, Unprintable()], [-1, -1]) == ([1], [-1], {"bad_id": 1})
    assert check([1, 2], [-1, Unprintable()]) == ([1], [-1], {"bad_parent": 1})
