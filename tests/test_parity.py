"""A slice of the grid (`tests/grid.py`): the real model and the engine against `generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
import grid

MAX_TOKENS = 24
NUM_SEEDED = 3


@dataclass(frozen=True)
class Setting:
    """The model, the prompts, what generate says, and what plain decoding gives with seeds."""

    model: Any
    tokenizer: Any
    prompts: Sequence[list[int]]
    generated: list[list[int]]
    logits: list[torch.Tensor]
    plain: grid.Result

    def run(self, condition: grid.Condition, **settings: Any) -> grid.Result:
        return grid.run(
            self.model,
            self.tokenizer,
            self.prompts,
            condition,
            max_tokens=MAX_TOKENS,
            num_seeded=NUM_SEEDED,
            **settings,
        )


def setting(folder: Path, dtype: torch.dtype) -> Setting:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompts = grid.read_prompts(Path(__file__).parent / "data" / "prompts.jsonl", 1, tokenizer)
    pairs = list(grid.generate(model, prompts, MAX_TOKENS))
    plain = grid.run(
        model,
        tokenizer,
        prompts,
        grid.Condition("none", "one", 16, None, "ample", "off"),
        max_tokens=MAX_TOKENS,
        num_seeded=NUM_SEEDED,
    )
    ids, logits = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Setting(model, tokenizer, prompts, ids, logits, plain)


@pytest.fixture(scope="module")
def float32(smollm2_dir: Path) -> Setting:
    return setting(smollm2_dir, torch.float32)


@pytest.fixture(scope="module")
def bfloat16(smollm2_dir: Path) -> Setting:
    return setting(smollm2_dir, torch.bfloat16)


def test_plain_decoding_gives_generates_ids(float32: Setting) -> None:
    assert float32.plain.greedy == float32.generated


@pytest.mark.parametrize(
    "condition",
    [
        grid.Condition("ngram", "one", 16, None, "ample", "warm"),
        grid.Condition("ngram", "one", 4, 8, "small", "cold"),
        grid.Condition("random", "one", 1, 8, "small", "warm"),
        grid.Condition("random", "one", 4, 8, "small", "cold", adaptive=True),
        grid.Condition("ngram", "one", 4, None, "ample", "off", adaptive=True),
        grid.Condition("all-eos", "each", 4, None, "ample", "off"),
        grid.Condition("random-trees", "one", 4, 8, "small", "cold"),
        grid.Condition("bushes", "one", 16, None, "ample", "warm", adaptive=True),
        grid.Condition("broken-trees", "each", 1, None, "ample", "off"),
        grid.Condition("raising", "one", 16, 8, "ample", "cold"),
        grid.Condition("out-of-range", "one", 4, None, "small", "off"),
    ],
    ids=lambda c: f"{c.proposer}-{c.batch}-{c.block_size}-{c.chunk}-{c.pool}-{c.prefix}",
)
def test_drafts_and_conditions_change_no_text(float32: Setting, condition: grid.Condition) -> None:
    result = float32.run(condition)
    assert result.greedy == float32.generated
    assert result.seeded == float32.plain.seeded
    assert bool(result.num_preemptions) == (condition.pool == "small")
    if condition.prefix == "warm":
        assert result.num_cached_tokens > 0


def test_seeded_texts_are_samples_not_the_greedy_text(float32: Setting) -> None:
    assert all(
        sampled != greedy
        for sampled, greedy in zip(float32.plain.seeded, float32.plain.greedy, strict=False)
    )


def test_in_bfloat16_every_other_argmax_lies_on_a_near_tie(bfloat16: Setting) -> None:
    target = grid.load_target(bfloat16.model, tokenizer=bfloat16.tokenizer)
    ours = [
        grid.forced_logits(target, prompt, ids)
        for prompt, ids in zip(bfloat16.prompts, bfloat16.generated, strict=True)
    ]
    margins = grid.compare_rows(ours, bfloat16.logits)
    assert margins.num_rows == sum(map(len, bfloat16.generated))
    assert margins.num_unexplained == 0, margins
    assert margins.num_different < margins.num_rows / 10, margins


@pytest.mark.parametrize("proposer", ["ngram", "random", "random-trees"])
def test_in_bfloat16_drafts_change_no_bit_where_rows_are_invariant(
    bfloat16: Setting, proposer: str
) -> None:
    result = bfloat16.run(grid.Condition(proposer, "one", 16, None, "ample", "cold"))
    if not result.row_invariant:
        pytest.skip("this machine's kernels are not row-invariant in bfloat16")
    assert result.greedy == bfloat16.plain.greedy
    assert result.seeded == bfloat16.plain.seeded
