"""Features and KV layers for a proposer that is driven without an engine.

Positions are handed over as the worker does it. What a position's features are depends on the
tokens up to it, and on no model: the rules compare drafts, not how good they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from foresay.core.proposer import DraftInput, DraftRequest, Needs, TargetView
from foresay.core.worker.drafter_kv import StepKV
from foresay.core.worker.kv_cache import LayerCache, LayerKV

_NUM_STATES = 509  # of features that differ
_SPARE_POSITIONS = 16  # behind a request's last one, for what is guessed there


@dataclass(slots=True)
class _Step:
    """What was handed over last."""

    view: StepKV | None
    ranges: list[range]


class FeatureFeed:
    """The features and the KV cache of one proposer's requests."""

    def __init__(self, needs: Needs, target: TargetView) -> None:
        self._needs = needs
        self._device = target.device
        generator = torch.Generator().manual_seed(7)
        shape = (_NUM_STATES, 1 + len(needs.aux_layers), target.hidden_size)
        self._states = torch.randn(shape, generator=generator).to(target.device, target.dtype)
        self._next: dict[str, int] = {}  # the first position that was not handed over
        self._region_size = target.max_model_len + _SPARE_POSITIONS
        self._regions: dict[str, int] = {}
        self._free = [*range(64)]
        self._null_slot = len(self._free) * self._region_size
        self._layers = []
        for layer in needs.kv_layers:
            kv = LayerKV.of(layer)
            slots = torch.zeros(self._null_slot + 1, kv.width, dtype=target.dtype)
            self._layers.append(LayerCache(kv, slots.to(target.device)))
        self._step = _Step(None, [])

    def add_to(self, batch: DraftInput) -> DraftInput:
        """Return the batch with what is due for its requests."""
        requests, needs = batch.requests, self._needs
        ranges = [self._due(request) for request in requests]
        row_starts = [0]
        states: list[int] = []
        positions: list[int] = []
        for request, due in zip(requests, ranges, strict=True):
            row_starts.append(row_starts[-1] + len(due))
            positions += due
            states += _hashes(request.token_ids, due)
            if due:
                self._next[request.req_id] = due.stop
        rows = self._states[torch.tensor(states, dtype=torch.int64, device=self._device)]
        view = None
        if needs.kv_layers:
            view = StepKV(
                self._layers,
                self._null_slot,
                requests,
                self._slots,
                draft_slots=needs.draft_slots,
                device=self._device,
            )
        self._step = _Step(view, ranges)
        return replace(
            batch,
            hidden_states=rows[:, 0] if needs.hidden_state else None,
            aux_hidden_states=rows[:, 1:] if needs.aux_layers else None,
            positions=torch.tensor(positions, dtype=torch.int64, device=self._device),
            row_starts=row_starts,
            kv=view,
        )

    def missing(self) -> str | None:
        """Say which of the positions handed over last were not stored; None: all were."""
        step = self._step
        return None if step.view is None else step.view.missing(step.ranges)

    def release(self, req_id: str) -> None:
        """Forget a request."""
        self._next.pop(req_id, None)
        region = self._regions.pop(req_id, None)
        if region is not None:
            self._free.append(region)

    def _due(self, request: DraftRequest) -> range:
        start = self._next.get(request.req_id, 0)
        end = len(request.token_ids) - 1
        if request.num_new_tokens == request.k == 0:  # a chunk: half of what is left of the prompt
            end = start + (end - start + 1) // 2
        elif request.k == 0 and start > 0:  # it waits for the next draft
            end = start
        elif start >= end:  # the same history, or a shorter one, again
            start = 0
        return range(start, max(start, end))

    def _slots(self, req_id: str, num_positions: int) -> np.ndarray:
        if req_id not in self._regions:
            self._regions[req_id] = self._free.pop()
        first = self._regions[req_id] * self._region_size
        return np.arange(first, first + num_positions)


def _hashes(token_ids: Sequence[int], positions: range) -> list[int]:
    """Return a number for each position that depends on the tokens up to it."""
    found, value = [], 0
    for position, token_id in enumerate(token_ids[: positions.stop]):
        value = zlib.crc32(token_id.to_bytes(8, "little"), value)
        if position >= positions.start:
            found.append(value % _NUM_STATES)
    return found
