"""The joint law of four tokens, over several steps of the whole engine, is the target's.

Thousands of requests continue one prompt on a tiny model; how often each text came is compared with
what transformers' own forward says, text by text. Drafts are wrong often enough that a text takes
one step to four, so noise that one step used twice, or the next step used again, would show.

Seeds are fixed. With other seeds each test would fail a right engine once in 10 000 runs. One noise
stream for everything fails here too; finer faults need more draws than an engine gives in a test,
and are looked for in verification alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import tiny_models
import torch
from laws import ODDS, ChiSquare, Text, chi_square, filters_worked_out_once

from foresay import LLM, SamplingParams
from foresay.core.outputs import RequestOutput
from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig
from foresay.core.worker.noise import NoiseKey

VOCAB_SIZE = 8
PROMPT = [3, 5, 1]
NUM_REQUESTS = 1200
NUM_TOKENS = 4
K = 3
FILTERS = {"temperature": 0.8, "top_k": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_models.llama(
        vocab_size=VOCAB_SIZE, num_hidden_layers=2, max_position_embeddings=32, eos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip


@torch.no_grad()
def next_probs(model: Any, texts: list[Text]) -> torch.Tensor:
    """What follows each of the texts, all of one length: [num_texts, VOCAB_SIZE] float64."""
    logits = model(torch.tensor(texts)).logits[:, -1].double() / FILTERS["temperature"]
    kept = logits >= logits.topk(int(FILTERS["top_k"])).values[:, -1:]
    return logits.masked_fill(~kept, -torch.inf).softmax(-1)


@pytest.fixture(scope="module")
def law(model: Any) -> dict[Text, float]:
    """The probability of each text of four tokens: 3 ** 4 of them."""
    law: dict[Text, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        rows = next_probs(model, [(*PROMPT, *text) for text in law])
        law = {
            (*text, token): mass * p
            for (text, mass), row in zip(law.items(), rows.tolist(), strict=True)
            for token, p in enumerate(row)
            if p > 0
        }
    assert len(law) == 3**NUM_TOKENS
    assert sum(law.values()) == pytest.approx(1)
    return law


class Drafter:
    """Knows the prompt and the last two tokens only, and adds its own mistakes to that."""

    table: ClassVar[torch.Tensor]  # [VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE]: logits after two tokens

    def __init__(self, config: ProposerConfig) -> None:
        pass


class Drawn(Drafter):
    """Draws its drafts through the sampler."""

    needs = Needs(sampled=True)

    def propose(self, batch: DraftInput) -> Draft:
        assert batch.sampler is not None
        texts = torch.tensor([request.token_ids[-2:] for request in batch.requests])
        for step in range(max(request.k for request in batch.requests)):
            rows = [row for row, request in enumerate(batch.requests) if request.k > step]
            logits = self.table[texts[rows, -2], texts[rows, -1]]  # [len(rows), VOCAB_SIZE]
            texts = torch.nn.functional.pad(texts, (0, 1))
            texts[rows, -1] = batch.sampler.draw(logits, step, rows)
        drafts = texts[:, 2:].tolist()
        return Draft([draft[: r.k] for draft, r in zip(drafts, batch.requests, strict=True)])


class Likeliest(Drafter):
    """Drafts without a draw."""

    def propose(self, batch: DraftInput) -> Draft:
        best = self.table.argmax(-1).tolist()
        drafts = []
        for request in batch.requests:
            text = list(request.token_ids[-2:])
            for _ in range(request.k):
                text.append(best[text[-2]][text[-1]])
            drafts.append(text[2:])
        return Draft(drafts)


@pytest.fixture(scope="module", autouse=True)
def table(model: Any) -> Iterator[None]:
    ids = torch.arange(VOCAB_SIZE)
    pairs = torch.cartesian_prod(ids, ids)  # [VOCAB_SIZE ** 2, 2]
    texts = torch.cat([torch.tensor(PROMPT).expand(len(pairs), -1), pairs], dim=1)
    with torch.no_grad():
        rows = model(texts).logits[:, -1]
    mistakes = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    Drafter.table = (0.6 * rows + 0.7 * mistakes).view(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    yield
    del Drafter.table


@filters_worked_out_once()
def play(
    model: Any, proposer: type[Drafter], verification: str, **changes: Any
) -> tuple[list[RequestOutput], Any]:
    params = SamplingParams(max_tokens=NUM_TOKENS + 1, **{**FILTERS, **changes})
    with LLM(
        model=model, proposer=proposer, num_speculative_tokens=K, verification=verification,
        seed=11, max_num_seqs=500, max_num_batched_tokens=2000, max_model_len=16, block_size=16,
        num_blocks=501, adaptive=False) as llm:  # fmt: skip
        outputs = llm.generate([PROMPT] * (NUM_REQUESTS // params.n), params)
        return outputs, llm.stats


def compared(outputs: list[RequestOutput], law: dict[Text, float]) -> ChiSquare:
    counts = Counter(
        tuple(each.token_ids[:NUM_TOKENS]) for output in outputs for each in output.outputs
    )
    return chi_square(counts, law)


@pytest.mark.parametrize(
    ("proposer", "verification", "n"),
    [
        (Drawn, "rejection", 1),
        (Drawn, "block", 1),
        (Drawn, "coupled", 1),
        (Likeliest, "auto", 1),
        (Drawn, "auto", 300),  # samples of one prompt, which share a seed
    ],
    ids=["rejection", "block", "coupled", "deterministic", "block-with-one-seed"],
)
def test_texts_come_as_often_as_the_target_says(
    model: Any, law: dict[Text, float], proposer: type[Drafter], verification: str, n: int
) -> None:
    outputs, stats = play(model, proposer, verification, n=n)
    result = compared(outputs, law)
    assert result.num_draws == NUM_REQUESTS
    assert result.degrees > 50
    assert result.odds > ODDS
    # Drafts were of use, and often wrong: five tokens took three or four steps, not two or five.
    assert 0.1 < stats.acceptance_rate < 0.6
    assert 1.1 < stats.tokens_per_step < 1.7
    assert not stats.faults


def test_one_stream_of_noise_for_everything_would_show(model: Any, law: dict[Text, float]) -> None:
    def counter_tail(key: NoiseKey) -> tuple[int, int, int]:
        return key.position, key.offset << 8, key.sample

    with patch.object(NoiseKey, "counter_tail", property(counter_tail)):
        outputs, _ = play(model, Drawn, "block")
    assert compared(outputs, law).odds < ODDS
