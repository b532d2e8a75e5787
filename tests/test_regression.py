"""The history of `make bench`, what it flags and draws, and its parts on small models."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_pairs
import bench_step
import pytest
import regression
import step_parts
import tiny_models
import torch
import trend
from trend import Figure, Record

from foresay import LLM
from foresay.core.errors import ConfigError, EngineError
from foresay.core.worker.linear import Linear

MACHINE = {"cpu": "a", "flags": ["avx2"], "cores": 2}
WORKLOAD = {"limit": 1}


def record(speed: float = 1.5, spread: float = 0.1, **changed: Any) -> Record:
    figures = {"batch1": {"ngram": Figure(speed, speed - spread / 2, speed + spread / 2)}}
    made = Record("abc", "2030-01-01T00:00:00+00:00", MACHINE, WORKLOAD, figures)
    return replace(made, **changed)


# --- the file


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.json"
    first, second = record(), record(1.7, commit="def-dirty")

    assert trend.read(path) == []
    assert trend.append(path, first) == [first]
    assert trend.append(path, second) == [first, second]
    assert trend.read(path) == [first, second]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"format": "foresay-regression", "vers', "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b'[{"task": "qa"}]', "'format'"),
        (b'{"format": "other", "version": 1, "records": []}', "'format'"),
        (b'{"format": "foresay-regression", "version": 2, "records": []}', "version is 2"),
        (b'{"format": "foresay-regression", "version": 1}', "'records'"),
        (b'{"format": "foresay-regression", "version": 1, "records": [{}]}', "damaged"),
    ],
)
def test_a_file_that_is_no_history_is_an_error_and_stays(
    content: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=why):
        trend.append(path, record())
    assert path.read_bytes() == content


def test_a_damaged_figure_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    trend.append(path, record())
    content = json.loads(path.read_text())
    content["records"][0]["figures"]["batch1"]["ngram"] = [1.5, 1.4]
    path.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match="damaged"):
        trend.read(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    trend.append(path, record())
    before = path.read_bytes()

    with pytest.raises(ValueError, match="not JSON compliant"):
        trend.append(path, record(float("nan")))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# --- what has changed


@pytest.mark.parametrize(
    ("earlier", "now", "is_worse"),
    [
        ([], (1.0, 0.1), False),
        ([(1.5, 0.1)], (1.45, 0.1), False),  # within the spread
        ([(1.5, 0.1)], (1.3, 0.1), True),
        ([(1.5, 0.1)], (1.3, 0.3), False),  # its own rounds are further apart
        ([(1.5, 0.3)], (1.3, 0.0), False),  # and those of earlier runs
        ([(1.5, 0.1)], (1.9, 0.1), False),  # better
        ([(1.5, 0.0)], (1.49, 0.0), False),  # less than a hundredth
        ([(1.0, 0.1), (1.5, 0.1), (1.6, 0.1)], (1.3, 0.1), True),  # their median counts
        ([(1.0, 0.1), (1.1, 0.1), (1.6, 0.1)], (1.05, 0.1), False),
    ],
)
def test_a_figure_is_flagged_that_fell_by_more_than_its_spread(
    earlier: list[tuple[float, float]], now: tuple[float, float], is_worse: bool
) -> None:
    (change,) = trend.changes(record(*now), [record(*each) for each in earlier])

    assert change.is_worse == is_worse


@pytest.mark.parametrize(("now", "is_worse"), [(1.1, False), (1.6, True)])
def test_of_a_cost_more_is_worse(now: float, is_worse: bool) -> None:
    def of(value: float) -> Record:
        return record(figures={"step": {"1 row": Figure(value, value, value)}})

    (change,) = trend.changes(of(now), [of(1.25)])
    assert change.is_worse == is_worse
    assert change.relative == pytest.approx(now / 1.25 - 1)


def test_a_figure_that_is_new_has_nothing_before_it() -> None:
    earlier = record(figures={"batch1": {"eagle": Figure(1.0, 1.0, 1.0)}})

    (change,) = trend.changes(record(), [earlier])
    assert (change.name, change.before, change.is_worse) == ("ngram", None, False)


def test_the_table_has_the_last_runs() -> None:
    runs = [record(1 + number / 10, commit=f"c{number}") for number in range(8)]
    headings, rows = trend.table(runs[-1], runs[:-1])

    assert [heading[:2] for heading in headings[2:7]] == ["c3", "c4", "c5", "c6", "c7"]
    assert rows == [
        ["speed over plain, batch 1", "ngram", "1.300", "1.400", "1.500", "1.600", "1.700",
         "1.650..1.750", "1.300", "+30.8%", ""]
    ]  # fmt: skip
    assert {len(row) for row in rows} == {len(headings)}


# --- the picture


def test_the_picture_has_a_point_for_each_run_in_its_place() -> None:
    runs = [
        record(1.0 + number, figures={
            "batch1": {"ngram": Figure(1.0 + number, 1.0 + number, 1.0 + number)},
            "outside": {"a<b": Figure(0.1, 0.1, 0.1)},
        })
        for number in range(3)
    ]  # fmt: skip
    root = ET.fromstring(trend.draw(runs))  # noqa: S314
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    texts = [text.text for text in root.iter(f"{space}text")]
    circles = [
        (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in panels[0].iter(f"{space}circle")
    ]

    assert len(panels) == 2
    assert "a<b 0.10" in texts
    assert len(circles) == 3
    assert [x for x, _ in circles] == sorted(x for x, _ in circles)
    (_, first), (_, second), (_, third) = circles
    assert first - second == pytest.approx(second - third)  # 1, 2, 3: a straight line upwards
    assert first > second


def test_one_run_can_be_drawn() -> None:
    root = ET.fromstring(trend.draw([record()]))  # noqa: S314
    assert [element for element in root.iter() if element.tag.endswith("circle")]


# --- the run


class Measured:
    """Stands in for the measuring: returns records in turn."""

    def __init__(self, *records: Record) -> None:
        self.records = list(records)

    def __call__(self, options: Namespace) -> Record:
        return self.records.pop(0)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return ["--history", str(tmp_path / "h.json"), "--picture", str(tmp_path / "t.svg")]


def test_runs_are_kept_compared_and_drawn(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record(9.0, machine={**MACHINE, "cores": 64})
    measured = Measured(other, record(1.5), record(1.5), record(1.1), record(1.5))
    monkeypatch.setattr(regression, "measure", measured)

    assert [regression.run(paths) for _ in range(3)] == [0, 0, 0]
    assert "WORSE" not in capsys.readouterr().out
    assert regression.run(paths) == 1
    out = capsys.readouterr().out
    assert "WORSE: speed over plain, batch 1, ngram: 1.100, before 1.500" in out
    assert "9.000" not in out
    assert regression.run([*paths, "--dry-run"]) == 0
    assert len(trend.read(Path(paths[1]))) == 4
    assert Path(paths[3]).read_text().count("<circle") == 3


def test_a_foreign_history_is_found_before_anything_is_measured(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(paths[1]).write_text("{}")
    measured = Measured(record())
    monkeypatch.setattr(regression, "measure", measured)
    monkeypatch.setattr("sys.argv", ["regression.py", *paths])

    assert regression.main() == 2
    assert "is no history of this script" in capsys.readouterr().err
    assert len(measured.records) == 1
    assert Path(paths[1]).read_text() == "{}"


def test_the_commit_says_whether_something_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["/usr/bin/env", "git", *who, "-C", str(tmp_path), *arguments], check=True)

    assert regression.commit(tmp_path) == "unknown"
    git("init", "--quiet")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "--quiet", "--message", "first")
    clean = regression.commit(tmp_path)
    (tmp_path / "file").write_text("b")

    assert len(clean) == 10
    assert regression.commit(tmp_path) == f"{clean}-dirty"


def test_acceptance_is_that_of_each_round() -> None:
    counts = [
        {"a": (0, 0), "b": (0, 0)},
        {"a": (20, 10), "b": (0, 0)},
        {"a": (50, 20), "b": (0, 0)},
    ]

    assert regression.acceptance(counts, ["a", "b"]) == {"a": Figure(2.5, 2.0, 3.0)}


# --- proposers, on engines that only count


class Prompts:
    """A source of one prompt."""

    def workloads(self, condition: str, round_number: int) -> list[bench_pairs.Workload]:
        params = bench_pairs.SamplingParams(temperature=0.0, max_tokens=4)
        prompt = bench_pairs.Prompt("p", [1, 2, 3], params)
        return [bench_pairs.Workload("qa", [[prompt]])]


def test_proposers_are_measured_in_rounds_with_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_models.llama()

    def load(options: Namespace, names: list[str], stack: Any) -> dict[str, LLM]:
        settings = {"num_blocks": 16, "max_num_seqs": 8, "enable_prefix_caching": False}
        return {
            name: stack.enter_context(LLM(model, None if name == "none" else name, **settings))
            for name in ("none", *names)
        }

    monkeypatch.setattr(bench_pairs, "load_engines", load)
    monkeypatch.setattr(bench_pairs, "read_source", lambda options, llm: Prompts())
    options = regression.parse(["--rounds", "3"])

    figures = regression.measure_proposers(options, ["ngram"])
    assert set(figures) == {"batch1", "acceptance", "batch8"}
    assert 0 < figures["batch1"]["ngram"].low <= figures["batch1"]["ngram"].high

    wrong = {"none": 1, "ngram": 2}
    answer = bench_pairs.answer
    monkeypatch.setattr(
        bench_pairs,
        "answer",
        lambda llm, workload, name: answer(llm, workload, name)._replace(
            token_ids={"p": [wrong[name]]}
        ),
    )
    with pytest.raises(EngineError, match="speculation changed the text"):
        regression.measure_proposers(options, ["ngram"])


# --- the step


def test_the_products_of_a_forward_are_all_noted_once() -> None:
    model = tiny_models.llama()
    with LLM(model, None, num_blocks=8, max_num_seqs=1) as llm:
        decoder = bench_step.llm_runner(llm).target.decoder
        held = step_parts.linears_of(decoder)
        with step_parts.noted_products() as calls:
            llm.generate([[1, 2, 3]], bench_pairs.SamplingParams(max_tokens=1))

    assert len(held) == 4 * model.config.num_hidden_layers + 1
    assert sorted(id(linear) for linear, _ in calls) == sorted(map(id, held))
    for _, call in calls:
        assert isinstance(call(), torch.Tensor)


def test_a_call_within_a_call_is_one_product() -> None:
    inner = Linear.__call__
    linear = Linear(torch.eye(4), None, torch.float32, pack=False)
    x = torch.ones(1, 4)
    with step_parts.noted_products() as calls:
        linear.add_to(x, x)
        linear(x)
        x.zero_()  # what was noted is a copy

    assert [call().tolist() for _, call in calls] == [[[2.0] * 4], [[1.0] * 4]]
    assert Linear.__call__ is inner


def test_a_step_is_measured_part_by_part(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench_step.parser().parse_args(
        ["--repeats", "3", "--rows", "1,4", "--batches", "1,2", "--context", "20"]
    )
    options.model = tiny_models.llama()
    by_rows, by_batch = bench_step.measure(options)

    for rows in by_rows:
        assert len(rows.products) == len(rows.forward) == len(rows.step) == 3
        assert all(own < step for own, step in zip(rows.forward, rows.step, strict=True))
    for batch in by_batch:
        assert set(batch.parts[0]) == set(step_parts.PARTS)
        assert sum(batch.parts[0].values()) == pytest.approx(batch.step[0])
        assert min(batch.parts[0].values()) >= 0
    bench_step.print_tables(by_rows, by_batch)
    assert "limit 8%" in capsys.readouterr().out
