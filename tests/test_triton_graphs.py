"""Passes over static buffers give what eager ones give; which steps they take; how they fail.

What a CUDA graph would hold is run as it is, with attention's kernels in Triton's interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import tiny_models
import torch
from interpreted import HAS_TRITON, interpreted

from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel, load_target

if not HAS_TRITON:
    pytest.skip("there is no triton", allow_module_level=True)

from static_passes import SMALL, Rows, compare, engine_texts, make_batch, rightness

from foresay.core.worker import triton_capture, triton_static
from foresay.core.worker import triton_graphs as graphs
from foresay.core.worker.triton_attention import RowLayout, Tiling
from foresay.core.worker.triton_graphs import Extent, Graphs, StaticForward, capture_graphs

TREE = [-1, -1, 0, 0, 1]
EXTENT = {"max_num_seqs": 3, "max_rows": 8, "max_model_len": 128, "max_nodes": 5}
PROMPTS = [[5, 17, 99, 3, 42, 64, 8, 120, 33], [77, 1, 30, 12]]


@cache
def target() -> TargetModel:
    return load_target(tiny_models.llama(num_hidden_layers=1))


def new_cache() -> KVCache:
    return KVCache(target().kv_layout, 64, 4, torch.float32, torch.device("cpu"))


# -- what comes out ------------------------------------------------------------------------------


def test_texts_and_trees_of_all_sizes_equal_the_eager_pass() -> None:
    """One after another over the same buffers: what a larger step left there must not show."""
    batches = [
        ([Rows(100, 3), Rows(33, 4), Rows(9, 1)], 8),  # 4 splits in one of the tiles, 2 in another
        ([Rows(40, 6, TREE)], 8),
        ([Rows(5, 1)], 1),
        ([Rows(70, 1), Rows(3, 1), Rows(12, 1)], 4),
        ([Rows(1, 1), Rows(90, 5, TREE)], 8),
        ([Rows(65, 2)], 2),
    ]
    wanted = (True, (0, 1))
    taken_by, are_equal = interpreted(
        compare, "llama", {"num_hidden_layers": 1}, [rows for rows, _ in batches], EXTENT, wanted
    )
    assert taken_by == [bucket for _, bucket in batches]
    assert all(are_equal)


def test_windows() -> None:
    batches = [[Rows(100, 1), Rows(60, 2)], [Rows(50, 6, TREE)]]
    taken_by, are_equal = interpreted(compare, "mistral", {"num_hidden_layers": 1}, batches, EXTENT)
    assert taken_by == [4, 8]
    assert all(are_equal)


def test_an_engines_texts_and_features_are_the_same() -> None:
    """With trees that are accepted, and hidden states for the proposer; prompts are not taken."""
    model = tiny_models.llama(num_hidden_layers=2, eos_token_id=None)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        texts.append(out[0].tolist())
    found = [
        interpreted(engine_texts, PROMPTS, 6, texts, {"enforce_eager": enforce_eager})
        for enforce_eager in (True, False)
    ]
    for outputs, _, _, accepted in found:
        assert [prompt + text for prompt, text in zip(PROMPTS, outputs, strict=True)] == texts
        assert accepted >= 4
    (_, in_eager, no_replays, _), (_, in_graphs, replays, _) = found
    assert no_replays == []
    assert sum(replays) == 3
    assert len(in_eager) == len(in_graphs) >= 2
    for one, other in zip(in_eager, in_graphs, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# -- work items within limits --------------------------------------------------------------------


@pytest.mark.parametrize("max_items", [11, 12, 20, 60, 1000])
def test_every_split_of_every_tile_is_a_part_however_few_items_there_are(max_items: int) -> None:
    lens = [1, 700, 64, 3000, 3000, 65, 400, 129]
    rows = [1, 5, 9, 2, 1, 4, 1, 1]  # 11 tiles of up to 4 rows
    positions = [np.arange(n - r, n) for n, r in zip(lens, rows, strict=True)]
    layout = RowLayout.of(positions, [np.arange(n) for n in lens], None)
    plan = layout.plan(4, 64, 50, max_items)
    assert 11 <= len(plan.items) <= max_items
    done: dict[int, list[int]] = {}
    for first, _, _, _, _, _, start, end, is_part in plan.items.tolist():
        assert end > start
        assert is_part
        done.setdefault(first, []).extend(range(start, end))
    num_splits = []
    for first, num_tokens, _, key_end, *_ in plan.items.tolist():
        assert done[first] == list(range(-(-key_end // 64)))
        if len(num_splits) == first:
            num_splits += [len(done[first])] * num_tokens
    assert [token for token, _, _ in plan.merged.tolist()] == list(range(sum(rows)))
    assert [num for _, _, num in plan.merged.tolist()] == num_splits
    starts = np.cumsum(num_splits) - num_splits
    assert [first for _, first, _ in plan.merged.tolist()] == starts.tolist()
    assert plan.first_parts.tolist() == starts.tolist()
    assert plan.num_parts == sum(num_splits)
    if max_items >= 20:  # the longest are shared out
        of_long = [item for item in plan.items.tolist() if item[3] >= 2999]
        assert len(of_long) >= (max_items - 11) * 3 // 5 or len(of_long) == 2 * 47


def test_otherwise_each_split_of_a_split_tile_is_an_item() -> None:
    layout = RowLayout.of([np.array([999]), np.array([9])], [np.arange(1000), np.arange(10)], None)
    plan = layout.plan(4, 64, 50)
    assert [tuple(item[6:]) for item in plan.items.tolist()] == [
        *((split, split + 1, 1) for split in range(16)),
        (0, 1, 0),
    ]


# -- which steps are taken -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [(1, [1]), (3, [1, 2, 4]), (8, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 24])],
)
def test_buckets_reach_the_largest_step(max_rows: int, expected: list[int]) -> None:
    assert Extent(8, max_rows, 64).buckets == expected


def test_no_bucket_has_more_than_512_rows() -> None:
    assert Extent(512, 4096, 64).buckets[-1] == 512


def recording(max_nodes: int = 5) -> tuple[Graphs, list[int]]:
    """Graphs whose replays do nothing but say which bucket it was."""
    found: list[int] = []
    works: list[Callable[[], None]] = []

    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        works.append(work)
        rows = work.__self__.num_rows  # type: ignore[attr-defined]
        return lambda: found.append(rows)

    made = capture_graphs(target(), new_cache(), Extent(3, 8, 48, max_nodes), capturing=capturing)
    assert made is not None
    return made, found


@pytest.mark.parametrize(
    ("requests", "bucket"),
    [
        pytest.param([Rows(9, 1)], 1, id="one"),
        pytest.param([Rows(9, 1)] * 3, 4, id="three"),
        pytest.param([Rows(9, 8)], 8, id="full"),
        pytest.param([Rows(9, 9)], None, id="too-many-rows"),
        pytest.param([Rows(9, 1)] * 4, None, id="too-many-requests"),
        pytest.param([Rows(70, 1), Rows(75, 1)], None, id="too-many-keys"),
        pytest.param([Rows(70, 1), Rows(74, 1)], 2, id="as-many-keys"),
        pytest.param([Rows(50, 6, TREE)], 8, id="tree"),
    ],
)
def test_the_smallest_bucket_that_holds_a_step_takes_it(
    requests: Sequence[Rows], bucket: int | None
) -> None:
    made, found = recording()
    logits = made.run(**make_batch(requests, 0), capture=None)
    assert found == ([] if bucket is None else [bucket])
    assert (logits is None) == (bucket is None)
    if logits is not None:
        assert logits.shape == (sum(r.num_rows for r in requests), tiny_models.VOCAB_SIZE)


def test_a_step_of_more_splits_than_there_is_room_for_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_static, "_PARTS", 5)
    monkeypatch.setattr(triton_static.Tiling, "choose", lambda *arguments: Tiling(*SMALL))
    made, found = recording()
    assert made.run(**make_batch([Rows(60, 1), Rows(64, 1)], 0), capture=None) is not None
    assert made.run(**make_batch([Rows(60, 1), Rows(32, 3)], 0), capture=None) is not None
    assert made.run(**make_batch([Rows(60, 1), Rows(33, 2)], 0), capture=None) is None
    assert found == [2, 4]


def test_a_tree_is_not_taken_where_none_was_expected() -> None:
    made, found = recording(max_nodes=0)
    assert made.run(**make_batch([Rows(50, 6, TREE)], 0), capture=None) is None
    assert made.run(**make_batch([Rows(50, 6)], 0), capture=None) is not None
    assert found == [8]


def test_what_was_not_captured_is_not_taken() -> None:
    made, found = recording()
    batch = make_batch([Rows(9, 1)], 0)
    for hidden_state, layers in ((True, ()), (False, (1,))):
        capture = graphs.Capture(hidden_state=hidden_state, layers=layers)
        assert made.run(**batch, capture=capture) is None
    assert found == []


# -- capturing -----------------------------------------------------------------------------------


def test_the_largest_is_captured_first_and_a_failure_means_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes: list[int] = []

    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        sizes.append(work.__self__.num_rows)  # type: ignore[attr-defined]
        if len(sizes) == 3:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return work

    with caplog.at_level(logging.WARNING, "foresay"):
        assert capture_graphs(target(), new_cache(), Extent(3, 8, 40), capturing=capturing) is None
    assert sizes == [8, 4, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA graphs: RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_layer_that_the_kernels_do_not_serve_is_not_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here none is: there is no GPU."""

    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    with caplog.at_level(logging.WARNING, "foresay"):
        assert capture_graphs(target(), new_cache(), Extent(3, 8, 40), capturing=capturing) is None
    assert "Triton kernels do not serve this model's layers" in caplog.text


