"""EAGLE-3 heads as they are trained, chain by chain against `eagle_heads`' plain reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny_models
import torch
import training_batches
from training_batches import Text

from foresay import LLM, SamplingParams
from foresay.core.errors import ConfigError
from foresay_eagle import EagleTraining, _training_needs
from foresay_eagle.training import TrainableEagle3

TAPS = (0, 1, 2)
FORMS = {
    "as it is by default": {},
    "as its authors have it": {"fc_norm": False, "norm_before_residual": False},
    "with an output head of its own": {
        "train_lm_head": True,
        "loss_decay": 0.5,
        "argmax_share": 0.0,
    },
    "one stream, one step": {"aux_layers": (1,), "num_steps": 1},
}


def trainable(target: Any, ids: torch.Tensor | None, **settings: Any) -> TrainableEagle3:
    config = EagleTraining(**{"aux_layers": TAPS, "num_steps": 3, **settings})
    head = TrainableEagle3(config, training_batches.view(target), ids)
    training_batches.randomise(head)
    return head


def as_reference(head: TrainableEagle3, target: Any) -> eagle_heads.Head:
    config = target.config
    sizes = {
        name: getattr(config, name)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    }
    tensors = {n: t for n, t in head.state_dict().items() if not n.startswith("head.")}
    return eagle_heads.Head(
        config={},
        tensors={**tensors, "lm_head.weight": head.head.own.weight},
        is_eagle3=True,
        taps=head._aux_layers,
        rope_theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
        norm_before_residual=head._config.norm_before_residual,
        sizes=sizes,
    )


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("draft_vocab", [None, 50], ids=["all tokens", "50 tokens"])
def test_every_step_of_every_chain_is_what_drafting_gives(
    draft_vocab: int | None, settings: dict[str, Any]
) -> None:
    target = tiny_models.llama()
    ids = None if draft_vocab is None else training_batches.draft_ids(draft_vocab)
    head = trainable(target, ids, **settings)
    reference = as_reference(head, target)
    texts = training_batches.texts()

    def logits(text: Text, base: int) -> list[torch.Tensor]:
        ahead = text.token_ids[base + 2 : base + 2 + head.num_steps]
        return eagle_heads.reference_logits(reference, target, text.token_ids[: base + 2], ahead)

    expected = training_batches.expected(
        target, texts, ids, head.num_steps, head.loss_decay, logits, head._argmax_share
    )
    found = head(training_batches.batch(target, texts, head._aux_layers))
    assert found.loss.item() == pytest.approx(expected.loss, rel=2e-4)
    assert found.valid.tolist() == expected.valid
    assert (found.hits & found.valid).tolist() == expected.hits


@pytest.mark.parametrize("settings", FORMS.values(), ids=FORMS.keys())
def test_the_gradient_is_the_losss(settings: dict[str, Any]) -> None:
    target = tiny_models.llama()
    head = trainable(target, training_batches.draft_ids(80), **settings)
    batch = training_batches.batch(target, training_batches.texts(1), head._aux_layers)
    told, tried = training_batches.slope(head, lambda: head(batch).loss, seed=2)
    assert told == pytest.approx(tried, rel=0.02, abs=0.02)


@pytest.mark.parametrize("trained", [False, True], ids=["shared lm_head", "lm_head of its own"])
def test_a_saved_head_drafts_as_it_was_trained(tmp_path: Path, trained: bool) -> None:
    target = tiny_models.llama()
    head = trainable(target, training_batches.draft_ids(80), train_lm_head=trained)
    head.to(torch.bfloat16).float()  # as it is stored
    head.save(tmp_path)
    reference = as_reference(head, target)
    with LLM(
        target,
        "eagle",
        drafter=str(tmp_path),
        strict=True,
        num_speculative_tokens=3,
        adaptive=False,
    ) as llm:
        drafts = drafts_of(llm, [5, 6, 7, 8])
    first = eagle_heads.reference_logits(
        reference, target, drafts.history, drafts.token_ids[:1] or [0]
    )[0]
    ids = head.head.draft_to_target
    assert ids is not None
    assert drafts.token_ids[0] == int(ids[first.argmax()])


class _Drafts:
    def __init__(self, history: list[int], token_ids: list[int]) -> None:
        self.history, self.token_ids = history, token_ids


def drafts_of(llm: LLM, prompt: list[int]) -> _Drafts:
    """Return the first draft of a text, and what it follows."""
    found: list[_Drafts] = []
    engine = llm._engine
    assert engine is not None
    runner: Any = engine._runner
    draft = runner.draft

    def watched(finished: Any) -> Any:
        out = draft(finished)
        if out is not None and not found:
            for req_id, ids in out.draft_token_ids.items():
                if ids:
                    found.append(_Drafts(list(runner._states[req_id].token_ids), list(ids)))
        return out

    runner.draft = watched
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))
    return found[0]


def test_a_head_takes_the_streams_that_eagle_3_takes() -> None:
    config = tiny_models.llama(num_hidden_layers=8).config
    assert _training_needs(EagleTraining(), config).aux_layers == (2, 4, 5)
    assert _training_needs(EagleTraining(aux_layers=(8, 0)), config).aux_layers == (8, 0)
    with pytest.raises(ConfigError, match="the target model has 8 layers"):
        _training_needs(EagleTraining(aux_layers=(9,)), config)


def test_a_target_of_another_family_has_heads_too(tmp_path: Path) -> None:
    target = tiny_models.gpt2()
    head = TrainableEagle3(EagleTraining(aux_layers=(1, 2)), training_batches.view(target), None)
    head.save(tmp_path)
    with LLM(target, "eagle", drafter=str(tmp_path), strict=True, adaptive=False) as llm:
        [out] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8))
    with LLM(target, None) as llm:
        [plain] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8))
    assert out.outputs[0].token_ids == plain.outputs[0].token_ids
