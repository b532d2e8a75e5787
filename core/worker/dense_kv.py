"""Dense copies of running requests' keys and values, from one step to the next.

Attention in torch wants the keys of a group of requests side by side, and the pool has them by
block. To gather them anew in every layer of every step costs as much as attending to them. So a
copy is kept, and brought up to date with what has changed since: the few slots of the last step's
tokens, or all of a request that joined.

What changed is known by stamps: each write to a slot gives it a new one, and a copy remembers the
stamp of every column. A copy therefore holds just what gathering would give, whoever had the slots
before, shares them, or gets them next: of writes that are announced, by `begin` or by the cache's
own `move` and `zero_blocks`. Knows slots and owners' names; not what a request or a draft is.

An interruption may come anywhere. So what is taken for done is written last, and what is taken for
lacking first: then work is done twice, and nothing is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_NEVER = -1


class SlotStamps:
    """A number for each slot of a pool that changes whenever the slot is written to."""

    def __init__(self, num_slots: int) -> None:
        self._stamps = np.arange(num_slots, dtype=np.int64)
        self._next = num_slots

    def renew(self, slots: np.ndarray) -> None:
        """Give `slots` [n] new stamps: they were written, or will be in this step."""
        first = self._next
        self._next += len(slots)
        self._stamps[slots] = np.arange(first, self._next)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Return the stamps of `slots`, of any shape."""
        stamps: np.ndarray = self._stamps[slots]
        return stamps


@dataclass(slots=True)
class _Copy:
    number: int
    owners: list[Hashable | None]  # by row
    slots: np.ndarray  # [num_rows, row_len] the slot that each column holds
    stamps: np.ndarray  # [num_rows, row_len] and its stamp; -1: it holds none
    plan: int = _NEVER  # the last one made for it
    step: int = _NEVER  # the last one that used it


@dataclass(slots=True)
class DensePlan:
    """Where a group of a step finds its keys: B rows of a copy, K columns each."""

    number: int
    previous: int  # the plan before; a layer that followed it lacks `columns` only
    columns: torch.Tensor  # [n] of all rows and columns, those that hold something else by now
    slots: torch.Tensor  # [n] what they are to hold
    only_written: bool  # whether `slots` are those of the step's first rows, in their order
    key_slots: np.ndarray  # [B, K]
    of: _Copy

    @property
    def copy(self) -> int:
        """Which copy."""
        return self.of.number

    @property
    def num_rows(self) -> int:
        """Rows that the copy has, at least B."""
        return len(self.of.stamps)

    @property
    def row_len(self) -> int:
        """Columns that a row of it has, at least K."""
        return int(self.of.stamps.shape[1])

    def everything(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `columns` and `slots` for a layer that missed a plan: all that it should hold."""
        columns = np.flatnonzero(self.of.stamps >= 0)
        return torch.from_numpy(columns), torch.from_numpy(self.of.slots.ravel()[columns])


class DenseCopies:
    """The copies of one pool, as far as their memory goes.

    Each is made for groups of so many columns and is used by one group in a step.
    """

    def __init__(self, stamps: SlotStamps, max_columns: int, forget: Callable[[int], None]) -> None:
        """max_columns: of all copies together. `forget(number)` drops a copy's keys and values."""
        self._stamps = stamps
        self._max_columns = max_columns
        self._forget = forget
        self._copies: dict[int, _Copy] = {}
        self._num_made = 0
        self._num_plans = 0
        self._step = 0
        self._written = np.empty(0, dtype=np.int64)  # in this step

    def begin(self, written: np.ndarray) -> None:
        """Begin a step that writes to the slots `written` [n]; its groups are laid out next."""
        self._stamps.renew(written)
        self._written = written
        self._step += 1

    def arrange(self, owners: Sequence[Hashable], row_len: int) -> tuple[_Copy, list[int]] | None:
        """Choose the copy for a group, and the order of its members that leaves most in place.

        owners: whose keys they are, all different. row_len: columns that a row must have; groups
        of other lengths use other copies. Returns None where memory does not suffice.
        """
        wanted = set(owners)
        if len(wanted) < len(owners):
            raise ValueError(f"{len(owners)} members of a group have {len(wanted)} owners")
        best, most = None, (-1, False)
        for copy in self._copies.values():
            if copy.step == self._step or copy.stamps.shape[1] != row_len:
                continue
            shared = len(wanted.intersection(copy.owners)), len(copy.owners) >= len(owners)
            if shared > most:
                best, most = copy, shared
        if best is None or len(best.owners) < len(owners):
            best = self._new(len(owners), row_len, instead=best)
            if best is None:
                return None
        best.step = self._step
        order = _in_place(best.owners, owners)
        best.owners[: len(owners)] = [owners[place] for place in order]
        return best, order

    def plan(self, copy: _Copy, key_slots: np.ndarray) -> DensePlan:
        """Say what a copy lacks. `key_slots` [B, K]: members in the order that was arranged."""
        num_requests, num_keys = key_slots.shape
        stamps = self._stamps.of(key_slots)
        held = copy.stamps[:num_requests, :num_keys]
        self._num_plans += 1
        previous = copy.plan
        copy.plan = self._num_plans  # from here on, layers that do not follow retake everything
        row, column = np.nonzero(held != stamps)
        slots = key_slots[row, column]
        copy.stamps[row, column] = _NEVER
        copy.slots[row, column] = slots
        copy.stamps[row, column] = stamps[row, column]
        return DensePlan(
            number=copy.plan,
            previous=previous,
            columns=torch.from_numpy(row * copy.stamps.shape[1] + column),
            slots=torch.from_numpy(slots),
            only_written=np.array_equal(slots, self._written[: len(slots)]),
            key_slots=key_slots,
            of=copy,
        )

    def _new(self, num_rows: int, row_len: int, instead: _Copy | None) -> _Copy | None:
        """Make a copy, with room for as many rows again if there is; `instead` goes for it.

        Others go, too, if need be: the ones not used for longest. None goes for nothing.
        """
        others = (c for c in self._copies.values() if c is not instead)
        idle = sorted((c for c in others if c.step != self._step), key=lambda c: c.step)
        if instead is not None:
            idle.insert(0, instead)
        used = sum(copy.stamps.size for copy in self._copies.values())
        least = used - sum(copy.stamps.size for copy in idle)
        for rows in (2 * num_rows, num_rows):
            if least + rows * row_len <= self._max_columns:
                break
        else:
            return None
        while idle and (idle[0] is instead or used + rows * row_len > self._max_columns):
            dropped = idle.pop(0)
            used -= dropped.stamps.size
            self._drop(dropped)
        self._num_made += 1
        slots, stamps = (np.full((rows, row_len), _NEVER, dtype=np.int64) for _ in range(2))
        copy = _Copy(self._num_made, [None] * rows, slots, stamps)
        self._copies[copy.number] = copy
        return copy

    def _drop(self, copy: _Copy) -> None:
        del self._copies[copy.number]
        self._forget(copy.number)


def _in_place(rows: Sequence[Hashable | None], owners: Sequence[Hashable]) -> list[int]:
    """Return places in `owners` by row: each who has one of the first rows keeps it."""
    places = {owner: place for place, owner in enumerate(owners)}
    order = [places.pop(owner, -1) for owner in rows[: len(owners)]]
    others = iter(places.values())
    return [next(others) if place < 0 else place for place in order]
