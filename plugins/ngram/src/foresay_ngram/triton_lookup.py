"""The host side of the n-gram search on a device: histories there, transfers, launches.

Finds the chains that the index finds, token for token. Knows requests and token ids; predictions,
trees, and which requests had better be left to the index are `proposer`'s. Needs triton, and a GPU
or Triton's interpreter.

A step is one transfer there, of the tokens that are new; three launches; and one transfer back, of
the drafts and their lengths. A history is searched by several programs, however many others are in
the batch, so that a long one holds up nobody.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton

from foresay.core.proposer import DraftRequest
from foresay_ngram import triton_kernels as kernels
from foresay_ngram.index import SuffixIndex

BLOCK = 1024  # tokens that a program takes at a time
_DRAFT_BLOCK = 16
_NUM_WARPS = 4
_PROGRAMS_PER_PROCESSOR = 16  # of 4 warps: all that a processor holds
_PROGRAMS_WITHOUT_GPU = 8
_FEWEST_SPLITS = 8  # of a history that has so many blocks, in however large a batch
_FEWEST_ROWS = 64
_SHORTEST_WIDTH = 1024
_WASTE = 4  # so many times what is needed is given back


LONGEST_HISTORY = 32768  # tokens; a thousand rows of it are 128 MiB


@dataclass(slots=True)
class _Held:
    """A request's history on the device."""

    row: int
    num_tokens: int = 0


@dataclass(slots=True)
class _Store:
    """All histories. What moves them makes another one: an interruption leaves one of the two."""

    tokens: torch.Tensor  # [rows, width] int32
    held: dict[str, _Held]
    free: list[int]  # rows; the last is taken first. One may get lost, and comes back with a move.


