"""Rows of the target's output head, for a drafter over fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch

from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, TargetView
from foresay.core.testing import ProposerConformance
from foresay.core.worker import transformers_model
from foresay.core.worker.linear import Linear
from foresay.core.worker.packed_modules import PackedLinear
from foresay.core.worker.target import load_target

IDS = torch.tensor([5, 0, 159, 33, 34, 5])  # in no order, one of them twice


def with_bias() -> Any:
    """Phi has a bias in its output head; transformers' modules run it."""
    model = tiny_models.phi()
    assert model.lm_head.bias is not None
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_models.llama,
    "llama, tied": lambda: tiny_models.llama(tie_word_embeddings=True),
    "llama, bfloat16": lambda: tiny_models.llama().to(torch.bfloat16),
    "gpt2, tied": tiny_models.gpt2,
    "gpt2, untied": lambda: tiny_models.gpt2(tie_word_embeddings=False),
    "gpt2, bfloat16": lambda: tiny_models.gpt2().to(torch.bfloat16),
    "phi, with a bias": with_bias,
}


def check(target: Any, model: Any) -> None:
    """Compare rows of a loaded target with the model's own, and with the whole head's logits."""
    weight, bias = target.view(100, embeddings=False, lm_head=True).lm_head_rows(IDS)
    head = model.get_output_embeddings()
    assert torch.equal(weight, head.weight[IDS])
    assert weight.dtype == model.dtype
    has_bias = getattr(head, "bias", None) is not None
    assert (bias is not None) == has_bias
    if has_bias:
        assert torch.equal(bias, head.bias[IDS])
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    with torch.inference_mode():
        whole = target.lm_head(x)[:, IDS]
        rows = torch.nn.functional.linear(x, weight, bias)
    tolerance = 1e-5 if model.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rows, whole, rtol=tolerance, atol=tolerance)
    weight.fill_(7.0)  # they are copies
    again, _ = target.decoder.lm_head_rows(IDS)
    assert torch.equal(again, head.weight[IDS])


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_heads_own(name: str) -> None:
    check(load_target(MODELS[name]()), MODELS[name]())


@pytest.mark.parametrize("name", ["llama", "gpt2, tied", "gpt2, bfloat16", "phi, with a bias"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "not packed"])
def test_rows_of_transformers_modules_are_the_heads_own_packed_or_not(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(transformers_model, "pack_linears", lambda *_: lambda: None)
    target = load_target(MODELS[name](), force_transformers=True)
    assert not target.is_fast
    assert isinstance(target.lm_head, PackedLinear) == packed
    check(target, MODELS[name]())


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "not packed"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_a_product_are_as_they_were_given(
    pack: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(160, 48, generator=generator).to(dtype)
    bias = torch.randn(160, generator=generator).to(dtype) if has_bias else None
    rows, bias_rows = Linear(weight, bias, dtype, pack=pack).rows(IDS)
    assert torch.equal(rows, weight[IDS])
    assert rows.dtype == dtype
    assert (bias_rows is None) == (bias is None)
    if bias is not None:
        assert bias_rows is not None
        assert torch.equal(bias_rows, bias[IDS])
        assert bias_rows.dtype == dtype


def test_a_view_has_the_weights_that_were_asked_for() -> None:
    target = load_target(tiny_models.llama())
    neither = target.view(100, embeddings=False, lm_head=False)
    assert (neither.embeddings, neither.lm_head, neither.lm_head_rows) == (None, None, None)
    embeddings = target.view(100, embeddings=True, lm_head=False)
    assert embeddings.embeddings is target.embeddings
    assert embeddings.lm_head_rows is None
    assert embeddings.max_model_len == 100
    both = target.view(100, embeddings=True, lm_head=True)
    assert both.lm_head is target.lm_head
    assert both.lm_head_rows is not None


class _TakesRows:
    """Asks for the output head, and drafts nothing."""

    needs = Needs(lm_head=True)

    def __init__(self, config: ProposerConfig) -> None:
        self.target: TargetView | None = None

    def load(self, target: TargetView) -> None:
        self.target = target

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([[] for _ in batch.requests])


def test_the_conformance_suite_shows_a_target_with_them() -> None:
    class Suite(ProposerConformance):
        proposer_name = _TakesRows

    target = Suite().target
    assert target.lm_head is not None
    assert target.lm_head_rows is not None
    weight, bias = target.lm_head_rows(torch.tensor([3, 60]))
    assert bias is None
    x = torch.randn(4, target.hidden_size)
    torch.testing.assert_close(x @ weight.T, target.lm_head(x)[:, [3, 60]])
