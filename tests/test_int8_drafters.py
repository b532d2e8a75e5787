"""Drafters with weights in int8: the text stays, the weights are rounded where that pays."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import eagle_heads
import medusa_heads
import mtp_checkpoints
import pytest
import tiny_models
import torch
from tiny_chat import save_chat_model

from foresay import LLM, SamplingParams
from foresay.cli import main
from foresay.core.errors import ConfigError
from foresay.core.worker import build, drafter_linear, int8_linear
from foresay.core.worker.drafter_linear import (
    DynamicInt8Linear,
    has_dynamic_products,
    pays_for_drafters,
)
from foresay.core.worker.int8_linear import Int8Linear
from foresay.core.worker.linear import Linear

CPU = torch.device("cpu")


def save_drafter(name: str, model: Any, folder: Path) -> Path:
    if name == "eagle":
        return eagle_heads.eagle().save(folder)
    if name == "medusa":
        return medusa_heads.of_authors().files.save(folder)
    tensors = mtp_checkpoints.module_tensors("qwen3_next", model.config)
    return mtp_checkpoints.save_drafter(folder, tensors, model.config, model_type="qwen3_next")


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that are rounded to int8 from here on."""
    shapes: list[tuple[int, ...]] = []
    has_dynamic_products()  # now: a weight is rounded to try
    original = int8_linear.rounded

    def noted(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(weight.shape))
        return original(weight)

    monkeypatch.setattr(int8_linear, "rounded", noted)
    return shapes


@pytest.mark.parametrize(
    ("name", "num_products"),
    [
        ("eagle", 6),  # fc, qkv, kv, o, gate and up, down; its output head is the target's
        ("medusa", 1),  # at least
        ("mtp", 6),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    name: str, num_products: int, tmp_path: Path, rounded: list[tuple[int, ...]]
) -> None:
    model = tiny_models.BUILDERS["qwen3" if name == "mtp" else "llama"]()
    drafter = save_drafter(name, model, tmp_path / "drafter")
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 150], list(range(40, 75))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=20),
    ]
    with LLM(model=model, proposer=None) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    drafts = {}
    for quantization in ("none", "auto", "int8"):
        with LLM(
            model=model,
            proposer=name,
            drafter=str(drafter),
            drafter_quantization=quantization,
            adaptive=False,
            strict=True,
        ) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            assert found == plain
            assert llm.stats.num_draft_tokens > 0
            drafts[quantization] = len(rounded)
    assert drafts["none"] == drafts["auto"] == 0  # so small a drafter stays as it is
    assert drafts["int8"] >= num_products


@pytest.mark.usefixtures("only_torch")
def test_automatically_where_it_was_found_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "input_levels", lambda: 127)
    monkeypatch.setattr(drafter_linear, "compute_dtype", lambda dtype, device: dtype)
    assert pays_for_drafters(torch.float32, CPU, 576)
    assert not pays_for_drafters(torch.float32, CPU, 64)
    assert not pays_for_drafters(torch.bfloat16, CPU, 576)
    assert not pays_for_drafters(torch.float32, torch.device("cuda"), 576)
    monkeypatch.setattr(int8_linear, "input_levels", lambda: 63)
    assert not pays_for_drafters(torch.float32, CPU, 576)


def test_a_proposer_is_told_by_its_view_of_the_target(
    monkeypatch: pytest.MonkeyPatch, products: str
) -> None:
    rounding, plain = medusa_heads.view(int8_drafter=True), medusa_heads.view()
    if products == "own":
        assert drafter_linear.drafter_linear(rounding) is Int8Linear
        assert drafter_linear.drafter_linear(plain) is Linear
        return
    for has, expected in ((True, DynamicInt8Linear), (False, Int8Linear)):
        monkeypatch.setattr(drafter_linear, "has_dynamic_products", lambda has=has: has)
        assert drafter_linear.drafter_linear(rounding) is expected
        assert drafter_linear.drafter_linear(plain) is Linear


def test_a_product_that_overflows_or_is_not_there_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_dynamic_products():
        pytest.skip("this torch has no products that round their input, or this CPU overflows")
    product = DynamicInt8Linear._product

    def overflowing(self: DynamicInt8Linear, x: torch.Tensor) -> torch.Tensor:
        return product(self, x).clamp(-20.0, 20.0)

    def missing(self: DynamicInt8Linear, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    for wrong in (overflowing, missing):
        monkeypatch.setattr(DynamicInt8Linear, "_product", wrong)
        assert not has_dynamic_products.__wrapped__()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(160, 48), (7, 5), (576, 1536)])
