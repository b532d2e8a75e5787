"""Products with int8 weights: their values, a row's bits in every batch, and engines of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiny_chat import save_chat_model

from foresay import LLM, SamplingParams
from foresay.cli import main
from foresay.core.errors import ConfigError
from foresay.core.worker import int8_linear
from foresay.core.worker import target as target_module
from foresay.core.worker.decoder import FastDecoder
from foresay.core.worker.int8_linear import Int8Linear, input_levels
from foresay.core.worker.target import load_target

pytestmark = pytest.mark.usefixtures("products")

SHAPES = [(160, 48), (7, 5), (576, 1536)]
DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[127, 63], ids=["127 levels", "63 levels"])
def levels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What this CPU's instructions allow, or fewer: what the others' allow."""
    number = min(int(request.param), input_levels())
    monkeypatch.setattr(int8_linear, "input_levels", lambda: number)
    return number


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_products_are_those_of_the_rounded_weight(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool, levels: int
) -> None:
    weight = numbers(out_features, in_features, dtype=dtype, seed=1)
    offset = numbers(out_features, dtype=dtype, seed=2) if bias else None
    ours = Int8Linear(weight, offset, dtype)
    exact = Int8Linear(weight, None, torch.float32).rows(torch.arange(out_features))[0].double()
    step = weight.double().abs().amax(dim=1) / 127
    assert ((exact - weight.double()).abs() <= 0.5001 * step[:, None]).all()
    for num_rows in (1, 5, 130):
        x = numbers(num_rows, in_features, dtype=dtype)
        expected = F.linear(x.double(), exact, None if offset is None else offset.double())
        y = ours(x)
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        # A step of the finer row is the largest element's 1 / (2 levels^2): half of it at most is
        # lost of each element, and the result is rounded.
        lost = x.double().abs().amax(dim=1, keepdim=True) / (4 * levels**2) * exact.abs().sum(dim=1)
        size = expected.abs() + x.double().norm(dim=1, keepdim=True) * exact.norm(dim=1)
        rounding = 2e-6 if dtype == torch.float32 else 2**-8
        assert ((y.double() - expected).abs() <= 1.001 * lost + rounding * size).all()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(
    out_features: int, in_features: int, dtype: torch.dtype, num_threads: int
) -> None:
    ours = Int8Linear(numbers(out_features, in_features, seed=1), numbers(out_features), dtype)
    x = numbers(130, in_features, dtype=dtype)
    residual = numbers(130, out_features, dtype=dtype, seed=3)
    before = torch.get_num_threads()
    alone = torch.cat([ours(row) for row in x.split(1)])
    torch.set_num_threads(num_threads)
    try:
        for num_rows in range(1, 131) if in_features < 100 else (1, 2, 3, 8, 17, 64, 129, 130):
            assert torch.equal(ours(x[:num_rows]), alone[:num_rows]), num_rows
            assert torch.equal(ours(x[-num_rows:]), alone[-num_rows:]), num_rows
            added = ours.add_to(residual[:num_rows], x[:num_rows])
            assert torch.equal(added, residual[:num_rows] + alone[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)


def test_rows_of_zeros_and_of_no_numbers_alter_no_other() -> None:
    weight, bias = numbers(9, 20, seed=1), numbers(9, seed=2)
    weight[3] = 0.0
    ours = Int8Linear(weight, bias, torch.float32)
    x = numbers(4, 20)
    x[1] = 0.0
    x[2, 5] = float("nan")
    y = ours(x)
    assert torch.equal(y[1], bias)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 3]], torch.cat([ours(x[:1]), ours(x[3:])]))
    assert torch.equal(y[[0, 1, 3], 3], bias[3].expand(3))


def test_no_rows_give_no_rows() -> None:
    ours = Int8Linear(numbers(9, 5), None, torch.bfloat16)
    y = ours(numbers(0, 5, dtype=torch.bfloat16))
    assert (y.shape, y.dtype) == ((0, 9), torch.bfloat16)


def test_the_weight_is_kept_in_int8_and_as_nothing_else() -> None:
    decoder = FastDecoder(
        tiny_models.llama(), device=torch.device("cpu"), dtype=torch.float32, linear=Int8Linear
    )
    for block in decoder.layers:
        for linear in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            assert isinstance(linear, Int8Linear)
    assert isinstance(decoder.lm_head, Int8Linear)
    kept = [value for value in vars(decoder.lm_head).values() if isinstance(value, torch.Tensor)]
    if decoder.lm_head.panels is not None:
        kept.append(decoder.lm_head.panels.values)
    assert [t.dtype for t in kept if t.dim() > 1] == [torch.int8]


