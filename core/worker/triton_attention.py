"""The host side of the attention kernels: from a step's rows to work items, and the launches.

Knows rows' positions, their keys' slots and trees, and what a device can take. Does not know the
arithmetic (`kernels.attention` does; `attention` is its reference in torch), nor what a draft is.

A row's result depends on the row and its keys alone: which rows share a tile, and whether one
program takes all of a tile's splits or each has its own, changes no bit of it. `kernels.attention`
says what that rests on. Needs triton, and tensors on a GPU or Triton's interpreter.
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
class _Plan:
    """Work items of a step for layers of one shape."""

    items: torch.Tensor  # [num_items, kernels.NUM_FIELDS] int32
    first_parts: torch.Tensor  # [num_tokens] int32
    merged: torch.Tensor  # [num_merged, kernels.NUM_MERGED_FIELDS] int32: rows that have parts
    num_parts: int


@dataclass(slots=True)
class TritonMetadata:
    """A step's rows as the kernels see them. Rows are flat: request after request."""

    key_slots: torch.Tensor  # [num_keys in all] int32, request after request
    positions: torch.Tensor  # [num_tokens] int32
    seen: torch.Tensor  # [num_tokens * num_words] int32: bit i of a node's words: it sees node i
    node_positions: torch.Tensor  # [num_nodes in all] int32, request after request
    num_words: int
    # The same step on the host. Of each row the key that ends what it sees; by request the rest.
    _ends: np.ndarray
    _query_lens: np.ndarray
    _key_lens: np.ndarray
    _text_ends: np.ndarray
    _node_counts: np.ndarray
    _plans: dict[tuple[Tiling, int, int, int], _Plan] = field(default_factory=dict)

    @staticmethod
    def build(
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        trees: Sequence[TreeLayout | None] | None,
        device: torch.device,
    ) -> TritonMetadata:
        """Lay out one step; arguments as those of `AttentionMetadata.build`."""
        trees = trees or [None] * len(positions)
        found = [tree for tree in trees if tree is not None]
        num_words = -(-max((len(tree.parents) for tree in found), default=0) // _WORD)
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
        key_slots, on_device, masks, node_positions = _to_device(
            [
                np.concatenate(slots),
                flat,
                seen.ravel().view(np.int32),
                np.concatenate([*depths, np.empty(0, dtype=np.int64)]),
            ],
            device,
        )
        return TritonMetadata(
            key_slots=key_slots,
            positions=on_device,
            seen=masks,
            node_positions=node_positions,
            num_words=num_words,
            _ends=ends,
            _query_lens=query_lens,
            _key_lens=np.array([len(keys) for keys in slots]),
            _text_ends=np.array([_TEXT if tree is None else tree.first for tree in trees]),
            _node_counts=np.array([0 if tree is None else len(tree.parents) for tree in trees]),
        )

    def plan(self, tiling: Tiling, fold: int, num_kv_heads: int, num_programs: int) -> _Plan:
        """Return the work items, made once per step and shape of layers.

        num_programs: what keeps the device busy; tiles are split as far as there are fewer.
        """
        key = (tiling, fold, num_kv_heads, num_programs)
        if key not in self._plans:
            self._plans[key] = self._make_plan(
                tiling.block_m // fold, tiling.split_len, -(-num_programs // num_kv_heads)
            )
        return self._plans[key]

    def _make_plan(self, tokens_per_tile: int, split_len: int, num_programs: int) -> _Plan:
        tiles_of = -(-self._query_lens // tokens_per_tile)
        request, index = _spread(tiles_of)  # [num_tiles] each
        starts = np.cumsum(self._query_lens) - self._query_lens
        first_token = starts[request] + index * tokens_per_tile
        num_tokens = np.minimum(self._query_lens[request] - index * tokens_per_tile,
                                tokens_per_tile)  # fmt: skip
        key_end = np.maximum.reduceat(self._ends, first_token)
        num_splits = -(-key_end // split_len)
        # A tile is split if it has more than its share of the work.
        is_split = (num_splits > 1) & (num_splits * num_programs > num_splits.sum())
        tile, split = _spread(np.where(is_split, num_splits, 1))  # [num_items] each
        items = np.empty((len(tile), kernels.NUM_FIELDS.value), dtype=np.int32)
        columns = {
            kernels.FIRST_TOKEN: first_token,
            kernels.NUM_TOKENS: num_tokens,
            kernels.FIRST_KEY: (np.cumsum(self._key_lens) - self._key_lens)[request],
            kernels.KEY_END: key_end,
            kernels.TEXT_END: self._text_ends[request],
            kernels.FIRST_NODE: (np.cumsum(self._node_counts) - self._node_counts)[request],
            kernels.IS_PART: is_split,
        }
        for column, of_tiles in columns.items():
            items[:, column.value] = of_tiles[tile]
        items[:, kernels.FIRST_SPLIT.value] = split
        items[:, kernels.SPLIT_END.value] = np.where(is_split[tile], split + 1, num_splits[tile])

        tile_of_token, _ = _spread(num_tokens)  # tiles are in the order of tokens
        num_parts = np.where(is_split, num_splits, 0)[tile_of_token]
        first_parts = np.cumsum(num_parts) - num_parts
        (tokens,) = np.nonzero(num_parts)
        merged = np.empty((len(tokens), kernels.NUM_MERGED_FIELDS.value), dtype=np.int32)
        merged[:, kernels.TOKEN.value] = tokens
        merged[:, kernels.FIRST_PART.value] = first_parts[tokens]
        merged[:, kernels.NUM_PARTS.value] = num_parts[tokens]
        on_device = _to_device([items.ravel(), first_parts, merged.ravel()], self.positions.device)
        return _Plan(
            items=on_device[0].view(items.shape),
            first_parts=on_device[1],
            merged=on_device[2].view(merged.shape),
            num_parts=int(num_parts.sum()),
        )


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
    """Return arrays as int32 on the device, in one transfer."""
    lens = [len(array) for array in arrays]
    starts = np.cumsum([0, *(max(-(-n // _ALIGNED), 1) * _ALIGNED for n in lens)])
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + len(array)] = array
    on_device = torch.from_numpy(packed)
    if device.type != "cpu":
        on_device = on_device.to(device)
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
    plan = metadata.plan(tiling, fold, num_kv_heads, num_programs or _num_programs(device))
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
            has_sinks=sinks is not None,
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
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * int(processors)
