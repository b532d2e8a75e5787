"""CUDA graphs of the target's decode and verify passes: captured at load, replayed step by step.

A step launches some ten kernels a layer, each of which costs the host more than a GPU needs for a
few rows of it. A graph launches all of them at once. So a pass is captured over static buffers, one
graph for each bucket of rows (see `triton_static`), and a step is copied into the smallest bucket
that holds it.

Taken are steps all of whose rows have logits: decoding and verifying. Knows rows, their slots and
trees; neither requests nor drafts. Needs triton, and the model on foresay's own decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from foresay.core.worker.attention import TreeLayout
from foresay.core.worker.capture import Capture
from foresay.core.worker.decoder import Heads
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.row_places import RowPlaces
from foresay.core.worker.target import TargetModel
from foresay.core.worker.triton_capture import Capturing, capture_buckets, memory_of_buckets
from foresay.core.worker.triton_static import AttentionShape, StaticRows, agree, one_row
from foresay.core.worker.triton_static import Extent as Extent

_SOME_TOKEN = 1  # 0 may be one for padding, whose embedding is zero


class _Outputs:
    """Where the passes of all buckets leave what they compute."""

    def __init__(self, target: TargetModel, num_rows: int, wanted: Capture | None) -> None:
        def states() -> torch.Tensor:
            return torch.zeros(
                num_rows, target.hidden_size, dtype=target.dtype, device=target.device
            )

        self.logits = torch.zeros(
            num_rows, target.vocab_size, dtype=target.dtype, device=target.device
        )
        self.hidden = states() if wanted is not None and wanted.hidden_state else None
        self.streams = {layer: states() for layer in (wanted.layers if wanted else ())}

    def capture(self) -> Capture | None:
        """Return a capture of what there is room for."""
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
        largest: StaticForward | None = None,
        wanted: Capture | None = None,
    ) -> None:
        """Lay out a bucket of `num_rows` rows; all share the buffers of the `largest`.

        That one is made first, without it.
        """
        self.num_rows = num_rows
        self.launch: Callable[[], None] = self.work
        self._target, self._cache = target, cache
        heads = Heads.of(target.config.get_text_config(decoder=True))
        layer = target.kv_layout[0]
        self.rows: StaticRows = StaticRows(
            AttentionShape(
                heads.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                layer.value_dim,
                cache.layers[0].slots.dtype,
            ),
            extent,
            num_rows,
            cache.scratch_slot,
            target.device,
            None if largest is None else largest.rows.inputs,
            has_ids=True,
        )
        self.outputs: _Outputs = (
            _Outputs(target, num_rows, wanted) if largest is None else largest.outputs
        )
        self._output_rows = torch.arange(num_rows, device=target.device)

    @torch.inference_mode()
    def run(
        self, input_ids: Sequence[int], places: RowPlaces, capture: Capture | None = None
    ) -> torch.Tensor:
        """Return the logits of all rows, which `self.rows` takes, and fill `capture`.

        The logits [number of rows, vocab_size] hold until the next run of any bucket; what is
        captured is the caller's own.
        """
        self.rows.put(places, input_ids)
        self.launch()
        outputs, num_rows = self.outputs, len(input_ids)
        if capture is not None:
            if capture.hidden_state:
                assert outputs.hidden is not None
                capture.put_hidden(outputs.hidden[:num_rows].clone())
            for layer in capture.layers:
                capture.put_stream(layer, outputs.streams[layer][:num_rows].clone())
        return outputs.logits[:num_rows]

    def is_right(self) -> bool:
        """Whether `launch` computes for a row what `work` does. Slot 0 is still nobody's."""
        self.rows.put(one_row(), [_SOME_TOKEN])
        logits, found = self.outputs.logits[:1], []
        for run in (self.work, self.launch):
            logits.zero_()
            run()
            found.append(logits.clone())
        for layer in self._cache.layers:
            layer.slots[0] = 0
        return agree(*found)

    def work(self) -> None:
        """Run the pass over whatever the buffers hold: reads and writes static memory only."""
        input_ids = self.rows.fields["input_ids"].long()
        metadata = self.rows.metadata(self._target.attention_rules)
        outputs = self.outputs
        capture = outputs.capture()
        logits = self._target.forward(input_ids, self._output_rows, self._cache, metadata, capture)
        outputs.logits[: self.num_rows].copy_(logits)
        if capture is not None:
            if outputs.hidden is not None:
                outputs.hidden[: self.num_rows].copy_(capture.hidden)
            for layer, states in outputs.streams.items():
                states[: self.num_rows].copy_(capture.streams([layer])[:, 0])


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
        if capture is not None:
            kept = self.forwards[0].outputs
            if capture.hidden_state and kept.hidden is None:
                return None
            if any(layer not in kept.streams for layer in capture.layers):
                return None
        places = RowPlaces(positions, slots, slot_mapping, trees)
        for forward in self.forwards:
            if forward.rows.takes(places):
                return forward.run(input_ids, places, capture)
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

    def make(num_rows: int, largest: StaticForward | None) -> StaticForward:
        return StaticForward(target, cache, extent, num_rows, largest, wanted)

    forwards = capture_buckets(
        make, extent.buckets, target.device, capturing=capturing, num_graphs=num_graphs
    )
    return None if forwards is None else Graphs(forwards)


def memory_of_graphs(
    target: TargetModel, extent: Extent, *, capturing: Capturing | None = None
) -> int | None:
    """Return the bytes that `capture_graphs` will take, measured over a cache of one block.

    Returns None, after the warning of `capture_graphs`, if it will fail.
    """
    cache = KVCache(target.kv_layout, 1, 1, target.dtype, target.device)

    def capture(num_graphs: int) -> Graphs | None:
        return capture_graphs(target, cache, extent, capturing=capturing, num_graphs=num_graphs)

    return memory_of_buckets(capture, len(extent.buckets), target.device)
