"""What the worker keeps of one request: tokens, blocks, parameters, and what its draft is made of.

Made from the messages alone, so that the worker may live in another process. Knows no other
request and no tensor of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from foresay.core.errors import EngineError
from foresay.core.messages import SamplingData
from foresay.core.worker.draft_sampler import DraftProbs


class TokenView(Sequence[int]):
    """A read-only view of a request's committed tokens, as proposers see them."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


class BlockTable:
    """A request's blocks, and the slots of its positions 0, 1, ... in one growing array."""

    def __init__(self, block_ids: Sequence[int], block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = 0
        self._slots = np.empty(0, dtype=np.int64)
        self.append(block_ids)

    def append(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end."""
        if not block_ids:
            return
        start, size = self._num_blocks * self._block_size, len(block_ids) * self._block_size
        if start + size > len(self._slots):
            grown = np.empty(max(2 * len(self._slots), start + size), dtype=np.int64)
            grown[:start] = self._slots[:start]
            self._slots = grown
        first = np.asarray(block_ids, dtype=np.int64)[:, None] * self._block_size
        self._slots[start : start + size] = (first + np.arange(self._block_size)).ravel()
        self._num_blocks += len(block_ids)

    def cut(self, num_kept: int) -> None:
        """Forget all blocks but the first ones."""
        if num_kept > self._num_blocks:
            raise EngineError(f"{num_kept} blocks to keep of the request's {self._num_blocks}")
        self._num_blocks = num_kept

    def slots(self, num_positions: int) -> np.ndarray:
        """Return the slots of the first positions; [num_positions]."""
        if num_positions > self._num_blocks * self._block_size:
            raise EngineError(
                f"{num_positions} positions do not fit the request's {self._num_blocks} blocks"
            )
        return self._slots[:num_positions]


@dataclass(slots=True)
class RequestState:
    """What the worker knows of one request."""

    token_ids: list[int]  # committed
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: BlockTable
    sampling: SamplingData
    prediction_ids: Sequence[int] = ()
    may_draft: bool = True
    max_num_tokens: int = 1 << 30
    num_new_tokens: int = 0  # committed by the last step
    # Of the draft that is to be verified: its parents, if it is a tree; what it was drawn from.
    draft_parents: DraftParents | None = None
    draft_probs: DraftProbs | None = None

    def probs_of(self, drafts: Sequence[int]) -> DraftProbs | None:
        """Return what `drafts` were drawn from, cut as they were; None: they are deterministic."""
        probs = self.draft_probs
        if probs is None or not drafts or probs.num_tokens != len(self.token_ids):
            return None
        return probs.cut(len(drafts))

    def parents_of(self, drafts: Sequence[int]) -> Sequence[int] | None:
        """Return the parents of `drafts`, cut as they were; None: they are a chain."""
        known = self.draft_parents
        if known is None or not drafts or known.num_tokens != len(self.token_ids):
            return None
        return known.parents[: len(drafts)]


@dataclass(frozen=True, slots=True)
class DraftParents:
    """The parents of a draft's nodes, and the committed length it was made for."""

    num_tokens: int
    parents: Sequence[int]
