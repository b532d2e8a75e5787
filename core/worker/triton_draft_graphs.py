"""CUDA graphs of drafters' passes: captured at load, replayed for each pass behind a draft's first.

A drafter makes a pass a draft token, or a level of a tree, each over a few rows and a layer or two:
on a GPU nearly all of its time goes into launching them. So the pass is captured over static
buffers, one graph for each bucket of rows (see `triton_static`). Token ids, hidden states and
logits stay on the device, and the slots of the requests' keys are sent once a step.

The first pass of a draft, over the features of all positions that the step committed, is not
captured. Knows a drafter by what it runs (`dummy_draft`), rows and buffers; neither requests nor
how tokens are picked. Needs triton, and layers of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foresay.core.errors import EngineError
from foresay.core.worker.attention import AttentionMetadata, AttentionRules
from foresay.core.worker.chain import Member
from foresay.core.worker.drafter_kv import StepRows
from foresay.core.worker.drafting import DrafterModel
from foresay.core.worker.dummy_draft import LaterPass, find_later_pass
from foresay.core.worker.kv_cache import KVCache, LayerCache, LayerKV
from foresay.core.worker.row_places import RowPlaces
from foresay.core.worker.target import TargetModel
from foresay.core.worker.triton_capture import (
    Capturing,
    capture_buckets,
    memory_of_buckets,
    warn,
)
from foresay.core.worker.triton_static import AttentionShape, Extent, StaticRows, agree, one_row

_NUM_HOSTS = 2  # the host lays out a pass while the device runs the one before


@dataclass(frozen=True, slots=True)
class PassShape:
    """What a pass of a row was seen to attend with, and to return."""

    attention: AttentionShape
    layers: tuple[int, ...]  # those that it stores its row in
    states: torch.Tensor  # [1, ...] like what `forward` returns
    logits: torch.Tensor  # [1, draft_vocab]


class StaticPass:
    """A drafter's pass over the static buffers of one bucket.

    `launch` runs `work`: by itself, or as a graph that was captured of it.
    """

    def __init__(
        self,
        later: LaterPass,
        shape: PassShape,
        layers: Sequence[LayerCache],
        scratch_slot: int,
        extent: Extent,
        num_rows: int,
        largest: StaticPass | None = None,
    ) -> None:
        """Lay out a bucket of `num_rows` rows; all share the buffers of the `largest`.

        That one is made first, without it.
        """
        self.num_rows = num_rows
        self.launch: Callable[[], None] = self.work
        self._later, self._layers = later, layers
        device = layers[0].slots.device
        self.rows: StaticRows = StaticRows(
            shape.attention,
            extent,
            num_rows,
            scratch_slot,
            device,
            None if largest is None else largest.rows.inputs,
            num_hosts=_NUM_HOSTS,
        )
        if largest is None:
            self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
            # What a pass takes, and what it leaves there for the next one.
            self._states = shape.states.new_zeros(num_rows, *shape.states.shape[1:])
            self._logits = shape.logits.new_zeros(num_rows, *shape.logits.shape[1:])
        else:
            self._token_ids = largest._token_ids
            self._states, self._logits = largest._states, largest._logits
        # Each row ends a range: others have none that a drafter could leave out.
        self._last_rows = torch.arange(num_rows, device=device)

    @torch.inference_mode()
    def run(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, places: RowPlaces
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows that `self.rows` takes; return states [n, ...] and logits [n, draft_vocab].

        Both hold until the next run of any bucket.
        """
        num_rows = len(token_ids)
        self.rows.put(places)
        self._token_ids[:num_rows].copy_(token_ids)
        # Where a chain goes on with all of its rows they are there.
        if hidden is not None and hidden.data_ptr() != self._states.data_ptr():
            self._states[:num_rows].copy_(hidden)
        self.launch()
        return self._states[:num_rows], self._logits[:num_rows]

    def is_right(self) -> bool:
        """Whether `launch` computes for a row what `work` does. Slot 0 is still nobody's."""
        self.rows.put(one_row())
        self._token_ids[:1] = 1
        logits, found = self._logits[:1], []
        for run in (self.work, self.launch):
            self._states[:1] = 0
            logits.zero_()
            run()
            found.append(logits.clone())
        for layer in self._layers:
            layer.slots[0] = 0
        return agree(*found)

    def work(self) -> None:
        """Run the pass over whatever the buffers hold: reads and writes static memory only."""
        metadata = self.rows.metadata(AttentionRules())
        model, step = self._later.model, self._later.step
        hidden = None if self._later.hidden is None else self._states[: self.num_rows]
        states = model.forward(
            self._token_ids[: self.num_rows], hidden, self._step_rows(metadata), step
        )
        self._logits[: self.num_rows].copy_(model.logits(states, step))
        self._states[: self.num_rows].copy_(states)

    def _step_rows(self, metadata: AttentionMetadata) -> StepRows:
        def lay_out() -> tuple[AttentionMetadata, torch.Tensor]:
            return metadata, self._last_rows

        return StepRows(
            self._layers, lay_out, lambda _layer: None, lambda: self._step_rows(metadata)
        )