class HistoryLookup:
    """Histories on a device, and the search in them.

    A history is kept per `req_id` from the first step that asks for a draft until `release`, and
    catches up whenever a draft is wanted. Memory: 4 bytes a token, for as many histories as are
    held, all as long as the longest, both rounded up to a power of two; and of the new and the old
    while it grows. None may be longer than `LONGEST_HISTORY`.
    """

    def __init__(
        self, device: torch.device, shortest: int, longest: int, *, block: int = BLOCK
    ) -> None:
        """Suffixes of `shortest` to `longest` tokens count. `block`: a power of two."""
        if device.type == "cpu" and isinstance(kernels.search_kernel, triton.runtime.JITFunction):
            raise ValueError(
                "the Triton kernels need a GPU, and the target is on the CPU; without one they run "
                "in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
            )
        self._device = device
        self._shortest = shortest
        self._longest = longest
        self._block = block
        self._num_programs = _programs_of(device)
        self._store = self._new_store(_FEWEST_ROWS, _SHORTEST_WIDTH)
        self._has_released = False  # since the size was looked at

    def __contains__(self, req_id: str) -> bool:
        """Whether a request's history is held."""
        return req_id in self._store.held

    def release(self, req_id: str) -> None:
        """Forget a request."""
        held = self._store.held.pop(req_id, None)
        if held is not None:
            self._has_released = True
            self._store.free.append(held.row)

    def drafts(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return the `request.k` tokens that followed each history's match; none if there is none.

        Predictions are not looked at. Where this raises, the same may be asked again.
        """
        sizes = [len(request.token_ids) for request in requests]
        self._make_room(sum(request.req_id not in self for request in requests), max(sizes))
        held_by_id = self._store.held
        histories = [held_by_id.get(request.req_id) or self._add(request) for request in requests]
        new_tokens: list[int] = []
        table = []
        most_new = 0
        for request, held, size in zip(requests, histories, sizes, strict=True):
            num_known = held.num_tokens
            table.append((held.row, num_known, size, len(new_tokens), request.k))
            new_tokens += request.token_ids[num_known:]
            most_new = max(most_new, size - num_known)
        out = self._launch(table, new_tokens, most_new, max(sizes))
        for held, size in zip(histories, sizes, strict=True):
            held.num_tokens = size
        return [row[1 : 1 + row[0]] for row in out.cpu().numpy().view(np.uint32).tolist()]

    def _launch(
        self,
        table: Sequence[tuple[int, ...]],  # the kernels' fields of each request
        new_tokens: Sequence[int],
        most_new: int,  # of a request
        longest_history: int,
    ) -> torch.Tensor:
        """Send what is new, search, and return the kernels' output [num_requests, 1 + most k]."""
        device, history, block = self._device, self._store.tokens, self._block
        num_requests, width = len(table), history.shape[1]
        fields = kernels.NUM_FIELDS.value
        packed = np.zeros(num_requests * fields + len(new_tokens), dtype=np.uint32)
        by_request = packed[: num_requests * fields].reshape(num_requests, fields)
        by_request[:, : len(table[0])] = table
        packed[num_requests * fields :] = new_tokens
        # One transfer, which nothing waits for. The kernels compare ids as int32: the same bits.
        sent = torch.from_numpy(packed.view(np.int32)).to(device, non_blocking=True)
        num_splits = min(
            -(-longest_history // block),
            max(self._num_programs // num_requests, _FEWEST_SPLITS),
            kernels.MAX_SPLITS.value,
        )
        most_wanted = max(row[kernels.NUM_WANTED.value] for row in table)
        best = torch.empty(num_requests, num_splits, dtype=torch.int64, device=device)
        out = torch.empty(num_requests, 1 + most_wanted, dtype=torch.int32, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if most_new:
                kernels.append_kernel[(num_requests, -(-most_new // block))](
                    sent, sent[num_requests * fields :], history, width, block=block,
                    num_warps=_NUM_WARPS,
                )  # fmt: skip
            kernels.search_kernel[(num_requests, num_splits)](
                sent, history, best, width, num_splits, self._shortest, self._longest, block=block,
                num_warps=_NUM_WARPS,
            )  # fmt: skip
            kernels.draft_kernel[(num_requests,)](
                sent, history, best, out, width, num_splits, out.shape[1], block=_DRAFT_BLOCK,
                num_warps=1,
            )  # fmt: skip
        return out

    def _add(self, request: DraftRequest) -> _Held:
        row = self._store.free.pop()
        held = self._store.held[request.req_id] = _Held(row)
        return held

    def _make_room(self, num_more: int, num_tokens: int) -> None:
        """Have rows for `num_more` histories of up to `num_tokens`; shrink if most is empty."""
        store = self._store
        height, width = store.tokens.shape
        fits = num_more <= len(store.free) and num_tokens <= width
        if fits and not self._has_released:
            return
        num_tokens = max([num_tokens, *(history.num_tokens for history in store.held.values())])
        rows = max(triton.next_power_of_2(len(store.held) + num_more), _FEWEST_ROWS)
        columns = max(triton.next_power_of_2(num_tokens), _SHORTEST_WIDTH)
        if not fits or _WASTE * rows * columns <= height * width:
            moved = self._new_store(rows, columns)
            used = torch.tensor([history.row for history in store.held.values()], dtype=torch.int64)
            kept = min(width, columns)
            moved.tokens[: len(used), :kept] = store.tokens[used.to(self._device), :kept]
            for req_id, history in store.held.items():
                moved.held[req_id] = _Held(moved.free.pop(), history.num_tokens)
            self._store = moved
        self._has_released = False

    def _new_store(self, rows: int, columns: int) -> _Store:
        tokens = torch.empty(rows, columns, dtype=torch.int32, device=self._device)
        return _Store(tokens, {}, list(range(rows))[::-1])


def tried_lookup(device: torch.device, shortest: int, longest: int) -> HistoryLookup:
    """Return a lookup whose kernels were compiled and tried here; raise what they fail with."""
    _try(device, shortest, longest)
    return HistoryLookup(device, shortest, longest)


@cache
def _try(device: torch.device, shortest: int, longest: int) -> None:
    """Compare the kernels with the index on a few texts, each arriving in two parts."""
    rng = random.Random(0)
    texts = [[rng.randrange(3) for _ in range(size)] for size in (1, longest + 1, 3 * BLOCK)]
    texts += [[7] * 50, list(range(50)), [i % 61 for i in range(2 * BLOCK)]]
    lookup = HistoryLookup(device, shortest, longest)
    indexes = [SuffixIndex(shortest, longest) for _ in texts]
    for part in (0.5, 1.0):
        known = [text[: max(int(part * len(text)), 1)] for text in texts]
        requests = [DraftRequest(str(i), ids, 1, 1 + 9 * i) for i, ids in enumerate(known)]
        for index, ids in zip(indexes, known, strict=True):
            index.extend(ids[len(index) :])
        expected = [index.continuation(r.k) for index, r in zip(indexes, requests, strict=True)]
        if lookup.drafts(requests) != expected:
            raise RuntimeError("the kernels find other drafts than the index")


@cache
def _programs_of(device: torch.device) -> int:
    """Return how many programs keep a device busy."""
    if device.type != "cuda":
        return _PROGRAMS_WITHOUT_GPU
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * int(processors)
