"""Putting draft trees together, and choosing the best of their candidates."""

from __future__ import annotations

import math
import random

import pytest

from foresay.core.proposer import draft_depths
from foresay.core.worker.draft_tree import DraftTree, is_chain, subtree

LOG_HALF = math.log(0.5)


def example() -> DraftTree:
    """By candidate: the token, where it hangs, the probability of its way."""
    tree = DraftTree()
    tree.add(-1, 10, math.log(0.6))  # 0: 0.6
    tree.add(-1, 11, math.log(0.3))  # 1: 0.3
    tree.add(0, 20, math.log(0.9))  # 2: 0.54
    tree.add(1, 20, math.log(0.8))  # 3: 0.24
    tree.add(2, 30, math.log(0.1))  # 4: 0.054
    tree.add(0, 21, math.log(0.1))  # 5: 0.06
    return tree


def test_the_best_come_first_and_what_is_cut_is_cut_from_the_end() -> None:
    tree = example()
    assert [round(math.exp(p), 3) for p in tree.log_probs] == [0.6, 0.3, 0.54, 0.24, 0.054, 0.06]
    assert tree.depths == [1, 1, 2, 2, 3, 2]
    assert tree.best(99) == [0, 2, 1, 3, 5, 4]
    for k in range(7):
        assert tree.best(k) == [0, 2, 1, 3, 5, 4][:k]
    assert tree.draft(tree.best(5)) == ([10, 20, 11, 20, 21], [-1, 0, -1, 2, 0])


def test_a_depth_and_a_probability_bound_the_best() -> None:
    tree = example()
    assert tree.best(99, max_depth=2) == [0, 2, 1, 3, 5]
    assert tree.best(99, max_depth=1) == [0, 1]
    assert tree.best(99, least_log_prob=math.log(0.25)) == [0, 2, 1]
    assert tree.best(99, least_log_prob=math.log(0.7)) == []
    assert tree.best(1, max_depth=2, least_log_prob=math.log(0.2)) == [0]


def test_a_child_that_is_there_already_stays_or_becomes_likelier() -> None:
    tree = example()
    assert tree.add(0, 20, math.log(0.5)) == 2
    assert math.exp(tree.log_probs[2]) == pytest.approx(0.54)
    assert tree.add(0, 20, math.log(0.95)) == 2
    assert math.exp(tree.log_probs[2]) == pytest.approx(0.57)
    assert len(tree) == 6
    assert [tree.find(0, 20), tree.find(1, 20), tree.find(-1, 20)] == [2, 3, None]


def test_of_equal_candidates_those_nearer_to_the_root_come_first_then_those_added_earlier() -> None:
    tree = DraftTree()
    tree.add(-1, 1, LOG_HALF)
    tree.add(0, 2, 0.0)
    tree.add(1, 3, 0.0)
    tree.add(-1, 4, LOG_HALF)
    tree.add(3, 5, 0.5)  # no token is likelier than certain
    assert tree.best(9) == [0, 3, 1, 4, 2]


def test_a_candidate_made_likelier_than_the_one_above_it_never_comes_without_it() -> None:
    tree = DraftTree()
    tree.add(-1, 1, -3.0)
    tree.add(0, 2, 0.0)
    tree.add(-1, 3, -1.0)
    tree.log_probs[1] = -0.5
    assert tree.best(2) == [2, 0]


def test_best_choices_are_trees_and_parents_come_first() -> None:
    rng = random.Random(0)
    for _ in range(50):
        tree = DraftTree()
        for _ in range(40):
            parent = rng.randrange(-1, len(tree))
            tree.add(parent, rng.randrange(5), -rng.choice((0.0, 0.1, 0.5, 2.0)))
        chosen = tree.best(rng.randrange(30), rng.randint(1, 6), -4.0)
        _, parents = tree.draft(chosen)
        assert all(parent < place for place, parent in enumerate(parents))
        # -1 is the root's child, never a node whose parent was left out.
        for number, parent in zip(chosen, parents, strict=True):
            assert tree.parents[number] == (-1 if parent < 0 else chosen[parent])
        found = [tree.log_probs[number] for number in chosen]
        assert found == sorted(found, reverse=True)


def test_depths_chains_and_subtrees_of_parents() -> None:
    assert draft_depths([-1, 0, -1, 2, 0, 3]) == [1, 2, 1, 2, 2, 3]
    assert subtree([-1, 0, -1, 2, 0, 3], [0, 2, 3, 4]) == [-1, -1, 1, 0]
    assert is_chain([])
    assert is_chain([-1, 0, 1])
    assert not is_chain([-1, -1])
    assert not is_chain([-1, 0, 0])