class DraftGraphs:
    """A drafter's captured passes, by bucket; see `foresay.core.worker.drafting.DraftPasses`."""

    def __init__(self, later: LaterPass, shape: PassShape, passes: Sequence[StaticPass]) -> None:
        """`passes` by ascending numbers of rows."""
        self.passes = list(passes)
        self._later, self._shape = later, shape
        self.description = f"{len(passes)}, up to {passes[-1].num_rows} rows"

    def run(
        self,
        model: DrafterModel,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        rows: StepRows,
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a pass in the smallest bucket that takes it; see `StaticPass.run`.

        None if no bucket does, or it is another pass than the one that was captured.
        """
        later = self._later
        if model is not later.model or step < later.step or rows.places is None:
            return None
        if (hidden is None) != (later.hidden is None):
            return None
        places = rows.places()
        for each in self.passes:
            if each.rows.takes(places):
                found = each.run(token_ids, hidden, places)
                for layer in self._shape.layers:
                    rows.on_stored(layer)
                return found
        return None


class _ProbeRows:
    """A row that attends to nothing, and notes by which heads."""

    def __init__(self, device: torch.device) -> None:
        self.positions = torch.zeros(1, dtype=torch.int64, device=device)
        self.last_rows = torch.zeros(1, dtype=torch.int64, device=device)
        self.shapes: set[tuple[int, int, int, int]] = set()
        self.stored: dict[int, None] = {}  # layers, in order

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **_settings: Any,
    ) -> torch.Tensor:
        self.stored[layer] = None
        self.shapes.add((query.shape[1], key.shape[1], key.shape[2], value.shape[2]))
        return query.new_zeros(len(query), query.shape[1], value.shape[2])

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:  # noqa: ARG002
        self.stored[layer] = None

    def last(self) -> _ProbeRows:
        return self


def _shape_of(later: LaterPass, layers: Sequence[LayerCache]) -> PassShape:
    """Run a row through a pass, to see what it makes of it; raises `EngineError` if unfit."""
    device = layers[0].slots.device
    rows = _ProbeRows(device)
    token_ids = torch.zeros(1, dtype=torch.int64, device=device)
    states = later.model.forward(token_ids, later.hidden, rows, later.step)
    logits = later.model.logits(states, later.step)
    if len(states) != 1 or len(logits) != 1:
        raise EngineError("a later pass of a draft does not return a row for each that it takes")
    taken = later.hidden
    if taken is not None and (taken.shape, taken.dtype) != (states.shape, states.dtype):
        raise EngineError(
            f"a later pass of a draft takes {list(taken.shape[1:])} of {taken.dtype} a row and "
            f"returns {list(states.shape[1:])} of {states.dtype}"
        )
    if len(rows.shapes) != 1:
        raise EngineError("a drafter's layers are not all of one shape of attention")
    return PassShape(
        AttentionShape(*rows.shapes.pop(), layers[0].slots.dtype),
        tuple(rows.stored),
        states,
        logits,
    )


def extent_of(member: Member, max_num_seqs: int, max_model_len: int) -> Extent:
    """Return the largest passes of a member's drafts: a row a request, of a tree up to k - 1."""
    k = member.num_speculative_tokens if member.needs.tree else 0
    return Extent(max_num_seqs, max_num_seqs * max(k - 1, 1), max_model_len, max_nodes=k)


@torch.inference_mode()
def capture_draft_graphs(
    target: TargetModel,
    member: Member,
    layers: Sequence[LayerCache],
    cache: KVCache,
    extent: Extent,
    *,
    capturing: Capturing | None = None,
    num_graphs: int | None = None,
) -> DraftGraphs | None:
    """Capture a member's later passes over its `layers` of `cache`, for each bucket.

    capturing, num_graphs: see `capture_buckets`. Returns None if the member has no such passes or
    does not say that they are alike (`dummy_run`); and after a warning if something cannot be
    captured: the passes then run operation by operation.
    """
    name = f"proposer {member.proposer.name!r}"
    try:
        later = find_later_pass(
            member, layers, cache, vocab_size=target.vocab_size, hidden_size=target.hidden_size
        )
        if later is None:
            if member.dummy_run is not None and member.num_speculative_tokens > 1:
                raise EngineError("its dummy_run made no pass behind the first")
            return None
        shape = _shape_of(later, layers)
    except Exception as error:  # noqa: BLE001  # whatever a plugin or a driver may raise
        warn(name, error)
        return None

    def make(num_rows: int, largest: StaticPass | None) -> StaticPass:
        return StaticPass(later, shape, layers, cache.scratch_slot, extent, num_rows, largest)

    passes = capture_buckets(
        make,
        extent.buckets,
        target.device,
        of=name,
        capturing=capturing,
        num_graphs=num_graphs,
    )
    return None if passes is None else DraftGraphs(later, shape, passes)


def memory_of_draft_graphs(
    target: TargetModel, member: Member, extent: Extent, *, capturing: Capturing | None = None
) -> int | None:
    """Return the bytes that `capture_draft_graphs` will take, measured over a cache of one block.

    Returns None if there will be none; if for a failure, after a warning.
    """
    if member.dummy_run is None:
        return None
    layout = [LayerKV.of(layer) for layer in member.needs.kv_layers]
    cache = KVCache(target.kv_layout, 1, 1, target.dtype, target.device, layout)

    def capture(num_graphs: int) -> DraftGraphs | None:
        return capture_draft_graphs(
            target,
            member,
            cache.proposer_layers,
            cache,
            extent,
            capturing=capturing,
            num_graphs=num_graphs,
        )

    name = f"proposer {member.proposer.name!r}"
    return memory_of_buckets(capture, len(extent.buckets), target.device, of=name)
