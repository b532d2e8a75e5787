"""The ngram proposer: one suffix index per request. Knows requests and ids; no model, no text."""

from __future__ import annotations

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay_ngram import NgramConfig
from foresay_ngram.index import SuffixIndex


class NgramProposer:
    """Drafts what followed the longest suffix of the request's history the last time it occurred.

    Prompt lookup decoding (Saxena, 2023). Deterministic; state is kept per `req_id` and catches up
    with the history whenever a draft is wanted, so requests that want none cost nothing.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, batch: DraftInput) -> Draft:
        """Return `request.k` tokens for each request whose suffix occurred before, else none."""
        return Draft([self._draft(request) for request in batch.requests])

    def release(self, req_id: str) -> None:
        """Forget a request; if it comes back, its history is indexed anew."""
        self._indexes.pop(req_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        if request.k == 0:
            return []
        index = self._indexes.get(request.req_id)
        if index is None:
            index = SuffixIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._indexes[request.req_id] = index
        index.extend(request.token_ids[len(index) :])
        return index.continuation(request.k)
