"""The sampler that proposers draw from: `batch.sampler.draw`, and `children` for trees.

Knows, for one step, which requests are drafted for, their sampling parameters, and what was drawn
for each so far. Does not know the drafter, nor whether a draft gets accepted.

A draft token is drawn from the *drafter's distribution*: its logits, with the draft ids of one
target id counted together, after the request's temperature, top_k, top_p and min_p. The filters are
the target's own, so that a drafter which agrees with the target is accepted. (The parameters that
change single logits are left to the target: a drafter need not honour them, for any distribution is
verified exactly.) What follows depends on the rule that the draft will be verified by:

- greedy: no draw, the likeliest token. A deterministic draft.
- coupled: the noise is that of the target's own draw at this position, so both tend to the same
  token. Which token the target draws does not depend on the draft, so no probs are needed.
- rejection, block: noise of its own, and the probs that the token was drawn from are kept.

A tree is coupled whatever its request's rule, for trees have one rule only: a node's children are
the first to arrive in the very race by which the target's token is drawn there, run with the
drafter's weights. So the first child is the coupled draw, and the others are what the target's
token is if the two distributions differ by more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from foresay.core.messages import SamplingData
from foresay.core.proposer import DraftChildren
from foresay.core.worker.draft_columns import Columns
from foresay.core.worker.likeliest import likeliest
from foresay.core.worker.noise import NoiseKey, Stream
from foresay.core.worker.processors import Context
from foresay.core.worker.race import Race, draw, first
from foresay.core.worker.sampling import Row, RowError, is_greedy, survivors

_MOST_MAPS = 4  # of the last steps' draft vocabularies are kept


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """What a request's draft was drawn from, and the rule that verifies it; only read.

    `probs` [num_drafts, draft_vocab] float32: row j is the distribution that token j was drawn
    from, after temperature and filters; it sums to 1. Column i is of the target id `token_ids[i]`
    ([draft_vocab] int64, ascending, distinct); None: of the target id i. The target may have more
    ids than there are columns, or fewer.
    """

    rule: Literal["rejection", "block"]
    num_tokens: int  # committed when it was drawn: the draft follows exactly these
    probs: torch.Tensor
    token_ids: torch.Tensor | None = None

    def cut(self, num_drafts: int) -> DraftProbs:
        """Return the probs of the first `num_drafts` tokens."""
        return replace(self, probs=self.probs[:num_drafts])


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """One request that is drafted for in this step."""

    req_id: str
    sampling: SamplingData
    num_tokens: int  # committed
    k: int  # most tokens to draw


class StepSampler:
    """The `DraftSampler` of one step. The `rows` of its methods are indices into `requests`.

    Where all requests of a draw are greedy, what was drawn stays on the device until it is asked
    for, so that a drafter's steps need not wait for one another's results.
    """

    def __init__(
        self,
        requests: Sequence[DrawRequest],
        vocab_size: int,
        known_maps: list[Columns] | None = None,
        *,
        may_branch: bool = True,
    ) -> None:
        """`vocab_size`: target ids are in range(vocab_size); no other id is ever drawn.

        `may_branch`: whether `children` may be asked for, by who declared `Needs.tree`. They tell
        of the noise of positions to come, and who knows it must not have its later drafts drawn as
        if nobody did: see `chain`.

        `known_maps` keeps what is worked out of draft vocabularies from one step to the next: the
        same list for all steps of a drafter. Sorting one costs as much as several draws.
        """
        self._faults: Counter[str] = Counter()
        self._pending: list[_Pending] = []  # draws whose tokens are on the device only
        self._vocab_size = vocab_size
        self._may_branch = may_branch
        self._columns = [] if known_maps is None else known_maps  # drafters have one map
        del self._columns[:-_MOST_MAPS]
        self._drafts = [_Draft(request) for request in requests]

    @torch.inference_mode()
    def draw(
        self,
        logits: torch.Tensor,
        step: int,
        rows: Sequence[int],
        draft_to_target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw token number `step` of the drafts of `rows`; see `DraftSampler.draw`.

        A row of `logits` that is not finite ends its request's draft before it. The id returned
        for it, then and in later steps, is a legal one, so that a batch can go on, and no draft.
        """
        checked = self._checked(logits, step, rows)
        columns = self._columns_of(logits.shape[1], draft_to_target)
        for draft in checked:
            draft.use(columns)
        going = {i: draft for i, draft in enumerate(checked) if not draft.has_ended}

        scores = columns.gather(logits)  # [len(rows), num_columns]
        top_scores, likely = scores.max(dim=-1)  # NaN if a row holds any
        if all(is_greedy(draft.sampling) for draft in checked):
            ids = likely if columns.token_ids is None else columns.token_ids[likely]
            self._pending.append(_Pending(checked, top_scores, ids))
            for draft in checked:
                draft.num_pending += 1
            return ids.clone()  # what was drawn stays, whatever the drafter does with it
        self._settle()
        going = {i: draft for i, draft in going.items() if not draft.has_ended}
        tops, best = top_scores.tolist(), likely.tolist()
        token_ids = [columns.lowest_id] * len(rows)
        races: dict[int, Race] = {}
        for i, draft in going.items():
            try:
                if not math.isfinite(tops[i]):
                    raise RowError("the drafter's logits are not finite")
                if is_greedy(draft.sampling):
                    token_ids[i] = columns.target_id(best[i])
                else:
                    races[i] = draft.race(scores[i], columns)
            except RowError:
                self._end(draft)
        for i, token_id in zip(races, draw(list(races.values())), strict=True):
            token_ids[i] = token_id
        for i, draft in going.items():
            if not draft.has_ended:
                draft.token_ids.append(token_ids[i])
        return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)

    @torch.inference_mode()
    def children(
        self,
        logits: torch.Tensor,
        depths: Sequence[int],
        rows: Sequence[int],
        width: int,
        draft_to_target: torch.Tensor | None = None,
    ) -> DraftChildren:
        """Return the best children of nodes of trees; see `DraftSampler.children`.

        A node whose logits are not finite has none. A log prob is that of a softmax over all that
        may follow, of the log probs of a greedy request, else of these after temperature and
        filters, with the noise added. Raises `ValueError` for a request that wants no draft, or
        that has drawn one in this step.
        """
        if not self._may_branch:
            raise ValueError("children are for who declared Needs.tree")
        nodes = self._nodes(logits, depths, rows, width)
        columns = self._columns_of(logits.shape[1], draft_to_target)
        for draft in nodes:
            draft.is_tree = True
        token_ids = torch.zeros((len(rows), width), dtype=torch.int64)
        log_probs = torch.full((len(rows), width), -torch.inf)
        scores = columns.gather(logits)  # [len(rows), num_columns]
        greedy = [i for i, draft in enumerate(nodes) if is_greedy(draft.sampling)]
        if len(greedy) == len(rows) and scores.shape[1] >= width:
            return self._likeliest_children(scores, width, columns)
        if greedy:
            chosen = scores if len(greedy) == len(rows) else scores[greedy]
            best, found = (part.cpu() for part in likeliest(chosen, width))
            if columns.token_ids is not None:
                best = columns.token_ids.cpu()[best].masked_fill(found == -torch.inf, 0)
            token_ids[greedy, : best.shape[1]] = best
            log_probs[greedy, : best.shape[1]] = found
            self._count_childless(found)
        races: dict[int, Race] = {}
        for i in sorted(set(range(len(rows))).difference(greedy)):
            try:
                races[i] = nodes[i].coupled_race(scores[i], columns, depths[i])
            except RowError:
                self._faults["non_finite_draft"] += 1
        for i, (ids, shares) in zip(races, first(list(races.values()), width), strict=True):
            token_ids[i, : len(ids)] = torch.tensor(ids)
            log_probs[i, : len(ids)] = torch.tensor(shares)
        return DraftChildren(token_ids.to(logits.device), log_probs.to(logits.device))

    def _likeliest_children(
        self, scores: torch.Tensor, width: int, columns: Columns
    ) -> DraftChildren:
        """Return the best children of greedy requests. `scores` [n, num_columns >= width]."""
        best, log_probs = likeliest(scores, width)
        self._count_childless(log_probs)
        if columns.token_ids is not None:
            best = columns.token_ids[best].masked_fill_(log_probs == -torch.inf, 0)
        return DraftChildren(best, log_probs)

    def _count_childless(self, log_probs: torch.Tensor) -> None:
        if num_childless := int((log_probs[:, 0] == -torch.inf).sum()):
            self._faults["non_finite_draft"] += num_childless

    def _settle(self) -> None:
        """Take in the tokens that are on the device only: in one transfer, if there are any."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        drafts = [draft for each in pending for draft in each.drafts]
        is_finite = torch.cat([each.tops for each in pending]).isfinite()
        found = torch.where(is_finite, torch.cat([each.ids for each in pending]), -1).tolist()
        for draft, token_id in zip(drafts, found, strict=True):
            draft.num_pending = 0
            if draft.has_ended:
                continue
            if token_id < 0:
                self._end(draft)
            else:
                draft.token_ids.append(token_id)

    def _end(self, draft: _Draft) -> None:
        draft.has_ended = True
        self._faults["non_finite_draft"] += 1

    @property
    def faults(self) -> Counter[str]:
        """Counts "non_finite_draft": drafts that ended before a row that is not finite.

        It holds NaN or +inf, or is -inf for every token the target has. Nodes that have no children
        for it count, too.
        """
        self._settle()
        return self._faults

    def drawn(self, row: int) -> list[int] | None:
        """Return what was drawn for a request, which is its draft; None: it was never drawn for."""
        self._settle()
        draft = self._drafts[row]
        return None if draft.columns is None else list(draft.token_ids)

    def ended(self, row: int) -> bool:
        """Return whether a request's draft ended at a row that was not finite."""
        self._settle()
        return self._drafts[row].has_ended

    def draft_probs(self, row: int) -> DraftProbs | None:
        """Return what a request's draft was drawn from; None: it is a deterministic draft.

        So is every draft of a greedy or a `coupled` request, and an empty one.
        """
        self._settle()
        return self._drafts[row].kept_probs()

    def _checked(self, logits: torch.Tensor, step: int, rows: Sequence[int]) -> list[_Draft]:
        """Return the drafts to draw for, once all is as `DraftSampler.draw` asks for it."""
        drafts = self._drafts_of(logits, rows)
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows {list(rows)} name a request twice")
        if any(step != draft.num_drawn for draft in drafts):
            self._settle()  # a draft that ended may be asked for any step
        for draft in drafts:
            draft.check_step(step)
        return drafts

    def _nodes(
        self, logits: torch.Tensor, depths: Sequence[int], rows: Sequence[int], width: int
    ) -> list[_Draft]:
        """Return the nodes' drafts, once all is as `DraftSampler.children` asks for it."""
        drafts = self._drafts_of(logits, rows)
        if len(depths) != len(rows) or any(depth < 0 for depth in depths):
            raise ValueError(
                f"depths {list(depths)} must be one for each of {len(rows)} rows, from 0 up"
            )
        if width < 1:
            raise ValueError(f"width is {width}; a node has at least 1 best child")
        for draft in drafts:
            draft.check_tree()
        return drafts

    def _drafts_of(self, logits: torch.Tensor, rows: Sequence[int]) -> list[_Draft]:
        if logits.ndim != 2 or logits.shape[0] != len(rows) or not logits.is_floating_point():
            raise ValueError(
                f"logits are {list(logits.shape)} of {logits.dtype}; "
                f"for {len(rows)} rows they must be [{len(rows)}, draft_vocab], of floats"
            )
        num_requests = len(self._drafts)
        for row in rows:
            if not 0 <= row < num_requests:
                raise ValueError(f"row {row} is no index of this step's {num_requests} requests")
        return [self._drafts[row] for row in rows]

    def _columns_of(self, draft_vocab: int, draft_to_target: torch.Tensor | None) -> Columns:
        for columns in self._columns:
            if columns.are_of(draft_vocab, draft_to_target):
                return columns
        self._columns.append(Columns(draft_vocab, draft_to_target, self._vocab_size))
        return self._columns[-1]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A draw of greedy requests, on the device."""

    drafts: list[_Draft]
    tops: torch.Tensor  # [len(drafts)] the largest logit of each
    ids: torch.Tensor  # [len(drafts)] int64, the target's


class _Draft:
    """One request's draft, as far as it was drawn."""

    def __init__(self, request: DrawRequest) -> None:
        sampling = request.sampling
        self.request = request
        self.sampling = SamplingData(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            min_tokens=0,
            stop_token_ids=(),
            sample_index=sampling.sample_index,
            verification=sampling.verification,
        )
        self.columns: Columns | None = None  # set by the first draw
        self.token_ids: list[int] = []
        self.num_pending = 0  # tokens that are on the device only
        self.has_ended = False  # at a row that was not finite
        self.is_tree = False  # made of `children`
        self._probs: list[torch.Tensor] = []  # [num_columns] float32 each
        self._context = Context(self.sampling, (), 0)

    @property
    def num_drawn(self) -> int:
        """How many tokens were drawn, unless one ended the draft that is on the device only."""
        return len(self.token_ids) + self.num_pending

    def check_step(self, step: int) -> None:
        """Raise unless token number `step` is the next to draw."""
        what = f"draft token {step} of request {self.request.req_id!r}"
        if step >= self.request.k:
            raise ValueError(f"{what} is beyond its k: at most {self.request.k} are wanted")
        if self.is_tree:
            raise ValueError(f"{what} cannot be drawn: its draft is made of children")
        if self.has_ended:  # whoever drafts for a batch need not know
            return
        if step < self.num_drawn:
            raise ValueError(f"{what} is drawn already: a draft is drawn once, from its start")
        if step > self.num_drawn:
            raise ValueError(f"{what} comes too early: the next to draw is {self.num_drawn}")

    def check_tree(self) -> None:
        """Raise unless the draft may be a tree, made of children."""
        what = f"request {self.request.req_id!r}"
        if self.request.k < 1:
            raise ValueError(f"{what} wants no draft: its k is 0")
        if self.columns is not None:
            raise ValueError(f"{what} has drawn its draft: it cannot be made of children as well")

    def use(self, columns: Columns) -> None:
        """Raise if an earlier token was drawn over other columns: one map serves a whole draft."""
        if self.columns not in (None, columns):
            raise ValueError(
                f"the draft vocabulary of request {self.request.req_id!r} changed within its draft"
            )
        self.columns = columns

    def race(self, scores: torch.Tensor, columns: Columns) -> Race:
        """Return the draw of the next token from its logits, and keep its probs if needed.

        `scores` [num_columns], finite or -inf. Raises `RowError` if the temperature is too low.
        """
        step, sample = len(self.token_ids), self.sampling.sample_index
        if self.sampling.verification == "coupled":
            return self.coupled_race(scores, columns, step)
        left = survivors(Row(scores, self._context))
        token_ids, weights = columns.target_ids(left.token_ids), left.weights
        position = self.request.num_tokens + step
        key = NoiseKey(self.sampling.seed, position, Stream.DRAFT, offset=step, sample=sample)
        weights = weights / weights.sum(dtype=torch.float64).to(torch.float32)
        probs = weights
        if left.token_ids is not None:
            probs = torch.zeros_like(scores, dtype=torch.float32)
            probs.index_copy_(0, left.token_ids, weights)
        self._probs.append(probs)
        return Race(key, token_ids, weights)

    def coupled_race(self, scores: torch.Tensor, columns: Columns, depth: int) -> Race:
        """Return the draw of what follows `depth` draft tokens, with the noise of the target's own.

        `scores` and `RowError` as in `race`.
        """
        left = survivors(Row(scores, self._context))
        position = self.request.num_tokens + depth
        key = NoiseKey(self.sampling.seed, position, sample=self.sampling.sample_index)
        return Race(key, columns.target_ids(left.token_ids), left.weights)

    def kept_probs(self) -> DraftProbs | None:
        """Return the probs of all tokens drawn; None: none were kept."""
        rule = self.sampling.verification
        if rule == "coupled" or self.columns is None or not self._probs:
            return None
        probs = torch.stack(self._probs)
        return DraftProbs(rule, self.request.num_tokens, probs, self.columns.token_ids)
