"""Calls the proposer and checks what comes back: a plugin's fault costs speed, never the text.

It knows the proposer contract and the vocabulary's size, not the model.
"""

from __future__ import annotations

import logging
import operator
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any

from foresay.core.errors import ProposerError, one_line
from foresay.core.proposer import DraftInput, DraftRequest, Proposer

logger = logging.getLogger("foresay")

MAX_FAILURES_IN_A_ROW = 3


class GuardedProposer:
    """A proposer behind the error policy: faults are mended or survived, logged once, counted.

    The kinds are "raised" (it raised, or what it returned is no `Draft`), "too_long" and "bad_id".
    After three failing calls in a row the proposer is dropped for the engine's life. In strict
    mode every fault raises `ProposerError` instead.
    """

    def __init__(
        self, proposer: Proposer, *, name: str, owner: str, vocab_size: int, strict: bool
    ) -> None:
        """`owner` names the distribution, for messages; draft ids are in range(vocab_size)."""
        self.name = name
        self.dropped = False
        self._proposer = proposer
        self._owner = owner
        self._vocab_size = vocab_size
        self._strict = strict
        self._failures_in_a_row = 0
        self._faults: Counter[str] = Counter()  # not yet taken
        self._logged: set[str] = set()
        self._release = getattr(proposer, "release", None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return one checked draft per request, maybe empty."""
        try:
            # A tuple: the list is the caller's, and a proposer might sort or empty it.
            draft = self._proposer.propose(DraftInput(tuple(requests)))
            drafts = _drafts(draft, requests)
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises must not end a request
            self._fault("raised", one_line(error), error)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                self.dropped = True
                logger.warning(
                    "proposer %r (%s) failed %d times in a row and is off for this engine",
                    self.name,
                    self._owner,
                    self._failures_in_a_row,
                )
            return [[] for _ in requests]
        self._failures_in_a_row = 0
        return [self._check(ids, request) for ids, request in zip(drafts, requests, strict=True)]

    def release(self, req_id: str) -> None:
        """Tell the proposer that a request ended or was preempted."""
        if self._release is None or self.dropped:
            return
        try:
            self._release(req_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._fault("raised", f"release: {one_line(error)}", error)

    def take_faults(self) -> dict[str, int]:
        """Return how many faults of each kind were met since this was asked last."""
        faults, self._faults = dict(self._faults), Counter()
        return faults

    def _check(self, ids: Sequence[Any], request: DraftRequest) -> list[int]:
        """Cut a draft to its k and before its first id that is no token; both are exact."""
        checked: list[int] = []
        for token_id in ids:
            if len(checked) == request.k:
                self._fault("too_long", f"more drafts than the {request.k} wanted")
                break
            index = _index(token_id)
            if index is None or not 0 <= index < self._vocab_size:
                shown = reprlib.repr(token_id)
                self._fault("bad_id", f"{shown} is no token id in range({self._vocab_size})")
                break
            checked.append(index)
        return checked

    def _fault(self, kind: str, what: str, cause: Exception | None = None) -> None:
        self._faults[kind] += 1
        message = f"proposer {self.name!r} ({self._owner}): {what}"
        if self._strict:
            raise ProposerError(message) from cause
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s; counted from now on, not logged again", message)


def _drafts(draft: Any, requests: Sequence[DraftRequest]) -> list[list[Any]]:
    """Return each request's draft, unchecked, one id longer than k at most; raise if it is none."""
    if not hasattr(draft, "token_ids"):
        raise TypeError(f"propose() returned {reprlib.repr(draft)}, not a Draft")
    if getattr(draft, "parents", None) is not None:
        raise ValueError("Draft.parents is set: drafts are chains in this version")
    token_ids = _sequence(draft.token_ids, "Draft.token_ids")
    if len(token_ids) != len(requests):
        raise ValueError(f"propose() drafted for {len(token_ids)} of {len(requests)} requests")
    return [
        list(islice(_sequence(ids, f"Draft.token_ids[{i}]"), request.k + 1))
        for i, (ids, request) in enumerate(zip(token_ids, requests, strict=True))
    ]


def _sequence(value: Any, what: str) -> Any:
    """Return `value` if it has a length and an order: a list, a tuple, an array, a tensor."""
    is_sized = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not is_sized or isinstance(value, str | bytes | Mapping | Set):
        raise TypeError(f"{what} is {reprlib.repr(value)}, not a list")
    return value


def _index(token_id: Any) -> int | None:
    """Return an integer of any kind, Python's, numpy's or torch's, as an int; None: it is none."""
    if isinstance(token_id, bool):
        return None
    try:
        return operator.index(token_id)
    except Exception:  # noqa: BLE001 - a plugin's own type
        return None
