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

A draft may be a tree (`VerifyRequest.parents`), whose siblings are alternatives for one position.
It is *walked*: from the root, the last committed token, to the child that equals the row's token,
and so on until no child does. Trees have one rule, whatever their request's `verification` says:
greedy or deterministic.

Why any tree is exact, with any children, chosen in any way, even by who has seen the noise. The
token t at a position p is a function of the tokens before p and of the noise of p alone: t(prefix),
what plain decoding emits with that noise. Suppose that the walk stands at a node, and what was
emitted so far is what plain decoding emits. The node's own tokens are these very ones, as the walk
went to children that equal them; so its row, its processors' prefix and its position are those of
plain decoding after the same prefix, and the token is t(prefix). The tree decides where the walk
must stop, and nothing else. So a text is a function of its seed, the same for every tree; it has
the target's law because the noise of different positions is independent, and no statement about how
the tree came to be was needed. Siblings that are equal do no harm: the first is taken, and the
other's rows are never looked at.

What a tree may know of noise, the other rules may not: whoever saw the TARGET noise of positions
yet to come must not choose by it which rule a later step of this request has, or where a draft ends
that `rejection` or `block` verifies, since their bonus tokens are drawn with that noise.

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
    """One request with output rows in this step.

    Row 0 predicts what follows the committed tokens, row j + 1 what follows draft j. `parents`, for
    a draft that is a tree: of each draft the place of the one above it, an earlier one, -1 for a
    child of the last committed token. None: a chain, each follows the one before it.
    """

    req_id: str
    draft_token_ids: Sequence[int]
    token_ids: Sequence[int]  # committed: prompt and output; only read
    num_prompt_tokens: int
    sampling: SamplingData
    draft_probs: DraftProbs | None = None  # None: a deterministic draft, or a coupled one
    parents: Sequence[int] | None = None  # a tree is deterministic: no probs are looked at

    @property
    def num_committed(self) -> int:
        """Tokens before this step: a row after n drafts gives the token at num_committed + n."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before this step."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """One row for each draft, and the one before all of them."""
        return 1 + len(self.draft_token_ids)

    def context(self) -> Context:
        """Return what the processors of the request's rows look at."""
        return Context(
            self.sampling,
            self.token_ids,
            self.num_prompt_tokens,
            self.draft_token_ids,
            self.parents,
        )


@dataclass(slots=True)
class VerifyResult:
    """Accepted drafts and one recovered or bonus token; or no tokens, and why.

    `logprobs`: for a request that asks, one dict per token; see `row_logprobs`. `faults` counts
    what was survived: "bad_draft_probs", by the deterministic rule, which is exact for any draft;
    "zero_residual", where target and draft differ by rounding only, by the target's own probs.
    `accepted`: the accepted drafts' places in the draft, ascending; of a chain, the first ones.
    """

    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    logprobs: list[dict[int, float]] | None = None
    faults: dict[str, int] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)


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
            used = (0, *(place + 1 for place in result.accepted))
            result.logprobs = [
                row_logprobs(logits[first_row + index], token_id, n)
                for index, token_id in zip(used, result.token_ids, strict=True)
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
        elif (draft_probs := drawn_from(request)) is None:
            kind = sampled
        elif not are_usable(
            draft_probs, request.draft_token_ids, request.num_committed, logits.shape[1]
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


def drawn_from(request: VerifyRequest) -> DraftProbs | None:
    """Return what a sampled request's draft was drawn from; None: its rule is the deterministic."""
    is_chain = request.parents is None and bool(request.draft_token_ids)
    return request.draft_probs if is_chain else None


class _Progress:
    """A request on its way through its rows."""

    def __init__(self, request: VerifyRequest, result: VerifyResult, first_row: int) -> None:
        self.request = request
        self.result = result
        self.first_row = first_row
        self.index = 0  # the row that gives the next token, among the request's
        self._context = request.context()
        self._children: dict[tuple[int, int], int] | None = None  # by row and token: places
        if request.parents is not None:
            self._children = {}
            edges = zip(request.parents, request.draft_token_ids, strict=True)
            for place, (parent, token_id) in enumerate(edges):
                self._children.setdefault((parent + 1, token_id), place)

    def row(self, logits: torch.Tensor, index: int) -> Row:
        return Row(logits[self.first_row + index], self._context, index)

    def key(self, stream: Stream, index: int) -> NoiseKey:
        """Return the noise of a row's stream, of a chain: keyed by the draft's offset, too."""
        sampling = self.request.sampling
        position = self.request.num_committed + index
        return NoiseKey(sampling.seed, position, stream, index, sampling.sample_index)

    def take(self, outcome: int | RowError) -> bool:
        """Take the row's token, or its error; return whether the walk goes on, to a next row."""
        self.end(outcome)
        place = None if isinstance(outcome, RowError) else self._child(outcome)
        if place is None:
            return False
        self.result.accepted.append(place)
        self.index = place + 1
        return True

    def end(self, outcome: int | RowError) -> None:
        """Take the row's token, or its error, without a look at the draft."""
        result = self.result
        if isinstance(outcome, RowError):
            position = self.request.num_committed + len(result.token_ids)
            result.token_ids, result.accepted = [], []
            result.error = f"at position {position}, {outcome}"
        else:
            result.token_ids.append(outcome)

    def _child(self, token_id: int) -> int | None:
        """Return the place of the draft that follows the row and is this token."""
        if self._children is not None:
            return self._children.get((self.index, token_id))
        drafts, place = self.request.draft_token_ids, self.index
        return place if place < len(drafts) and drafts[place] == token_id else None


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
        progress.result.accepted = list(range(num_accepted))
        progress.index = num_accepted
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
            progress.end(error)
    recovered = draw([race for _, race in recovering])
    for (progress, _), token_id in zip(recovering, recovered, strict=True):
        progress.end(token_id)
    _verify_sampled(logits, complete)  # the bonus tokens
