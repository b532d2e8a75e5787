"""`foresay doctor`: what it measures on a tiny model, what it prints; mistakes; Ctrl-C.

The proposers ask a second copy of the target what comes next, so that what is accepted is known
beforehand. What an answer takes is made up where a verdict depends on it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_chat import save_chat_model

from foresay import LLM
from foresay.cli import main
from foresay.core.commands import doctor
from foresay.core.commands.diagnosis import Timed
from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, TargetView

DATA = [
    {"id": 1, "task": "copy", "turns": ["abcabcabc", "and again"]},
    {"id": 2, "task": "talk", "turns": ["Hello"], "prediction": "abc"},
    {"id": 3, "task": "copy", "turns": ["xyzxyzxyz"]},
]


class Right:
    """Drafts what the target will say."""

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config

    def load(self, target: TargetView) -> None:
        self.vocab_size = target.vocab_size
        assert target.checkpoint is not None
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(target.checkpoint)

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.next(request.token_ids, request.k) for request in batch.requests])

    def next(self, token_ids: Sequence[int], k: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(k):
            with torch.no_grad():
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(token_ids) :]


class Slow(Right):
    """Takes its time for each token."""

    def next(self, token_ids: Sequence[int], k: int) -> list[int]:
        time.sleep(0.1 * k)
        return super().next(token_ids, k)


class Once(Right):
    """Is right with the first token and wrong with the second."""

    def next(self, token_ids: Sequence[int], k: int) -> list[int]:
        ids = super().next(token_ids, k)
        return [*ids[:1], *((token_id + 1) % self.vocab_size for token_id in ids[1:])]


class Remembering(Right):
    """Is wrong with a text that is new, and right when it comes again."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.known: dict[tuple[int, ...], int] = {}  # how often a prompt came
        self.prompts: dict[str, tuple[int, ...]] = {}

    def propose(self, batch: DraftInput) -> Draft:
        drafts = []
        for request in batch.requests:
            if request.req_id not in self.prompts:
                prompt = tuple(request.token_ids[:-1])
                self.prompts[request.req_id] = prompt
                self.known[prompt] = self.known.get(prompt, 0) + 1
            right = self.next(request.token_ids, request.k)
            if self.known[self.prompts[request.req_id]] < 2:
                right = [(token_id + 1) % self.vocab_size for token_id in right]
            drafts.append(right)
        return Draft(drafts)


class Foretelling(Right):
    """Drafts the first token of the prediction, and nothing where there is none."""

    needs = Needs(prediction=True)

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([list(request.prediction_ids[:1]) for request in batch.requests])


class Failing(Right):
    """Never gets anywhere."""

    def propose(self, batch: DraftInput) -> Draft:
        raise RuntimeError("no draft today")


