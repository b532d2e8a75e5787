"""What the target's passes leave for one proposer, until it is handed over: features by position.

Knows requests by id, positions and rows. Each position's features are handed over once, in order.
Does not know who decides when, nor what a proposer makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.core.errors import EngineError
from foresay.core.proposer import Needs
from foresay.core.worker.capture import Capture

MOST_PENDING = 512  # positions that may gather while a request is not drafted for


@dataclass(slots=True)
class _Piece:
    """Consecutive rows of one request."""

    hidden: torch.Tensor | None  # [num_rows, hidden_size]
    aux: torch.Tensor | None  # [num_rows, num_taps, hidden_size]
    lasting: bool = False  # whether it holds no memory but its own


@dataclass(slots=True)
class _Pending:
    """A request's rows that were not handed over; and where they begin and end."""

    start: int
    end: int
    pieces: list[_Piece]


@dataclass(frozen=True, slots=True)
class Features:
    """The rows of several requests, one after another, as `DraftInput` has them."""

    hidden_states: torch.Tensor | None
    aux_hidden_states: torch.Tensor | None
    positions: torch.Tensor
    row_starts: list[int]
    ranges: list[range]  # the positions of each request


class FeatureQueue:
    """The features of one proposer, by request."""

    def __init__(
        self, needs: Needs, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._needs = needs
        self._hidden_size = hidden_size
        self._dtype, self._device = dtype, device
        self._pending: dict[str, _Pending] = {}

    def add(self, req_id: str, start: int, capture: Capture | None, rows: Sequence[int]) -> None:
        """Take the kept rows of a pass: those of positions `start`, `start + 1`, ...

        `rows`: a range, where they are neighbours; they are not copied then.
        """
        num_rows = len(rows)
        pending = self._pending.get(req_id)
        if pending is None:
            pending = self._pending[req_id] = _Pending(start, start, [])
        if start != pending.end:
            raise EngineError(
                f"request {req_id!r}: features of position {start} come after those of "
                f"{pending.end - 1}"
            )
        pending.end += num_rows
        needs = self._needs
        if needs.hidden_state or needs.aux_layers:
            assert capture is not None
            kept = slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)
            pending.pieces.append(
                _Piece(
                    capture.hidden[kept] if needs.hidden_state else None,
                    capture.streams(needs.aux_layers)[kept] if needs.aux_layers else None,
                )
            )

    def num_pending(self, req_id: str) -> int:
        """How many positions wait to be handed over."""
        pending = self._pending.get(req_id)
        return pending.end - pending.start if pending is not None else 0

    def take(self, req_ids: Sequence[str]) -> Features:
        """Hand over everything that waits for these requests, in their order."""
        hidden: list[torch.Tensor] = []
        aux: list[torch.Tensor] = []
        ranges = []
        row_starts = [0]
        for req_id in req_ids:
            pending = self._pending.get(req_id)
            ranges.append(range(pending.start, pending.end) if pending is not None else range(0))
            row_starts.append(row_starts[-1] + len(ranges[-1]))
            if pending is None:
                continue
            for piece in pending.pieces:
                if piece.hidden is not None:
                    hidden.append(piece.hidden)
                if piece.aux is not None:
                    aux.append(piece.aux)
            self._pending[req_id] = _Pending(pending.end, pending.end, [])
        needs, size = self._needs, self._hidden_size
        positions = [position for positions in ranges for position in positions]
        return Features(
            hidden_states=self._joined(hidden, (size,)) if needs.hidden_state else None,
            aux_hidden_states=(
                self._joined(aux, (len(needs.aux_layers), size)) if needs.aux_layers else None
            ),
            positions=torch.tensor(positions, dtype=torch.int64, device=self._device),
            row_starts=row_starts,
            ranges=ranges,
        )

    def settle(self) -> None:
        """Let go of the passes' tensors: what still waits is copied out of them."""
        for pending in self._pending.values():
            for piece in pending.pieces:
                if not piece.lasting:
                    piece.hidden = None if piece.hidden is None else piece.hidden.clone()
                    piece.aux = None if piece.aux is None else piece.aux.clone()
                    piece.lasting = True

    def forget(self, req_id: str) -> None:
        """Drop what waits for a request; if it comes back, its features start anew."""
        self._pending.pop(req_id, None)

    def _joined(self, pieces: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return torch.empty((0, *shape), dtype=self._dtype, device=self._device)
        return torch.cat(pieces)
