"""A real model that drafts for itself: every draft is what it would have said anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foresay import LLM, SamplingParams

TEXTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time there was"]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_a_model_equal_to_the_target_is_accepted(temperature: float, smollm2_dir: Path) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=19) for i in range(3)]
    shared: dict[str, Any] = {"max_model_len": 128, "dtype": "float32"}
    with LLM(str(smollm2_dir), proposer=None, **shared) as plain:
        expected = [out.outputs[0].token_ids for out in plain.generate(TEXTS, params)]
    drafting = {"drafter": str(smollm2_dir), "strict": True, **shared}
    with LLM(str(smollm2_dir), proposer="draft_model", **drafting, adaptive=False) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(TEXTS, params)] == expected
        stats = llm.stats
    assert stats.num_draft_tokens > 30
    assert stats.num_accepted_tokens / stats.num_draft_tokens >= 0.98
