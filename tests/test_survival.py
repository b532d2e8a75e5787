"""A thousand things that go wrong in the worker: counted, survived, and nobody else notices."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_models
import torch

from foresay import LLM, SamplingParams
from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, TargetView
from foresay.core.worker.draft_sampler import DraftProbs

NAN_ID = 150  # a token whose embedding is no number: every row after it is none
VOCAB_SIZE = tiny_models.VOCAB_SIZE


class Hostile:
    """Does something wrong in most steps; what it does is exact all the same."""

    needs = Needs(sampled=True)

    def __init__(self, config: ProposerConfig) -> None:
        self.random = random.Random(5)
        self.vocab_size = 0

    def load(self, target: TargetView) -> None:
        self.vocab_size = target.vocab_size

    def propose(self, batch: DraftInput) -> Draft:
        deed = self.random.choice(("nan", "nan row", "bad id", "lie", "raise", "long", "fine"))
        if deed in ("bad id", "long"):
            ids = [[7, self.vocab_size, -3], [9] * 9][deed != "bad id"]
            return Draft([list(ids) for _ in batch.requests])
        if deed == "nan":  # the target's row behind it is no number
            return Draft([[NAN_ID, 3][: request.k] for request in batch.requests])
        assert batch.sampler is not None
        drafts: list[list[int]] = [[] for _ in batch.requests]
        for step in range(max(request.k for request in batch.requests)):
            rows = [row for row, request in enumerate(batch.requests) if request.k > step]
            logits = torch.randn(len(rows), self.vocab_size)
            logits[:, NAN_ID] = -torch.inf
            if deed == "nan row" and step:
                logits[0] = torch.nan
            ids = batch.sampler.draw(logits, step, rows).tolist()
            for row, token_id in zip(rows, ids, strict=True):
                drafts[row].append(token_id)
            if deed == "raise" and step:
                raise RuntimeError("in the middle of a draft")
        return Draft([[1] for _ in batch.requests] if deed == "lie" else drafts)


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_models.llama(eos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_ID] = torch.nan
    return model


def test_the_engine_survives_a_thousand_failures(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad drafts, bad probs, rows that are no numbers: the sound requests' texts don't change."""
    rng = random.Random(3)
    cut = DraftProbs.cut

    def spoiled(self: DraftProbs, num_drafts: int) -> DraftProbs:
        probs = cut(self, num_drafts)
        if rng.random() < 0.3:
            return DraftProbs(probs.rule, probs.num_tokens, probs.probs * 2, probs.token_ids)
        return probs

    monkeypatch.setattr(DraftProbs, "cut", spoiled)
    # Nothing is banned for who is to fail; the others can't draw the token that is no number.
    sound = {NAN_ID: float("-inf")}
    asked, params = [], []
    for i in range(240):
        asked.append([rng.randrange(3, 150) for _ in range(rng.randint(1, 12))])
        fails = i % 4 == 3
        if fails:
            asked[-1].append(NAN_ID)
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.7, 1.5)),
                top_p=rng.choice((1.0, 0.9)),
                seed=i,
                max_tokens=12,
                logit_bias=sound,
                allowed_token_ids=[NAN_ID] if i % 8 == 1 else None,
            )
        )
    # Greedy and seeded texts must equal the plain ones: with 'auto' these are coupled.
    with LLM(model=model, proposer=None) as plain:
        expected = [o.outputs[0] for o in plain.generate(asked, params)]
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "max_num_seqs": 16}
    num_events = 0
    for verification in ("auto", "block", "rejection"):
        with LLM(
            model=model,
            proposer=Hostile,
            verification=verification,
            max_model_len=64,
            **settings,
            adaptive=False,
        ) as llm:
            engine: Any = llm._engine
            monkeypatch.setattr(
                "foresay.core.worker.proposing.GuardedProposer._drop", lambda self, why: None
            )
            for start in range(0, len(asked), 40):
                part = slice(start, start + 40)
                for output, plainly, own in zip(
                    llm.generate(asked[part], params[part]),
                    expected[part],
                    params[part],
                    strict=True,
                ):
                    found = output.outputs[0]
                    assert (found.finish_reason == "error") == (plainly.finish_reason == "error")
                    if verification == "auto" or own.temperature == 0:
                        assert (found.token_ids, found.stop_reason) == (
                            plainly.token_ids,
                            plainly.stop_reason,
                        )
                    num_events += found.finish_reason == "error"
                engine._scheduler.check_integrity()
                assert engine._scheduler.blocks.num_free_blocks == 80
            faults = llm.stats.faults
            num_events += sum(faults.values())
            assert {"raised", "bad_id", "too_long", "not_as_drawn"} <= set(faults)
            assert "non_finite_draft" in faults
            if verification != "auto":
                assert "bad_draft_probs" in faults
    assert num_events >= 1000
