"""Where the rows of a pass lie, on the host: what attention's layouts are made of.

Knows positions, slots and trees by request; neither tensors of keys nor a device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from foresay.core.worker.attention import TreeLayout


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rows, request after request; see `AttentionMetadata.build`.

    `slots` may go on behind a request's last row: what lies there is not read.
    """

    positions: Sequence[np.ndarray]
    slots: Sequence[np.ndarray]
    slot_mapping: Sequence[np.ndarray]
    trees: Sequence[TreeLayout | None]
    # What equals this in another pass has the very same `slots`; None: not known.
    slots_key: Hashable | None = None

    @property
    def num_rows(self) -> int:
        """Of all requests."""
        return sum(map(len, self.positions))
