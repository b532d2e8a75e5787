"""Draft trees that tests of verification share: shapes, and what a walk through one must give."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify

Tree = tuple[list[int], list[int]]  # token ids and parents


def random_tree(rng: random.Random, size: int, num_nodes: int) -> Tree:
    """Parents at random, siblings that differ; fewer nodes where there is no more room."""
    token_ids: list[int] = []
    parents: list[int] = []
    seen: set[tuple[int, int]] = set()
    for _ in range(num_nodes):
        parent, token_id = rng.randrange(-1, len(token_ids)), rng.randrange(size)
        if (parent, token_id) not in seen:
            seen.add((parent, token_id))
            token_ids.append(token_id)
            parents.append(parent)
    return token_ids, parents


def alike_but_one(rng: random.Random, size: int, num_nodes: int) -> Tree:
    """Every node has the same two tokens below it, on each level but one token differs."""
    token_ids: list[int] = []
    parents: list[int] = []
    for parent in range(-1, num_nodes):
        for token_id in (0, 1 + parent % 2):
            if len(token_ids) < num_nodes and token_id < size:
                token_ids.append(token_id)
                parents.append(parent)
    return token_ids, parents


def deepest_first(rng: random.Random, size: int, num_nodes: int) -> Tree:
    """One long way first, then siblings of its nodes, from the deepest up."""
    length = num_nodes // 2
    way = [rng.randrange(size) for _ in range(length)]
    token_ids, parents = list(way), list(range(-1, length - 1))
    for place in range(length - 1, -1, -1):
        if size > 1:
            token_ids.append((way[place] + 1) % size)
            parents.append(place - 1)
    return token_ids, parents


def maximal(rng: random.Random, size: int, num_nodes: int) -> Tree:
    """Level by level, with all tokens there are below each node: a walk goes as deep as it can."""
    token_ids: list[int] = []
    parents: list[int] = []
    parent = -1
    while len(token_ids) < num_nodes:
        few = min(size, num_nodes - len(token_ids))
        token_ids += rng.sample(range(size), few)
        parents += [parent] * few
        parent += 1
    return token_ids, parents


SHAPES: dict[str, Callable[[random.Random, int, int], Tree]] = {
    shape.__name__: shape for shape in (random_tree, alike_but_one, deepest_first, maximal)
}


def walked_plainly(rows: torch.Tensor, request: VerifyRequest) -> VerifyResult:
    """What plain decoding emits from the same rows, one token a step, while a draft has it.

    `rows` [1 + num_drafts, vocab_size].
    """
    parents = request.parents
    assert parents is not None
    token_ids: list[int] = []
    accepted: list[int] = []
    node: int | None = -1
    while node is not None:
        one = replace(
            request,
            draft_token_ids=[],
            parents=None,
            draft_probs=None,
            token_ids=[*request.token_ids, *token_ids],
        )
        (result,) = verify(rows[node + 1 : node + 2], [one], backend="torch")
        if result.error is not None:
            return VerifyResult(error=result.error)
        token_ids += result.token_ids
        edges = list(zip(parents, request.draft_token_ids, strict=True))
        found = [place for place, edge in enumerate(edges) if edge == (node, token_ids[-1])]
        node = found[0] if found else None
        accepted += found[:1]
    return VerifyResult(token_ids, accepted=accepted)


def in_a_tree(request: VerifyRequest, tree: Tree) -> VerifyRequest:
    return replace(request, draft_token_ids=tree[0], parents=tree[1])


def way_to(parents: Sequence[int], place: int) -> list[int]:
    """The places from the root's child to a node, itself included."""
    return [] if place < 0 else [*way_to(parents, parents[place]), place]
