"""KV blocks in memory: the tensors, their slots, and zeroing. Knows nothing of requests.

A block holds `block_size` slots; slot = block_id * block_size + offset. Besides the pool that the
scheduler hands out there are two blocks it never sees: the *null* block is never written and stays
zero (padding reads it), the *scratch* block is where rows are stored of which nothing is kept:
padding, and what is run to try or to capture a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.core.errors import ConfigError
from foresay.core.proposer import KVLayer
from foresay.core.worker.dense_kv import DenseCopies, DensePlan, SlotStamps

# Bytes of a number in a dense copy, at most: narrower ones may be computed with in float32.
_DENSE_ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores per token."""

    num_kv_heads: int
    head_dim: int  # of the keys
    value_dim: int  # of the values; differs from head_dim in some models

    @staticmethod
    def of(layer: KVLayer) -> LayerKV:
        """Return what a layer stores that a proposer declared."""
        return LayerKV(layer.num_kv_heads, layer.head_dim, layer.value_dim or layer.head_dim)

    @property
    def width(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class LayerCache:
    """One layer's keys and values, by slot.

    A slot's keys and values lie side by side, so that one copy reads or writes both.
    """

    def __init__(self, layer: LayerKV, slots: torch.Tensor) -> None:
        """`slots` [num_slots, layer.width]."""
        self.slots = slots
        self.num_kv_heads, self.value_dim = layer.num_kv_heads, layer.value_dim
        self.key, self.value = self._split(slots, layer.num_kv_heads * layer.head_dim)
        # By number of a dense copy: its rows [num_rows * row_len, width], and the last plan done.
        self._dense: dict[int, tuple[torch.Tensor, int]] = {}

    def _split(self, rows: torch.Tensor, key_width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [n, Hkv, D] and [n, Hkv, Dv] of `rows` [n, width]."""
        size = (rows.shape[0], self.num_kv_heads, -1)
        return rows[:, :key_width].view(size), rows[:, key_width:].view(size)

    def write(
        self, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store `key` [T, Hkv, D] and `value` [T, Hkv, Dv] at `slot_mapping` [T].

        Where there are dense copies they must know of it: see `DenseCopies.begin`. Returns what
        was stored, [T, width].
        """
        rows = _side_by_side(key, value)
        self.slots.index_copy_(0, slot_mapping, rows)
        return rows

    def gather(
        self, slots: torch.Tensor, num_requests: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [B, Hkv, K, D] and values [B, Hkv, K, Dv] of B requests, as views of a copy.

        slots: [B * K], request after request.
        """
        rows = self.slots.index_select(0, slots)
        if rows.dtype != dtype:
            rows = rows.to(dtype)
        num_keys = slots.shape[0] // num_requests
        return self._heads(rows, num_requests, num_keys, num_keys)

    def dense(
        self, plan: DensePlan, dtype: torch.dtype, written: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `gather` does of `plan.key_slots`, as views of a dense copy in `dtype`.

        The copy is brought up to date first: the step's own keys and values must be written, and
        `written` [T, width] is what was stored.
        """
        width = self.slots.shape[1]
        rows, done = self._dense.get(plan.copy, (None, 0))
        if rows is None:
            rows = self.slots.new_empty((plan.num_rows * plan.row_len, width), dtype=dtype)
        columns, slots = plan.columns, plan.slots
        missed = done not in (plan.previous, plan.number)
        if missed:
            columns, slots = plan.everything()
        if columns.shape[0]:
            if plan.only_written and not missed:
                new = written[: len(columns)]
            else:
                new = self.slots.index_select(0, slots)
            rows.index_copy_(0, columns, new if new.dtype == dtype else new.to(dtype))
        self._dense[plan.copy] = rows, plan.number
        num_requests, num_keys = plan.key_slots.shape
        return self._heads(rows, num_requests, num_keys, plan.row_len)

    def forget_dense(self, number: int) -> None:
        """Drop this layer's part of a dense copy."""
        self._dense.pop(number, None)

    def _heads(
        self, rows: torch.Tensor, num_requests: int, num_keys: int, row_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [B, Hkv, K, D] and [B, Hkv, K, Dv] of `rows`, `row_len` to a request."""
        width = rows.shape[1]
        key_width = width - self.num_kv_heads * self.value_dim

        def view(dim: int, start: int) -> torch.Tensor:
            return rows.as_strided(
                (num_requests, self.num_kv_heads, num_keys, dim),
                (row_len * width, dim, width, 1),
                start,
            )

        return view(key_width // self.num_kv_heads, 0), view(self.value_dim, key_width)


class KVCache:
    """The KV tensors of all layers, zeroed at the start.

    `layers` are the target's, `proposer_layers` those of its proposers: another layout, but the
    same blocks.
    """

    def __init__(
        self,
        layout: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        proposer_layout: Sequence[LayerKV] = (),
        *,
        max_dense_bytes: int = 0,
    ) -> None:
        """max_dense_bytes: what dense copies of the target's layers may take; 0: there are none."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.null_slot = num_blocks * block_size
        self.scratch_slot = (num_blocks + 1) * block_size
        num_slots = (num_blocks + 2) * block_size

        try:
            self.layers, self.proposer_layers = (
                [LayerCache(kv, _zeros((num_slots, kv.width), dtype, device)) for kv in layers]
                for layers in (layout, proposer_layout)
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = num_blocks * block_bytes([*layout, *proposer_layout], block_size, dtype)
            raise ConfigError(
                f"num_blocks={num_blocks}: a KV cache of {size / 2**30:.1f} GiB does not fit in "
                "memory; lower num_blocks"
            ) from error
        self._stamps = SlotStamps(num_slots)
        self.dense_copies: DenseCopies | None = None
        if max_dense_bytes and layout:
            max_columns = max_dense_bytes // (sum(kv.width for kv in layout) * _DENSE_ITEMSIZE)
            self.dense_copies = DenseCopies(self._stamps, max_columns, self._forget_dense)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks: one NaN in a masked slot would poison attention."""
        for block_id in block_ids:
            first = block_id * self.block_size
            self._stamps.renew(np.arange(first, first + self.block_size))
            for layer in (*self.layers, *self.proposer_layers):
                layer.slots[first : first + self.block_size].zero_()

    def move(self, source: Sequence[int] | np.ndarray, target: Sequence[int] | np.ndarray) -> None:
        """Copy the target model's keys and values from slots `source` [n] to slots `target` [n].

        All are read before any is written, so the two may overlap. No slot is written twice.
        """
        if len(source) == 0:
            return
        self._stamps.renew(np.asarray(target))
        device = self.layers[0].slots.device
        read, written = (
            torch.from_numpy(np.asarray(slots, dtype=np.int64)).to(device)
            for slots in (source, target)
        )
        for layer in self.layers:
            layer.slots.index_copy_(0, written, layer.slots.index_select(0, read))

    def _forget_dense(self, number: int) -> None:
        for layer in self.layers:
            layer.forget_dense(number)


def _side_by_side(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `key` [T, Hkv, D] and `value` [T, Hkv, Dv] as rows [T, width], uncopied if possible.

    As slices of one projection they do; then a copy less is made.
    """
    num_tokens, num_heads, head_dim = key.shape
    inner = (head_dim, 1), (value.shape[2], 1)
    key_width = num_heads * head_dim
    if (
        (key.stride()[1:], value.stride()[1:]) == inner
        and key.stride(0) == value.stride(0)
        and value.storage_offset() == key.storage_offset() + key_width
        and value.data_ptr() == key.data_ptr() + key_width * key.element_size()
    ):
        width = key_width + num_heads * value.shape[2]
        return key.as_strided((num_tokens, width), (key.stride(0), 1))
    return torch.cat([key.flatten(1), value.flatten(1)], dim=1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU their memory is taken only as it is written.

    A pool is sized for the most that could ever run, and torch.zeros would touch all of it.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def block_bytes(layout: Sequence[LayerKV], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes one block takes over all layers."""
    return block_size * dtype.itemsize * sum(layer.width for layer in layout)