def test_where_products_overflow_rows_have_fewer_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    product = int8_linear._product

    def saturated(*given: Any) -> torch.Tensor:
        return product(*given).clamp_max(32 * (2**15 - 1))  # of each pair

    monkeypatch.setattr(int8_linear, "_product", saturated)
    assert input_levels.__wrapped__() == 63


# Engines


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eagle head over fewer tokens, whose output head is the target's rows."""
    head = eagle_heads.reduced(eagle_heads.eagle(), 64).without("lm_head.weight")
    return head.save(tmp_path_factory.mktemp("eagle"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_speculation_changes_no_token_of_the_quantised_model(
    family: str, dtype: torch.dtype, head: Path
) -> None:
    model = tiny_models.BUILDERS[family]().to(dtype)
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 150], list(range(40, 75))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=1.0, seed=3, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=24),
    ]
    found = {}
    for name, settings in {
        "float": {"quantization": None, "proposer": None},
        "plain": {"proposer": None},
        "ngram": {"proposer": "ngram", "adaptive": False},
        "eagle": {"proposer": "eagle", "drafter": str(head), "adaptive": False},
    }.items():
        asked: dict[str, Any] = {"quantization": "int8", "strict": True, **settings}
        with LLM(model=model, **asked) as llm:
            found[name] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            assert llm.stats.row_invariant or name == "float"
            if settings["proposer"] is not None:
                assert llm.stats.num_draft_tokens > 0
    assert found["ngram"] == found["plain"]
    assert found["eagle"] == found["plain"]
    assert found["float"] != found["plain"]  # else nothing was quantised


def refusal(model: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load_target(model, quantization="int8", **settings)
    return str(error.value)


class _Scaled(torch.nn.Linear):
    """A layer with something beside its weights, as quantised layers have."""


def changed() -> Any:
    model = tiny_models.llama()
    model.model.layers[1].mlp.up_proj = _Scaled(48, 96, bias=False)
    return model


@pytest.mark.parametrize(
    ("build", "settings", "reason"),
    [
        pytest.param(tiny_models.gpt2, {}, "model type 'gpt2' is not one of", id="family"),
        pytest.param(changed, {}, "'model.layers.1.mlp.up_proj' is a _Scaled", id="quantised"),
        pytest.param(tiny_models.llama, {"force_transformers": True}, "asked for", id="forced"),
    ],
)
def test_what_the_own_decoder_does_not_run_is_refused(
    build: Callable[[], Any], settings: dict[str, Any], reason: str
) -> None:
    expected = "quantization='int8' needs foresay's own decoder, which does not run this model: "
    assert refusal(build(), **settings).startswith(expected + reason)


def test_another_family_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    tiny_models.gpt2().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model type 'gpt2'" in refusal(tmp_path)


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(target_module, "choose_device", lambda _device: gpu)
    assert refusal("anything") == (
        "quantization='int8' is for a CPU, and the model's device is 'cuda:0': set device to 'cpu' "
        "or leave quantization out"
    )


@pytest.mark.usefixtures("only_torch")
def test_a_torch_without_onednn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "has no products for it" in refusal(tiny_models.llama())


def test_the_description_says_so() -> None:
    target = load_target(tiny_models.llama(), quantization="int8")
    assert ", int8 weights, foresay's own decoder" in target.description


def test_the_command_line_takes_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(save_chat_model(tmp_path))
    common = ["run", "Hello", "--model", folder, "--proposer", "none", "--max-tokens", "8"]
    assert main([*common, "--quantization", "int8", "--json"]) == 0
    ids = json.loads(capfd.readouterr().out)["token_ids"]
    with LLM(model=folder, proposer=None, quantization="int8") as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=8)
        (expected,) = llm.chat([{"role": "user", "content": "Hello"}], asked)
    assert ids == list(expected.outputs[0].token_ids)
    capfd.readouterr()
    assert main([*common, "--quantization", "int4"]) == 2
    assert "quantization='int4'" in capfd.readouterr().err
