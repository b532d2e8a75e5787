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

from foresay import LLM, SamplingParams
from foresay.cli import main
from foresay.core.errors import ConfigError
from foresay.core.worker import build, int8_linear
from foresay.core.worker.int8_linear import Int8Linear, drafter_linear, pays_for_drafters
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
    init = Int8Linear.__init__

    def noted(self: Int8Linear, weight: torch.Tensor, *args: Any, **settings: Any) -> None:
        shapes.append(tuple(weight.shape))
        init(self, weight, *args, **settings)

    monkeypatch.setattr(Int8Linear, "__init__", noted)
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


def test_automatically_where_it_was_found_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "input_levels", lambda: 127)
    monkeypatch.setattr(int8_linear, "compute_dtype", lambda dtype, device: dtype)
    assert pays_for_drafters(torch.float32, CPU, 576)
    assert not pays_for_drafters(torch.float32, CPU, 64)
    assert not pays_for_drafters(torch.bfloat16, CPU, 576)
    assert not pays_for_drafters(torch.float32, torch.device("cuda"), 576)
    monkeypatch.setattr(int8_linear, "input_levels", lambda: 63)
    assert not pays_for_drafters(torch.float32, CPU, 576)


def test_a_proposer_is_told_by_its_view_of_the_target() -> None:
    assert drafter_linear(medusa_heads.view(int8_drafter=True)) is Int8Linear
    assert drafter_linear(medusa_heads.view()) is Linear


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


@pytest.mark.parametrize("command", ["run", "chat", "bench", "doctor"])
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
    if command == "run":
        arguments.append("hello")
    flags = ["--drafter-quantization", "int8", "--quantization", "int8"]
    if command != "doctor":
        flags.append("--enforce-eager")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main([*arguments, *flags]) == 2
    assert "enough was seen" in capfd.readouterr().err
    assert asked[0]["drafter_quantization"] == "int8"
    assert asked[0]["quantization"] == "int8"
    assert command == "doctor" or asked[0]["enforce_eager"] is True
