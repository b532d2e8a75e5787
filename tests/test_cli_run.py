"""`foresay run` and `foresay showcase`, on a tiny model with a byte tokenizer; mistakes; Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_chat import save_chat_model

from foresay import LLM, SamplingParams
from foresay.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


Run = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str, command: str = "run") -> tuple[int, str, str]:
        code = main([command, *arguments, "--model", str(folder)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_the_text_alone_goes_to_stdout_and_the_figures_to_stderr(run: Run, folder: Path) -> None:
    code, out, err = run("Hello", "--max-tokens", "12", "--proposer", "none")
    with LLM(model=str(folder), proposer=None) as llm:
        expected = llm.chat(
            [{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=12)
        )[0]
    assert code == 0
    assert out == expected.outputs[0].text + (
        "" if expected.outputs[0].text.endswith("\n") else "\n"
    )
    assert "12 tokens in " in err
    assert "no drafts were verified" in err
    assert "Hello" not in out


def test_json_is_one_object_with_the_documented_keys(run: Run) -> None:
    code, out, err = run(
        "abcabcabc", "--json", "--max-tokens", "16", "--proposer", "ngram", "--raw"
    )
    row = json.loads(out)
    assert code == 0
    assert list(row) == ["text", "token_ids", "finish_reason", "stats"]
    assert len(row["token_ids"]) == 16
    assert row["finish_reason"] == "length"
    assert row["stats"]["num_output_tokens"] == 16
    assert row["stats"]["num_steps"] <= 16
    assert "tokens/s" not in err


def test_speculation_and_settings_change_no_token(run: Run) -> None:
    common = (
        "xyxyxyxy",
        "--json",
        "--max-tokens",
        "40",
        "--raw",
        "--temperature",
        "0.9",
        "--seed",
        "5",
    )
    plain = json.loads(run(*common, "--proposer", "none")[1])
    for extra in (
        ("--proposer", "ngram"),
        ("--proposer", "ngram", "-k", "2", "--set", "prompt_lookup_min=2"),
        ("--proposer", "ngram", "-k", "40"),
        ("--proposer", "ngram", "-k", "0"),
        ("--proposer", "adversaries:Random"),
    ):
        drafted = json.loads(run(*common, *extra)[1])
        assert drafted["token_ids"] == plain["token_ids"], extra
    assert plain["stats"]["num_draft_tokens"] == 0
    assert drafted["stats"]["num_draft_tokens"] > 0


def test_a_dash_reads_the_prompt_from_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    _, piped, _ = run("-", "--max-tokens", "8")
    _, given, _ = run("Hello", "--max-tokens", "8")
    assert piped == given


@pytest.mark.parametrize("option", ["prompt", "prediction"])
def test_bytes_from_stdin_that_are_no_text_are_a_mistake(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    strict = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdin", strict)
    arguments = ("-",) if option == "prompt" else ("x", "--prediction", "-")
    code, out, err = run(*arguments, "--proposer", "ngram")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert f"{option} is no valid text: character 3" in err


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("Hello", "--raw", "--max-tokens", "64", "--proposer", "none")
    text = json.loads(run(*arguments, "--json")[1])["text"]
    assert not text.isascii()
    stdout = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stdout, encoding="ascii", newline="\n"))
    code, _, _ = run(*arguments)
    assert code == 0
    assert stdout.getvalue().decode("ascii").rstrip("\n") == (
        text.encode("ascii", "replace").decode("ascii").rstrip("\n")
    )


def test_closed_streams_are_empty_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    code, _, err = run("-")
    assert (code, err) == (2, "error: the prompt is empty\n")
    monkeypatch.setattr(sys, "stdout", None)
    code, _, err = run("Hello", "--max-tokens", "4")
    assert code == 0
    assert "4 tokens in " in err


def test_no_stats_prints_no_figures(run: Run) -> None:
    code, _, err = run("Hello", "--max-tokens", "4", "--no-stats")
    assert code == 0
    assert "tokens/s" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "the prompt is empty"),
        (("x", "--set", "novalue"), "--set 'novalue': expected key=value"),
        (("x", "--set", "a=1", "--set", "a=2"), "'a' is given twice"),
        (
            ("x", "--proposer", "ngram", "--set", "prompt_lookup_mim=1"),
            "did you mean 'prompt_lookup_min'?",
        ),
        (("x", "--proposer", "ngrm"), "did you mean 'ngram'?"),
        (("x", "--proposer", "ngram,a"), "no proposer 'a'"),
        (("x", "--proposer", "ngram,ngram"), "'ngram' is in the chain twice"),
        (("x", "--proposer", "none", "-k", "3"), "num_speculative_tokens would have no effect"),
        (("x", "--proposer", "ngram", "-k", "-1"), "num_speculative_tokens=-1"),
        (("x\udcff",), "no valid text"),
        (("x", "--temperature", "-1"), "temperature=-1.0"),
        (("x", "--top-p", "0"), "top_p=0.0"),
        (("x", "--max-tokens", "0"), "max_tokens=0"),
        (("x", "--dtype", "float61"), "dtype='float61'"),
        (("x", "--device", "gpu"), "device='gpu'"),
        (("x", "--drafter", ".", "--proposer", "ngram"), "loads no drafter"),
        (("x", "--drafter", "no/such", "--proposer", "ngram"), "no drafter 'no/such'"),
        (("y" * 5000,), "at most 4095 leave room for an output"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err


def test_an_unknown_option_is_a_usage_error(run: Run) -> None:
    code, _, err = run("x", "--tempreture", "1")
    assert code == 2
    assert err.startswith("error: ")
    assert "--tempreture" in err


def test_showcase_compares_the_two_and_says_that_the_ids_are_equal(run: Run) -> None:
    code, out, _ = run("--max-tokens", "12", "--repeats", "1", command="showcase")
    assert code == 0
    table = out[out.index("prompt") :].splitlines()
    assert [line.split()[0] for line in table[1:]] == ["rewrite", "code", "explain", "ALL"]
    assert all(line.split()[-1] == "yes" for line in table[1:])
    assert table[-1].split()[1] == "36"  # 3 x 12 tokens


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a POSIX signal")
def test_ctrl_c_ends_the_answer_with_the_figures_so_far(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "foresay.cli", "run", "Hello", "--model", str(folder), "--raw",
         "--max-tokens", "5000", "--proposer", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # see test_cli_plugins
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(5)  # it answers
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first + rest) >= 5
    assert "tokens/s" in err
    assert "Traceback" not in err
