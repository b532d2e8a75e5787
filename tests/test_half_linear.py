"""Weights in float16: the products of float32, the same bits in every batch, the same model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresay import LLM, SamplingParams
from foresay.core.config import EngineConfig
from foresay.core.errors import ConfigError
from foresay.core.worker import half_linear
from foresay.core.worker import target as target_module
from foresay.core.worker.decoder import FastDecoder
from foresay.core.worker.half_linear import HalfLinear, is_available, scale_for
from foresay.core.worker.linear import Linear
from foresay.core.worker.target import load_target

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="there are no float16 products here"),
    pytest.mark.usefixtures("products"),
]

SHAPES = [(160, 48), (7, 5), (576, 1536)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """As checkpoints have them: bfloat16's, of the usual size."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    return found.bfloat16().float()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_products_are_those_of_float32(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool
) -> None:
    weight = numbers(out_features, in_features)
    shift = numbers(out_features, seed=1) if bias else None
    linear = HalfLinear(weight, shift, dtype)
    assert linear.is_half
    x = torch.randn(9, in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(linear(x).double(), exact, rtol=tolerance, atol=tolerance)
    residual = torch.ones(9, out_features, dtype=dtype)
    assert torch.equal(linear.add_to(residual, x), linear(x) + residual)
    rows, of_bias = linear.rows(torch.tensor([3, 0]))
    assert torch.equal(rows, weight[[3, 0]].to(dtype))
    assert (of_bias is None) == (shift is None)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(
    out_features: int, in_features: int, num_threads: int
) -> None:
    linear = HalfLinear(numbers(out_features, in_features), None, torch.float32)
    x = torch.randn(140, in_features, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    whole = linear(x)
    torch.set_num_threads(num_threads)
    try:
        for num_rows in [*range(1, 36), 64, 100, 128, 131]:
            for start in (0, 7):
                part = linear(x[start : start + num_rows])
                assert torch.equal(part, whole[start : start + num_rows]), (num_rows, start)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("odd", [1 / 3, 2.0**-30 + 2.0**-39, math.inf, math.nan])
def test_a_weight_with_more_digits_stays_in_float32(odd: float) -> None:
    weight = numbers(32, 16)
    weight[5, 7] = odd
    assert scale_for(weight) is None
    linear, x = HalfLinear(weight, None, torch.float32), torch.randn(4, 16)
    assert not linear.is_half
    usual = Linear(weight, None, torch.float32, pack=True)(x)
    torch.testing.assert_close(linear(x), usual, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("factor", [2.0**-70, 2.0**-20, 1.0, 2.0**20, 2.0**100])
def test_weights_of_any_size_are_in_float16_to_their_last_digit(factor: float) -> None:
    weight = numbers(64, 600, seed=5) * factor
    linear = HalfLinear(weight, None, torch.float32)
    assert linear.is_half
    rows, _ = linear.rows(torch.arange(64))
    assert torch.equal(rows, weight)


@given(data=st.data())
def test_what_is_lost_of_the_smallest_weights_is_far_below_the_rounding_of_sums(
    data: st.DataObject,
) -> None:
    whole = st.integers(0, 2**16 - 1)  # as bits of a bfloat16
    bits = torch.tensor(data.draw(st.lists(whole, min_size=8, max_size=8)), dtype=torch.int32)
    weight = (bits << 16).view(torch.float32)[None]
    scale = scale_for(weight)
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        assert scale is None
        return
    if largest == 0:
        assert scale == 1.0
        return
    if largest < 2.0**-86:  # no scale within float32 would do
        assert scale is None
        return
    assert scale is not None
    assert math.frexp(scale)[0] == 0.5  # a power of two: it costs no digit
    exact = weight.double() * scale
    lost = (exact.half().double() - exact).abs().max()
    assert float(lost) <= largest * scale * 2.0**-39
    if scale == 1.0:
        assert float(lost) == 0


def test_float16_numbers_are_kept_as_they_are() -> None:
    weight = numbers(64, 64).half().float()
    weight[0, 0] = 1 + 2.0**-10
    assert scale_for(weight) == 1.0


def test_the_model_is_the_same_and_speculation_changes_no_token() -> None:
    model = tiny_models.llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 150], list(range(40, 75))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=1.0, seed=3, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=24),
    ]
    found = {}
    for name, settings in {
        "float32": {"proposer": None, "quantization": "none"},
        "plain": {"proposer": None},
        "ngram": {"proposer": "ngram", "adaptive": False},
    }.items():
        asked: dict[str, Any] = {"strict": True, **settings}
        with LLM(model=model, **asked) as llm:
            assert llm.stats.row_invariant
            found[name] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert found["ngram"] == found["plain"] == found["float32"]


@pytest.mark.parametrize("quantization", ["float16", "auto"])
def test_nothing_but_half_the_bytes_is_kept(quantization: str) -> None:
    target = load_target(tiny_models.llama().bfloat16().float(), quantization=quantization)
    assert isinstance(target.decoder, FastDecoder)
    linears = [target.decoder.lm_head]
    for layer in target.decoder.layers:
        linears += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    for linear in linears:
        assert isinstance(linear, HalfLinear)
        tensors = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
        assert tensors == []
    assert "float16 weights" in target.description


def test_where_there_is_no_product_for_it_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_linear, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="FBGEMM"):
        load_target(tiny_models.llama(), quantization="float16")


@pytest.mark.parametrize(
    ("quantization", "is_half"), [("auto", True), ("float16", True), ("none", False)]
)
def test_transformers_modules_keep_them_too(quantization: str, is_half: bool) -> None:
    model = tiny_models.llama().bfloat16().float()
    target = load_target(model, quantization=quantization, force_transformers=True)
    assert target.decoder.is_half == is_half
    assert ("float16 weights" in target.description) == is_half


def test_a_float32_checkpoint_stays_as_it_is() -> None:
    target = load_target(tiny_models.llama())
    assert not target.decoder.is_half
    assert "float16" not in target.description


def test_automatically_only_where_products_are_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_models.llama().bfloat16()
    monkeypatch.setattr(target_module, "compute_dtype", lambda dtype, device: torch.bfloat16)
    assert not load_target(model).decoder.is_half
    monkeypatch.setattr(target_module, "compute_dtype", lambda dtype, device: torch.float32)
    assert load_target(model).decoder.is_half
    monkeypatch.setattr(half_linear, "is_available", lambda: False)
    assert not load_target(model).decoder.is_half


def test_none_is_another_word_for_as_they_are() -> None:
    assert EngineConfig(quantization=None).quantization == "none"  # type: ignore[arg-type]
