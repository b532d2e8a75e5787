"""Drafts through static buffers are those of eager passes; which passes are taken; how they fail.

What a CUDA graph would hold is run as it is, with attention's kernels in Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_heads
import mtp_checkpoints
import numpy as np
import pytest
import tiny_models
import torch
from interpreted import HAS_TRITON, interpreted

from foresay.core.config import EngineConfig, SpeculativeConfig
from foresay.core.plugins import PluginManager
from foresay.core.proposer import DraftInput, DraftRequest, KVRows
from foresay.core.worker import build
from foresay.core.worker.drafter_kv import StepKV
from foresay.core.worker.memory import CPU_SHARE
from foresay.core.worker.target import TargetModel, load_target

if not HAS_TRITON:
    pytest.skip("there is no triton", allow_module_level=True)

from static_drafts import Compared, Engine, Layer, Proposer, compare_drafts, engine_drafts

from foresay.core.worker import triton_capture
from foresay.core.worker.triton_draft_graphs import (
    DraftGraphs,
    capture_draft_graphs,
    extent_of,
    memory_of_draft_graphs,
)
from foresay.core.worker.triton_static import Extent, StaticInputs

Work = Callable[[], None]


@cache
def target() -> TargetModel:
    return load_target(tiny_models.llama(num_hidden_layers=1))


# -- what comes out ------------------------------------------------------------------------------


def check(steps: Sequence[Compared]) -> None:
    """All is the same, and each draft's passes are replayed but for its first."""
    for step in steps:
        assert step.static == step.eager
        assert step.same_kv
        assert step.num_eager_passes == 1
        assert len(step.buckets) == step.num_passes - 1


@pytest.mark.parametrize("kind", ["chain", "tokens"])
def test_chains_of_several_requests_equal_the_eager_ones(kind: str) -> None:
    """Requests come and go from step to step, and drop out of a draft as their k is reached."""
    ks = [
        {"a": 5, "b": 3, "c": 1},
        {"a": 5, "b": 5, "c": 5},
        {"b": 4},
        {"c": 2, "a": 5, "b": 0},
        {"a": 1},
        {"c": 5, "b": 5, "a": 4},
    ]
    steps = interpreted(compare_drafts, kind, ks)
    check(steps)
    assert [step.buckets for step in steps] == [
        [2, 2, 1, 1],
        [4, 4, 4, 4],
        [1, 1, 1],
        [2, 1, 1, 1],
        [],
        [4, 4, 4, 2],
    ]
    drafted = [tuple(ids) for step in steps for ids, _ in step.eager.values()]
    assert [len(ids) for ids in drafted] == [5, 3, 1, 5, 5, 5, 4, 2, 5, 1, 5, 5, 4]
    assert len({token for ids in drafted for token in ids}) > 15


def test_trees_of_several_requests_equal_the_eager_ones() -> None:
    ks = [
        {"a": 16, "b": 5, "c": 1},
        {"a": 16, "b": 16, "c": 16},
        {"b": 9},
        {"c": 3, "a": 12},
    ]
    steps = interpreted(compare_drafts, "tree", ks, 16)
    check(steps)
    assert sum(len(step.buckets) for step in steps) > 8
    assert max(bucket for step in steps for bucket in step.buckets) >= 16
    parents = [tree for step in steps for _, tree in step.eager.values() if tree]
    assert sum(parent >= 0 for tree in parents for parent in tree) > 10


@pytest.mark.parametrize(("kind", "k"), [("chain", 4), ("tree", 8)])
def test_drafts_that_are_sampled_are_the_same(kind: str, k: int) -> None:
    ks = [{"a": k, "b": k - 1}, {"b": k, "c": 2}]
    steps = interpreted(compare_drafts, kind, ks, k, 1.0)
    check(steps)
    assert sum(len(step.buckets) for step in steps) >= 4


