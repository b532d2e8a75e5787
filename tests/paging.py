"""Runs a target model on pieces of texts, without an engine: what tests of models share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tiny_models
import torch

from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel

# float32 and another order of sums; logits are of the order of 2.
TOLERANCE = 2e-5


def tolerance(expected: torch.Tensor) -> float:
    """The same for larger logits: their rounding errors are larger as they are.

    transformers' own logits of Phi-3 with longrope, up to 9.4, are 2.7e-5 off those in float64.
    """
    return TOLERANCE * max(1.0, float(expected.abs().max()) / 2)


class Pages:
    """Texts in scattered blocks of one KV cache, run piece by piece."""

    def __init__(self, target: TargetModel, num_texts: int, block_size: int = 4) -> None:
        self.target = target
        blocks_per_text = 64 // block_size
        num_blocks = num_texts * blocks_per_text
        self.cache = KVCache(target.kv_layout, num_blocks, block_size, target.dtype, target.device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).numpy()
        tables = order.reshape(num_texts, blocks_per_text, 1)
        self.slots = (tables * block_size + np.arange(block_size)).reshape(num_texts, -1)

    def run(
        self, pieces: Sequence[tuple[int, int, Sequence[int]]], rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run pieces (text, first position, token ids) in one pass; returns logits of `rows`."""
        ids = torch.tensor([token for _, _, tokens in pieces for token in tokens])
        spans = [(text, start, start + len(tokens)) for text, start, tokens in pieces]
        metadata = AttentionMetadata.build(
            [np.arange(start, end) for _, start, end in spans],
            [self.slots[text, :end] for text, _, end in spans],
            np.concatenate([self.slots[text, start:end] for text, start, end in spans]),
            self.cache.null_slot,
            self.target.attention_rules,
            self.target.device,
        )
        wanted = torch.arange(len(ids)) if rows is None else torch.tensor(rows, dtype=torch.int64)
        with torch.inference_mode():
            return self.target.forward(ids, wanted, self.cache, metadata)


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCAB_SIZE, (length,), generator=generator).tolist()


def own_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """The model's own logits of a whole text; [len(ids), vocab_size]."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def largest_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    assert logits.shape == expected.shape
    return float((logits - expected).abs().max())
