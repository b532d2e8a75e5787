"""The self-check at load: are a row's logits the same bits in every batch on this machine?

It computes the same few rows in several shapes, on random tokens over a random KV history, and
compares them bit for bit. It cannot prove invariance, but what that rests on (library kernels,
their choice by shape) shows here if it fails at all; tests compare many more shapes.
"""

from __future__ import annotations

import numpy as np
import torch

from foresay.core.worker.attention import AttentionMetadata, TreeLayout
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel

_BLOCK_SIZE = 16
_ROWS = 6  # rows compared: the last ones before each of these positions
_ENDS = (150, 514)
# Chunks that hold them: rows before them, rows after them, one-row requests beside.
_SHAPES = ((0, 0, 0), (0, 0, 3), (0, 2, 0), (7, 0, 0), (34, 0, 1))
_LONGEST = 144
_DENSE_BYTES = 1 << 28  # few rows read dense copies, as in the engine; the longest chunk gathers


@torch.inference_mode()
def rows_are_invariant(target: TargetModel, max_model_len: int) -> bool:
    """Return whether every compared row of logits was bit-equal in all shapes tried.

    The rows lie on both sides of a key block's border, as far as `max_model_len` allows. The last
    shape is a draft tree of which they are one path.
    """
    num_positions = min(max(_ENDS) + 2, max_model_len)
    trial = _Trial(target.shallow(), num_positions)
    for end in sorted({max(1, min(end, max_model_len - 2)) for end in _ENDS}):
        num_rows = min(_ROWS, end)
        start = end - num_rows
        # The longest chunk first: the others find the KV it wrote, and write the same again.
        early = max(0, end - _LONGEST)
        expected = trial.logits(early, end)[start - early :]
        for row in range(num_rows):
            alone = trial.logits(start + row, start + row + 1)
            if not torch.equal(alone[0], expected[row]):
                return False
        for before, after, num_others in _SHAPES:
            first = max(0, start - before)
            last = min(end + after, num_positions)
            rows = trial.logits(first, last, num_others)[start - first :]
            if not torch.equal(rows[:num_rows], expected):
                return False
        first = max(1, start)
        if first < end:
            rows = trial.tree_logits(first, end)
            if not torch.equal(rows, expected[first - start :]):
                return False
    return True


class _Trial:
    """A model, random tokens, and a KV cache full of noise: one request's, and some others'."""

    def __init__(self, target: TargetModel, num_positions: int) -> None:
        self._target = target
        num_blocks = -(-num_positions // _BLOCK_SIZE)
        self._cache = KVCache(
            target.kv_layout,
            2 * num_blocks + 1,
            _BLOCK_SIZE,
            target.dtype,
            target.device,
            max_dense_bytes=_DENSE_BYTES
            if target.device.type == "cpu" and not target.attention_rules.own_kernels
            else 0,
        )
        self._num_positions = num_positions
        self._others = num_blocks * _BLOCK_SIZE  # their first slot
        generator = torch.Generator().manual_seed(0)
        for layer in self._cache.layers:
            for tensor in (layer.key, layer.value):
                used = tensor[: self._cache.null_slot]
                used.copy_(torch.randn(used.shape, generator=generator))
        self._tokens = torch.randint(0, target.vocab_size, (num_positions,), generator=generator)

    def logits(self, start: int, end: int, num_others: int = 0) -> torch.Tensor:
        """Run rows start..end, with one-row requests behind; [end - start, vocab_size]."""
        positions = [np.arange(start, end)]
        slots = [np.arange(end)]
        slot_mapping = [slots[0][start:]]
        ids = [self._tokens[start:end]]
        num_padding = self._target.min_rows - (end - start) - num_others
        if num_padding > 0:  # as the model runner pads
            positions[0] = np.append(positions[0], [end - 1] * num_padding)
            slot_mapping.append(np.full(num_padding, self._cache.scratch_slot))
            ids.append(ids[0][-1:].repeat(num_padding))
        for other in range(num_others):
            length = min(start + other + 1, self._num_positions)
            positions.append(np.array([length - 1]))
            slots.append(np.arange(self._others, self._others + length))
            slot_mapping.append(np.array([self._cache.scratch_slot]))
            ids.append(self._tokens[other % self._num_positions].view(1))
        metadata = AttentionMetadata.build(
            positions,
            slots,
            np.concatenate(slot_mapping),
            self._cache.null_slot,
            self._target.attention_rules,
            self._target.device,
            owners=range(len(positions)),
            dense_copies=self._cache.dense_copies,
        )
        rows = torch.arange(end - start, device=self._target.device)
        return self._target.forward(
            torch.cat(ids).to(self._target.device), rows, self._cache, metadata
        )

    def tree_logits(self, first: int, end: int) -> torch.Tensor:
        """Run a tree with rows first..end as one path; their logits, [end - first, vocab_size].

        Each has two siblings, one before it and one behind, so that it lies in a lane of its own.
        """
        depth = end - first
        parents = np.repeat(np.arange(-2, 3 * depth - 4, 3), 3)
        parents[:3] = -1
        text = np.arange(first, end)
        tokens = self._tokens[np.repeat(text, 3)]
        tokens[0::3] += 1
        tokens[2::3] += 2
        # The nodes' slots are another request's, whose rows nobody compares.
        slots = np.append(np.arange(first), self._others + np.arange(3 * depth))
        metadata = AttentionMetadata.build(
            [np.append([first - 1], np.repeat(text, 3))],
            [slots],
            slots[first - 1 :],
            self._cache.null_slot,
            self._target.attention_rules,
            self._target.device,
            [TreeLayout(first, parents, np.arange(-1, 3 * depth))],
            owners=[0],
            dense_copies=self._cache.dense_copies,
        )
        ids = torch.cat([self._tokens[first - 1 : first], tokens % self._target.vocab_size])
        rows = torch.arange(2, 1 + 3 * depth, 3, device=self._target.device)
        return self._target.forward(ids.to(self._target.device), rows, self._cache, metadata)