class Short(Right):
    """Takes short texts only."""

    needs = Needs(max_context=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    return path


Doctor = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def run(folder: Path, data: Path, capfd: pytest.CaptureFixture[str]) -> Doctor:
    def call(proposer: str, *arguments: str) -> tuple[int, str, str]:
        name = (
            proposer
            if proposer in ("none", "ngram") or ":" in proposer
            else f"{__name__}:{proposer}"
        )
        own = [] if "--data" in arguments else ["--data", str(data)]
        few = [] if "--max-tokens" in arguments else ["--max-tokens", "13"]
        once = [] if "--pairs" in arguments else ["--pairs", "1"]
        model = [] if "--model" in arguments else ["--model", str(folder)]
        code = main(["doctor", "--proposer", name, *model, *own, *few, *once, *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def report_of(run: Doctor, *arguments: str) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json", "-")
    assert code == 0, err
    report = json.loads(out)
    assert isinstance(report, dict)
    return report


def impose(
    monkeypatch: pytest.MonkeyPatch, own: float, plain: float
) -> list[tuple[int | None, str]]:
    """Have whole answers take given seconds; return the log of draft tokens and prompt ids."""
    log: list[tuple[int | None, str]] = []
    timed = doctor._call

    def imposed(llm: LLM, batch: Any, params: Any, k: int | None = None) -> Any:
        call, outputs = timed(llm, batch, params, k)
        if params.max_tokens > 8:  # else it warms up
            log.append((k, ",".join(prompt.id for prompt in batch.prompts)))
        seconds = plain if llm.proposer_name is None else own
        whole = Timed(call.whole.tokens, seconds) if k is None else call.whole
        return dataclasses.replace(call, whole=whole), outputs

    monkeypatch.setattr(doctor, "_call", imposed)
    return log


# -- what it finds -------------------------------------------------------------------------------


def test_a_right_drafter_that_is_fast_enough_helps(
    run: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = impose(monkeypatch, own=0.5, plain=1.0)
    out = tmp_path / "report.json"
    code, text, err = run("Right", "-k", "2", "--limit", "1", "--json", str(out))
    assert code == 0
    # Every prompt has every number of draft tokens, and who begins changes.
    assert log[:6] == [(0, "1"), (1, "1"), (2, "1"), (1, "2"), (2, "2"), (0, "2")]
    assert log[6:] == [(None, "1")] * 2 + [(None, "2")] * 2
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["complete"] is True
    speed = report["measured_speedup"]
    assert [speed[key] for key in ("median", "least", "most")] == [2.0, 2.0, 2.0]
    assert list(report["measured_by_task"]) == ["copy", "talk"]
    assert (report["helps"], report["cause"]) == (True, "helps")
    # 12 tokens after the first, all accepted that were drafted, two or three a step.
    assert [row["k"] for row in report["lengths"]] == [0, 1, 2]
    assert [row["rows"] for row in report["lengths"]] == pytest.approx([1, 2, 3], abs=0.1)
    tokens = [row["tokens_per_step"] for row in report["lengths"]]
    assert tokens == pytest.approx([1, 2, 3], abs=0.15)
    assert report["acceptance_rate"] > 0.9
    assert report["stats"]["acceptance_rate"] == 1.0
    assert report["steps"] == report["drafts"] == 2 * (6 + 4)
    assert report["prompts"] == 2
    assert report["faults"] == {}
    rows = [rows for rows, _ in report["step_seconds_by_rows"]]
    assert rows == [1, 2, 3]
    (points,) = report["drafting_seconds_by_tokens"].values()
    assert [tokens for tokens, _ in points if tokens] == [1, 2]
    assert all(row["step_seconds"] > 0 for row in report["lengths"])
    # The same in words.
    assert "what a step costs" in text
    assert f"verdict: {report['verdict']}\n" in text
    assert text.splitlines()[0].endswith("2 prompts of 2 tasks, up to 13 tokens each")
    assert "measured: 2.00x (2.00x to 2.00x in 1 pair of runs" in text
    assert "by task: copy 2.00x, talk 2.00x" in text
    assert "faults: none" in text
    assert "foresay: drafting 0, 1, 2 tokens for 2 prompts\n" in err


def test_expected_speedups_are_tokens_over_seconds(run: Doctor) -> None:
    report = report_of(run, "Right", "-k", "2", "--limit", "1")
    plain, *others = report["lengths"]
    assert plain["expected_speedup"] == pytest.approx(1.0)
    assert plain["step_seconds"] == pytest.approx(report["plain_step_seconds"])
    for row in others:
        seconds = row["step_seconds"] + row["drafting_seconds"]
        assert row["expected_speedup"] == pytest.approx(
            row["tokens_per_step"] * plain["step_seconds"] / seconds
        )
        assert row["drafting_seconds"] > 0
        assert row["measured_speedup"] > 0


def test_a_slow_drafter_is_too_slow(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    impose(monkeypatch, own=1.02, plain=1.0)
    report = report_of(run, "Slow", "-k", "1", "--task", "talk", "--max-tokens", "9")
    assert (report["helps"], report["cause"]) == (False, "drafting")
    assert "drafting takes too long: 1 token " in report["verdict"]
    assert report["break_even_acceptance"] is None
    ((points),) = report["drafting_seconds_by_tokens"].values()
    assert dict(map(tuple, points))[1] >= 0.1


def test_acceptance_is_told_by_place(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    impose(monkeypatch, own=1.0, plain=1.0)
    code, text, _ = run("Once", "-k", "2", "--limit", "1")
    assert code == 0
    lines = [line.split() for line in text.splitlines()]
    (accepted,) = [line for line in lines if line[:3] == ["accepted", "if", "reached"]]
    assert accepted[3:] == ["100%", "0%"]
    (there,) = [line for line in lines if line[1:5] == ["calls", "that", "draft", "it"]]
    assert there[5] == "100%"


@pytest.mark.parametrize(
    ("proposer", "cause", "why"),
    [
        ("Failing", "faults", "the proposer failed and was turned off (dropped 2x, raised 6x)"),
        ("Short", "not_asked", "leave no room in the longest text that it takes"),
        ("adversaries:Empty", "no_drafts", "never had a draft, in 24 steps"),
    ],
    ids=["failing", "short context", "silent"],
)
def test_without_drafts_the_verdict_says_why(
    run: Doctor, proposer: str, cause: str, why: str
) -> None:
    report = report_of(run, proposer, "-k", "2", "--task", "talk")
    assert (report["helps"], report["cause"]) == (False, cause)
    assert why in report["verdict"]
    assert report["acceptance_rate"] is None or report["acceptance_rate"] >= 0


def test_without_drafts_the_tables_are_printed_all_the_same(run: Doctor) -> None:
    code, text, _ = run("adversaries:Empty", "-k", "1", "--task", "talk")
    assert code == 0
    assert "there was no draft in 12 steps" in text
    cells = next(line.split() for line in text.splitlines() if line.startswith("1 "))
    assert cells[:4] == ["1", "2", "n/a", "n/a"]  # no step had two rows


def test_batches_are_full_and_mixed(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    log = impose(monkeypatch, own=1.0, plain=1.0)
    report = report_of(run, "ngram", "-k", "1", "--batch-size", "2")
    assert {ids for _, ids in log} == {"1,2", "3,1"}
    assert report["batch_size"] == 2
    assert report["measured_by_task"] == {}
    assert report["lengths"][0]["rows"] == 2
    _, _, err = run("ngram", "-k", "1", "--batch-size", "2")
    assert "3 prompts do not fill batches of 2: some come more than once" in err


def test_a_chain_is_told_by_its_members(run: Doctor) -> None:
    chain = f"ngram,{__name__}:Right"
    report = report_of(run, chain, "-k", "2", "--limit", "1")
    assert report["proposer"] == chain
    assert list(report["drafting_seconds_by_tokens"]) == chain.split(",")
    assert report["acceptance"][f"{__name__}:Right"]["accepted"][0] > 0.9
    # Where one has nothing, the other drafts.
    assert report["drafts"] >= report["steps"] - 4  # the last token of a request has no draft


def test_a_proposer_that_remembers_is_noticed(run: Doctor) -> None:
    report = report_of(run, "Remembering", "-k", "2")
    (text,) = [text for text in report["notes"] if "remembers" in text]
    assert text.startswith(
        "prompts came more than once, and then 100% of the first draft tokens were accepted, 0% "
        "before: "
    )


def test_a_prediction_goes_to_who_takes_it(run: Doctor) -> None:
    report = report_of(run, "Foretelling", "-k", "2", "--task", "talk")
    assert report["drafts"] > 0
    (rates,) = report["acceptance"].values()
    assert rates["there"][0] > 0.9  # it has a draft in every step


# -- mistakes and interruptions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("none",), "--proposer none: that is plain decoding, there is no speculation to look at"),
        (("ngram", "-k", "0"), "-k 0: that is plain decoding"),
        (("ngram", "--max-tokens", "4"), "--max-tokens 4: too short to measure, at least 8"),
        (("ngram", "--task", "cpy"), "--task 'cpy': no such task; did you mean 'copy'?"),
        (("ngram", "--data", "/no/such.jsonl"), "--data '/no/such.jsonl': No such file"),
        (("ngram", "--json", "/no/such/out"), "--json '/no/such/out': No such file"),
        (("no:Such",), "no:Such"),
        (("ngram", "--limit", "0"), "--limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_code_2(
    run: Doctor, arguments: tuple[str, ...], error: str
) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert error in err.splitlines()[-1]


def test_a_text_that_speculation_changed_is_an_error_after_the_verdict(
    run: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = doctor._take_texts
    changed = iter([True])

    def spoilt(measured: Any, batch: Any, outputs: Any) -> None:
        take(measured, batch, outputs)
        if next(changed, False):
            measured.texts["2"] = {(1, 2, 3)}

    monkeypatch.setattr(doctor, "_take_texts", spoilt)
    code, out, err = run("ngram", "-k", "1", "--task", "talk")
    assert code == 2
    assert "verdict: " in out
    assert "error: the token ids differ on 1 of the prompts (2)" in err


@pytest.mark.parametrize(
    ("num_calls", "measured", "note"),
    [
        (1, None, "interrupted before anything was measured"),
        (5, False, "interrupted: the figures are of what was measured so far"),
        (7, False, "interrupted: the figures are of what was measured so far"),
        (9, True, "interrupted: the figures are of what was measured so far"),
    ],
    ids=["with the first prompt", "with the second", "in the first pair", "in the second"],
)
def test_an_interrupt_prints_what_there_is(
    run: Doctor,
    monkeypatch: pytest.MonkeyPatch,
    num_calls: int,
    measured: bool | None,
    note: str,
) -> None:
    log = impose(monkeypatch, own=1.0, plain=3.0)
    imposed = doctor._call

    def interrupted(*arguments: Any) -> Any:
        result = imposed(*arguments)
        if len(log) > num_calls:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(doctor, "_call", interrupted)
    # Two prompts with three lengths each, then a pair for each.
    code, out, err = run("Right", "-k", "2", "--limit", "1", "--json", "-")
    assert code == 130
    assert note in err
    if measured is None:
        assert out == ""
    else:
        report = json.loads(out)
        assert report["complete"] is False
        assert (report["measured_speedup"] is not None) == measured