def test_passes_that_no_bucket_takes_run_eagerly() -> None:
    """Too many requests at first, and in the end too long ones: there is room for 27 keys."""
    ks = [
        {"a": 5, "b": 5, "c": 5, "d": 5},
        {"a": 5, "b": 5},
        {"a": 5, "b": 5, "c": 5},
    ]
    extent = {"max_num_seqs": 3, "max_rows": 3, "max_model_len": 9}
    first, second, third = interpreted(compare_drafts, "chain", ks, 5, None, extent)
    for step in (first, second, third):
        assert step.static == step.eager
        assert step.same_kv
    assert (first.buckets, first.num_eager_passes) == ([], 5)
    assert (second.buckets, second.num_eager_passes) == ([2] * 4, 1)
    assert (third.buckets, third.num_eager_passes) == ([], 5)


PROMPTS = [[5, 17, 99, 3, 42, 64, 8, 120, 33], [77, 1, 30, 12]]


ENGINES = ["eagle, chains", "eagle3, trees", "mtp, chains"]


@pytest.fixture(scope="module")
def drafts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Texts and drafts of an engine, and how many passes it replayed; by its name and settings."""
    folders: dict[str, Path] = {}

    @cache
    def run(name: str, *, enforce_eager: bool = False, fails: bool = False) -> Any:
        kind, how = name.split(", ")
        is_new = name not in folders
        folder = folders.setdefault(name, tmp_path_factory.mktemp(kind))
        settings: dict[str, Any] = {"enforce_eager": enforce_eager}
        settings["num_speculative_tokens"] = 4
        if kind == "mtp":
            if is_new:
                model = tiny_models.qwen2(num_hidden_layers=1)
                tensors = mtp_checkpoints.module_tensors("mimo", model.config, 2)
                mtp_checkpoints.save_target(model, folder, tensors)
            return interpreted(engine_drafts, str(folder), "mtp", settings, PROMPTS, 6, fails)
        if is_new:
            (eagle_heads.eagle() if kind == "eagle" else eagle_heads.eagle3()).save(folder)
        settings |= {"drafter": str(folder), "proposer_settings": {"tree": how == "trees"}}
        model = 3 if kind == "eagle3" else 1
        return interpreted(engine_drafts, model, "eagle", settings, PROMPTS, 6, fails)

    return run


@pytest.mark.parametrize("name", ENGINES)
def test_engines_draft_the_same_in_graphs(name: str, drafts_of: Callable[..., Any]) -> None:
    texts, drafts, no_replays = drafts_of(name, enforce_eager=True)
    *in_graphs, num_replays = drafts_of(name)
    assert in_graphs == [texts, drafts]
    assert sum(map(len, drafts)) >= 3
    assert no_replays == 0
    assert num_replays >= 3


def test_an_engine_whose_passes_cannot_be_captured_drafts_eagerly(
    drafts_of: Callable[..., Any],
) -> None:
    texts, drafts, num_replays = drafts_of("eagle, chains", fails=True)
    assert (texts, drafts) == drafts_of("eagle, chains")[:2]
    assert num_replays == 0


# -- which passes are taken ----------------------------------------------------------------------


def recording(engine: Engine, extent: Extent | None = None) -> tuple[DraftGraphs, list[int]]:
    """Graphs whose replays do nothing but say which bucket it was."""
    found: list[int] = []

    def capturing(work: Work) -> Work:
        rows = work.__self__.num_rows  # type: ignore[attr-defined]
        return lambda: found.append(rows)

    member = engine.member
    made = capture_draft_graphs(
        target(), member, member.layers, engine.cache, extent or extent_of(member, 4, 40),
        capturing=capturing,
    )  # fmt: skip
    assert made is not None
    return made, found


def engine(kind: str = "chain", k: int = 5) -> Engine:
    return Engine(target(), Proposer(kind, target().hidden_size), k)


def view(of: Engine, passes: DraftGraphs) -> StepKV:
    requests = [DraftRequest(name, range(6), 1, 5) for name in "abc"]
    return StepKV(
        of.member.layers, of.cache.null_slot, requests, of.slots, draft_slots=0,
        device=torch.device("cpu"), passes=passes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "k", "buckets"),
    [("chain", 5, [1, 2, 4]), ("tokens", 2, [1, 2, 4]), ("tree", 3, [1, 2, 4, 8])],
)
def test_buckets_are_of_a_row_a_request_and_of_more_for_trees(
    kind: str, k: int, buckets: list[int]
) -> None:
    made, _ = recording(engine(kind, k))
    assert [each.num_rows for each in made.passes] == buckets
    assert made.description == f"{len(buckets)}, up to {buckets[-1]} rows"


def test_only_what_was_captured_is_taken() -> None:
    of = engine()
    made, found = recording(of)
    model, hidden, ids = of.proposer.layer, torch.zeros(1, 48), torch.zeros(1, dtype=torch.int64)
    rows = view(of, made).rows([0], [range(5, 6)])
    assert made.run(Layer(48), ids, hidden, rows, 1) is None  # another drafter
    assert made.run(model, ids, hidden, rows, 0) is None  # the first pass
    assert made.run(model, ids, None, rows, 1) is None
    assert found == []
    for step in (1, 4):
        states, logits = made.run(model, ids, hidden, rows, step) or (None, None)
        assert states is not None
        assert logits is not None
        assert (states.shape, logits.shape) == ((1, 48), (1, 160))
    assert found == [1, 1]


def test_what_was_stored_is_noted() -> None:
    of = engine()
    made, _ = recording(of)
    step = view(of, made)
    assert step.missing([range(3, 5)]) is not None
    rows = step.rows([0], [range(3, 5)])
    assert made.run(of.proposer.layer, torch.zeros(2).long(), torch.zeros(2, 48), rows, 1)
    assert step.missing([range(3, 5)]) is None


def test_slots_of_keys_are_sent_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    of = engine()
    made, _ = recording(of)
    sent: list[int] = []
    send = StaticInputs.send

    def noted(self: StaticInputs, start: int, end: int) -> None:
        sent.append(end - self.front)
        send(self, start, end)

    monkeypatch.setattr(StaticInputs, "send", noted)
    inputs = made.passes[0].rows.inputs
    most = 5 + 4  # positions of a request, and those that it may draft for
    for step in (view(of, made), view(of, made)):
        for requests, position in (([0, 1], 5), ([0, 1], 6), ([1], 7), ([1], 8)):
            spans = [range(position, position + 1)] * len(requests)
            rows, num = step.rows(requests, spans), len(requests)
            ids, hidden = torch.zeros(num).long(), torch.zeros(num, 48)
            assert made.run(of.proposer.layer, ids, hidden, rows, 1) is not None
            slots = of.slots("abc"[requests[0]], most)
            on_device = inputs.on_device[inputs.front :][: len(slots)]
            assert on_device.tolist() == slots.tolist()
    assert sent == [2 * most, 0, most, 0] * 2


def test_the_host_writes_where_nothing_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            Event.made += 1
            self.name = f"{Event.made}"

        def record(self, stream: torch.device) -> None:
            assert stream == inputs.on_device.device
            log.append(f"sent {self.name}")

        def synchronize(self) -> None:
            log.append(f"waits for {self.name}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    inputs = StaticInputs(torch.device("cpu"), 4, 4, num_hosts=2)
    inputs.is_gpu = True
    arrays = []
    for _ in range(4):
        arrays.append(inputs.begin())
        inputs.send(0, 4)
    expected = ["sent 1", "sent 2", "waits for 1", "sent 1", "waits for 2", "sent 2"]
    assert log == expected
    assert np.shares_memory(arrays[0], arrays[2])
    assert not np.shares_memory(arrays[0], arrays[1])


# -- capturing -----------------------------------------------------------------------------------


def attempt(of: Engine, capturing: Callable[[Work], Work]) -> DraftGraphs | None:
    member = of.member
    return capture_draft_graphs(
        target(), member, member.layers, of.cache, extent_of(member, 3, 40), capturing=capturing
    )


def unreachable(_work: Work) -> Work:
    raise AssertionError("there is nothing to capture")


def test_a_failure_means_none_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []

    def capturing(work: Work) -> Work:
        sizes.append(work.__self__.num_rows)  # type: ignore[attr-defined]
        if len(sizes) == 2:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return work

    with caplog.at_level(logging.WARNING, "foresay"):
        assert attempt(engine(), capturing) is None
    assert sizes == [4, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs of proposer 'toy': RuntimeError: operation not permitted when stream is "
        "capturing"
    ]


class OfTwoShapes(Layer):
    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: KVRows, step: int
    ) -> torch.Tensor:
        if step:
            parts = torch.zeros(len(token_ids), 2, 16)
            rows.attend(0, parts, parts, parts, scale=1.0)
        return super().forward(token_ids, hidden, rows, step)


class Widening(Layer):
    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: KVRows, step: int
    ) -> torch.Tensor:
        assert hidden is not None
        out = super().forward(token_ids, hidden.float(), rows, step)
        return out.double() if step else out

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        return super().logits(hidden.float(), step)


class Raising(Layer):
    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        raise OSError("it broke")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OfTwoShapes, "EngineError: a drafter's layers are not all of one shape of attention"),
        (
            Widening,
            "EngineError: a later pass of a draft takes [48] of torch.float32 a row and returns "
            "[48] of torch.float64",
        ),
        (Raising, "OSError: it broke"),
    ],
)
def test_a_drafter_that_does_not_fit_is_told(
    kind: type[Layer], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    of = engine()
    of.proposer.layer = kind(48)
    with caplog.at_level(logging.WARNING, "foresay"):
        assert attempt(of, unreachable) is None
    assert caplog.messages == [f"no CUDA graphs of proposer 'toy': {message}"]


def test_who_has_no_later_passes_or_does_not_run_for_nobody_has_no_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "foresay"):
        assert attempt(engine(k=1), unreachable) is None
        of = engine()
        of.member.dummy_run = None
        assert attempt(of, unreachable) is None
        assert memory_of_draft_graphs(target(), of.member, Extent(3, 3, 40)) is None
    assert caplog.messages == []


def test_a_dummy_run_leaves_nothing_behind() -> None:
    released: list[str] = []
    seen: list[DraftInput] = []

    class Noting(Proposer):
        def dummy_run(self, batch: DraftInput) -> None:
            seen.append(batch)
            super().dummy_run(batch)

        def release(self, req_id: str) -> None:
            released.append(req_id)
            super().release(req_id)

    of = Engine(target(), Noting("tree", 48), 6)
    recording(of)
    [batch] = seen
    assert released == [request.req_id for request in batch.requests]
    assert of.proposer.trees._last == {}
    assert of.proposer.trees._calibrations == {}
    [layer] = of.cache.proposer_layers
    assert not layer.slots[: of.cache.scratch_slot].any()
    assert layer.slots.any()


def test_the_memory_of_graphs_is_what_the_two_largest_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = 0

    def capturing(work: Work) -> Work:
        nonlocal taken
        is_largest = work.__self__.num_rows == 8  # type: ignore[attr-defined]
        taken += 1000 if is_largest else 30
        return work

    monkeypatch.setattr(triton_capture, "free_memory", lambda device: 10**6 - taken)
    extent, of = Extent(3, 8, 40), engine()
    member = replace(of.member, layers=())  # it is asked before there is a cache
    assert memory_of_draft_graphs(target(), member, extent, capturing=capturing) == 1090


def test_their_memory_is_kept_from_the_kv_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []
    size_pool = build.size_pool

    def noted(*, budget: int, **settings: Any) -> Any:
        budgets.append(budget)
        return size_pool(budget=budget, **settings)

    monkeypatch.setattr(build, "free_memory", lambda device: 10**9)
    monkeypatch.setattr(build, "size_pool", noted)
    config = EngineConfig(
        model="tiny", max_model_len=64, speculative=SpeculativeConfig(proposer="ngram")
    )
    for memory in (None, 4 * 10**6):
        module = SimpleNamespace(
            Extent=Extent,
            memory_of_graphs=lambda *_: None,
            extent_of=lambda *_: None,
            memory_of_draft_graphs=lambda *_, memory=memory: memory,
            capture_draft_graphs=lambda *_: None,
        )
        monkeypatch.setattr(build, "_graphs_module", lambda *_, module=module: module)
        build.build_runner(config, PluginManager.load(), model=tiny_models.llama())
    assert budgets[0] - budgets[1] == 4 * 10**6 * CPU_SHARE
