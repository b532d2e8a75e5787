"""The self-check at load: it trusts the fast decoder, and catches decoders whose rows depend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch

from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.capture import Capture
from foresay.core.worker.invariance import rows_are_invariant
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import Decoder, TargetModel, load_target

# Which rows are wrong, from the batch: its input ids [num_tokens] and metadata; a mask or a bool.
Wrong = Callable[[torch.Tensor, AttentionMetadata], Any]


class Variant:
    """A decoder with one logit moved by one unit of the last place in rows that are wrong."""

    def __init__(self, decoder: Decoder, wrong: Wrong) -> None:
        self._decoder = decoder
        self._wrong = wrong
        self.vocab_size = decoder.vocab_size
        self.kv_layout = decoder.kv_layout
        self.attention_rules = decoder.attention_rules
        self.min_rows = decoder.min_rows

    def forward(
        self,
        input_ids: torch.Tensor,
        output_rows: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        logits = self._decoder.forward(input_ids, output_rows, cache, metadata, capture)
        wrong = torch.as_tensor(self._wrong(input_ids, metadata)).bool()
        wrong = wrong.expand(input_ids.shape)[output_rows]
        moved = logits[:, 7].nextafter(torch.tensor(torch.inf))
        logits[:, 7] = torch.where(wrong, moved, logits[:, 7])
        return logits


def with_decoder(target: TargetModel, wrong: Wrong) -> TargetModel:
    return replace(target, decoder=Variant(target.decoder, wrong))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return load_target(tiny_models.llama(max_position_embeddings=1024))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "qwen3"])
def test_the_fast_decoder_is_invariant(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.BUILDERS[family](max_position_embeddings=1024).to(dtype)
    assert rows_are_invariant(load_target(model), 1024)


FEWEST = 4  # rows a single one is padded to: two key heads of the tiny model, eight rows
WRONG: dict[str, Wrong] = {
    "one row alone": lambda ids, metadata: len(ids) <= FEWEST,
    "as many rows as drafts make": lambda ids, metadata: FEWEST < len(ids) < 9,
    "as many rows as a short chunk has": lambda ids, metadata: 9 <= len(ids) < 33,
    "as many rows as a long chunk has": lambda ids, metadata: 33 <= len(ids) < 128,
    "more rows than one product takes": lambda ids, metadata: len(ids) > 128,
    "an odd number of rows": lambda ids, metadata: len(ids) % 2,
    "the row's index": lambda ids, metadata: torch.arange(len(ids)) >= 24,
    "batch mates": lambda ids, metadata: sum(g.num_requests for g in metadata.groups) > 1,
    "rows of the same text behind it": lambda ids, metadata: (
        metadata.positions < metadata.positions.max()
    ),
    "a tree": lambda ids, metadata: any(g.hidden is not None for g in metadata.groups),
    "a sum over the batch": lambda ids, metadata: ids.sum() % 3 == 0,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_a_bit_that_depends_on_the_batch_is_caught(target: TargetModel, wrong: Wrong) -> None:
    assert rows_are_invariant(with_decoder(target, lambda ids, metadata: False), 1024)
    assert not rows_are_invariant(with_decoder(target, wrong), 1024)


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
def test_a_bit_that_depends_on_the_chunk_near_or_far_is_caught(
    target: TargetModel, far: bool
) -> None:
    """Attention's kernels change with the number of keys: both sides of 512 are looked at."""

    def wrong(ids: torch.Tensor, metadata: AttentionMetadata) -> Any:
        concerned = metadata.positions >= 512 if far else metadata.positions < 500
        return concerned & (len(ids) > FEWEST)

    assert not rows_are_invariant(with_decoder(target, wrong), 1024)
    assert rows_are_invariant(with_decoder(target, wrong), 512) is far


@pytest.mark.parametrize("max_model_len", [2, 3, 7, 10, 40, 147, 152, 515])
def test_a_short_limit_is_heeded(target: TargetModel, max_model_len: int) -> None:
    positions: set[int] = set()

    def watch(ids: torch.Tensor, metadata: AttentionMetadata) -> Any:
        positions.update(metadata.positions.tolist())
        return False

    assert rows_are_invariant(with_decoder(target, watch), max_model_len)
    assert max(positions) < max_model_len
    assert not rows_are_invariant(with_decoder(target, WRONG["batch mates"]), max_model_len)


def test_a_model_whose_logits_are_not_numbers_is_not_called_invariant() -> None:
    model = tiny_models.llama()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    assert not rows_are_invariant(load_target(model), 256)


def test_a_model_on_transformers_modules_is_checked_at_its_shortest() -> None:
    target = load_target(tiny_models.gpt2(max_position_embeddings=16))
    assert rows_are_invariant(target, 16) in (True, False)
    assert not rows_are_invariant(with_decoder(target, WRONG["batch mates"]), 16)
