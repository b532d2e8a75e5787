"""Medusa heads as they are trained, chain by chain against `medusa_heads`' plain reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import medusa_heads
import pytest
import tiny_models
import torch
import training_batches
from training_batches import Text

from foresay import LLM, SamplingParams
from foresay_medusa import MedusaTraining
from foresay_medusa.training import TrainableMedusa

FORMS: dict[str, dict[str, Any]] = {
    "as they are by default": {},
    "the target's lm_head": {"train_lm_head": False, "loss_decay": 0.5, "argmax_share": 0.0},
    "two blocks": {"num_layers": 2, "num_heads": 2},
    "no blocks": {"num_layers": 0, "num_heads": 1},
}


def trainable(target: Any, ids: torch.Tensor | None, **settings: Any) -> TrainableMedusa:
    heads = TrainableMedusa(MedusaTraining(**settings), training_batches.view(target), ids)
    training_batches.randomise(heads)
    return heads


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("draft_vocab", [None, 50], ids=["all tokens", "50 tokens"])
def test_every_head_of_every_row_is_what_drafting_gives(
    draft_vocab: int | None, settings: dict[str, Any]
) -> None:
    target = tiny_models.llama()
    ids = None if draft_vocab is None else training_batches.draft_ids(draft_vocab)
    heads = trainable(target, ids, **settings)
    num_heads, decay = heads._config.num_heads, heads._config.loss_decay
    reference = medusa_heads.Heads(
        blocks=[[(linear.weight, linear.bias) for linear in layers] for layers in heads.blocks],
        matrices=[heads.head.own.weight],
    )
    texts = training_batches.texts()

    def logits(text: Text, base: int) -> list[torch.Tensor]:
        found = medusa_heads.reference_logits(reference, target, text.token_ids[: base + 2])
        return [each[: len(heads.head.own.weight)] for each in found]

    share = heads._config.argmax_share
    expected = training_batches.expected(target, texts, ids, num_heads, decay, logits, share)
    found = heads(training_batches.batch(target, texts))
    assert found.loss.item() == pytest.approx(expected.loss, rel=2e-4)
    assert found.valid.tolist() == expected.valid
    assert (found.hits & found.valid).tolist() == expected.hits


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS.keys())
def test_the_gradient_is_the_losss(settings: dict[str, Any]) -> None:
    target = tiny_models.llama()
    heads = trainable(target, training_batches.draft_ids(80), **settings)
    if not list(heads.parameters()):
        return
    batch = training_batches.batch(target, training_batches.texts(1))
    told, tried = training_batches.slope(heads, lambda: heads(batch).loss, seed=2)
    assert told == pytest.approx(tried, rel=0.02, abs=0.02)


@pytest.mark.parametrize("trained", [False, True], ids=["shared lm_head", "lm_head of their own"])
def test_saved_heads_are_loaded_and_change_no_text(tmp_path: Path, trained: bool) -> None:
    target = tiny_models.llama()
    trainable(target, training_batches.draft_ids(80), train_lm_head=trained).save(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(target, "medusa", drafter=str(tmp_path), strict=True, adaptive=False) as llm:
        [out] = llm.generate([[5, 6, 7]], params)
        assert llm.stats.num_draft_tokens > 0
    with LLM(target, None) as llm:
        [plain] = llm.generate([[5, 6, 7]], params)
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids


def test_new_heads_say_what_the_target_says() -> None:
    target = tiny_models.llama()
    heads = TrainableMedusa(MedusaTraining(), training_batches.view(target), None)
    texts = training_batches.texts()
    found = heads(training_batches.batch(target, texts))
    # A head's guess is the target's token for the place before: right where the text has it again.
    guesses = [
        [
            int(target(torch.tensor([text.token_ids])).logits[0, base].argmax())
            == text.token_ids[base + 2 + step]
            for step in range(4)
            if base + 2 + step < len(text.token_ids)
        ]
        for text in texts
        for base in text.bases
    ]
    hits = [row[valid].tolist() for row, valid in zip(found.hits, found.valid, strict=True)]
    assert hits == guesses


def test_accuracies_are_measured_on_whole_texts_and_kept(tmp_path: Path) -> None:
    target = tiny_models.llama()
    heads = trainable(target, training_batches.draft_ids(80), num_heads=2)
    batch = training_batches.batch(target, training_batches.texts())
    found = heads(batch)
    heads.save_measured(tmp_path, [batch, batch])
    fields = json.loads((tmp_path / "accuracies.json").read_text(encoding="utf-8"))
    first = found.valid[:, 0]
    hits = int((found.hits[:, 0] & first).sum())
    assert fields["tokens"][0] == 2 * int(first.sum())
    share = max(2 * hits, 0.5) / fields["tokens"][0]  # never right counts as half of once
    assert fields["heads"][0][0] == pytest.approx(share, abs=1e-5)
