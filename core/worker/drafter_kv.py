"""The KV cache of a proposer's own layers: `DraftInput.kv`, or one that is its own altogether.

Usually it lies in the blocks of the requests, by the target's positions. A drafter that counts
positions of its own, since it has another tokenizer, keeps a `PrivateKV`.

Knows slots by request and the layers' tensors; not the drafter. The rows of a proposer need not be
row-invariant: they decide how many drafts are accepted, never what a text says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from foresay.core.proposer import DraftRequest, KVLayer
from foresay.core.worker import cpu_kernels
from foresay.core.worker.attention import (
    AttentionMetadata,
    AttentionRules,
    TreeLayout,
    paged_attention,
)
from foresay.core.worker.kv_cache import KVCache, LayerCache, LayerKV
from foresay.core.worker.linear import compute_dtype
from foresay.core.worker.row_places import RowPlaces

if TYPE_CHECKING:
    from foresay.core.worker.drafting import DraftPasses

_BLOCK_SIZE = 16  # of a `PrivateKV`

Slots = Callable[[str, int], np.ndarray]  # a request's id and n -> the slots of positions 0..n-1


class StepRows:
    """Rows laid out for attention; see `foresay.core.proposer.KVRows`.

    Where there are `passes` that may run them without, they are laid out when they are asked for.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        lay_out: Callable[[], tuple[AttentionMetadata, torch.Tensor]],
        on_stored: Callable[[int], None],
        last: Callable[[], StepRows],
        places: Callable[[], RowPlaces] | None = None,
        passes: DraftPasses | None = None,
    ) -> None:
        """`lay_out` returns the layout and `last_rows`; `places`, for `passes`, where rows lie.

        `on_stored` is told each layer that has stored them.
        """
        self.passes = passes
        self.places = places
        self.on_stored = on_stored
        self._layers = layers
        self._last = last
        self._lay_out = lay_out
        self._layout = lay_out() if passes is None else None

    @property
    def positions(self) -> torch.Tensor:
        """[num_rows] int64."""
        return self._laid_out()[0].positions

    @property
    def last_rows(self) -> torch.Tensor:
        """[num_ranges] int64: the row where each range ends."""
        return self._laid_out()[1]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the rows' keys and values in `layer`, then attend causally."""
        cache = self._cache(layer)
        dtype = cache.key.dtype
        out = paged_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            cache,
            self._laid_out()[0],
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
        self.on_stored(layer)
        return out.to(query.dtype)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the rows' keys and values in `layer`."""
        cache = self._cache(layer)
        dtype = cache.key.dtype
        cache.write(self._laid_out()[0].slot_mapping, key.to(dtype), value.to(dtype))
        self.on_stored(layer)

    def last(self) -> StepRows:
        """Lay out the rows `last_rows` alone."""
        return self._last()

    def _laid_out(self) -> tuple[AttentionMetadata, torch.Tensor]:
        if self._layout is None:
            self._layout = self._lay_out()
        return self._layout

    def _cache(self, layer: int) -> LayerCache:
        if not 0 <= layer < len(self._layers):
            raise ValueError(
                f"layer {layer}: the proposer declared {len(self._layers)} KV layers, from 0"
            )
        return self._layers[layer]


