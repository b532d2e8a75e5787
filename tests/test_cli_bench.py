"""`foresay bench`: its rows, what they pool, whose turn it is, its data; mistakes; Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import save_chat_model

from foresay import LLM
from foresay.cli import main
from foresay.core.commands import bench
from foresay.core.commands.bench_report import Call, Measurements
from foresay.core.commands.prompts import read_prompts, select, shipped
from foresay.core.commands.report import judge_differences
from foresay.core.errors import ConfigError, EngineError
from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig
from foresay.core.stats import RequestStats

KEYS = [
    *("proposer", "task", "prompts", "tokens", "seconds", "tokens_per_second", "speedup"),
    *("mean_acceptance_length", "tokens_per_step", "acceptance_rate", "time_to_first_token"),
    *("speedup_spread", "ids_equal", "nodes_per_step"),
]
DATA = [
    {"id": 1, "task": "copy", "turns": ["abcabcabc", "and again"]},
    {"id": 2, "task": "talk", "turns": ["Hello"], "prediction": "abc"},
    {"id": 3, "task": "copy", "turns": ["xyzxyzxyz"], "prediction": "xyz"},
]


class Foreteller:
    """Drafts the first token of the prediction, and nothing where there is none."""

    needs = Needs(prediction=True)

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([list(request.prediction_ids[:1]) for request in batch.requests])


FORETELLER = "test_cli_bench:Foreteller"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", *map(json.dumps, DATA))


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


Bench = Callable[..., tuple[int, str, str]]  # exit code, stdout, stderr


@pytest.fixture
def run(folder: Path, data: Path, capfd: pytest.CaptureFixture[str]) -> Bench:
    def call(*arguments: str) -> tuple[int, str, str]:
        few = [] if "--max-tokens" in arguments else ["--max-tokens", "8"]
        own = [] if "--data" in arguments else ["--data", str(data)]
        once = [] if "--repeats" in arguments else ["--repeats", "1"]
        code = main(["bench", "--model", str(folder), *few, *own, *once, *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def rows_of(run: Bench, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "--json", "-")
    assert code == 0, err
    rows = json.loads(out)
    assert isinstance(rows, list)
    return rows


# -- rows ----------------------------------------------------------------------------------------


def test_the_rows_have_the_documented_keys_and_all_pools_the_tasks(
    run: Bench, tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    code, table, err = run("--proposers", "none,ngram", "--repeats", "3", "--json", str(out))
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert code == 0
    assert all(list(row) == KEYS for row in rows)
    assert [(row["task"], row["proposer"], row["prompts"], row["tokens"]) for row in rows] == [
        ("copy", "none", 2, 16),
        ("copy", "ngram", 2, 16),
        ("talk", "none", 1, 8),
        ("talk", "ngram", 1, 8),
        ("ALL", "none", 3, 24),
        ("ALL", "ngram", 3, 24),
    ]
    for row in rows:
        (plain,) = [r for r in rows if (r["task"], r["proposer"]) == (row["task"], "none")]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / plain["tokens_per_second"]
        )
        assert row["speedup_spread"][0] <= row["speedup"] <= row["speedup_spread"][1]
        assert 0 < row["time_to_first_token"] < row["seconds"]
        assert row["ids_equal"] is True
    for proposer in ("none", "ngram"):
        *tasks, everything = [row for row in rows if row["proposer"] == proposer]
        assert everything["seconds"] == pytest.approx(sum(row["seconds"] for row in tasks))
    assert [rows[4][key] for key in KEYS[7:10]] == [None, 1.0, None]  # plain: no drafts
    lines = [line.split() for line in table.splitlines()]
    assert lines[0][:4] == ["task", "proposer", "prompts", "tokens"]
    assert [line[:4] for line in lines[1:]] == [
        [row["task"], row["proposer"], str(row["prompts"]), str(row["tokens"])] for row in rows
    ]
    assert all(line.startswith("foresay: ") for line in err.splitlines())  # no progress in a pipe


def test_every_proposer_and_chain_gives_the_same_ids(run: Bench) -> None:
    rows = rows_of(
        run,
        *("--proposers", "ngram,none,adversaries:Random,ngram+adversaries:Constant"),
        *("--set", "ngram.prompt_lookup_min=2", "-k", "3", "--no-adaptive"),
    )
    names = ["ngram", "none", "adversaries:Random", "ngram+adversaries:Constant"]
    assert [row["proposer"] for row in rows[-4:]] == names
    assert all(row["ids_equal"] is True for row in rows)
    assert [row["acceptance_rate"] is None for row in rows[-4:]] == [False, True, False, False]
    # The chain drafts where ngram alone has nothing to copy.
    assert rows[-1]["tokens_per_step"] >= rows[-4]["tokens_per_step"]


def test_without_plain_decoding_there_is_no_speedup(run: Bench) -> None:
    rows = rows_of(run, "--proposers", "ngram", "--task", "talk")
    assert [(row["speedup"], row["speedup_spread"]) for row in rows] == [(None, None)] * 2
    _, table, _ = run("--proposers", "ngram", "--task", "talk")
    assert table.splitlines()[1].split()[5:7] == ["n/a", "n/a"]


def test_ids_are_compared_where_a_seed_fixes_them(run: Bench) -> None:
    common = ("--proposers", "none,ngram", "--limit", "1", "--temperature", "0.9")
    assert {row["ids_equal"] for row in rows_of(run, *common, "--seed", "4")} == {True}
    assert {row["ids_equal"] for row in rows_of(run, *common)} == {None}


def test_limit_and_task_choose_prompts(run: Bench) -> None:
    rows = rows_of(run, "--proposers", "none", "--limit", "1")
    assert [(row["task"], row["prompts"]) for row in rows] == [("copy", 1), ("talk", 1), ("ALL", 2)]
    rows = rows_of(run, "--proposers", "none", "--task", "copy")
    assert [(row["task"], row["prompts"]) for row in rows] == [("copy", 2), ("ALL", 2)]


# -- figures worked out by hand ------------------------------------------------------------------


def call(seconds: float, *lengths: int, num_steps: int, first: float) -> Call:
    """Texts of `lengths` tokens, `num_steps` steps each, two tokens in each step but the first."""
    stats = []
    for length in lengths:
        stats.append(RequestStats(time_to_first_token=first))
        stats[-1].record_step(0, 0, length - 2 * (num_steps - 1), None)
        for _ in range(num_steps - 1):
            stats[-1].record_step(4, 1, 2, "fast")
    return Call(seconds, [[7] * length for length in lengths], stats)


def test_a_row_is_of_the_repeat_in_the_middle_and_its_spread_of_all() -> None:
    measured = Measurements(["fast", "none"], [("a", ["1", "2"]), ("b", ["3"])])
    # Seconds of "fast" and "none" by repeat: in all 13, 33 and 23, so the third is in the middle.
    for repeat, (fast, plain) in enumerate([(1.0, 4.0), (5.0, 10.0), (2.0, 8.0)]):
        for batch, lengths in enumerate([(10, 10), (10,)]):
            share = 2 if batch else 1  # the second batch takes half the time
            measured.add(
                repeat,
                batch,
                {
                    "fast": call(fast / share, *lengths, num_steps=5, first=0.5),
                    "none": call(plain / share, *lengths, num_steps=1, first=0.25),
                },
            )
    rows = measured.rows(compared=True)
    assert [(row.task, row.proposer) for row in rows] == [
        *(("a", "fast"), ("a", "none"), ("b", "fast"), ("b", "none"), ("ALL", "fast")),
        ("ALL", "none"),
    ]
    everything = rows[4]
    assert everything.prompts == 3
    assert everything.tokens == 30
    assert everything.seconds == pytest.approx(3.0)
    assert everything.tokens_per_second == pytest.approx(10.0)
    assert everything.speedup == pytest.approx(4.0)
    assert everything.speedup_spread == pytest.approx((2.0, 4.0))
    assert everything.mean_acceptance_length == pytest.approx(2.0)
    assert everything.tokens_per_step == pytest.approx(30 / 15)
    assert everything.acceptance_rate == pytest.approx(1 / 4)
    assert everything.time_to_first_token == pytest.approx(0.5)
    assert rows[5].speedup == pytest.approx(1.0)
    assert not measured.is_partial
    assert measured.num_repeats == 3
    assert measured.different() == []


def test_an_incomplete_repeat_counts_only_if_it_is_the_only_one() -> None:
    measured = Measurements(["none"], [("a", ["1"]), ("b", ["2"])])
    assert measured.rows(compared=True) == []
    measured.add(0, 0, {"none": call(1.0, 4, num_steps=1, first=0.1)})
    assert measured.is_partial
    assert [(row.task, row.tokens) for row in measured.rows(compared=True)] == [
        ("a", 4),
        ("ALL", 4),
    ]
    measured.add(0, 1, {"none": call(1.0, 4, num_steps=1, first=0.1)})
    measured.add(1, 0, {"none": call(9.0, 4, num_steps=1, first=0.1)})
    assert not measured.is_partial
    assert measured.num_repeats == 1
    assert [row.seconds for row in measured.rows(compared=True)] == [1.0, 1.0, 2.0]


def test_a_difference_is_found_in_any_repeat_and_named() -> None:
    measured = Measurements(["none", "fast"], [("a", ["one", "two"])])
    for repeat, last in enumerate([5, 6]):
        same = Call(1.0, [[1], [4, 5]], [RequestStats(), RequestStats()])
        other = Call(1.0, [[1], [4, last]], [RequestStats(), RequestStats()])
        measured.add(repeat, 0, {"none": same, "fast": other})
    assert measured.different() == ["two"]
    assert [row.ids_equal for row in measured.rows(compared=True)] == [True, False, True, False]
    with pytest.raises(EngineError, match=r"differ on 1 of the prompts \(two\): speculation"):
        judge_differences(["two"], invariant=True)


def test_a_difference_where_rows_are_not_invariant_is_told_but_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    judge_differences(["two"], invariant=False)
    assert "differ on 1 of the prompts (two): rows are not invariant" in capsys.readouterr().err
    judge_differences([], invariant=True)


# -- the run -------------------------------------------------------------------------------------


def watch(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Call], Call]) -> list[str]:
    """Let every timed call pass through `change`; return the log of "proposer:prompt ids"."""
    log: list[str] = []
    timed = bench._call

    def watched(name: str, llm: LLM, batch: Any, params: Any, predictions: bool) -> Call:
        log.append(f"{name}:{','.join(prompt.id for prompt in batch.prompts)}")
        return change(name, timed(name, llm, batch, params, predictions))

    monkeypatch.setattr(bench, "_call", watched)
    return log


def test_proposers_take_turns_and_who_begins_changes(
    run: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = watch(monkeypatch, lambda name, timed: timed)
    run("--proposers", "none,ngram", "--repeats", "2", "--limit", "1")
    assert log == [
        *("none:1", "ngram:1", "ngram:2", "none:2"),
        *("ngram:1", "none:1", "none:2", "ngram:2"),
    ]


def test_prompts_of_one_task_are_answered_together(
    run: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = watch(monkeypatch, lambda name, timed: timed)
    rows = rows_of(run, "--proposers", "none,ngram", "--batch-size", "2")
    assert log == ["none:1,3", "ngram:1,3", "ngram:2", "none:2"]
    assert [(row["prompts"], row["tokens"]) for row in rows[-2:]] == [(3, 24), (3, 24)]
    assert all(row["ids_equal"] for row in rows)


def test_a_text_that_speculation_changed_is_an_error_after_the_table(
    run: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def change(name: str, timed: Call) -> Call:
        ids = [[*own[:-1], 0] for own in timed.token_ids] if name == "ngram" else timed.token_ids
        return Call(timed.seconds, ids, timed.stats)

    watch(monkeypatch, change)
    out = tmp_path / "rows.json"
    code, table, err = run("--proposers", "none,ngram", "--limit", "1", "--json", str(out))
    assert code == 2
    assert "error: the token ids differ on 2 of the prompts (1, 2)" in err
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["yes", "NO"] * 3
    assert [row["ids_equal"] for row in json.loads(out.read_text())] == [True, False] * 3


@pytest.mark.parametrize(
    ("num_calls", "note", "prompts"),
    [
        (1, "interrupted before anything was measured", None),
        (5, "interrupted: the figures are of 1 of 2 repeats, and not of all prompts", [2, 2]),
        (8, "interrupted: the figures are of 1 of 2 repeats\n", [2, 2, 1, 1, 3, 3]),
    ],
    ids=["in the first pair", "in the first repeat", "in the second repeat"],
)
def test_an_interrupt_prints_what_there_is(
    run: Bench,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_calls: int,
    note: str,
    prompts: Sequence[int] | None,
) -> None:
    def change(name: str, timed: Call) -> Call:
        if len(log) > num_calls:
            raise KeyboardInterrupt
        return timed

    log = watch(monkeypatch, change)
    out = tmp_path / "rows.json"
    arguments = ("--proposers", "none,ngram", "--repeats", "2", "--json", str(out))
    code, table, err = run(*arguments)
    assert code == 130
    assert note in err
    assert out.exists() == (prompts is not None)
    counts = [int(line.split()[2]) for line in table.splitlines()[1:]]
    expected = prompts or []
    assert counts == (expected if len(expected) != 2 else [*expected, *expected])  # copy, and ALL


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a POSIX signal")
def test_ctrl_c_ends_with_code_130_and_no_traceback(folder: Path, data: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "foresay.cli", "bench", "--model", str(folder), "--data", str(data),
         "--proposers", "none", "--max-tokens", "200", "--repeats", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # see test_cli_plugins
    )  # fmt: skip
    assert process.stderr is not None
    while "measuring none on 3 prompts; repeats: 1000" not in (line := process.stderr.readline()):
        assert line, "it ended by itself"
    process.send_signal(signal.SIGINT)
    table, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not table or table.startswith("task")


def test_prompts_that_do_not_fit_are_left_out_and_counted(run: Bench, tmp_path: Path) -> None:
    long = json.dumps({"id": "long", "task": "talk", "turns": ["y" * 300]})
    mixed = write(tmp_path / "mixed.jsonl", *map(json.dumps, DATA), long)
    code, table, err = run("--data", str(mixed), "--proposers", "none")
    assert code == 0
    assert "left out, 1 of 4 prompts do not fit max_model_len 256: long\n" in err
    assert table.splitlines()[-1].split()[:4] == ["ALL", "none", "3", "24"]
    code, table, err = run("--data", str(write(tmp_path / "long.jsonl", long)))
    assert (code, table) == (2, "")
    assert "error: no prompt is left: 1 of 1 prompts do not fit" in err


def test_a_prediction_reaches_who_takes_it_and_is_told_of_where_not(run: Bench) -> None:
    common = ("--proposers", f"none,{FORETELLER}", "--task", "copy")
    (*_, given) = rows_of(run, *common)
    assert given["acceptance_rate"] is not None  # it drafted
    (*_, withheld) = rows_of(run, *common, "--no-predictions")
    assert withheld["acceptance_rate"] is None
    _, _, err = run("--proposers", f"none,adversaries:Random,{FORETELLER}")
    assert (
        "no predictions for adversaries:Random, which cannot take them: those of 2 prompts" in err
    )
    _, _, err = run("--proposers", f"none,{FORETELLER}")
    assert "no predictions" not in err


def test_a_model_without_a_chat_template_continues_the_prompts(
    tmp_path: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_chat_model(tmp_path / "raw", template=None)
    code = main(
        ["bench", "--model", str(model), "--data", str(data), "--proposers", "none,ngram",
         "--max-tokens", "4", "--repeats", "1"]
    )  # fmt: skip
    out, err = capfd.readouterr()
    assert code == 0
    assert "no chat template: the prompts are continued as they are" in err
    assert out.splitlines()[-1].split()[:4] == ["ALL", "ngram", "3", "12"]


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no prompts: it is empty"),
        (["", "  "], "has no prompts: it is empty"),
        (['{"task": "a", "turns": ["x"]}', "{broken"], ", line 2 is no JSON"),
        (["[1, 2]"], ", line 1: expected {"),
        (["", '{"id": 1, "task": "a", "prompt": "x"}'], ", line 2 has no 'turns'"),
        (['{"id": 1, "turns": ["x"]}'], ", line 1 has no 'task'"),
        (['{"task": "a", "turns": []}'], ", line 1: 'turns' is []"),
        (['{"task": "a", "turns": "x"}'], ", line 1: 'turns' is 'x'"),
        (['{"task": "a", "turns": [" "]}'], ", line 1: 'turns' is [' ']"),
        (['{"task": "ALL", "turns": ["x"]}'], ", line 1: 'task' is 'ALL'"),
        (['{"task": 7, "turns": ["x"]}'], ", line 1: 'task' is 7"),
        (['{"task": "a", "turns": ["x"], "prediction": 7}'], ", line 1: 'prediction' is 7"),
        (['{"task": "a", "turns": ["\\ud800"]}'], ", line 1: the turn is no valid text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_the_data_names_file_and_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    path = write(tmp_path / "own.jsonl", *lines)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"--data '{path}'")
    assert message in str(caught.value)


def test_line_separators_of_unicode_do_not_end_a_row(tmp_path: Path) -> None:
    row = json.dumps({"task": "a", "turns": ["one\u2028two"]}, ensure_ascii=False)
    (prompt,) = read_prompts(write(tmp_path / "own.jsonl", row))
    assert (prompt.id, prompt.text) == ("1", "one\u2028two")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "no/such.jsonl"), "--data 'no/such.jsonl': No such file"),
        (("--data", "."), "--data '.': Is a directory"),
        (("--json", "no/such/folder/rows.json"), "--json 'no/such/folder/rows.json': No such file"),
        (("--json", "."), "--json '.': Is a directory"),
        (("--proposers", "none,"), "--proposers 'none,': expected names with commas between"),
        (("--proposers", "none,none"), "'none' is given twice"),
        (("--proposers", "none,ngrm"), "did you mean 'ngram'?"),
        (("--proposers", "ngram+none"), "'none' cannot be part of a chain"),
        (("--task", "cop"), "--task 'cop': no such task; did you mean 'copy'?"),
        (
            ("--proposers", "none,ngram,adversaries:Random", "--set", "prompt_lookup_min=2"),
            "say which proposer it is for, e.g. --set ngram.prompt_lookup_min=2",
        ),
        (("--proposers", "none", "--set", "a=1"), "say which proposer it is for"),
        (("--proposers", "none,ngram", "--set", "a=1"), "no setting 'a'"),
        (("--proposers", "none,ngram", "--drafter", "no/such"), "no drafter 'no/such'"),
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--repeats", "0"), "--repeats"),
        (("--limit", "0"), "--limit"),
        (("--batch-size", "0"), "--batch-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(
    run: Bench, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(*arguments)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1)
    assert message in errors[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [("--json", "no/such/folder/rows.json"), ("--proposers", "none,ngram+nobody")]
)
def test_what_can_be_found_before_anything_is_loaded_is(
    run: Bench, arguments: tuple[str, ...]
) -> None:
    _, _, err = run(*arguments)
    assert err.startswith("error: ")  # and no line about a model


def test_looking_whether_the_result_can_be_written_leaves_nothing(
    run: Bench, tmp_path: Path
) -> None:
    new, old = tmp_path / "new.json", write(tmp_path / "old.json", "[]")
    for path in (new, old):
        assert run("--json", str(path), "--proposers", "ngrm")[0] == 2
    assert not new.exists()
    assert old.read_text(encoding="utf-8") == "[]\n"


# -- the shipped prompts, the real model ---------------------------------------------------------


def test_the_shipped_prompts_cover_seven_tasks() -> None:
    prompts = read_prompts(shipped("prompts.jsonl"))
    assert {prompt.task for prompt in prompts} == {
        *("rewriting", "code_edit", "summary", "question", "list", "dialogue", "translation")
    }
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 24
    assert len(select(prompts, None, 3)) == 21
    for prompt in prompts:
        assert (prompt.prediction is not None) == (prompt.task in ("rewriting", "code_edit"))
        assert (prompt.prediction or "").strip() in prompt.text


def test_a_real_model_is_measured_with_the_shipped_prompts(
    smollm2_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["bench", "--model", str(smollm2_dir), "--proposers", "none,ngram", "--task", "list",
         "--limit", "1", "--max-tokens", "6", "--repeats", "1"]
    )  # fmt: skip
    lines = capfd.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["list", "none"], ["list", "ngram"], ["ALL", "none"], ["ALL", "ngram"])
    ]
    assert all(line.split()[-1] == "yes" for line in lines[1:])
