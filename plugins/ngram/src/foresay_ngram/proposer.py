"""The ngram proposer: indexes of each request's tokens. Knows requests and ids, no model.

Chains of large batches are looked up on a GPU, if there is one (`triton_lookup`, which is imported
only then). They are the same chains.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foresay.core.errors import ConfigError, one_line
from foresay.core.proposer import Draft, DraftInput, DraftRequest, TargetView
from foresay.core.worker.draft_trie import NOTHING, Continuation, Merged, merge
from foresay_ngram import NgramConfig
from foresay_ngram.alignment import Alignment
from foresay_ngram.index import SuffixIndex
from foresay_ngram.odds import Odds

if TYPE_CHECKING:
    from foresay_ngram.triton_lookup import HistoryLookup

logger = logging.getLogger("foresay")

_MOST_PLACES = 16  # whose continuations are merged
_RECENCY = 0.74  # place number n of them counts (n + 1) ** -0.74 of what the first does
_WEIGHTS = [(number + 1) ** -_RECENCY for number in range(_MOST_PLACES)]
# So much of the chain that is drafted without trees is in a tree with more nodes than that.
_CHAIN_LENGTH = 5
# Requests from which on "auto" takes the kernels. The index takes 1.4 ms for 256 requests, 5.5 us
# for each. By the kernels a step takes 0.3 of that on the host (measured), and 0.2 ms of transfers,
# launches and waiting (assumed): even near 50. Twice as many and more, until a GPU measures it.
_LEAST_ON_DEVICE = 128


@dataclass(slots=True)
class _State:
    """What is known of one request's tokens."""

    index: SuffixIndex  # of prompt and output
    alignment: Alignment | None  # of the output with the prediction, if there is one
    odds: Odds | None  # of the index's matches, for trees

    def catch_up(self, request: DraftRequest) -> None:
        """Take in the tokens that are new."""
        index, alignment, odds = self.index, self.alignment, self.odds
        num_known = len(index)
        tokens = request.token_ids[num_known:]
        if alignment is None and odds is None:
            index.extend(tokens)
            return
        for place, token in enumerate(tokens, num_known):
            if odds is not None and index.match_length:
                odds.see(index.match_length, index.next_token == token)
            if alignment is not None and place >= request.num_prompt_tokens:
                alignment.append(token, index.next_token)
            index.append(token)


