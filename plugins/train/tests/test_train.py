"""`foresay train` as a user runs it: mistakes, whole trainings, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file

import foresay_train
from foresay import LLM, SamplingParams, cli
from foresay.core.plugins import PluginManager

SMALL = ["--max-tokens", "24", "--held-out", "2", "--batch-tokens", "300", "--measure", "2"]
FAST = ["--learning-rate", "0.02", "--max-steps", "40", "--eval-steps", "20"]


def arguments(proposer: str, model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    files = ["--model", str(model), "--prompts", str(prompts), "--out", str(out)]
    return ["train", proposer, *files, *SMALL, *more]


# -- the command ---------------------------------------------------------------------------------


def test_the_plugin_adds_the_command() -> None:
    app = typer.Typer()
    foresay_train.foresay_register_commands(app)

    assert [command.name for command in app.registered_commands] == ["train"]
    records = {record.entry_point: record for record in PluginManager.load().records}
    assert records["train"].status == "ok"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "which one? can be trained: eagle, medusa, mtp"),
        (["nobody"], "no proposer 'nobody'"),
        (["nobody"], "can be trained: eagle, medusa, mtp"),
        (["ngram"], "proposer 'ngram' (foresay-ngram 0.1.0) has no training"),
        (["eagle"], "give either --prompts"),
        (["eagle", "--prompts", "a", "--replies", "b"], "give either --prompts"),
        (["eagle", "--prompts", "a"], "--out is missing"),
        (["eagle", "--prompts", "a", "--out", "b", "--set", "num_step=2"], "num_steps"),
        (["eagle", "--prompts", "a", "--out", "b", "--set", "num_steps=0"], "num_steps=0"),
        (["eagle", "--prompts", "a", "--out", "b", "--set", "num_steps"], "expected key=value"),
        (["eagle", "--prompts", "a", "--out", "b", "--learning-rate", "0"], "--learning-rate 0.0"),
        (["eagle", "--prompts", "a", "--out", "b", "--layers-also", "1,x"], "expected numbers"),
        (["eagle", "--prompts", "a", "--out", "b", "--held-out", "0"], "held-out"),
        (["eagle", "--prompts", "a", "--out", "b", "--model", "no-such-model"], "no-such-model"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(
    given: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["train", *given])

    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    [line] = printed.err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_prompts_that_are_not_there_are_an_error(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(arguments("medusa", model, tmp_path / "none.jsonl", tmp_path / "out"))

    assert code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: --prompts '{tmp_path / 'none.jsonl'}': No such file or directory"


# -- whole trainings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposer", "settings", "learned"),
    [
        ("eagle", ["num_steps=2", "fc_norm=false"], "fc.weight"),
        ("medusa", ["draft_vocab_size=64"], "0.0.linear.weight"),
        ("mtp", ["num_steps=3", "draft_vocab_size=64"], "model.mtp_layers.0.input_proj.weight"),
    ],
)
def test_a_drafter_is_trained_saved_measured_and_changes_no_text(
    proposer: str,
    settings: list[str],
    learned: str,
    model: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "head"
    given = [part for setting in settings for part in ("--set", setting)]

    code = cli.main(arguments(proposer, model, prompts, out, *given, *FAST))

    printed = capsys.readouterr()
    assert code == 0, printed.err
    report = printed.out.splitlines()
    assert report[0].startswith(f"{proposer} for {model.name}: ")
    assert "trained for 40 steps" in report[0]
    assert "2 held-out prompts" in report[1]
    # The model runs in circles, which a drafter soon knows: most of what it drafts is accepted.
    assert float(report[1].removeprefix("mean acceptance length ").split(",")[0]) > 2.5
    assert report[-1] == (
        f'  foresay run "..." --model {model} --proposer {proposer} --drafter {out}'
    )
    assert learned in load_file(out / "model.safetensors")
    curve = (out / "work" / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in curve] == [0, 20, 40]
    assert f"`{settings[0]}`".replace("false", "False") in (out / "README.md").read_text("utf-8")
    assert str(tmp_path) not in (out / "README.md").read_text("utf-8")
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(model, None) as plain:
        wanted = [o.outputs[0].token_ids for o in plain.generate(["say 3", "one two"], params)]
    with LLM(model, proposer, drafter=out, strict=True, adaptive=False) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(["say 3", "one two"], params)]
        assert llm.stats.num_accepted_tokens > 0
    assert got == wanted


KILLED = """
import os, signal, sys
from foresay import cli
from foresay_train import training

step, calls = training._Trainer.training_step, []
def killing(self, *arguments, **keywords):
    calls.append(1)
    if len(calls) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments, **keywords)
training._Trainer.training_step = killing
cli.main(sys.argv[1:])
"""


def test_a_killed_training_goes_on_and_ends_as_if_it_had_not_been(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = ["--max-steps", "9", "--save-steps", "2", "--eval-steps", "2"]
    whole, broken = (
        arguments("medusa", model, prompts, tmp_path / name, *often) for name in ("whole", "broken")
    )
    assert cli.main(whole) == 0
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *broken],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    checkpoints = tmp_path / "broken" / "work" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    capsys.readouterr()

    assert cli.main(broken) == 0

    printed = capsys.readouterr().err
    assert "hidden states of" not in printed  # they were there
    ends = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "broken")]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
    curves = [
        (tmp_path / name / "work" / "curve.jsonl").read_text("utf-8")
        for name in ("whole", "broken")
    ]
    assert curves[0] == curves[1]
