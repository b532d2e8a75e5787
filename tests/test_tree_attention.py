"""Attention over draft trees: each row has the bits that plain decoding of its path gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from foresay.core.proposer import draft_depths
from foresay.core.worker import attention_rules, draft_tree
from foresay.core.worker.attention import (
    AttentionMetadata,
    AttentionRules,
    TreeLayout,
    paged_attention,
)
from foresay.core.worker.attention_rules import LANE
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.target import TargetModel, load_target
from foresay.core.worker.tree_columns import tree_columns, within_members

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
            [*range(first), *(first - 1 + depth for depth in draft_depths(parents))]
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
@pytest.mark.parametrize("first", [1, 7, 230, 249, 505, 770])
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(
    rules: Any, shape: Shape, dtype: torch.dtype, first: int
) -> None:
    rng = np.random.default_rng(first)
    cache = Cache(shape, rules[shape, dtype], dtype)
    for parents in TREES.values():
        assert_rows_of_plain_decoding(cache, [Request(rng, shape, first, parents)], [1])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"sliding_window": 200}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_and_texts_in_one_pass_keep_their_bits(
    rules: Any, options: dict[str, Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = SHAPES[0]
    requests = [
        Request(rng, shape, int(rng.choice([3, 90, 248, 255, 256, 300, 507])), parents)
        for parents in ([], *(random_tree(rng, int(n)) for n in rng.integers(1, 34, 4)), [-1, 0])
    ]
    chunks = [3, *map(int, rng.integers(1, 4, 4)), 2]
    assert_rows_of_plain_decoding(
        Cache(shape, rules[shape, torch.float32], torch.float32), requests, chunks, **options
    )


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "paths"])
@pytest.mark.parametrize("needed", [True, False], ids=["invariant", "any order"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 4},
        {"softcap": 2.0, "sliding_window": 30},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_rows_of_trees_equal_a_plain_softmax(
    options: dict[str, Any], needed: bool, lanes: bool
) -> None:
    rng = np.random.default_rng(1)
    shape = (4, 2, 16, 8)
    block = (256 if lanes else 0) if needed else None
    cache = Cache(shape, AttentionRules(tree_block=block), torch.float32)
    requests = [
        Request(rng, shape, 250, random_tree(rng, 14)),
        Request(rng, shape, 5, []),
        Request(rng, shape, 30, TREES["two deep ways"]),
    ]
    parts = [(r, list(range(r.first + len(r.parents))), 2 + len(r.parents)) for r in requests]
    for request, rows in zip(requests, cache.run(parts, tree=True, **options), strict=True):
        for place, row in enumerate(rows, start=request.first - 2):
            expected = reference(
                request,
                place,
                options.get("sliding_window"),
                options.get("softcap"),
                options.get("sinks"),
            )
            assert (row.double() - expected).abs().max() < 2e-5, (request.first, place)


def test_padding_rows_may_repeat_a_node() -> None:
    rng = np.random.default_rng(2)
    shape = SHAPES[0]
    request = Request(rng, shape, 40, [-1, -1])
    cache = Cache(shape, AttentionRules(tree_block=0), torch.float32)
    (expected,) = cache.run([(request, [*range(42)], 3)], tree=True)
    slots, scratch = np.arange(42), cache.kv.scratch_slot
    cache.kv.layers[0].write(torch.arange(42), request.key, request.value)
    rows = [39, 40, 41, 41, 41]
    metadata = AttentionMetadata.build(
        [request.positions[rows]], [slots], np.array([39, 40, 41, scratch, scratch]),
        cache.kv.null_slot, cache.rules, CPU,
        [TreeLayout(40, np.array([-1, -1]), np.array([-1, 0, 1, 1, 1]))],
    )  # fmt: skip
    numbers = (x[rows] for x in (request.query, request.key, request.value))
    found = paged_attention(*numbers, cache.kv.layers[0], metadata, scale=SCALE)
    assert torch.equal(found, expected[[0, 1, 2, 2, 2]])


def columns_of(first: int, parents: Sequence[int], block: int | None) -> list[dict[int, int]]:
    rules = AttentionRules(tree_block=block)
    nodes = np.arange(-1, len(parents))
    return [
        dict(zip(m.nodes.tolist(), m.columns.tolist(), strict=True))
        for m in tree_columns(first, np.array(parents), nodes, rules)
    ]


@pytest.mark.parametrize("block", [0, 32, 256, 512])
def test_columns_follow_the_rules_that_kernels_set(block: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        first, parents = int(rng.integers(1, 600)), random_tree(rng, int(rng.integers(1, 40)))
        depths = draft_depths(parents)
        computed: list[int] = []
        members = tree_columns(
            first, np.array(parents), np.arange(-1, len(parents)), AttentionRules(tree_block=block)
        )
        for number, member in enumerate(members):
            columns = dict(zip(member.nodes.tolist(), member.columns.tolist(), strict=True))
            assert len(set(columns.values())) == len(columns)
            assert member.num_columns == max(columns.values()) + 1
            assert member.computed[-1] == (number == 0)
            mine = np.flatnonzero(member.computed[:-1]).tolist()
            assert mine
            computed += mine
            for node, column in columns.items():
                position = first - 1 + depths[node]
                above = columns[parents[node]] if parents[node] >= 0 else first - 1
                assert column > above
                if block:
                    assert column % LANE == position % LANE
                    assert column // block == position // block
                else:
                    assert column == position
        assert sorted(computed) == list(range(len(parents)))


def test_as_many_lanes_as_a_depth_has_nodes_and_members_only_where_there_is_no_room() -> None:
    parents = by_widths(4, 4, 4, 2, 2)
    (columns,) = columns_of(100, parents, 256)
    assert max(columns.values()) < 100 + 4 * LANE
    assert len(columns_of(100, parents, 0)) == len(set(range(16)) - set(parents))
    # Two lanes fit before the border, so each member takes two of four ways.
    assert len(columns_of(256 - LANE - 5, parents, 256)) == 2
    # Below a border a chain is where it was; behind it there is room again.
    assert columns_of(250, by_widths(*[1] * 10), 256) == [{i: 250 + i for i in range(10)}]
    assert len(columns_of(256, parents, 256)) == 1
    assert columns_of(100, [-1, -1, 0], None) == [{0: 100, 1: 101, 2: 102}]


@pytest.mark.parametrize(
    ("stride", "border", "expected"), [(16, 512, 512), (8, 128, 128), (4, 32, 32), (32, 512, 0)]
)
def test_lanes_are_taken_as_far_as_sums_allow(
    stride: int, border: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that add up the weights in `stride` parts, and values in blocks of `border`."""

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attn_mask: torch.Tensor
    ) -> torch.Tensor:
        (q0, q1), (k0, k1) = query[..., None, :].unbind(-1), keys[:, :, None].unbind(-1)
        scores = q0 * k0 + q1 * k1 + attn_mask
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp().numpy()

        def in_order(terms: np.ndarray, axis: int) -> np.ndarray:
            # One after the other: those that are hidden add nothing.
            return np.take(np.add.accumulate(terms, axis=axis), -1, axis=axis)

        parts = in_order(weights.reshape(*weights.shape[:-1], -1, stride), -2)
        terms = weights[..., None] * values[:, :, None].numpy()
        blocks = np.split(terms, range(border, terms.shape[-2], border), axis=-2)
        out = sum(in_order(block, -2) for block in blocks)
        return torch.from_numpy(out / in_order(parts, -1)[..., None])

    monkeypatch.setattr(attention_rules.F, "scaled_dot_product_attention", attend)
    rules = AttentionRules(min_rows=2, key_lens=(64, 128, 192, 256, 384, 512))
    assert attention_rules._tree_block(rules, torch.float32, 1, 2) == expected


