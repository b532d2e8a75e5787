"""Verification: which drafts of a step are accepted, and the token that follows them.

Knows a step's logits and each request's draft; not where they come from, nor what becomes of the
tokens. Two rules, both lossless for any draft whatever: the tokens are those that plain decoding
would give, and a draft only decides how many of them one step yields.

- greedy: the row's token is its argmax, the lowest id on ties.
- deterministic: the row's token is drawn from the target's distribution, after all sampling
  parameters, with noise that depends on the request's seed and the token's position only.

A draft token is *accepted* if it is its row's token. The first that isn't is replaced by it (the
*recovered* token); if all are accepted, the last row gives one more (the *bonus* token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foresay.core.messages import SamplingData
from foresay.core.worker.sampling import Row, RowError, greedy_token, is_greedy, sample


@dataclass(slots=True)
class VerifyRequest:
    """One request with output rows in this step: row j predicts what follows its j-th draft."""

    req_id: str
    draft_token_ids: Sequence[int]
    num_committed: int  # tokens before this step: row j gives the token at num_committed + j
    num_output_tokens: int  # output tokens before this step
    sampling: SamplingData

    @property
    def num_rows(self) -> int:
        """One row for each draft, and the one after the last."""
        return 1 + len(self.draft_token_ids)


@dataclass(slots=True)
class VerifyResult:
    """Accepted drafts and one recovered or bonus token; or no tokens, and why."""

    token_ids: list[int] = field(default_factory=list)
    error: str | None = None


@torch.inference_mode()
def verify(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
    """Verify every request's draft; the results are in the order of `requests`.

    `logits` [num_rows, vocab_size], any float dtype, only read: the rows of all requests in order.
    Rows after a request's first mismatch are not looked at, so whatever they hold does no harm. A
    row that is used and holds NaN or +inf, or allows no token, is an error of its request alone.
    """
    num_rows = sum(request.num_rows for request in requests)
    if logits.shape[0] != num_rows:
        raise ValueError(
            f"{logits.shape[0]} rows of logits, but the {len(requests)} requests need {num_rows}: "
            "one for each draft token and one more"
        )
    results = [VerifyResult() for _ in requests]
    greedy: list[_Progress] = []
    sampled: list[_Progress] = []
    first_row = 0
    for request, result in zip(requests, results, strict=True):
        kind = greedy if is_greedy(request.sampling) else sampled
        kind.append(_Progress(request, result, first_row))
        first_row += request.num_rows
    if greedy:
        _verify_greedy(logits, greedy)
    if sampled:
        _verify_sampled(logits, sampled)
    return results


@dataclass(slots=True)
class _Progress:
    """A request on its way through its rows."""

    request: VerifyRequest
    result: VerifyResult
    first_row: int

    @property
    def row_index(self) -> int:
        return self.first_row + len(self.result.token_ids)

    def row(self, logits: torch.Tensor) -> Row:
        """Return the row that gives the next token."""
        index = len(self.result.token_ids)
        return Row(
            logits=logits[self.row_index],
            sampling=self.request.sampling,
            position=self.request.num_committed + index,
            output_index=self.request.num_output_tokens + index,
        )

    def take(self, outcome: int | RowError) -> bool:
        """Take the row's token, or its error; return whether the next row is to be used."""
        result, drafts = self.result, self.request.draft_token_ids
        index = len(result.token_ids)
        if isinstance(outcome, RowError):
            result.token_ids = []
            result.error = f"at position {self.request.num_committed + index}, {outcome}"
            return False
        result.token_ids.append(outcome)
        return index < len(drafts) and outcome == drafts[index]


def _verify_greedy(logits: torch.Tensor, batch: Sequence[_Progress]) -> None:
    rows = [p.first_row + j for p in batch for j in range(p.request.num_rows)]
    used = logits if len(rows) == logits.shape[0] else logits[rows]
    # One pass gives the lowest id of the maximum, and a maximum that is NaN if any logit is.
    tops, ids = used.max(dim=-1)  # [num_greedy_rows] each
    best = dict(zip(rows, zip(tops.tolist(), ids.tolist(), strict=True), strict=True))
    for progress in batch:
        going = True
        while going:
            outcome: int | RowError
            try:
                outcome = greedy_token(progress.row(logits), *best[progress.row_index])
            except RowError as error:
                outcome = error
            going = progress.take(outcome)


def _verify_sampled(logits: torch.Tensor, batch: Sequence[_Progress]) -> None:
    # All requests' first rows together, then the second rows of those that go on: a row is only
    # worked on if it is used, and the noise of a round is computed in one call.
    while batch:
        outcomes = sample([progress.row(logits) for progress in batch])
        batch = [p for p, outcome in zip(batch, outcomes, strict=True) if p.take(outcome)]