def test_a_graph_is_right_if_it_computes_what_the_pass_does() -> None:
    assert interpreted(rightness) == [True, False, False]


def test_a_graph_that_does_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def is_right(forward: StaticForward) -> bool:
        tried.append(forward.num_rows)
        return forward.num_rows != 2

    monkeypatch.setattr(StaticForward, "is_right", is_right)
    monkeypatch.setattr(triton_capture, "in_cuda", lambda device: lambda work: work)
    with caplog.at_level(logging.WARNING, "foresay"):
        assert capture_graphs(target(), new_cache(), Extent(3, 8, 40)) is None
    assert tried == [8, 4, 2]
    assert [record.message for record in caplog.records] == [
        "no CUDA graphs: EngineError: a graph of 2 rows does not do what it was captured of"
    ]


def test_the_memory_of_graphs_is_what_the_two_largest_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = 0

    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        nonlocal taken
        is_largest = work.__self__.num_rows == 8  # type: ignore[attr-defined]
        taken += 1000 if is_largest else 30
        return work

    monkeypatch.setattr(triton_capture, "free_memory", lambda device: 10**6 - taken)
    assert graphs.memory_of_graphs(target(), Extent(3, 8, 40), capturing=capturing) == 1090


def test_the_memory_of_graphs_is_unknown_where_they_fail() -> None:
    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("no memory")

    assert graphs.memory_of_graphs(target(), Extent(3, 8, 40), capturing=capturing) is None


def test_before_the_first_step_nothing_is_stored_where_requests_are() -> None:
    cache = new_cache()
    forward = StaticForward(target(), cache, Extent(3, 8, 40), 8)
    assert forward.rows.fields["slot_mapping"].tolist() == [cache.scratch_slot] * 8


def test_a_bucket_begins_with_nothing_that_a_larger_one_left() -> None:
    """All lie at the end of one buffer: slots of another bucket would be token ids here."""
    cache, extent = new_cache(), Extent(3, 32, 64, 5)
    largest = None
    for num_rows in extent.buckets[::-1]:
        forward = StaticForward(target(), cache, extent, num_rows, largest)
        largest = largest or forward
        for name, field in forward.rows.fields.items():
            expected = cache.scratch_slot if name == "slot_mapping" else 0
            assert (field == expected).all(), (num_rows, name)