class Run:
    """A target model over slots in no order: passes of texts and trees."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.cache = KVCache(target.kv_layout, 64, 16, target.dtype, CPU)
        self.order = np.random.default_rng(4).permutation(64 * 16)

    def __call__(
        self, ids: torch.Tensor, start: int, tree: tuple[int, Sequence[int]] | None = None
    ) -> torch.Tensor:
        """Logits of the rows from `start` on; `tree`: its first position, and parents."""
        places = np.arange(start, len(ids))
        positions, trees = places, None
        if tree is not None:
            first, parents = tree
            trees = [TreeLayout(first, np.array(parents), np.maximum(places - first, -1))]
            depths = [first - 1 + depth for depth in draft_depths(parents)]
            positions = np.append(places[: first - start], depths)
        slots = self.order[: len(ids)]
        metadata = AttentionMetadata.build(
            [positions], [slots], slots[start:], self.cache.null_slot,
            self.target.attention_rules, CPU, trees,
        )  # fmt: skip
        with torch.inference_mode():
            return self.target.forward(ids[start:], torch.arange(len(places)), self.cache, metadata)


SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
           "intermediate_size": 1536, "num_hidden_layers": 1, "initializer_range": .04}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2_sliding", {}), ("gpt2", {}), ("llama", SMOLLM2)],
    ids=["llama", "sliding", "transformers' modules", "smollm2's shape"],
)
def test_logits_of_a_tree_are_those_of_plain_decoding(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Each path is decoded one row at a time, over the cache that the text left."""
    model = tiny_models.BUILDERS[family](max_position_embeddings=640, **changes).to(dtype)
    run = Run(load_target(model))
    generator = torch.Generator().manual_seed(5)
    parents = by_widths(3, 4, 2, 2)
    for first in (40, 253, 511):
        ids = torch.randint(3, 150, (first + len(parents),), generator=generator)
        run(ids[:first], 0)
        rows = run(ids, first - 1, (first, parents))
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(parents, leaf)
            text = torch.cat([ids[:first], ids[[first + node for node in path]]])
            for depth, node in enumerate([-1, *path]):
                (plain,) = run(text[: first + depth], first - 1 + depth)
                assert torch.equal(rows[1 + node], plain), (first, node)


@pytest.mark.parametrize("block", [0, 32, 256, None])
def test_a_tree_is_cut_to_what_few_members_compute(block: int | None) -> None:
    rng = np.random.default_rng(3)
    rules = AttentionRules(tree_block=block)
    was_cut = 0
    for _ in range(200):
        num_nodes, first = int(rng.integers(1, 33)), int(rng.integers(1, 520))
        parents = random_tree(rng, num_nodes)
        most = int(rng.integers(1, 4))
        kept = within_members(first, parents, most, rules)
        rest = draft_tree.subtree(parents, kept)
        assert kept == sorted(set(kept))
        assert kept[0] == 0
        assert all(-1 <= parent < place for place, parent in enumerate(rest))
        members = tree_columns(first, np.array(rest), np.arange(len(rest)), rules)
        assert len(members) <= most
        whole = tree_columns(first, np.array(parents), np.arange(num_nodes), rules)
        assert (len(kept) < num_nodes) == (len(whole) > most)
        was_cut += len(kept) < num_nodes
    assert bool(was_cut) == (block is not None)
