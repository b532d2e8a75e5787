"""Medusa's trees: which of the heads' candidates are combined, and what is learnt of it.

Knows requests, tokens and what heads say of them; not how heads compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay_medusa.accuracies import NUM_CANDIDATES, Accuracies
from foresay_medusa.measuring import likeliest
from foresay_medusa.tree import best_tree


@dataclass(frozen=True, slots=True)
class _Candidates:
    """What the heads offered a request, the likeliest first, head by head."""

    num_tokens: int  # committed then
    token_ids: list[list[int]]
    probabilities: list[list[float]]


class MedusaTrees:
    """Drafts trees. Remembers what each head is worth, and each request's last candidates."""

    def __init__(self, accuracies: Accuracies, *, sample: bool) -> None:
        """`sample`: where tokens are sampled, the sampler says which candidates are best."""
        self._accuracies = accuracies
        self._sample = sample
        self._last: dict[str, _Candidates] = {}

    def release(self, req_id: str) -> None:
        """Forget a request."""
        self._last.pop(req_id, None)

    def learn(self, requests: Sequence[DraftRequest]) -> None:
        """See which candidates were right, of requests that have new tokens."""
        for request in requests:
            last = self._last.get(request.req_id)
            if last is None or len(request.token_ids) <= last.num_tokens:
                continue
            del self._last[request.req_id]
            end = last.num_tokens + len(last.token_ids)
            followed = request.token_ids[last.num_tokens : end]
            for head, token_id in enumerate(followed):
                ids = last.token_ids[head]
                rank = ids.index(token_id) if token_id in ids else None
                self._accuracies.see(head, last.probabilities[head], rank)
                if rank is None:  # the heads behind were about another text
                    break

    def draft(
        self,
        batch: DraftInput,
        drafting: Sequence[int],
        depths: Sequence[int],
        logits: Sequence[torch.Tensor],
        members: Sequence[Sequence[int]],
        draft_to_target: torch.Tensor | None,
    ) -> Draft:
        """Return a tree for each request of `drafting`, indices into the batch; [] for others.

        `depths` of their trees. `logits[h]` [n, draft_vocab] are what head h says for the members
        `members[h]` of `drafting`, whose trees are deeper than h.
        """
        heads = [head for head, rows in enumerate(members) for _ in rows]
        owners = [row for rows in members for row in rows]
        joined = torch.cat(list(logits))
        if self._sample:
            assert batch.sampler is not None, "a proposer that samples declares it"
            rows = [drafting[row] for row in owners]
            children = batch.sampler.children(joined, heads, rows, NUM_CANDIDATES, draft_to_target)
            log_probs, ids = children.log_probs, children.token_ids
        else:
            log_probs, ids = likeliest(joined, draft_to_target)
        offered = {
            row: _Candidates(len(batch.requests[index].token_ids), [], [])
            for row, index in enumerate(drafting)
        }
        probabilities = log_probs.exp().nan_to_num(nan=0.0, posinf=0.0)
        for row, own_ids, own in zip(owners, ids.tolist(), probabilities.tolist(), strict=True):
            offered[row].token_ids.append(own_ids)
            offered[row].probabilities.append(_of_distinct(own_ids, own))
        draft = Draft([[] for _ in batch.requests], [None for _ in batch.requests])
        assert draft.parents is not None
        for row, index in enumerate(drafting):
            request, found = batch.requests[index], offered[row]
            values = [
                self._accuracies.values(head, own) for head, own in enumerate(found.probabilities)
            ]
            nodes = best_tree(values[: depths[row]], request.k, request.min_confidence)
            draft.token_ids[index] = [found.token_ids[node.depth][node.rank] for node in nodes]
            draft.parents[index] = [node.parent for node in nodes]
            self._last[request.req_id] = found
        return draft


def _of_distinct(token_ids: Sequence[int], probabilities: list[float]) -> list[float]:
    """Return the probabilities, 0 for a token that came before: siblings must differ."""
    if len(set(token_ids)) == len(token_ids):
        return probabilities
    seen: set[int] = set()
    found = []
    for token_id, probability in zip(token_ids, probabilities, strict=True):
        found.append(0.0 if token_id in seen else probability)
        seen.add(token_id)
    return found
