"""An MTP module as it is trained, chain by chain against `mtp_checkpoints`' plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import training_batches
from mtp_checkpoints import Reference
from training_batches import Text

from foresay import LLM, SamplingParams
from foresay_mtp import MTPTraining
from foresay_mtp.training import TrainableModule

FORMS: dict[str, dict[str, Any]] = {
    "as it is by default": {},
    "with an output head of its own": {
        "train_lm_head": True,
        "loss_decay": 0.5,
        "argmax_share": 0.0,
    },
    "one step": {"num_steps": 1},
}


def trainable(target: Any, ids: torch.Tensor | None, **settings: Any) -> TrainableModule:
    module = TrainableModule(
        MTPTraining(**{"num_steps": 3, **settings}), training_batches.view(target), ids
    )
    training_batches.randomise(module)
    return module


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("draft_vocab", [None, 50], ids=["all tokens", "50 tokens"])
def test_every_step_of_every_chain_is_what_drafting_gives(
    draft_vocab: int | None, settings: dict[str, Any]
) -> None:
    target = tiny_models.llama()
    ids = None if draft_vocab is None else training_batches.draft_ids(draft_vocab)
    module = trainable(target, ids, **settings)
    prefix = "model.mtp_layers.0."
    tensors = {prefix + n: t for n, t in module.state_dict().items() if n[:5] != "head."}
    reference = Reference(target, "mimo", tensors)
    reference.heads = [module.head.own.weight]
    texts = training_batches.texts()

    def logits(text: Text, base: int) -> list[torch.Tensor]:
        history = text.token_ids[: base + 2]
        ahead = text.token_ids[base + 2 : base + 2 + module.num_steps]
        return [reference.logits(history, ahead[:step]) for step in range(len(ahead))]

    expected = training_batches.expected(
        target, texts, ids, module.num_steps, module.loss_decay, logits, module._argmax_share
    )
    found = module(training_batches.batch(target, texts))
    assert found.loss.item() == pytest.approx(expected.loss, rel=2e-4)
    assert found.valid.tolist() == expected.valid
    assert (found.hits & found.valid).tolist() == expected.hits


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS.keys())
def test_the_gradient_is_the_losss(settings: dict[str, Any]) -> None:
    target = tiny_models.llama()
    module = trainable(target, training_batches.draft_ids(80), **settings)
    batch = training_batches.batch(target, training_batches.texts(1))
    told, tried = training_batches.slope(module, lambda: module(batch).loss, seed=2)
    assert told == pytest.approx(tried, rel=0.02, abs=0.02)


@pytest.mark.parametrize("trained", [False, True], ids=["shared lm_head", "lm_head of its own"])
def test_a_saved_module_is_loaded_and_changes_no_text(tmp_path: Path, trained: bool) -> None:
    target = tiny_models.llama()
    trainable(target, training_batches.draft_ids(80), train_lm_head=trained).save(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(target, "mtp", drafter=str(tmp_path), strict=True, adaptive=False) as llm:
        [out] = llm.generate([[5, 6, 7]], params)
        assert llm.stats.num_draft_tokens > 0
    with LLM(target, None) as llm:
        [plain] = llm.generate([[5, 6, 7]], params)
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
