"""What a pass of the target leaves for proposers, against transformers' own hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from foresay.core.errors import ModelError
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.capture import Capture
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel, load_target

IDS = [5, 17, 99, 3, 42, 64, 8, 120, 33, 77, 1]
NUM_LAYERS = 3


def run(target: TargetModel, capture: Capture | None, *chunks: int) -> torch.Tensor:
    """Run `IDS` in chunks; returns the logits of the last chunk's rows. `capture`: the last's."""
    cache = KVCache(target.kv_layout, 4, 4, target.dtype, target.device)
    start = 0
    for size in chunks:
        end = start + size
        metadata = AttentionMetadata.build(
            [np.arange(start, end)], [np.arange(end)], np.arange(start, end), cache.null_slot,
            target.attention_rules, target.device,
        )  # fmt: skip
        with torch.inference_mode():
            logits = target.forward(
                torch.tensor(IDS[start:end]),
                torch.arange(size),
                cache,
                metadata,
                capture if end == len(IDS) else None,
            )
        start = end
    return logits


def expected(model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """transformers' hidden states, and what enters the final norm."""
    entering = []
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None) or getattr(decoder, "ln_f", None)
    handle = norm.register_forward_pre_hook(lambda _module, inputs: entering.append(inputs[0][0]))
    with torch.inference_mode():
        out = model(torch.tensor([IDS]), output_hidden_states=True)
    handle.remove()
    return [states[0] for states in out.hidden_states], entering[0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2", "deepseek_v3"])
def test_hidden_states_are_those_of_transformers(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    states, last = expected(model)
    capture = Capture(hidden_state=True, layers=(0, 2, NUM_LAYERS))
    run(load_target(model), capture, len(IDS))

    torch.testing.assert_close(capture.hidden, states[-1], rtol=1e-4, atol=1e-4)
    streams = capture.streams((NUM_LAYERS, 0, 2))
    for number, reference in enumerate((last, states[0], states[2])):
        torch.testing.assert_close(streams[:, number], reference, rtol=1e-4, atol=1e-4)


def test_a_chunks_hidden_states_are_those_of_its_rows() -> None:
    model = tiny_models.llama()
    states, _ = expected(model)
    capture = Capture(hidden_state=True, layers=(1,))
    run(load_target(model), capture, 6, 5)
    torch.testing.assert_close(capture.hidden, states[-1][6:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(capture.streams((1,))[:, 0], states[1][6:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_capturing_changes_no_logit(family: str) -> None:
    target = load_target(tiny_models.BUILDERS[family]())
    capture = Capture(hidden_state=True, layers=(0, 1, 2, 3))
    assert torch.equal(run(target, capture, 8, 3), run(target, None, 8, 3))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_lm_head_and_the_embeddings_are_the_targets(family: str) -> None:
    model = tiny_models.BUILDERS[family](final_logit_softcapping=None) if family == "gemma2" else (
        tiny_models.BUILDERS[family]()
    )  # fmt: skip
    target = load_target(model)
    capture = Capture(hidden_state=True)
    logits = run(target, capture, len(IDS))
    torch.testing.assert_close(target.lm_head(capture.hidden), logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(target.embeddings, model.get_input_embeddings().weight)


def test_a_model_whose_final_norm_is_unknown_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(tiny_models.gpt2())
    monkeypatch.setattr("foresay.core.worker.transformers_model._FINAL_NORMS", ("norm",))
    with pytest.raises(ModelError, match="no final norm of a known name"):
        run(target, Capture(hidden_state=False, layers=(NUM_LAYERS,)), len(IDS))
