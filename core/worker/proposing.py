"""Calls the proposer and checks what comes back: a plugin's fault costs speed, never the text.

It knows the proposer contract and the vocabulary's size, not the model.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from foresay.core.errors import ProposerError
from foresay.core.proposer import DraftInput, DraftRequest, Proposer

logger = logging.getLogger("foresay")

MAX_FAILURES_IN_A_ROW = 3


class GuardedProposer:
    """A proposer behind the error policy: faults are mended or survived, logged once, counted.

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
        self._logged: set[str] = set()
        self._release = getattr(proposer, "release", None)

    def propose(self, requests: Sequence[DraftRequest]) -> tuple[list[list[int]], Counter[str]]:
        """Return one checked draft per request (maybe empty) and the faults met, by kind."""
        faults: Counter[str] = Counter()
        try:
            draft = self._proposer.propose(DraftInput(requests))
            lists = self._lists(draft, len(requests))
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises must not end a request
            self._fault("raised", f"{type(error).__name__}: {error}", faults, cause=error)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                self.dropped = True
                logger.warning(
                    "proposer %r (%s) failed %d times in a row and is off for this engine",
                    self.name,
                    self._owner,
                    self._failures_in_a_row,
                )
            return [[] for _ in requests], faults
        self._failures_in_a_row = 0
        checked = [
            self._check(ids, request, faults) for ids, request in zip(lists, requests, strict=True)
        ]
        return checked, faults

    def release(self, req_id: str) -> None:
        """Tell the proposer that a request ended or was preempted."""
        if self._release is None or self.dropped:
            return
        try:
            self._release(req_id)
        except Exception as error:  # noqa: BLE001 - as above
            self._fault("raised", f"release: {type(error).__name__}: {error}", Counter(), error)

    def _lists(self, draft: Any, num_requests: int) -> Sequence[Any]:
        token_ids = getattr(draft, "token_ids", None)
        if not isinstance(token_ids, (list, tuple)):
            raise TypeError(f"propose() returned {draft!r}, not a Draft with lists of token ids")
        if getattr(draft, "parents", None) is not None:
            raise ValueError("Draft.parents is set: drafts are chains in this version")
        if len(token_ids) != num_requests:
            raise ValueError(f"propose() drafted for {len(token_ids)} of {num_requests} requests")
        return token_ids

    def _check(self, ids: Any, request: DraftRequest, faults: Counter[str]) -> list[int]:
        """Cut a draft to its k and before its first id that is no token; both are exact."""
        checked: list[int] = []
        for token_id in ids:
            if len(checked) == request.k:
                self._fault("too_long", f"{len(ids)} drafts, {request.k} wanted", faults)
                break
            try:
                index = operator.index(token_id)
            except TypeError:
                index = -1
            if not 0 <= index < self._vocab_size:
                self._fault("bad_id", f"{token_id!r} not in range({self._vocab_size})", faults)
                break
            checked.append(index)
        return checked

    def _fault(
        self, kind: str, what: str, faults: Counter[str], cause: Exception | None = None
    ) -> None:
        faults[kind] += 1
        message = f"proposer {self.name!r} ({self._owner}): {what}"
        if self._strict:
            raise ProposerError(message) from cause
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s; counted from now on, not logged again", message)