class NgramProposer:
    """Drafts from the output that the caller expects, else from the request's own history.

    From the history: what followed its longest suffix the last time it occurred (prompt lookup
    decoding; Saxena, 2023); a tree has what followed in other places as well, and after shorter
    suffixes. From a prediction: what follows the place that the output has reached in it.
    Deterministic, a function of the token ids alone; state is kept per `req_id` and catches
    up with the history whenever a draft is wanted, so requests that want none cost nothing.

    With `lookup="auto"` a request that was looked up on the GPU once stays there: its history would
    have to be indexed from the beginning, which takes as long as hundreds of steps there.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._states: dict[str, _State] = {}
        self._device_lookup: HistoryLookup | None = None
        self._longest_history = 0  # that is looked up there

    def load(self, target: TargetView) -> None:
        """Have the kernels ready, if the settings and the target's device ask for them.

        Raises `ConfigError` if the settings do and they can't be used.
        """
        config, device = self._config, target.device
        must = config.lookup == "triton"
        if not must and (config.lookup == "index" or config.tree or device.type != "cuda"):
            return
        try:
            module = importlib.import_module("foresay_ngram.triton_lookup")
            self._longest_history = module.LONGEST_HISTORY
            self._device_lookup = module.tried_lookup(
                device, config.prompt_lookup_min, config.prompt_lookup_max
            )
        except Exception as error:  # whatever a compiler or a driver may raise
            if must:
                raise ConfigError(
                    f"ngram: lookup='triton' cannot be had on {str(device)!r}: {one_line(error)}; "
                    "lookup='auto' takes it where it can be had, else the index"
                ) from error
            _warn(error)

    def propose(self, batch: DraftInput) -> Draft:
        """Return up to `request.k` tokens for each request, none where nothing matches."""
        if not self._config.tree:
            return Draft(self._chains(batch.requests))
        trees = [self._tree(request) for request in batch.requests]
        return Draft([tree.token_ids for tree in trees], [tree.parents for tree in trees])

    def release(self, req_id: str) -> None:
        """Forget a request; if it comes back, its history is indexed anew."""
        self._states.pop(req_id, None)
        if self._device_lookup is not None:
            self._device_lookup.release(req_id)

    def _chains(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        found = self._chains_on_device(requests)
        return [
            self._chain(request) if chain is None else chain
            for request, chain in zip(requests, found, strict=True)
        ]

    def _chains_on_device(self, requests: Sequence[DraftRequest]) -> list[list[int] | None]:
        """Return the drafts of the requests that are looked up there; None for the others."""
        found: list[list[int] | None] = [None] * len(requests)
        lookup, must = self._device_lookup, self._config.lookup == "triton"
        if lookup is None:
            return found
        served = [
            i
            for i, request in enumerate(requests)
            if request.k
            and not len(request.prediction_ids)
            and len(request.token_ids) <= self._longest_history
        ]
        if len(served) < _LEAST_ON_DEVICE and not must:
            served = [i for i in served if requests[i].req_id in lookup]
        if not served:
            return found
        try:
            drafts = lookup.drafts([requests[i] for i in served])
        except Exception as error:  # want of memory, say
            if must:
                raise
            _warn(error)
            self._device_lookup = None
            return found
        for i, draft in zip(served, drafts, strict=True):
            found[i] = draft
            self._states.pop(requests[i].req_id, None)
        return found

    def _chain(self, request: DraftRequest) -> list[int]:
        if request.k == 0:
            return []
        return _continuation(self._state(request), request.k)

    def _tree(self, request: DraftRequest) -> Merged:
        k = request.k
        if k == 0:
            return NOTHING
        depth = min(k, request.max_depth, self._config.max_depth or k)
        state = self._state(request)
        assert state.odds is not None
        continuations = [
            Continuation(state.index.tokens, end, length, weight, grows=True)
            for (end, length), weight in zip(
                state.index.places(_MOST_PLACES), _WEIGHTS, strict=False
            )
        ]
        alignment = state.alignment
        if alignment is not None:
            predicted = alignment.continuation(depth)
            # A guess is not worth nothing: who wrote the prediction expects it.
            continuations.insert(0, Continuation(predicted, 0, max(1, alignment.match_length)))
        return merge(
            continuations,
            state.odds.values,
            k,
            max_depth=depth,
            min_probability=request.min_confidence,
            chain=_continuation(state, _CHAIN_LENGTH) if k > _CHAIN_LENGTH else (),
        )

    def _state(self, request: DraftRequest) -> _State:
        """Return what is known of a request, its newest tokens included."""
        state = self._states.get(request.req_id)
        if state is None:
            state = self._states[request.req_id] = self._new_state(request)
        state.catch_up(request)
        return state

    def _new_state(self, request: DraftRequest) -> _State:
        config = self._config
        prediction_ids = request.prediction_ids
        return _State(
            SuffixIndex(
                config.prompt_lookup_min, config.prompt_lookup_max, keeps_places=config.tree
            ),
            Alignment(prediction_ids, config.prompt_lookup_max) if len(prediction_ids) else None,
            Odds() if config.tree else None,
        )


def _continuation(state: _State, k: int) -> list[int]:
    """Return the one continuation that is drafted without trees."""
    index, alignment = state.index, state.alignment
    if alignment is not None and alignment.prefers(index.match_length):
        draft = alignment.continuation(k)
        if draft:
            return draft
    return index.continuation(k)


def _warn(error: Exception) -> None:
    logger.warning("ngram drafts from its index, not by the Triton kernels: %s", one_line(error))
