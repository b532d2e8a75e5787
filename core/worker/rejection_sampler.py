"""Verification: which drafts of a step are accepted, and the token that follows them.

Knows a step's logits and each request's draft; not where they come from, nor what becomes of the
tokens. All rules are lossless: what is emitted has the law of plain decoding, whatever the drafter.

- greedy: the row's token is its argmax, the lowest id on ties.
- deterministic: the row's token is drawn from the target's distribution, after all sampling
  parameters, with noise that depends on the request's seed and the token's position only. It
  serves any draft; a `coupled` one was drawn with that same noise, and so is often right.
- rejection, block: for drafts that were drawn with noise of their own, from probs that were kept
  (`draft_sampler`); in `drawn_drafts`. Which one is said by the draft, not by the request: the rule
  is fixed before drafting.

A draft token is *accepted* if the rule takes it. The first that isn't is replaced (the *recovered*
token); if all are accepted, the last row gives one more (the *bonus* token).

Which drafts may be verified. Under the first two rules each token depends on target rows and noise
alone; a draft only decides how many of them one step yields. So it may be cut, dropped or chosen in
any way. `rejection` and `block` accept a token more readily the more its draft prob falls short of
its target prob, which gives the target's law only because tokens arrive as often as their draft
prob says. Had a token been dropped for what it turned out to be (its own probability, an illegal
id, a prefix of the draft that looks best), those that are left would arrive more often than that,
and the dropped ones would get a second chance from the target's row: both distort the law. Hence
the stopping rule: whether the draft goes on to x_i is decided before x_i is drawn, from the past,
x_<i and the distributions up to i. Scan forward and stop; a token that was drawn is verified. One
that the target lacks has target prob 0 and is *rejected*, which cuts nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Literal

import torch

from foresay.core.messages import SamplingData
from foresay.core.worker.draft_sampler import DraftProbs
from foresay.core.worker.drawn_drafts import (
    DrawnDraft,
    accept_by_block,
    accept_by_rejection,
    are_usable,
)
from foresay.core.worker.noise import NoiseKey, Stream, uniforms
from foresay.core.worker.processors import Context
from foresay.core.worker.race import Race, draw
from foresay.core.worker.sampling import (
    Row,
    RowError,
    greedy_token,
    is_greedy,
    row_logprobs,
    sample,
    survivors,
)

Backend = Literal["auto", "torch", "triton"]


@dataclass(slots=True)
class VerifyRequest:
    """One request with output rows in this step: row j predicts what follows its j-th draft."""

    req_id: str
    draft_token_ids: Sequence[int]
    token_ids: Sequence[int]  # committed: prompt and output; only read
    num_prompt_tokens: int
    sampling: SamplingData
    draft_probs: DraftProbs | None = None  # None: a deterministic draft, or a coupled one

    @property
    def num_committed(self) -> int:
        """Tokens before this step: row j gives the token at num_committed + j."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before this step."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """One row for each draft, and the one after the last."""
        return 1 + len(self.draft_token_ids)


@dataclass(slots=True)
class VerifyResult:
    """Accepted drafts and one recovered or bonus token; or no tokens, and why.

    `logprobs`: for a request that asks, one dict per token; see `row_logprobs`. `faults` counts
    what was survived: "bad_draft_probs", by the deterministic rule, which is exact for any draft;
    "zero_residual", where target and draft differ by rounding only, by the target's own probs.
    """

    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    logprobs: list[dict[int, float]] | None = None
    faults: dict[str, int] = field(default_factory=dict)


@torch.inference_mode()
def verify(
    logits: torch.Tensor, requests: Sequence[VerifyRequest], *, backend: Backend = "auto"
) -> list[VerifyResult]:
    """Verify every request's draft; the results are in the order of `requests`.

    `logits` [num_rows, vocab_size], any float dtype, only read: the rows of all requests in order.
    Rows that a rule does not need are not looked at, so whatever they hold does no harm. A row that
    is used and holds NaN or +inf, or allows no token, is an error of its request alone.
    `backend`: this module is the reference in torch; "auto" takes the Triton kernels for logits on
    a GPU, if triton is there.
    """
    num_rows = sum(request.num_rows for request in requests)
    if logits.shape[0] != num_rows:
        raise ValueError(
            f"{logits.shape[0]} rows of logits, but the {len(requests)} requests need {num_rows}: "
            "one for each draft token and one more"
        )
    if backend == "triton" or (backend == "auto" and logits.is_cuda and _has_triton()):
        # Not imported before it is wanted: it compiles, and there may be none.
        triton_sampler = importlib.import_module("foresay.core.worker.triton_sampler")
        results: list[VerifyResult] = triton_sampler.verify(logits, requests)
    else:
        results = _verify_in_torch(logits, requests)
    first_row = 0
    for request, result in zip(requests, results, strict=True):
        n = request.sampling.logprobs
        if n is not None and result.error is None:
            result.logprobs = [
                row_logprobs(logits[first_row + j], token_id, n)
                for j, token_id in enumerate(result.token_ids)
            ]
        first_row += request.num_rows
    return results