class StepKV:
    """A proposer's KV layers in one step; see `foresay.core.proposer.KVView`."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        null_slot: int,
        requests: Sequence[DraftRequest],
        slots: Slots,
        *,
        draft_slots: int,
        device: torch.device,
        passes: DraftPasses | None = None,
    ) -> None:
        """`passes`: what may run a drafter's passes over `layers` in its own way."""
        self._layers = layers
        self._null_slot = null_slot
        self._requests = requests
        self._slots = slots
        self._draft_slots = draft_slots
        self._device = device
        dtype = layers[0].key.dtype
        compute = compute_dtype(dtype, device)
        self._rules = AttentionRules(
            compute_dtype=None if compute == dtype else compute,
            own_kernels=cpu_kernels.serves(dtype, device),
        )
        # By layer and request: the positions that were stored, as ranges.
        self._stored: dict[tuple[int, int], list[range]] = {}
        self._passes = passes
        # By request: the slots of all positions that it may have rows for, for `passes`.
        self._all_slots: dict[int, np.ndarray] = {}
        self._slots_key = object()  # this step's

    def rows(self, requests: Sequence[int], positions: Sequence[range]) -> StepRows:
        """Lay out rows; see `KVView.rows`. Raises `ValueError` for positions that are not there."""
        if len(requests) != len(positions) or not requests:
            raise ValueError(
                f"{len(positions)} ranges of positions for {len(requests)} requests: give one "
                "range for each, and one request at least"
            )
        arrays, slots, mapping = [], [], []
        for index, span in zip(requests, positions, strict=True):
            request = self._requests[index]
            most = self._end(request)
            if span.step != 1 or not span or span.start < 0 or span.stop > most:
                raise ValueError(
                    f"{span} for request {request.req_id!r}: expected consecutive positions, one "
                    f"at least, in range({most})"
                )
            arrays.append(np.arange(span.start, span.stop))
            slots.append(self._slots(request.req_id, span.stop))
            mapping.append(slots[-1][span.start :])

        def stored(layer: int) -> None:
            for index, span in zip(requests, positions, strict=True):
                self._stored.setdefault((layer, index), []).append(span)

        last = functools.partial(self.rows, requests, [span[-1:] for span in positions])
        return self._laid_out(requests, arrays, slots, mapping, None, stored, last)

    def tree_rows(
        self,
        requests: Sequence[int],
        firsts: Sequence[int],
        parents: Sequence[Sequence[int]],
        num_new: Sequence[int],
    ) -> StepRows:
        """Lay out the newest nodes of trees; see `KVView.tree_rows`.

        Raises `ValueError` for what is no tree, or does not lie behind the features that are
        handed over and within the positions of `rows`.
        """
        if not len(requests) == len(firsts) == len(parents) == len(num_new) or not requests:
            raise ValueError(
                f"{len(firsts)} first positions, {len(parents)} trees and {len(num_new)} numbers "
                f"of rows for {len(requests)} requests: give one of each, and one request at least"
            )
        arrays, slots, mapping, trees = [], [], [], []
        for index, first, above, new in zip(requests, firsts, parents, num_new, strict=True):
            request = self._requests[index]
            depths: list[int] = []
            for node, parent in enumerate(above):
                if not -1 <= parent < node:
                    raise ValueError(
                        f"node {node} of request {request.req_id!r} has the parent {parent}: "
                        "expected an earlier node, or -1"
                    )
                depths.append(0 if parent < 0 else depths[parent] + 1)
            num_nodes, start, most = len(depths), len(request.token_ids) - 1, self._end(request)
            if first < start or first + num_nodes > most:
                raise ValueError(
                    f"{num_nodes} nodes from position {first} for request {request.req_id!r}: "
                    f"expected to lie in range({start}, {most})"
                )
            if not 1 <= new <= num_nodes:
                raise ValueError(
                    f"{new} rows of {num_nodes} nodes for request {request.req_id!r}: give one at "
                    "least, and no more than there are nodes"
                )
            nodes = np.arange(num_nodes - new, num_nodes)
            arrays.append(first + np.array(depths[-new:], dtype=np.int64))
            slots.append(self._slots(request.req_id, first + num_nodes))
            mapping.append(slots[-1][-new:])
            trees.append(TreeLayout(first, np.array(above, dtype=np.int64), nodes))
        last = functools.partial(self.tree_rows, requests, firsts, parents, [1] * len(requests))
        # No features are stored: their positions lie before the nodes.
        return self._laid_out(requests, arrays, slots, mapping, trees, lambda _layer: None, last)

    def _laid_out(
        self,
        requests: Sequence[int],
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        slot_mapping: Sequence[np.ndarray],
        trees: Sequence[TreeLayout | None] | None,
        stored: Callable[[int], None],
        last: Callable[[], StepRows],
    ) -> StepRows:
        def lay_out() -> tuple[AttentionMetadata, torch.Tensor]:
            metadata = AttentionMetadata.build(
                positions,
                slots,
                np.concatenate(slot_mapping),
                self._null_slot,
                self._rules,
                self._device,
                trees,
            )
            last_rows = torch.from_numpy(np.cumsum([len(each) for each in positions]) - 1)
            return metadata, last_rows.to(self._device, non_blocking=True)

        def places() -> RowPlaces:
            """Return these rows with the same slots in all passes of a step: they are sent once."""
            for index in requests:
                if index not in self._all_slots:
                    request = self._requests[index]
                    self._all_slots[index] = self._slots(request.req_id, self._end(request))
            return RowPlaces(
                positions,
                [self._all_slots[index] for index in requests],
                slot_mapping,
                trees or [None] * len(positions),
                slots_key=(self._slots_key, *requests),
            )

        return StepRows(self._layers, lay_out, stored, last, places, self._passes)

    def _end(self, request: DraftRequest) -> int:
        """Return where the positions end that rows may be laid out for."""
        end = len(request.token_ids) - 1
        return end + request.k - 1 + self._draft_slots if request.k else end

    def missing(self, ranges: Sequence[range]) -> str | None:
        """Say which of the positions handed over were not stored; None if all were.

        ranges: by request, what was handed over. A proposer that leaves one out would find, at
        the next prefix hit, another request's keys.
        """
        for index, handed in enumerate(ranges):
            for layer in range(len(self._layers)):
                reached = handed.start
                for span in sorted(self._stored.get((layer, index), []), key=lambda s: s.start):
                    if span.start <= reached:
                        reached = max(reached, span.stop)
                if reached < handed.stop:
                    return (
                        f"it did not store position {reached} of request "
                        f"{self._requests[index].req_id!r} in its KV layer {layer}"
                    )
        return None


