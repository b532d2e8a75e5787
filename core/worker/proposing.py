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
from foresay.core.proposer import Draft, DraftInput, DraftRequest, Proposer
from foresay.core.worker.checked_tree import checked_tree
from foresay.core.worker.draft_sampler import StepSampler
from foresay.core.worker.draft_tree import is_chain
from foresay.core.worker.drafter_kv import StepKV

logger = logging.getLogger("foresay")

MAX_FAILURES_IN_A_ROW = 3


class GuardedProposer:
    """A proposer behind the error policy: faults are mended or survived, logged once, counted.

    The kinds are "raised" (it raised, or what it returned is no `Draft`), "too_long", "bad_id" and
    "not_as_drawn" (it returned something else than it drew through the sampler) and
    "not_stored" (it left positions out of its KV layers); of trees also those of `checked_tree`.
    After three failing calls in a row the proposer is dropped for the engine's life; at once, if it
    has hidden states or KV layers to keep up with, and when something was not stored. That is
    counted too, as "dropped". In strict mode every fault raises `ProposerError` instead.

    What a request drew through the sampler is its draft, whatever is returned, and if `propose`
    raises afterwards: had it been dropped for what it is, the text's distribution would change.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        name: str,
        owner: str,
        vocab_size: int,
        strict: bool,
        max_failures: int = MAX_FAILURES_IN_A_ROW,
        may_branch: bool = False,
    ) -> None:
        """`owner` names the distribution, for messages; draft ids are in range(vocab_size).

        `max_failures`: so many failing calls in a row drop it. `may_branch`: it declared
        `Needs.tree`.
        """
        self.name = name
        self.dropped = False
        self._proposer = proposer
        self._owner = owner
        self._vocab_size = vocab_size
        self._strict = strict
        self._max_failures = max_failures
        self._may_branch = may_branch
        self._failures_in_a_row = 0
        self._faults: Counter[str] = Counter()  # not yet taken
        self._logged: set[str] = set()
        self._release = getattr(proposer, "release", None)

    def propose(self, batch: DraftInput) -> Draft:
        """Return one checked draft per request, maybe empty; chains have no parents."""
        requests, sampler = batch.requests, batch.sampler
        assert sampler is None or isinstance(sampler, StepSampler)
        try:
            drafts = _drafts(self._proposer.propose(batch), requests, self._may_branch)
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises must not end a request
            self._fault("raised", one_line(error), error)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self._max_failures:
                self._drop(f"failed {self._failures_in_a_row} times in a row")
            return Draft([(sampler and sampler.drawn(row)) or [] for row in range(len(requests))])
        finally:
            if sampler is not None:
                self._faults.update(sampler.faults)
        self._failures_in_a_row = 0
        checked: list[list[int]] = []
        trees: list[list[int] | None] = []
        for row, ((ids, parents), request) in enumerate(zip(drafts, requests, strict=True)):
            drawn = None if sampler is None else sampler.drawn(row)
            if drawn is None and parents is not None:
                ids, parents = self._check_tree(ids, parents, request)
                checked.append(ids)
                trees.append(None if is_chain(parents) else parents)
                continue
            trees.append(None)
            if drawn is None:
                checked.append(self._check(ids, request))
                continue
            if sampler is not None and not sampler.ended(row) and [*map(_index, ids)] != drawn:
                self._fault(
                    "not_as_drawn",
                    f"it returned {reprlib.repr(ids)} for a request that drew {drawn}; what was "
                    "drawn is the draft",
                )
            checked.append(drawn)
        return Draft(checked, trees if any(trees) else None)

    def check_stored(self, view: StepKV, ranges: Sequence[range]) -> None:
        """Make sure that the positions handed over were stored in every KV layer of its own."""
        missing = view.missing(ranges)
        if missing is not None:
            self._fault("not_stored", missing)
            self._drop("left a hole in its KV cache")

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
            if len(checked) == request.max_depth < request.k:
                break  # more would be of no use
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

    def _check_tree(
        self, ids: Sequence[Any], parents: Sequence[Any], request: DraftRequest
    ) -> tuple[list[int], list[int]]:
        return checked_tree(
            ids,
            parents,
            k=request.k,
            max_depth=request.max_depth,
            vocab_size=self._vocab_size,
            as_index=_index,
            fault=self._fault,
        )

    def _drop(self, why: str) -> None:
        self.dropped = True
        self._faults["dropped"] += 1
        logger.warning(
            "proposer %r (%s) %s and is off for this engine", self.name, self._owner, why
        )

    def _fault(self, kind: str, what: str, cause: Exception | None = None) -> None:
        self._faults[kind] += 1
        message = f"proposer {self.name!r} ({self._owner}): {what}"
        if self._strict:
            raise ProposerError(message) from cause
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s; counted from now on, not logged again", message)


def _drafts(
    draft: Any, requests: Sequence[DraftRequest], may_branch: bool
) -> list[tuple[list[Any], list[Any] | None]]:
    """Return each request's draft, unchecked, one id longer than k at most; raise if it is none.

    With each the parents of its tokens; None: it is a chain.
    """
    if not hasattr(draft, "token_ids"):
        raise TypeError(f"propose() returned {reprlib.repr(draft)}, not a Draft")
    token_ids = _sequence(draft.token_ids, "Draft.token_ids")
    if len(token_ids) != len(requests):
        raise ValueError(f"propose() drafted for {len(token_ids)} of {len(requests)} requests")
    trees: Sequence[Any] = [None] * len(requests)
    if getattr(draft, "parents", None) is not None:
        trees = _sequence(draft.parents, "Draft.parents")
        if not may_branch and any(tree is not None for tree in trees):
            raise ValueError(
                "Draft.parents is set, and Needs.tree was not declared: set "
                "`needs = Needs(tree=True)` on the class, or have the spec's `needs` return it"
            )
        if len(trees) != len(requests):
            raise ValueError(f"Draft.parents has {len(trees)} items for {len(requests)} requests")
    found: list[tuple[list[Any], list[Any] | None]] = []
    for i, (ids, tree, request) in enumerate(zip(token_ids, trees, requests, strict=True)):
        ids = _sequence(ids, f"Draft.token_ids[{i}]")
        first = list(islice(ids, request.k + 1))
        if tree is None:
            found.append((first, None))
            continue
        tree = _sequence(tree, f"Draft.parents[{i}]")
        if len(tree) != len(ids):
            raise ValueError(f"Draft.parents[{i}] has {len(tree)} items for {len(ids)} tokens")
        above = list(islice(tree, request.k + 1))
        if len(above) != len(first):
            raise ValueError(f"Draft.parents[{i}] ends after {len(above)} items")
        found.append((first, above))
    return found


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
