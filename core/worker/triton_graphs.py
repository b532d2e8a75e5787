"""CUDA graphs of the target's decode and verify passes: captured at load, replayed step by step.

A step launches some ten kernels a layer, each of which costs the host more than a GPU needs for a
few rows of it. A graph launches all of them at once, but is always the same: same kernels, same
shapes, same addresses. So a pass is captured over static buffers, one graph for each *bucket* of
rows, and a step is copied into the smallest bucket that holds it.

Buckets are of rows, not of requests and rows of each: attention takes its rows as work items,
whatever requests they are of (see `triton_attention`), and the other operations know rows only. So
one row of 8 requests and 8 rows of one, a tree's among them, are the same graph.

Taken are steps all of whose rows have logits: decoding and verifying. Knows rows, their slots and
trees; neither requests nor drafts. Needs triton, and the model on foresay's own decoder.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.core.errors import EngineError, one_line
from foresay.core.worker.attention import AttentionMetadata, TreeLayout
from foresay.core.worker.attention_layout import Group
from foresay.core.worker.capture import Capture
from foresay.core.worker.decoder import Heads
from foresay.core.worker.kernels import attention as kernels
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.memory import free_memory
from foresay.core.worker.target import TargetModel
from foresay.core.worker.triton_attention import (
    Plan,
    RowLayout,
    Tiling,
    TritonMetadata,
    programs_of,
    words_of,
)

logger = logging.getLogger("foresay")

# At most 60 % more rows are computed than a step has; up to 64 cost a GPU about what one does.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ALIGNED = 4  # int32s: 16 bytes, as the kernels are compiled for
# Splits of all rows, at most: each takes float32 memory by head. Longer contexts are not taken.
_PARTS = 16384
_WARM_UPS = 2  # passes before a capture: kernels are compiled, libraries take their workspaces
_MORE_ITEMS = 2  # items beyond one a tile, in units of what keeps the device busy

# Runs some work a few times, captures it, and returns what runs it again.
Capturing = Callable[[Callable[[], None]], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest steps that are to be captured."""

    max_num_seqs: int
    max_rows: int
    max_model_len: int
    max_nodes: int = 0  # of a request's tree

    @property
    def buckets(self) -> list[int]:
        """Numbers of rows, ascending; the last holds `max_rows`, or is the largest there is."""
        smaller = [rows for rows in _BUCKETS if rows < self.max_rows]
        return [*smaller, *_BUCKETS[len(smaller) : len(smaller) + 1]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows, request after request; see `AttentionMetadata.build`."""

    input_ids: Sequence[int]
    positions: Sequence[np.ndarray]
    slots: Sequence[np.ndarray]
    slot_mapping: Sequence[np.ndarray]
    trees: Sequence[TreeLayout | None]


class _Buffers:
    """What all buckets share: their inputs, in one piece of memory, and their outputs.

    A bucket's own inputs end where the slots of keys begin, so that a step is sent in one transfer.
    """

    def __init__(
        self, target: TargetModel, front: int, num_keys: int, num_rows: int, wanted: Capture | None
    ) -> None:
        device = target.device
        self.front, self.num_keys = front, num_keys
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(front + num_keys, dtype=torch.int32, pin_memory=is_gpu)
        self.inputs = torch.zeros(front + num_keys, dtype=torch.int32, device=device)
        self.array = self._host.numpy()

        def states() -> torch.Tensor:
            return torch.zeros(num_rows, target.hidden_size, dtype=target.dtype, device=device)

        self.logits = torch.zeros(num_rows, target.vocab_size, dtype=target.dtype, device=device)
        self.hidden = states() if wanted is not None and wanted.hidden_state else None
        self.streams = {layer: states() for layer in (wanted.layers if wanted else ())}

    def send(self, start: int, end: int) -> None:
        """Copy inputs to the device.

        The host goes on at once. It writes the next step's when it has read this one's tokens, and
        then this copy is done.
        """
        self.inputs[start:end].copy_(self._host[start:end], non_blocking=True)

    def capture(self) -> Capture | None:
        """Return a capture of what there are buffers for."""
        if self.hidden is None and not self.streams:
            return None
        return Capture(hidden_state=self.hidden is not None, layers=list(self.streams))


class StaticForward:
    """The target's pass over the static buffers of one bucket.

    `launch` runs `work`: by itself, or as a graph that was captured of it.
    """

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        extent: Extent,
        num_rows: int,
        buffers: _Buffers | None = None,
        wanted: Capture | None = None,
    ) -> None:
        """Lay out a bucket of `num_rows` rows; without `buffers` it makes those of all buckets.

        Make the largest bucket first, and give its `buffers` to the others.
        """
        self.num_rows = num_rows
        self.launch: Callable[[], None] = self.work
        self._target, self._cache = target, cache
        heads = Heads.of(target.config.get_text_config(decoder=True))
        layer = target.kv_layout[0]
        fold = heads.num_heads // layer.num_kv_heads
        dtype = cache.layers[0].slots.dtype
        tiling = Tiling.choose(fold, layer.head_dim, layer.value_dim, dtype)
        num_programs = programs_of(target.device)
        self._tokens_per_tile, self._split_len = tiling.block_m // fold, tiling.split_len
        self._num_programs = -(-num_programs // layer.num_kv_heads)
        self._num_requests = min(extent.max_num_seqs, num_rows)
        num_tiles = min(num_rows, self._num_requests + num_rows // self._tokens_per_tile)
        self._max_items = num_tiles + _MORE_ITEMS * self._num_programs
        most_splits = -(-extent.max_model_len // tiling.split_len)
        self._max_parts = min(num_rows * most_splits, _PARTS)
        num_words = words_of(extent.max_nodes)
        num_fields, num_merged_fields = kernels.NUM_FIELDS.value, kernels.NUM_MERGED_FIELDS.value
        sizes = {
            "input_ids": num_rows,
            "positions": num_rows,
            "slot_mapping": num_rows,
            "seen": num_rows * num_words,
            "node_positions": num_rows,
            "items": self._max_items * num_fields,
            "first_parts": num_rows,
            "merged": num_rows * num_merged_fields,
        }
        padded = {name: max(-(-size // _ALIGNED), 1) * _ALIGNED for name, size in sizes.items()}
        if buffers is None:
            num_keys = extent.max_num_seqs * extent.max_model_len
            buffers = _Buffers(target, sum(padded.values()), num_keys, num_rows, wanted)
        self.buffers = buffers
        self._num_words = num_words
        self._start = at = buffers.front - sum(padded.values())
        self._arrays: dict[str, np.ndarray] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, size in sizes.items():
            self._arrays[name] = buffers.array[at : at + size]
            tensors[name] = buffers.inputs[at : at + size]
            at += padded[name]
        self._rows = [tensors[name] for name in ("input_ids", "positions", "slot_mapping")]
        self._output_rows = torch.arange(num_rows, device=target.device)
        plan = Plan(
            items=tensors["items"].view(-1, num_fields),
            first_parts=tensors["first_parts"],
            merged=tensors["merged"].view(-1, num_merged_fields),
            num_parts=self._max_parts,
            all_parts=True,
        )
        self._metadata = TritonMetadata(
            key_slots=buffers.inputs[buffers.front :],
            positions=tensors["positions"],
            seen=tensors["seen"],
            node_positions=tensors["node_positions"],
            num_words=num_words,
            layout=None,
            max_items=self._max_items,
            plans={(tiling, fold, layer.num_kv_heads, num_programs): plan},
        )
        # Until there is a step, no row attends, and all are stored aside. A larger bucket has left
        # its own here: slots would be read as token ids.
        buffers.array[self._start : buffers.front] = 0
        self._arrays["slot_mapping"][:] = cache.scratch_slot
        buffers.send(self._start, buffers.front)

    def takes(self, batch: Batch) -> bool:
        """Whether the buffers hold a batch."""
        if len(batch.input_ids) > self.num_rows:
            return False
        largest = max((len(tree.parents) for tree in batch.trees if tree is not None), default=0)
        num_parts = sum(
            len(rows) * -(-len(keys) // self._split_len)
            for rows, keys in zip(batch.positions, batch.slots, strict=True)
        )
        return (
            len(batch.slots) <= self._num_requests
            and num_parts <= self._max_parts
            and sum(map(len, batch.slots)) <= self.buffers.num_keys
            and words_of(largest) <= self._num_words
        )

    @torch.inference_mode()
    def run(self, batch: Batch, capture: Capture | None = None) -> torch.Tensor:
        """Return the logits of all rows of a batch that it `takes`, and fill `capture`.

        The logits [num_rows of the batch, vocab_size] hold until the next run of any bucket; what
        is captured is the caller's own.
        """
        buffers = self.buffers
        end = buffers.front + self._fill(batch)
        buffers.send(self._start, end)
        self.launch()
        num_rows = len(batch.input_ids)
        if capture is not None:
            if capture.hidden_state:
                assert buffers.hidden is not None
                capture.put_hidden(buffers.hidden[:num_rows].clone())
            for layer in capture.layers:
                capture.put_stream(layer, buffers.streams[layer][:num_rows].clone())
        return buffers.logits[:num_rows]

    def work(self) -> None:
        """Run the pass over whatever the buffers hold: reads and writes static memory only."""
        input_ids, positions, slot_mapping = (rows.long() for rows in self._rows)
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=slot_mapping,
            rules=self._target.attention_rules,
            triton=self._metadata,
            _lay_out=_not_in_torch,
        )
        capture = self.buffers.capture()
        logits = self._target.forward(input_ids, self._output_rows, self._cache, metadata, capture)
        self.buffers.logits[: self.num_rows].copy_(logits)
        if capture is not None:
            if self.buffers.hidden is not None:
                self.buffers.hidden[: self.num_rows].copy_(capture.hidden)
            for layer, states in self.buffers.streams.items():
                states[: self.num_rows].copy_(capture.streams([layer])[:, 0])

    def _fill(self, batch: Batch) -> int:
        """Write a batch to the host's side of the buffers; returns how many keys it has."""
        layout = RowLayout.of(batch.positions, batch.slots, batch.trees, self._num_words)
        plan = layout.plan(
            self._tokens_per_tile, self._split_len, self._num_programs, self._max_items
        )
        values = {
            "input_ids": np.asarray(batch.input_ids),
            "positions": layout.positions,
            "slot_mapping": np.concatenate(batch.slot_mapping),
            "seen": layout.seen.ravel(),
            "node_positions": layout.node_positions,
            "items": plan.items.ravel(),
            "first_parts": plan.first_parts,
            "merged": plan.merged.ravel(),
        }
        for name, array in self._arrays.items():
            # Rows of the bucket that the batch has not are computed, stored aside and never read.
            num_values = len(values[name])
            array[:num_values] = values[name]
            array[num_values:] = self._cache.scratch_slot if name == "slot_mapping" else 0
        num_keys = int(layout.key_lens.sum())
        keys = self.buffers.array[self.buffers.front : self.buffers.front + num_keys]
        np.concatenate(batch.slots, out=keys, casting="same_kind")
        return num_keys


class Graphs:
    """The captured passes, by bucket."""

    def __init__(self, forwards: Sequence[StaticForward]) -> None:
        """`forwards` by ascending numbers of rows."""
        self.forwards = list(forwards)
        self.description = f"CUDA graphs: {len(forwards)}, up to {forwards[-1].num_rows} rows"

    def run(
        self,
        input_ids: Sequence[int],
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        slot_mapping: Sequence[np.ndarray],
        trees: Sequence[TreeLayout | None],
        capture: Capture | None,
    ) -> torch.Tensor | None:
        """Run a step, all of whose rows have logits, in the smallest bucket that takes it.

        The rows are those of `AttentionMetadata.build`, by request. Returns their logits, see
        `StaticForward.run`; None if no bucket takes them, or `capture` wants what none keeps.
        """
        batch = Batch(input_ids, positions, slots, slot_mapping, trees)
        if capture is not None:
            kept = self.forwards[0].buffers
            if capture.hidden_state and kept.hidden is None:
                return None
            if any(layer not in kept.streams for layer in capture.layers):
                return None
        for forward in self.forwards:
            if forward.takes(batch):
                return forward.run(batch, capture)
        return None


@torch.inference_mode()
def capture_graphs(
    target: TargetModel,
    cache: KVCache,
    extent: Extent,
    wanted: Capture | None = None,
    *,
    capturing: Capturing | None = None,
    num_graphs: int | None = None,
) -> Graphs | None:
    """Capture the target's pass over `cache` for each bucket, the largest first.

    wanted: what steps will capture for proposers. capturing: None for CUDA's. num_graphs: of the
    largest buckets only; None: all. Returns None after a warning if something cannot be captured:
    steps then run operation by operation.
    """
    forwards: list[StaticForward] = []
    try:
        capturing = capturing or _in_cuda(target.device)
        for num_rows in extent.buckets[::-1][:num_graphs]:
            buffers = forwards[0].buffers if forwards else None
            forward = StaticForward(target, cache, extent, num_rows, buffers, wanted)
            forward.launch = capturing(forward.work)
            forwards.append(forward)
    except Exception as error:  # noqa: BLE001  # whatever a driver or a library may raise
        logger.warning("no CUDA graphs: %s", one_line(error))
        return None
    return Graphs(forwards[::-1])


def memory_of_graphs(
    target: TargetModel, extent: Extent, *, capturing: Capturing | None = None
) -> int | None:
    """Return the bytes that `capture_graphs` will take, measured over a cache of one block.

    The largest graph's memory serves the others, each of which takes as much more as the second.
    Returns None, after the warning of `capture_graphs`, if it will fail.
    """
    # What libraries keep from the first time on is not a graph's.
    if _measured(target, extent, 1, capturing) is None:
        return None
    largest = _measured(target, extent, 1, capturing)
    both = None if largest is None else _measured(target, extent, 2, capturing)
    if largest is None or both is None:
        return None
    return largest + max(both - largest, 0) * (len(extent.buckets) - 1)


def _measured(
    target: TargetModel, extent: Extent, num_graphs: int, capturing: Capturing | None
) -> int | None:
    """Return the bytes that so many graphs take, the largest ones; None if it fails."""
    cache = KVCache(target.kv_layout, 1, 1, target.dtype, target.device)
    try:
        _tidy(target.device)  # a capture does so, too: what it frees would be taken for its own
        before = free_memory(target.device)
        graphs = capture_graphs(target, cache, extent, capturing=capturing, num_graphs=num_graphs)
        taken = None if graphs is None else max(before - free_memory(target.device), 0)
        del graphs
        _tidy(target.device)
    except RuntimeError as error:  # a capture that broke off may leave the allocator in its midst
        logger.warning("no CUDA graphs: %s", one_line(error))
        return None
    return taken


def _tidy(device: torch.device) -> None:
    """Give back all memory that is not in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that graphs are captured on: libraries keep memory for each."""
    return torch.cuda.Stream(device)


def _in_cuda(device: torch.device) -> Capturing:
    """Return what captures CUDA graphs that share their memory: one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    stream = _capture_stream(device)

    def capturing(work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    work()
            finally:
                torch.cuda.set_stream(before)  # which a capture that broke off does not restore
        replay: Callable[[], None] = graph.replay
        return replay

    return capturing


def _not_in_torch() -> list[Group]:
    raise EngineError("attention's Triton kernels do not serve this model's layers")
