"""The bounds of top_k and top_p keep the tokens that the definition keeps: no more, no less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foresay.core.messages import SamplingData
from foresay.core.worker.filter_bounds import filter_bounds, is_filtered
from foresay.core.worker.processors import Context
from foresay.core.worker.sampling import Row, target_probs

PLAIN = SamplingData(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, stop_token_ids=()
)


def kept(logits: torch.Tensor, samplings: list[SamplingData]) -> list[list[int]]:
    low, high, cut = (part.unsqueeze(1) for part in filter_bounds(logits, samplings))
    ids = torch.arange(logits.shape[1])
    passes = (logits > high) | ((logits >= low) & (ids <= cut))
    return [row.nonzero().squeeze(1).tolist() for row in passes & (logits > -torch.inf)]


TWO = [1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]  # two of 3, three of 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 1}, [1, 3]),  # ties at the k-th are kept
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 2, 3, 4, 5]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.1}, [1]),  # ties at the last of the nucleus: the lower ids
        ({"top_p": 0.4}, [1, 3]),  # 3s weigh 1, 2s e^-1, 1 e^-2, 0 e^-3: 3.29 in all
        ({"top_p": 0.65}, [1, 2, 3]),
        ({"top_p": 0.75}, [1, 2, 3, 4]),
        ({"top_p": 0.999999}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_k": 3, "top_p": 0.8}, [1, 2, 3, 4]),  # of 3.10: the third 2 begins at 0.88
        ({"top_k": 2, "top_p": 0.4}, [1]),
        ({"top_k": 2, "top_p": 0.999999}, [1, 3]),
    ],
    ids=str,
)
def test_a_row_keeps(changes: dict[str, float], expected: list[int]) -> None:
    assert kept(torch.tensor([TWO]), [replace(PLAIN, **changes)]) == [expected]  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", [5, 300, 5000])
def test_many_rows_keep_what_the_definition_keeps(vocab_size: int, temperature: float) -> None:
    """Rows rounded to bfloat16, so that there are ties; and flat ones, whose nuclei are large."""
    generator = torch.Generator().manual_seed(vocab_size)
    settings = [(0, 0.9), (7, 1.0), (3, 0.5), (40, 0.99), (0, 0.3), (4999, 0.95), (4, 1e-9)]
    rows = torch.randn(len(settings), vocab_size, generator=generator)
    rows *= torch.tensor([3.0, 3.0, 1.0, 0.5, 0.01, 2.0, 1.0]).unsqueeze(1)
    logits = rows.bfloat16().float()
    logits[:, 1] = -torch.inf
    samplings = [replace(PLAIN, temperature=temperature, top_k=k, top_p=p) for k, p in settings]
    expected = [
        target_probs(Row(row, Context(sampling, [0], 1))).nonzero().squeeze(1).tolist()
        for row, sampling in zip(logits, samplings, strict=True)
    ]
    assert kept(logits, samplings) == expected


def test_different_logits_may_have_one_weight() -> None:
    """Two logits apart by less than float32 resolves once the maximum is subtracted."""
    logits = torch.tensor([[20.0, 1e-8, 2e-8, 1e-8, 19.0, 3e-8]])
    sampling = replace(PLAIN, temperature=10.0, top_p=0.8)
    # Weights 1 and 0.90, the others 0.14: 2.45 in all. So one of them is kept: the lowest, though
    # the logits of ids 2 and 5 are above its own.
    assert kept(logits, [sampling]) == [[0, 1, 4]]
    probs = target_probs(Row(logits[0], Context(sampling, [0], 1)))
    assert probs.nonzero().squeeze(1).tolist() == [0, 1, 4]


def test_a_row_that_is_not_filtered_keeps_its_vocabulary() -> None:
    samplings = [PLAIN, replace(PLAIN, top_k=7), replace(PLAIN, top_k=9), replace(PLAIN, top_k=6)]
    assert [is_filtered(sampling, 7) for sampling in samplings] == [False, False, False, True]
    everything = list(range(7))
    assert kept(torch.tensor([TWO] * 3), samplings[:3]) == [everything] * 3
