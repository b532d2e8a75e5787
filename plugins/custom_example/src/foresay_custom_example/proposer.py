"""The proposer: it remembers for each request which token followed each token the last time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay_custom_example import ExampleConfig


@dataclass(slots=True)
class PairTable:
    """What followed each token of one text the last time, and how often in a row it did."""

    followers: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_read: int = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in what the text has grown by."""
        for i in range(max(1, self.num_read), len(token_ids)):
            token, follower = token_ids[i - 1], token_ids[i]
            known, count = self.followers.get(token, (follower, 0))
            self.followers[token] = (follower, count + 1 if known == follower else 1)
        self.num_read = len(token_ids)


class ExampleProposer:
    """Drafts by going from the last token to what followed it, from there on to the next."""

    def __init__(self, config: ExampleConfig) -> None:
        self._min_count = config.min_count
        self._tables: dict[str, PairTable] = {}

    def propose(self, batch: DraftInput) -> Draft:
        """Return one list of draft tokens per request, in the requests' order."""
        return Draft([self._draft(request) for request in batch.requests])

    def release(self, req_id: str) -> None:
        """Forget a request: it ended, or it was preempted and will come again as a whole."""
        self._tables.pop(req_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        table = self._tables.setdefault(request.req_id, PairTable())
        table.read(request.token_ids)
        draft: list[int] = []
        token = request.token_ids[-1]
        while len(draft) < request.k:
            token, count = table.followers.get(token, (token, 0))
            if count < self._min_count:
                break
            draft.append(token)
        return draft
