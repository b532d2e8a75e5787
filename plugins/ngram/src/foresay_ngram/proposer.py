"""The ngram proposer: indexes of each request's tokens. Knows requests and ids, no model."""

from __future__ import annotations

from dataclasses import dataclass

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay.core.worker.draft_trie import NOTHING, Continuation, Merged, merge
from foresay_ngram import NgramConfig
from foresay_ngram.alignment import Alignment
from foresay_ngram.index import SuffixIndex
from foresay_ngram.odds import Odds

_MOST_PLACES = 16  # whose continuations are merged
_RECENCY = 0.74  # place number n of them counts (n + 1) ** -0.74 of what the first does
_WEIGHTS = [(number + 1) ** -_RECENCY for number in range(_MOST_PLACES)]
# So much of the chain that is drafted without trees is in a tree with more nodes than that.
_CHAIN_LENGTH = 5


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
    """

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._states: dict[str, _State] = {}

    def propose(self, batch: DraftInput) -> Draft:
        """Return up to `request.k` tokens for each request, none where nothing matches."""
        if not self._config.tree:
            return Draft([self._chain(request) for request in batch.requests])
        trees = [self._tree(request) for request in batch.requests]
        return Draft([tree.token_ids for tree in trees], [tree.parents for tree in trees])

    def release(self, req_id: str) -> None:
        """Forget a request; if it comes back, its history is indexed anew."""
        self._states.pop(req_id, None)

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