def test_products_are_those_of_the_rounded_weight_and_rounded_rows(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool
) -> None:
    if not has_dynamic_products():
        pytest.skip("this torch has no products that round their input, or this CPU overflows")
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight, offset = numbers(out_features, in_features), numbers(out_features) if bias else None
    ours = DynamicInt8Linear(weight, offset, dtype)
    exact, kept = ours.rows(torch.arange(out_features))
    assert exact.dtype == dtype
    assert (kept is None) == (offset is None)
    if kept is not None and offset is not None:
        assert torch.equal(kept, offset)
    step = weight.double().abs().amax(dim=1) / 127
    lost = 0.5001 * step[:, None] + (0 if dtype == torch.float32 else 2**-8 * weight.double().abs())
    assert ((exact.double() - weight.double()).abs() <= lost).all()
    full, _ = DynamicInt8Linear(weight, None, torch.float32).rows(torch.arange(out_features))
    for num_rows in (0, 1, 5, 130):
        x = numbers(num_rows, in_features)
        x[1:2] *= 1000  # as states of a text's first token: the others keep their digits
        x[2:3] = 0.0
        product = x.double() @ full.double().T
        expected = product if offset is None else product + offset.double()
        residual = numbers(num_rows, out_features)
        for y, whole in ((ours(x), expected), (ours.add_to(residual, x), expected + residual)):
            assert (y.dtype, y.shape) == (dtype, expected.shape)
            # A step is at most 2 / 255 of a row's largest element: half of it is lost of each.
            most = x.double().abs().amax(dim=1, keepdim=True) / 255 * full.double().abs().sum(dim=1)
            rounding = 1e-5 if dtype == torch.float32 else 2**-7
            size = whole.abs() + product.abs() + x.double().norm(dim=1, keepdim=True)
            assert ((y.double() - whole).abs() <= 1.01 * most + rounding * size).all()


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_of_any_size_keep_their_digits(num_rows: int, size: float) -> None:
    if not has_dynamic_products():
        pytest.skip("this torch has no products that round their input, or this CPU overflows")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    x = torch.randn(num_rows, 256, generator=generator)
    ours = DynamicInt8Linear(weight, None, torch.float32)
    exact = x @ weight.T
    assert (ours(x * size) / size - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("column", [0, 5])
def test_what_is_no_number_fails_nobody_and_alters_no_other_row(
    wrong: float, row: int, column: int
) -> None:
    if not has_dynamic_products():
        pytest.skip("this torch has no products that round their input, or this CPU overflows")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    x = torch.randn(3, 256, generator=generator)
    exact = x @ weight.T
    x[row, column] = wrong
    ours = DynamicInt8Linear(weight, None, torch.float32)
    others = [each for each in range(3) if each != row]
    assert (ours(x)[others] - exact[others]).norm() <= 0.02 * exact.norm()
    assert ours(x[row : row + 1]).shape == (1, 64)


def test_where_it_cannot_be_had_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.llama()
    head = {"proposer": "eagle", "drafter": str(save_drafter("eagle", model, tmp_path / "head"))}

    def refusal(**settings: Any) -> str:
        with pytest.raises(ConfigError) as error:
            LLM(model=model, **settings)
        return str(error.value)

    said = "drafter_quantization='int8' is for heads on the model's states"
    assert said in refusal(proposer="ngram", drafter_quantization="int8")
    assert said in refusal(proposer=None, drafter_quantization="int8")
    assert "drafter_quantization" in refusal(**head, drafter_quantization="int4")
    monkeypatch.setattr(build, "is_available", lambda: False)
    assert "has no integer products" in refusal(**head, drafter_quantization="int8")
    LLM(model=model, **head, drafter_quantization="auto").close()


def test_the_line_at_the_start_says_so(tmp_path: Path) -> None:
    model = tiny_models.llama()
    head = save_drafter("eagle", model, tmp_path / "head")
    with LLM(
        model=model,
        proposer="ngram,eagle",
        drafter={"eagle": str(head)},
        drafter_quantization="int8",
    ) as llm:
        assert llm.summary.endswith("; heads in int8")
    with LLM(model=model, proposer="ngram,eagle", drafter={"eagle": str(head)}) as llm:
        assert "int8" not in llm.summary


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_plain_decoding_beside_it_is_not_asked_for_a_head(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not int8_linear.is_available():
        pytest.skip("this torch has no integer products")
    model = save_chat_model(tmp_path / "model")
    head = save_drafter("eagle", None, tmp_path / "head")
    data = tmp_path / "data.jsonl"
    data.write_text('{"id": "a", "task": "t", "turns": ["Hello"]}\n', encoding="utf-8")
    asked = ["--model", str(model), "--data", str(data), "--drafter-quantization", "int8"]
    own = {
        "bench": ["--proposers", "none,eagle", "--drafter", f"eagle={head}", "--repeats", "1"],
        "doctor": ["--proposer", "eagle", "--drafter", str(head), "--pairs", "1"],
    }
    code = main([command, *asked, *own[command], "--max-tokens", "12"])
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "heads in int8" in err
    assert "error" not in err
    assert out


@pytest.mark.parametrize("command", ["run", "chat", "bench", "doctor", "check"])
def test_the_commands_pass_their_options_on(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What they open an engine with has the settings that were asked for."""
    asked: list[dict[str, Any]] = []

    def opened(*args: Any, **settings: Any) -> Any:
        asked.append(settings)
        raise ConfigError("enough was seen")

    monkeypatch.setattr(LLM, "__init__", opened)
    arguments = [command, "--model", "smollm2", "--proposer", "eagle"]
    if command == "bench":
        arguments[3:] = ["--proposers", "eagle"]
    if command == "check":
        arguments[1:] = ["smollm2-eagle", *arguments[1:]]
    if command == "run":
        arguments.append("hello")
    flags = ["--drafter-quantization", "int8", "--quantization", "int8"]
    flags.append("--enforce-eager")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([*arguments, *flags]) == 2
    assert "enough was seen" in capfd.readouterr().err
    assert asked[0]["drafter_quantization"] == "int8"
    assert asked[0]["quantization"] == "int8"
    assert asked[0]["enforce_eager"] is True