@cache
def _has_triton() -> bool:
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def _verify_in_torch(logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
    results = [VerifyResult() for _ in requests]
    greedy: list[_Progress] = []
    sampled: list[_Progress] = []
    drawn: list[_Progress] = []
    first_row = 0
    for request, result in zip(requests, results, strict=True):
        kind = drawn
        if is_greedy(request.sampling):
            kind = greedy
        elif request.draft_probs is None or not request.draft_token_ids:
            kind = sampled
        elif not are_usable(
            request.draft_probs, request.draft_token_ids, request.num_committed, logits.shape[1]
        ):
            kind = sampled
            result.faults["bad_draft_probs"] = 1
        kind.append(_Progress(request, result, first_row))
        first_row += request.num_rows
    if greedy:
        _verify_greedy(logits, greedy)
    if sampled:
        _verify_sampled(logits, sampled)
    if drawn:
        _verify_drawn(logits, drawn)
    return results


class _Progress:
    """A request on its way through its rows."""

    def __init__(self, request: VerifyRequest, result: VerifyResult, first_row: int) -> None:
        self.request = request
        self.result = result
        self.first_row = first_row
        self._context = Context(
            request.sampling, request.token_ids, request.num_prompt_tokens, request.draft_token_ids
        )

    @property
    def index(self) -> int:
        """The row that gives the next token, among the request's."""
        return len(self.result.token_ids)

    def row(self, logits: torch.Tensor, index: int) -> Row:
        return Row(logits[self.first_row + index], self._context, index)

    def key(self, stream: Stream, index: int) -> NoiseKey:
        """Return the noise of a row's stream: keyed by the draft's offset, too."""
        sampling = self.request.sampling
        position = self.request.num_committed + index
        return NoiseKey(sampling.seed, position, stream, index, sampling.sample_index)

    def take(self, outcome: int | RowError) -> bool:
        """Take the row's token, or its error; return whether the next row is to be used."""
        result, drafts = self.result, self.request.draft_token_ids
        index = self.index
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
            index = progress.index
            outcome: int | RowError
            try:
                row = progress.row(logits, index)
                outcome = greedy_token(row, *best[progress.first_row + index])
            except RowError as error:
                outcome = error
            going = progress.take(outcome)


def _verify_sampled(logits: torch.Tensor, batch: Sequence[_Progress]) -> None:
    # All requests' first rows together, then the second rows of those that go on: a row is only
    # worked on if it is used, and the noise of a round is computed in one call.
    while batch:
        outcomes = sample([progress.row(logits, progress.index) for progress in batch])
        batch = [p for p, outcome in zip(batch, outcomes, strict=True) if p.take(outcome)]


def _verify_drawn(logits: torch.Tensor, batch: Sequence[_Progress]) -> None:
    accept_keys = [
        p.key(Stream.ACCEPT, j) for p in batch for j in range(len(p.request.draft_token_ids))
    ]
    noise = iter(uniforms(accept_keys))
    complete: list[_Progress] = []
    recovering: list[tuple[_Progress, Race]] = []
    for progress in batch:
        drafts, draft_probs = progress.request.draft_token_ids, progress.request.draft_probs
        assert draft_probs is not None  # or it would not be in this batch
        draft = DrawnDraft(partial(progress.row, logits), drafts, draft_probs, logits.shape[1])
        accept = accept_by_block if draft_probs.rule == "block" else accept_by_rejection
        num_accepted, scale = accept(draft, list(islice(noise, len(drafts))))
        progress.result.token_ids = list(drafts[:num_accepted])
        if num_accepted == len(drafts):
            complete.append(progress)
            continue
        try:
            residual = draft.residual(num_accepted, scale)
            if not bool(residual.weights.any()):
                progress.result.faults["zero_residual"] = 1
                residual = survivors(progress.row(logits, num_accepted))
            race = Race(progress.key(Stream.RECOVER, num_accepted), *residual)
            recovering.append((progress, race))
        except RowError as error:
            progress.take(error)
    recovered = draw([race for _, race in recovering])
    for (progress, _), token_id in zip(recovering, recovered, strict=True):
        progress.take(token_id)
    _verify_sampled(logits, complete)  # the bonus tokens
