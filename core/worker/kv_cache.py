"""KV blocks in memory: the tensors, their slots, and zeroing. Knows nothing of requests.

A block holds `block_size` slots; slot = block_id * block_size + offset. Besides the pool that the
scheduler hands out there are two blocks it never sees: the *null* block is never written and stays
zero (padding reads it), the *scratch* block is never read (padding rows write to it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one attention layer stores per token."""

    num_kv_heads: int
    head_dim: int  # of the keys
    value_dim: int  # of the values; differs from head_dim in some models

    @property
    def width(self) -> int:
        """Numbers stored per token."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, by slot."""

    key: torch.Tensor  # [num_slots, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_slots, num_kv_heads, value_dim]

    def write(self, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `key` [T, Hkv, D] and `value` [T, Hkv, Dv] at `slot_mapping` [T]."""
        self.key.index_copy_(0, slot_mapping, key)
        self.value.index_copy_(0, slot_mapping, value)


class KVCache:
    """The KV tensors of all layers, zeroed at the start."""

    def __init__(
        self,
        layout: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.null_slot = num_blocks * block_size
        self.scratch_slot = (num_blocks + 1) * block_size
        num_slots = (num_blocks + 2) * block_size

        self.layers = [
            LayerCache(
                _zeros((num_slots, layer.num_kv_heads, layer.head_dim), dtype, device),
                _zeros((num_slots, layer.num_kv_heads, layer.value_dim), dtype, device),
            )
            for layer in layout
        ]

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero whole blocks: one NaN in a masked slot would poison attention."""
        for block_id in block_ids:
            first = block_id * self.block_size
            for layer in self.layers:
                layer.key[first : first + self.block_size].zero_()
                layer.value[first : first + self.block_size].zero_()


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
