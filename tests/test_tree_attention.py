"""Attention over draft trees: each row has the bits that plain decoding of its path gives it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from foresay.core.worker import attention_rules, draft_tree
from foresay.core.worker.attention import (
    AttentionMetadata,
    AttentionRules,
    TreeLayout,
    paged_attention,
)
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.target import TargetModel, load_target

CPU = torch.device("cpu")
SCALE = 0.3
SHAPES = [(9, 3, 64, 64), (8, 8, 32, 32), (8, 1, 64, 64)]
Shape = tuple[int, int, int, int]  # heads, key heads, head dim, value dim


def by_widths(*widths: int) -> list[int]:
    """Nodes depth by depth, hung on the nodes of the depth above in turn."""
    parents: list[int] = []
    above = [-1]
    for width in widths:
        level = range(len(parents), len(parents) + width)
        parents += [above[i % len(above)] for i in range(width)]
        above = list(level)
    return parents


def random_tree(rng: np.random.Generator, num_nodes: int) -> list[int]:
    """Any tree: bushy or deep, by chance."""
    back = int(rng.integers(1, num_nodes + 1))
    return [int(rng.integers(max(-1, i - back), i)) for i in range(num_nodes)]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


class Request:
    """A text of `first` positions with a tree behind it (no nodes: a text), and all its numbers."""

    def __init__(
        self, rng: np.random.Generator, shape: Shape, first: int, parents: Sequence[int]
    ) -> None:
        num_heads, num_kv_heads, head_dim, value_dim = shape
        size = first + len(parents)

        def random(heads: int, dim: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal((size, heads, dim))).float()

        self.first, self.parents = first, list(parents)
        self.query = random(num_heads, head_dim)
        self.key, self.value = random(num_kv_heads, head_dim), random(num_kv_heads, value_dim)
        self.positions = np.array(
            [*range(first), *(first - 1 + depth for depth in draft_tree.depths(parents))]
        )

    def path(self, node: int) -> list[int]:
        """Places in the tensors of the text and the way to a node."""
        return [*range(self.first), *(self.first + i for i in path_to(self.parents, node))]


class Cache:
    """One layer's cache; every run lays its requests out anew, in scattered slots."""

    def __init__(self, shape: Shape, rules: AttentionRules, dtype: torch.dtype) -> None:
        self.rng = np.random.default_rng(0)
        self.rules, self.dtype = rules, dtype
        self.kv = KVCache([LayerKV(*shape[1:])], 2048, 4, dtype, CPU)

    def run(
        self, parts: Sequence[tuple[Request, list[int], int]], *, tree: bool, **options: Any
    ) -> list[torch.Tensor]:
        """Attend for the last rows of each part: (request, places in its tensors, number of rows).

        The earlier ones are put in the cache first.
        """
        layer = self.kv.layers[0]
        order = self.rng.permutation(2048 * 4)
        positions, slots, trees = [], [], []
        at = 0
        for request, places, num_rows in parts:
            slots.append(order[at : at + len(places)])
            at += len(places)
            key, value = (x[places].to(self.dtype) for x in (request.key, request.value))
            layer.write(torch.from_numpy(slots[-1]), key, value)
            rows = np.arange(len(places) - num_rows, len(places))
            positions.append(request.positions[places][rows] if tree else rows)
            nodes = np.maximum(rows - request.first, -1)
            trees.append(TreeLayout(request.first, np.array(request.parents, dtype=int), nodes))
        kept = [slots[i][-num_rows:] for i, (_, _, num_rows) in enumerate(parts)]
        metadata = AttentionMetadata.build(
            positions,
            slots,
            np.concatenate(kept),
            self.kv.null_slot,
            self.rules,
            CPU,
            [t if r.parents else None for t, (r, _, _) in zip(trees, parts, strict=True)]
            if tree
            else None,
        )

        def flat(name: str) -> torch.Tensor:
            return torch.cat(
                [getattr(request, name)[places[-n:]] for request, places, n in parts]
            ).to(self.dtype)

        found = paged_attention(
            flat("query"), flat("key"), flat("value"), layer, metadata, scale=SCALE, **options
        )
        return list(found.split([num_rows for _, _, num_rows in parts]))


def rules_for(shape: Shape, dtype: torch.dtype, compute: torch.dtype) -> AttentionRules:
    return AttentionRules.choose(
        CPU,
        dtype,
        compute,
        num_heads=shape[0],
        num_kv_heads=shape[1],
        head_dim=shape[2],
        row_invariant=True,
    )


def reference(
    request: Request, place: int, window: int | None, softcap: float | None, sinks: Any
) -> torch.Tensor:
    """One row by the definition, in float64; [num_heads, value_dim]."""
    seen = [*range(place + 1)]
    if place >= request.first:
        seen = request.path(place - request.first)
    if window is not None:
        seen = seen[-window:]
    fold = request.query.shape[1] // request.key.shape[1]
    key, value = (x[seen].double().repeat_interleave(fold, 1) for x in (request.key, request.value))
    scores = torch.einsum("hd,khd->hk", request.query[place].double(), key) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp()
    total = weights.sum(1)
    if sinks is not None:
        total = total + sinks.double().exp()
    return torch.einsum("hk,khd->hd", weights / total[:, None], value)


def assert_rows_of_plain_decoding(
    cache: Cache, requests: Sequence[Request], chunks: Sequence[int], **options: Any
) -> None:
    """One pass of all requests, with some rows of their texts, against a pass for each leaf."""
    parts = [
        (r, list(range(r.first + len(r.parents))), n + len(r.parents))
        for r, n in zip(requests, chunks, strict=True)
    ]
    found = cache.run(parts, tree=True, **options)
    for request, rows, chunk in zip(requests, found, chunks, strict=True):
        leaves = set(range(len(request.parents))) - set(request.parents)
        for node in leaves or {None}:
            places = list(range(request.first)) if node is None else request.path(node)
            depth = len(places) - request.first
            (plain,) = cache.run([(request, places, chunk + depth)], tree=False, **options)
            of_path = [*range(chunk), *(place - request.first + chunk for place in places[-depth:])]
            same = rows[of_path if depth else range(chunk)].eq(plain).flatten(1).all(1)
            assert same.all(), (request.first, request.parents, node, same)


@pytest.fixture(scope="module")
def rules() -> dict[tuple[Shape, torch.dtype], AttentionRules]:
    return {
        (shape, dtype): rules_for(shape, dtype, torch.float32)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
    }


TREES = {
    "a chain": by_widths(*[1] * 7),
    "siblings only": by_widths(8),
    "wide and shallow": by_widths(8, 8),
    "by confidence": by_widths(4, 4, 4, 2, 2),
    "two deep ways": by_widths(*[2] * 20),
    "a comb": [max(-1, i // 2 * 2 - 2) for i in range(20)],
    "as many as rows are not folded": by_widths(6, 12, 12, 6),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("first", [1, 7, 100, 249, 300, 505, 512, 770])
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(
    rules: Any, shape: Shape, dtype: torch.dtype, first: int
) -> None:
    rng = np.random.default_rng(first)
    cache = Cache(shape, rules[shape, dtype], dtype)
    for parents in TREES.values():
        assert_rows_of_plain_decoding(cache, [Request(rng, shape, first, parents)], [1])
