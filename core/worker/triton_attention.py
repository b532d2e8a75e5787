"""The host side of the attention kernels: from a step's rows to work items, and the launches.

Knows rows' positions, their keys' slots and trees, and what a device can take. Does not know the
arithmetic (`kernels.attention` does; `attention` is its reference in torch), nor what a draft is.

A row's result depends on the row and its keys alone: which rows share a tile, and whether one
program takes all of a tile's splits or several share them, changes no bit of it.
`kernels.attention` says what that rests on. Needs triton, and tensors on a GPU or Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from foresay.core.worker.kernels import attention as kernels
from foresay.core.worker.kv_cache import LayerCache

if TYPE_CHECKING:
    from foresay.core.worker.attention import TreeLayout

_WORD = 32  # nodes in a word of a mask
_TEXT = 2**30  # where the nodes of a text begin: beyond all of its keys
_ALIGNED = 4  # int32s: arrays share a transfer, and pointers at 16 bytes let one compilation serve
_PROGRAMS_PER_PROCESSOR = 4
_PROGRAMS_WITHOUT_GPU = 8
# Of float32 products: three passes of NVIDIA's matrix units come near float32, and are much faster.
_PRECISION = "ieee" if torch.version.hip else "tf32x3"


@dataclass(frozen=True, slots=True)
class Tiling:
    """How rows and keys are cut. One for all rows of a model: another gives other roundings."""

    block_m: int  # rows of a tile, query heads folded in: a power of two
    block_n: int  # keys taken at a time: a power of two, at least 16
    split_len: int  # keys of a split, a multiple of block_n
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(cls, fold: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> Tiling:
        """Return what suits layers with `fold` query heads per key head.

        32 rows: enough to keep matrix units busy, few enough that single tokens, which leave most
        of them idle, go on waiting for memory.
        """
        size = max(head_dim, value_dim) * dtype.itemsize
        wide = max(head_dim, value_dim) > 128 or dtype == torch.float32
        return cls(
            block_m=max(32, triton.next_power_of_2(fold)),
            block_n=64 if size <= 256 else 32,
            split_len=512,
            num_warps=8 if wide else 4,
            num_stages=3 if size <= 256 else 2,
        )


@dataclass(slots=True)
class Plan:
    """Work items of a step for layers of one shape."""

    items: torch.Tensor  # [num_items, kernels.NUM_FIELDS] int32
    first_parts: torch.Tensor  # [num_tokens] int32
    merged: torch.Tensor  # [num_merged, kernels.NUM_MERGED_FIELDS] int32: rows that have parts
    num_parts: int
    all_parts: bool  # whether all splits are left to merging


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The same on the host, where it is made."""

    items: np.ndarray
    first_parts: np.ndarray
    merged: np.ndarray
    num_parts: int


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A step's rows on the host, request after request: where they lie and what they see."""

    positions: np.ndarray  # [num_tokens]
    seen: np.ndarray  # [num_tokens, num_words] int32: bit i of a node's words: it sees node i
    node_positions: np.ndarray  # [num_nodes in all]
    ends: np.ndarray  # [num_tokens] the key that ends what each row sees
    query_lens: np.ndarray  # these by request
    key_lens: np.ndarray
    text_ends: np.ndarray
    node_counts: np.ndarray

    @staticmethod
    def of(
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        trees: Sequence[TreeLayout | None] | None,
        num_words: int | None = None,
    ) -> RowLayout:
        """Lay out one step; arguments as those of `AttentionMetadata.build`.

        num_words: words of a row's mask; None: what the largest tree needs.
        """
        trees = trees or [None] * len(positions)
        if num_words is None:
            found = [tree for tree in trees if tree is not None]
            num_words = words_of(max((len(tree.parents) for tree in found), default=0))
        query_lens = np.array([len(rows) for rows in positions])
        starts = np.cumsum(query_lens) - query_lens
        flat = np.concatenate(positions)
        ends = flat + 1
        seen = np.zeros((len(flat), num_words), dtype=np.uint32)
        depths: list[np.ndarray] = []
        for start, rows, tree in zip(starts, positions, trees, strict=True):
            if tree is None:
                continue
            if len(tree.nodes) != len(rows):
                raise ValueError(
                    f"{len(tree.nodes)} nodes for {len(rows)} query rows: give one for each"
                )
            words, positions_of_nodes = _seen_nodes(tree)
            is_node = np.flatnonzero(tree.nodes >= 0)
            nodes = tree.nodes[is_node]
            seen[start + is_node, : words.shape[1]] = words[nodes]
            ends[start + is_node] = tree.first + nodes + 1  # a node comes after those above it
            depths.append(positions_of_nodes)
        return RowLayout(
            positions=flat,
            seen=seen.view(np.int32),
            node_positions=np.concatenate([*depths, np.empty(0, dtype=np.int64)]),
            ends=ends,
            query_lens=query_lens,
            key_lens=np.array([len(keys) for keys in slots]),
            text_ends=np.array([_TEXT if tree is None else tree.first for tree in trees]),
            node_counts=np.array([0 if tree is None else len(tree.parents) for tree in trees]),
        )

    def plan(
        self, tokens_per_tile: int, split_len: int, num_programs: int, max_items: int | None = None
    ) -> HostPlan:
        """Share the rows out among programs, `num_programs` of which keep the device busy.

        A tile is shared out if it has more than its share of the work: each split is an item then,
        and a part of each row.

        With `max_items`, at least the number of tiles, an item may have several splits, and all
        splits are parts of their rows: for launches that serve many steps.
        """
        tiles_of = -(-self.query_lens // tokens_per_tile)
        request, index = _spread(tiles_of)  # [num_tiles] each
        starts = np.cumsum(self.query_lens) - self.query_lens
        first_token = starts[request] + index * tokens_per_tile
        num_tokens = np.minimum(self.query_lens[request] - index * tokens_per_tile,
                                tokens_per_tile)  # fmt: skip
        key_end = np.maximum.reduceat(self.ends, first_token)
        num_splits = -(-key_end // split_len)
        is_split = (num_splits > 1) & (num_splits * num_programs > num_splits.sum())
        num_items = np.where(is_split, num_splits, 1)
        if max_items is not None:
            num_items = _limited(num_items, max_items)
            is_split = num_splits > 0
        tile, item = _spread(num_items)  # [num_items] each
        items = np.empty((len(tile), kernels.NUM_FIELDS.value), dtype=np.int32)
        columns = {
            kernels.FIRST_TOKEN: first_token,
            kernels.NUM_TOKENS: num_tokens,
            kernels.FIRST_KEY: (np.cumsum(self.key_lens) - self.key_lens)[request],
            kernels.KEY_END: key_end,
            kernels.TEXT_END: self.text_ends[request],
            kernels.FIRST_NODE: (np.cumsum(self.node_counts) - self.node_counts)[request],
            kernels.IS_PART: is_split,
        }
        for column, of_tiles in columns.items():
            items[:, column.value] = of_tiles[tile]
        items[:, kernels.FIRST_SPLIT.value] = item * num_splits[tile] // num_items[tile]
        items[:, kernels.SPLIT_END.value] = (item + 1) * num_splits[tile] // num_items[tile]

        tile_of_token, _ = _spread(num_tokens)  # tiles are in the order of tokens
        num_parts = np.where(is_split, num_splits, 0)[tile_of_token]
        first_parts = np.cumsum(num_parts) - num_parts
        (tokens,) = np.nonzero(num_parts)
        merged = np.empty((len(tokens), kernels.NUM_MERGED_FIELDS.value), dtype=np.int32)
        merged[:, kernels.TOKEN.value] = tokens
        merged[:, kernels.FIRST_PART.value] = first_parts[tokens]
        merged[:, kernels.NUM_PARTS.value] = num_parts[tokens]
        return HostPlan(items, first_parts, merged, int(num_parts.sum()))


@dataclass(slots=True)
class TritonMetadata:
    """A step's rows as the kernels see them. Rows are flat: request after request."""

    key_slots: torch.Tensor  # [num_keys in all] int32, request after request
    positions: torch.Tensor  # [num_tokens] int32
    seen: torch.Tensor  # [num_tokens * num_words] int32: bit i of a node's words: it sees node i
    node_positions: torch.Tensor  # [num_nodes in all] int32, request after request
    num_words: int
    layout: RowLayout | None  # the same step on the host; None where all plans are given
    max_items: int | None = None  # see `RowLayout.plan`
    plans: dict[tuple[Tiling, int, int, int], Plan] = field(default_factory=dict)

    @staticmethod
    def build(
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        trees: Sequence[TreeLayout | None] | None,
        device: torch.device,
    ) -> TritonMetadata:
        """Lay out one step; arguments as those of `AttentionMetadata.build`."""
        layout = RowLayout.of(positions, slots, trees)
        key_slots, on_device, masks, node_positions = _to_device(
            [
                np.concatenate(slots),
                layout.positions,
                layout.seen.ravel(),
                layout.node_positions,
            ],
            device,
        )
        return TritonMetadata(
            key_slots=key_slots,
            positions=on_device,
            seen=masks,
            node_positions=node_positions,
            num_words=layout.seen.shape[1],
            layout=layout,
        )

    def plan(self, tiling: Tiling, fold: int, num_kv_heads: int, num_programs: int) -> Plan:
        """Return the work items, made once per step and shape of layers.

        num_programs: what keeps the device busy; tiles are split as far as there are fewer.
        """
        key = (tiling, fold, num_kv_heads, num_programs)
        if key not in self.plans:
            assert self.layout is not None, f"there is no plan for {key}"
            plan = self.layout.plan(
                tiling.block_m // fold,
                tiling.split_len,
                -(-num_programs // num_kv_heads),
                self.max_items,
            )
            items, first_parts, merged = _to_device(
                [plan.items.ravel(), plan.first_parts, plan.merged.ravel()], self.positions.device
            )
            self.plans[key] = Plan(
                items=items.view(plan.items.shape),
                first_parts=first_parts,
                merged=merged.view(plan.merged.shape),
                num_parts=plan.num_parts,
                all_parts=self.max_items is not None,
            )
        return self.plans[key]


def words_of(num_nodes: int) -> int:
    """Return how many words the mask of a row takes, in a tree of `num_nodes` nodes."""
    return -(-num_nodes // _WORD)


def _limited(num_items: np.ndarray, max_items: int) -> np.ndarray:
    """Return how many items each tile becomes if there may be no more: in proportion."""
    more = num_items - 1  # than one
    room = max_items - len(num_items)
    if more.sum() > room:
        more = more * room // more.sum()
    return 1 + more


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each of all that are counted, its group and its number within the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return group, np.arange(len(group)) - starts[group]


def _seen_nodes(tree: TreeLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return which nodes each node sees, as words of bits [num_nodes, n], and its position."""
    num_nodes = len(tree.parents)
    seen = np.zeros((num_nodes, -(-num_nodes // _WORD)), dtype=np.uint32)
    positions = np.full(num_nodes, tree.first)
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            seen[node] = seen[parent]
            positions[node] = positions[parent] + 1
        seen[node, node // _WORD] |= np.uint32(1 << node % _WORD)
    return seen, positions


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return arrays as int32 on the device, in one transfer that waits for nothing."""
    lens = [len(array) for array in arrays]
    starts = np.cumsum([0, *(max(-(-n // _ALIGNED), 1) * _ALIGNED for n in lens)])
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + len(array)] = array
    on_device = torch.from_numpy(packed)
    if device.type != "cpu":
        on_device = on_device.to(device, non_blocking=True)
    return [on_device[start : start + n] for start, n in zip(starts, lens, strict=False)]


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], rope applied
    cache: LayerCache,
    metadata: TritonMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
    tiling: Tiling | None = None,
    num_programs: int | None = None,
) -> torch.Tensor:
    """Attend for rows whose keys and values are in the cache, as `paged_attention` does.

    Returns [num_tokens, num_heads, value_dim]. `tiling` and `num_programs`: None for what suits
    the device. The latter changes no bit of the result.
    """
    device = query.device
    if device.type == "cpu" and isinstance(kernels.attention_kernel, triton.runtime.JITFunction):
        raise ValueError(
            "tensors on the CPU, but the Triton kernels need them on a GPU; without one they run "
            "in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, value_dim = cache.num_kv_heads, cache.value_dim
    fold = num_heads // num_kv_heads
    dtype = cache.slots.dtype
    if query.dtype != dtype or query.stride(2) != 1:
        query = query.to(dtype).contiguous()
    tiling = tiling or Tiling.choose(fold, head_dim, value_dim, dtype)
    plan = metadata.plan(tiling, fold, num_kv_heads, num_programs or programs_of(device))
    out = query.new_empty(query.shape[0], num_heads, value_dim)
    sums = torch.empty(plan.num_parts, num_heads, 2, device=device)
    values = torch.empty(plan.num_parts, num_heads, value_dim, device=device)
    sink_logits = sums if sinks is None else sinks.to(device, torch.float32)
    block_v = max(triton.next_power_of_2(value_dim), 16)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernels.attention_kernel[(len(plan.items), num_kv_heads)](
            query, query.stride(0), query.stride(1), cache.slots, cache.slots.stride(0), out,
            sink_logits, plan.items, metadata.key_slots, metadata.positions,
            metadata.node_positions, metadata.seen, plan.first_parts, sums, values,
            metadata.num_words, sliding_window or 0, scale, softcap or 0.0,
            num_heads=num_heads, fold=fold, head_dim=head_dim, value_dim=value_dim,
            block_m=tiling.block_m, block_n=tiling.block_n,
            block_d=max(triton.next_power_of_2(head_dim), 16), block_v=block_v,
            split_len=tiling.split_len, precision=_PRECISION,
            has_window=sliding_window is not None, has_softcap=softcap is not None,
            has_sinks=sinks is not None, all_parts=plan.all_parts,
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        if len(plan.merged):
            kernels.merge_kernel[(len(plan.merged), num_heads)](
                out, sink_logits, plan.merged, sums, values, num_heads=num_heads,
                value_dim=value_dim, block_v=block_v, has_sinks=sinks is not None, num_warps=1,
                enable_fp_fusion=True,
            )  # fmt: skip
    return out


@cache
def programs_of(device: torch.device) -> int:
    """Return how many programs keep a device busy."""
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * int(processors)