class PrivateKV:
    """A pool of KV blocks for a drafter whose positions are not the target's.

    Nobody but the drafter knows of it: no prefix is shared, and it grows no further than it was
    made. A request has a row of positions here from its first `hold` until `release`. Those up to
    the last row of a pass are read, so each must have been stored, in this pass or before.
    """

    def __init__(
        self, layers: Sequence[KVLayer], num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make room for `num_tokens` positions of all requests together, rounded up to blocks."""
        self._cache = KVCache(
            [LayerKV.of(layer) for layer in layers],
            -(-num_tokens // _BLOCK_SIZE),
            _BLOCK_SIZE,
            dtype,
            device,
        )
        self._device = device
        self._free = list(range(self._cache.num_blocks))
        self._blocks: dict[str, list[int]] = {}

    @property
    def num_free_tokens(self) -> int:
        """Positions for which there is room."""
        return len(self._free) * _BLOCK_SIZE

    def hold(self, req_id: str, num_positions: int) -> bool:
        """See to it that a request has that many positions; False, and no change, if it can't."""
        blocks = self._blocks.get(req_id, [])
        num_more = -(-num_positions // _BLOCK_SIZE) - len(blocks)
        if num_more > len(self._free):
            return False
        if num_more > 0:
            self._blocks[req_id] = blocks + self._free[-num_more:]
            del self._free[-num_more:]
        return True

    def release(self, req_id: str) -> None:
        """Take back what a request has, if it has anything."""
        self._free += self._blocks.pop(req_id, [])

    def view(self, requests: Sequence[DraftRequest]) -> StepKV:
        """Return the view of one step. `requests` are as the drafter sees them.

        Their `token_ids` are in its tokens; those that rows are laid out for hold their positions.
        """
        return StepKV(
            self._cache.layers,
            self._cache.null_slot,
            requests,
            self._slots,
            draft_slots=1,
            device=self._device,
        )

    def _slots(self, req_id: str, num_positions: int) -> np.ndarray:
        blocks = np.array(self._blocks[req_id][: -(-num_positions // _BLOCK_SIZE)])
        offsets = np.arange(_BLOCK_SIZE)
        slots: np.ndarray = (blocks[:, None] * _BLOCK_SIZE + offsets).ravel()[:num_positions]
        return slots
