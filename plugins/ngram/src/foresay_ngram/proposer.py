"""The ngram proposer: indexes of each request's tokens. Knows requests and ids, no model."""

from __future__ import annotations

from dataclasses import dataclass

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay_ngram import NgramConfig
from foresay_ngram.alignment import Alignment
from foresay_ngram.index import SuffixIndex


@dataclass(slots=True)
class _State:
    """What is known of one request's tokens."""

    index: SuffixIndex  # of prompt and output
    alignment: Alignment | None  # of the output with the prediction, if there is one

    def catch_up(self, request: DraftRequest) -> None:
        """Take in the tokens that are new."""
        if self.alignment is None:
            self.index.extend(request.token_ids[len(self.index) :])
            return
        self.index.extend(request.token_ids[len(self.index) : request.num_prompt_tokens])
        for token in request.token_ids[len(self.index) :]:
            self.alignment.append(token, self.index.next_token)
            self.index.append(token)


class NgramProposer:
    """Drafts from the output that the caller expects, else from the request's own history.

    From the history: what followed its longest suffix the last time it occurred (prompt lookup
    decoding; Saxena, 2023). From a prediction: what follows the place that the output has reached
    in it. Deterministic, a function of the token ids alone; state is kept per `req_id` and catches
    up with the history whenever a draft is wanted, so requests that want none cost nothing.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._states: dict[str, _State] = {}

    def propose(self, batch: DraftInput) -> Draft:
        """Return up to `request.k` tokens for each request, none where nothing matches."""
        return Draft([self._draft(request) for request in batch.requests])

    def release(self, req_id: str) -> None:
        """Forget a request; if it comes back, its history is indexed anew."""
        self._states.pop(req_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        if request.k == 0:
            return []
        state = self._states.get(request.req_id)
        if state is None:
            state = self._states[request.req_id] = self._new_state(request)
        state.catch_up(request)
        index, alignment = state.index, state.alignment
        if alignment is not None and alignment.prefers(index.match_length):
            draft = alignment.continuation(request.k)
            if draft:
                return draft
        return index.continuation(request.k)

    def _new_state(self, request: DraftRequest) -> _State:
        config = self._config
        prediction_ids = request.prediction_ids
        return _State(
            SuffixIndex(config.prompt_lookup_min, config.prompt_lookup_max),
            Alignment(prediction_ids, config.prompt_lookup_max) if len(prediction_ids) else None,
        )
