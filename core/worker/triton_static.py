"""Rows of a pass in static memory: the inputs of passes that are captured as CUDA graphs.

A graph is always the same: same kernels, same shapes, same addresses. So the rows of a pass are
copied to where the graph of a *bucket*, a number of rows that holds them, expects them.

Buckets are of rows, not of requests and rows of each: attention takes its rows as work items,
whatever requests they are of (see `triton_attention`), and the other operations know rows only. So
one row of 8 requests and 8 rows of one, a tree's among them, are the same graph.

Knows where rows lie and what attention makes of it; neither the model that runs them, nor what
else it takes. Needs triton, and layers that are all of one shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.core.errors import EngineError
from foresay.core.worker.attention import AttentionMetadata, AttentionRules
from foresay.core.worker.attention_layout import Group
from foresay.core.worker.kernels import attention as kernels
from foresay.core.worker.row_places import RowPlaces
from foresay.core.worker.triton_attention import (
    Plan,
    RowLayout,
    Tiling,
    TritonMetadata,
    programs_of,
    words_of,
)

# At most 60 % more rows are computed than a pass has; up to 64 cost a GPU about what one does.
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_ALIGNED = 4  # int32s: 16 bytes, as the kernels are compiled for
# Splits of all rows, at most: each takes float32 memory by head. Longer contexts are not taken.
_PARTS = 16384
_ROUNDING = 0.01  # of the largest number, where the same kernels should give the same bits
_MORE_ITEMS = 2  # items beyond one a tile, in units of what keeps the device busy


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest passes that are to be captured."""

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
class AttentionShape:
    """The shape of a model's attention layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype  # of keys and values


class StaticInputs:
    """What all buckets share: the inputs, in one piece of memory, with as much on the host.

    A bucket's own inputs end where the slots of keys begin, so that they are sent in one transfer.
    """

    def __init__(self, device: torch.device, front: int, num_keys: int, num_hosts: int) -> None:
        """Make room for `front` numbers of a bucket, and `num_keys` slots of keys.

        num_hosts: how many batches may be written while none of them has arrived yet.
        """
        self.front, self.num_keys = front, num_keys
        self.is_gpu = device.type == "cuda"
        size = front + num_keys
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self.is_gpu) for _ in range(num_hosts)
        ]
        self._sent: list[torch.cuda.Event | None] = [None] * num_hosts
        self._turn = 0
        self.slots_key: Hashable | None = None  # of the slots of keys that were sent last

    def begin(self) -> np.ndarray:
        """Return the host's side, to be written and then sent: [front + num_keys] int32.

        The host goes on at once when it has sent something. What it writes the next time is
        another piece of memory, or waits until the device has what was in this one.
        """
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        array: np.ndarray = self._hosts[self._turn].numpy()
        return array

    def send(self, start: int, end: int) -> None:
        """Copy a part of what was written to the device."""
        host = self._hosts[self._turn]
        self.on_device[start:end].copy_(host[start:end], non_blocking=True)
        if self.is_gpu:
            event = self._sent[self._turn] = self._sent[self._turn] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.on_device.device))


class StaticRows:
    """The rows of one bucket."""

    def __init__(
        self,
        shape: AttentionShape,
        extent: Extent,
        num_rows: int,
        scratch_slot: int,
        device: torch.device,
        inputs: StaticInputs | None = None,
        *,
        has_ids: bool = False,
        num_hosts: int = 1,
    ) -> None:
        """Lay out a bucket of `num_rows` rows; without `inputs` it makes those of all buckets.

        Make the largest bucket first, and give its `inputs` to the others. has_ids: token ids are
        sent along. num_hosts: see `StaticInputs`.
        """
        self.num_rows = num_rows
        self._scratch_slot = scratch_slot
        fold = shape.num_heads // shape.num_kv_heads
        tiling = Tiling.choose(fold, shape.head_dim, shape.value_dim, shape.dtype)
        num_programs = programs_of(device)
        self._tokens_per_tile, self._split_len = tiling.block_m // fold, tiling.split_len
        self._num_programs = -(-num_programs // shape.num_kv_heads)
        self._num_requests = min(extent.max_num_seqs, num_rows)
        num_tiles = min(num_rows, self._num_requests + num_rows // self._tokens_per_tile)
        self._max_items = num_tiles + _MORE_ITEMS * self._num_programs
        most_splits = -(-extent.max_model_len // tiling.split_len)
        self._max_parts = min(num_rows * most_splits, _PARTS)
        self._num_words = words_of(extent.max_nodes)
        num_fields, num_merged_fields = kernels.NUM_FIELDS.value, kernels.NUM_MERGED_FIELDS.value
        sizes = {
            "input_ids": num_rows if has_ids else 0,
            "positions": num_rows,
            "slot_mapping": num_rows,
            "seen": num_rows * self._num_words,
            "node_positions": num_rows,
            "items": self._max_items * num_fields,
            "first_parts": num_rows,
            "merged": num_rows * num_merged_fields,
        }
        padded = {name: max(-(-size // _ALIGNED), 1) * _ALIGNED for name, size in sizes.items()}
        if inputs is None:
            num_keys = extent.max_num_seqs * extent.max_model_len
            inputs = StaticInputs(device, sum(padded.values()), num_keys, num_hosts)
        self.inputs = inputs
        self._start = at = inputs.front - sum(padded.values())
        self._places: dict[str, slice] = {}
        for name, size in sizes.items():
            self._places[name] = slice(at, at + size)
            at += padded[name]
        self.fields = {name: inputs.on_device[place] for name, place in self._places.items()}
        plan = Plan(
            items=self.fields["items"].view(-1, num_fields),
            first_parts=self.fields["first_parts"],
            merged=self.fields["merged"].view(-1, num_merged_fields),
            num_parts=self._max_parts,
            all_parts=True,
        )
        self._metadata = TritonMetadata(
            key_slots=inputs.on_device[inputs.front :],
            positions=self.fields["positions"],
            seen=self.fields["seen"],
            node_positions=self.fields["node_positions"],
            num_words=self._num_words,
            layout=None,
            max_items=self._max_items,
            plans={(tiling, fold, shape.num_kv_heads, num_programs): plan},
        )
        # Until there is a step, no row attends, and all are stored aside. A larger bucket has left
        # its own here: slots would be read as token ids.
        array = inputs.begin()
        array[self._start : inputs.front] = 0
        array[self._places["slot_mapping"]] = scratch_slot
        inputs.send(self._start, inputs.front)

    def takes(self, places: RowPlaces) -> bool:
        """Whether there is room for rows."""
        if places.num_rows > self.num_rows or len(places.slots) > self._num_requests:
            return False
        largest = max((len(tree.parents) for tree in places.trees if tree is not None), default=0)
        num_parts = sum(
            len(rows) * -(-len(keys) // self._split_len)
            for rows, keys in zip(places.positions, places.slots, strict=True)
        )
        return (
            num_parts <= self._max_parts
            and sum(map(len, places.slots)) <= self.inputs.num_keys
            and words_of(largest) <= self._num_words
        )

    def put(self, places: RowPlaces, input_ids: Sequence[int] | None = None) -> None:
        """Send rows that it `takes` to the device, and their token ids where they come along."""
        inputs = self.inputs
        layout = RowLayout.of(places.positions, places.slots, places.trees, self._num_words)
        plan = layout.plan(
            self._tokens_per_tile, self._split_len, self._num_programs, self._max_items
        )
        values = {
            "input_ids": np.asarray([] if input_ids is None else input_ids),
            "positions": layout.positions,
            "slot_mapping": np.concatenate(places.slot_mapping),
            "seen": layout.seen.ravel(),
            "node_positions": layout.node_positions,
            "items": plan.items.ravel(),
            "first_parts": plan.first_parts,
            "merged": plan.merged.ravel(),
        }
        array = inputs.begin()
        for name, place in self._places.items():
            # Rows of the bucket that are not there are computed, stored aside and never read.
            end = place.start + len(values[name])
            array[place.start : end] = values[name]
            array[end : place.stop] = self._scratch_slot if name == "slot_mapping" else 0
        end = inputs.front
        if places.slots_key is None or places.slots_key != inputs.slots_key:
            end += int(layout.key_lens.sum())
            np.concatenate(places.slots, out=array[inputs.front : end], casting="same_kind")
            inputs.slots_key = places.slots_key
        inputs.send(self._start, end)

    def metadata(self, rules: AttentionRules) -> AttentionMetadata:
        """Return what a pass over the rows attends by: it reads static memory only."""
        return AttentionMetadata(
            positions=self.fields["positions"].long(),
            slot_mapping=self.fields["slot_mapping"].long(),
            rules=rules,
            triton=self._metadata,
            cpu=None,
            _lay_out=_not_in_torch,
        )


def one_row() -> RowPlaces:
    """Return the places of a row at slot 0, to try a pass with while the slots are nobody's.

    Not where padding is stored: rows that do not attend are stored there, too, whatever they are.
    """
    slots = np.zeros(1, dtype=np.int64)
    return RowPlaces([np.zeros(1, dtype=np.int64)], [slots], [slots], [None])


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether numbers are the same but for rounding; not if any is not finite."""
    most = float(expected.float().abs().max())
    return float((found.float() - expected.float()).abs().max()) <= _ROUNDING * most


def _not_in_torch() -> list[Group]:
    raise EngineError("attention's Triton kernels do not serve this model's layers")
