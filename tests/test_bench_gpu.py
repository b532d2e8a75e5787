"""The script for a GPU runs, tiny and in Triton's interpreter; its times mean nothing here."""

from __future__ import annotations

import pytest
from interpreted import HAS_TRITON, interpreted

if not HAS_TRITON:
    pytest.skip("there is no triton", allow_module_level=True)

import bench_gpu

ARGUMENTS = (
    "--device cpu --dtype float32 --layers 1 --hidden 64 --intermediate 96 --heads 4,2,16 "
    "--vocab 160 --context 20 --batch-sizes 1,2 --rows 1,4 --repeats 1 --tokens 2"
)


def test_passes_by_graph_and_eager_are_measured_and_agree() -> None:
    figures = interpreted(bench_gpu.measure, bench_gpu.parse(ARGUMENTS.split()))
    attention = (64 + 2 * 32 + 64) * 64  # query, key and value, output; of 4, 2 and 2 heads
    assert figures.weights == 4 * (attention + 3 * 64 * 96 + 160 * 64)
    assert [(each.batch, each.rows) for each in figures.passes] == [(1, 1), (1, 4), (2, 1), (2, 4)]
    for each in figures.passes:
        assert each.difference < 1e-6
        assert min(each.eager, each.graph, each.replay) > 0
    assert [each.batch for each in figures.drafter_passes] == [1, 2]
    for drafted in figures.drafter_passes:
        assert drafted.same == 1
        assert drafted.replay > 0
    assert figures.drafter_weights == 4 * (2 * 64 * 64 + attention + 3 * 64 * 96 + 160 * 64)
    assert figures.floor > 0
    assert figures.steps["eager"] > 0


def test_it_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bench_gpu.Figures(
        bandwidth=4e12,
        weights=16 * 10**9,
        passes=[bench_gpu.Pass(1, 8, 0.012, 0.005, 0.0045, 1e-3)],
        drafter_weights=2 * 10**9,
        drafter_passes=[bench_gpu.DrafterPass(16, 0.002, 0.0008, 0.0006, 0.99)],
        steps={"graphs": 0.006},
    )
    monkeypatch.setattr(bench_gpu, "measure", lambda options: made)
    bench_gpu.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "copy 4000 GB/s; weights 16.00 GB; floor 4.000 ms"
    assert lines[2].split() == ["1", "8", "12.000", "5.000", "4.500", "1.25", "1.0e-03"]
    assert lines[3] == "a drafter's passes; its weights 2.00 GB; floor 0.500 ms"
    assert lines[5].split() == ["16", "2.000", "0.800", "0.600", "1.60", "0.99"]
    assert lines[6] == "a step of the engine, graphs: 6.000 ms, 1.50"
