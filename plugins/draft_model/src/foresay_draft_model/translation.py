"""Drafting with another tokenizer: the same texts in the drafter's tokens, at its own positions.

Token by token: what both tokenizers have stays one token, anything else is spelt out in several of
the drafter's. So a text grows at its end only, like the target's, and a draft that is accepted is
in the drafter's text what was drafted. But a position of the one is no position of the other, which
is why the KV cannot lie in the core's blocks; it has a pool of a fixed size here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay.core.worker.drafter_kv import PrivateKV, StepKV
from foresay.core.worker.drafting import draft
from foresay.core.worker.target import TargetModel
from foresay_draft_model.drafter import LoopModel
from foresay_draft_model.vocabulary import Intersection

_MOST_ROWS = 2048  # in one pass of the drafter: a long text is computed piece by piece


@dataclass(slots=True)
class _Text:
    """A request's text in the drafter's tokens."""

    token_ids: list[int]
    num_read: int = 0  # tokens of the target's that are in it
    num_stored: int = 0  # positions whose KV is that of these tokens


class Translator:
    """Drafts for a target with another tokenizer."""

    def __init__(
        self,
        model: TargetModel,
        intersection: Intersection,
        *,
        target_vocab_size: int,
        kv_tokens: int,
        first_id: int | None,
    ) -> None:
        """`kv_tokens`: the KV pool's size. `first_id` stands before every text, if it is given."""
        self._model, self._intersection, self._first_id = model, intersection, first_id
        self._texts: dict[str, _Text] = {}
        self._kv = PrivateKV(model.kv_layers, kv_tokens, model.dtype, model.device)
        # The most tokens of a text and its draft together.
        self._limit = min(self._kv.num_free_tokens, model.max_model_len or kv_tokens)
        model.reserve(self._limit)
        # [num_shared] int64: the columns of logits that count, and the target's ids of them.
        columns, self._draft_to_target = (
            torch.tensor(ids, device=model.device)
            for ids in (intersection.draft_ids, intersection.target_ids)
        )
        to_draft = torch.zeros(target_vocab_size, dtype=torch.int64)
        for target_id in intersection.target_ids:  # no other is ever drafted
            to_draft[target_id] = intersection.in_draft_tokens(target_id)[0]
        self._loop_model = LoopModel(
            model, to_draft=to_draft.to(model.device), columns=columns, starts_translated=True
        )

    @torch.inference_mode()
    def propose(self, batch: DraftInput, *, sample: bool) -> Draft:
        """Draft as `Proposer.propose`; nothing for a text that is too long, or finds no room."""
        requests = [self._translated(request) for request in batch.requests]
        drafting = [request for request in requests if request.k]
        if not drafting:
            return Draft([[] for _ in requests])
        view = self._kv.view(requests)
        most_rows = max(1, _MOST_ROWS // len(drafting))
        row_starts = [0]
        positions: list[int] = []
        for index, request in enumerate(requests):
            end = len(request.token_ids) - 1 if request.k else 0  # the loop adds the last one
            if request.k:
                self._compute(view, index, request, end - most_rows)
            start = min(self._texts[request.req_id].num_stored, end)
            row_starts.append(row_starts[-1] + end - start)
            positions += range(start, end)
        drafts = draft(
            replace(
                batch,
                requests=requests,
                positions=torch.tensor(positions, dtype=torch.int64, device=self._model.device),
                row_starts=row_starts,
                kv=view,
            ),
            self._loop_model,
            hidden=None,
            shifted=False,
            sample=sample,
            draft_to_target=self._draft_to_target,
            last_rows_only=True,
        )
        for request in drafting:
            self._texts[request.req_id].num_stored = len(request.token_ids)
        return drafts

    def release(self, req_id: str) -> None:
        """Forget a request."""
        self._texts.pop(req_id, None)
        self._kv.release(req_id)

    def _translated(self, request: DraftRequest) -> DraftRequest:
        """Return a request in the drafter's tokens; k is 0 if it can't be drafted for."""
        text = self._texts.get(request.req_id)
        if text is None or text.num_read > len(request.token_ids):
            text = self._texts[request.req_id] = _Text([])
        new_ids: Sequence[int] = request.token_ids[text.num_read :]
        for target_id in new_ids:
            text.token_ids += self._intersection.in_draft_tokens(target_id)
        first = [] if self._first_id is None else [self._first_id]
        if not text.num_read and text.token_ids[: len(first)] != first:
            text.token_ids[:0] = first
        text.num_read += len(new_ids)
        num_tokens = len(text.token_ids)
        k = min(request.k, self._limit - num_tokens) if num_tokens else 0
        if k <= 0 or not self._kv.hold(request.req_id, num_tokens + k - 1):
            k = 0
        return replace(request, token_ids=text.token_ids, k=k)

    def _compute(self, view: StepKV, index: int, request: DraftRequest, end: int) -> None:
        """Store a text's positions up to `end`, so many rows at a time."""
        text = self._texts[request.req_id]
        while text.num_stored < end:
            span = range(text.num_stored, min(text.num_stored + _MOST_ROWS, end))
            rows = view.rows([index], [span])
            ids = text.token_ids[span.start : span.stop]
            self._model.forward_rows(
                torch.tensor(ids, device=self._model.device), rows.last_rows, rows
            )
            text.num_stored = span.stop
