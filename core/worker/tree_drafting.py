"""The loop that drafts trees, as eagle and mtp do: the most promising nodes are gone on from.

As EAGLE-2 does it (Li et al., 2024, arXiv 2406.16858), with two differences. A pass of the drafter
takes the most promising nodes that it has not gone on from yet, at whatever depth they lie, not
those of the newest level alone; and how promising a node is, is what `calibration` has learnt of
the drafter's probabilities, not these themselves. Both are exact: a tree is verified by the
deterministic rule, under which any choice of drafts is (`rejection_sampler`).

A request may have as many passes as its tree may be deep, and rows for one node less than it may
have: as many positions as its KV has room for. Both are shared out evenly. A node that is not
among the best k candidates, or is the last of them, has no child that could be, so it gets no row;
where no request has another, drafting ends.

Knows rows, positions, tokens and probabilities. What a drafter computes of a row is the drafter's;
how trees are put together and cut is told by `draft_tree`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace

import torch

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay.core.worker.calibration import Calibration
from foresay.core.worker.draft_tree import DraftTree
from foresay.core.worker.drafting import DrafterModel, on_device, run_pass, take_features

_MOST_CHILDREN = 8  # of a node that are looked at


@dataclass(slots=True)
class _Growth:
    """One request's tree while it grows, and what is kept of it until it is known who was right."""

    index: int  # in the batch
    k: int
    depth: int  # no node lies deeper
    num_tokens: int  # committed
    least_log_prob: float
    calibration: Calibration  # the request's
    tree: DraftTree = field(default_factory=DraftTree)
    drafter_log_probs: list[float] = field(
        default_factory=list
    )  # of each candidate after its parent
    children: dict[int, range] = field(default_factory=dict)  # of each candidate gone on from
    row_parents: list[int] = field(default_factory=list)  # of the nodes that were given rows
    _rows: dict[int, int] = field(default_factory=lambda: {-1: -1})  # their place among these
    _open: list[int] = field(default_factory=list)  # candidates not gone on from
    _best: list[float] = field(default_factory=list)  # a heap: the k largest log probs

    def add(
        self,
        parent: int,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
    ) -> None:
        """Add the children of a candidate, -1 being the root, that could be among the best k."""
        tree, best = self.tree, self._best
        above = 0.0 if parent < 0 else tree.log_probs[parent]
        start = len(tree)
        for token_id, log_prob in zip(token_ids, log_probs, strict=True):
            if not log_prob > -math.inf:  # the row has no more, or is not finite
                break
            likelihood = self.calibration.of(log_prob)
            whole = above + likelihood
            if len(best) == self.k and whole <= best[0]:  # nor could those behind it
                break
            number = tree.add(parent, token_id, likelihood)
            if number < len(self.drafter_log_probs):  # two draft ids of one token
                continue
            self.drafter_log_probs.append(log_prob)
            self._open.append(number)
            if len(best) < self.k:
                heappush(best, whole)
            else:
                heapreplace(best, whole)
        self.children[parent] = range(start, len(tree))

    def expand(self, num_passes: int) -> list[int]:
        """Choose the candidates to go on from, the best first, `num_passes` having been made."""
        num_left = self.depth - 1 - num_passes
        if num_left <= 0:
            return []
        log_probs, depths = self.tree.log_probs, self.tree.depths
        last = self._best[0] if len(self._best) == self.k else -math.inf
        self._open = [number for number in self._open if log_probs[number] > last]
        hopeful = [
            number
            for number in self._open
            if depths[number] < self.depth and log_probs[number] >= self.least_log_prob
        ]
        hopeful.sort(key=lambda number: (-log_probs[number], number))
        del hopeful[(self.k - 1 - len(self.row_parents)) // num_left :]
        for number in hopeful:
            self._rows[number] = len(self.row_parents)
            self.row_parents.append(self._rows[self.tree.parents[number]])
            self._open.remove(number)
        return hopeful

    def learn(self, followed: Sequence[int]) -> None:
        """Tell `calibration` of each candidate whose way was right, knowing what followed.

        Whether a candidate was verified does not matter, nor whether it was drafted at all.
        """
        token_ids, node = self.tree.token_ids, -1
        for token_id in followed:
            right = None
            for number in self.children.get(node, ()):
                is_right = token_ids[number] == token_id
                self.calibration.see(self.drafter_log_probs[number], is_right)
                if is_right:
                    right = number
            if right is None:
                break
            node = right


class TreeDrafter:
    """Drafts trees. Remembers, by request, the last one and what was learnt of the drafter.

    So the drafts of a request depend on what became of its own earlier ones, on no other request.
    """

    def __init__(self, max_depth: int, *, sample: bool) -> None:
        """`max_depth`: no node lies deeper. `sample`: the sampler says which children are best."""
        self._max_depth = max_depth
        self._sample = sample
        self._calibrations: dict[str, Calibration] = {}
        self._last: dict[str, _Growth] = {}

    def release(self, req_id: str) -> None:
        """Forget a request."""
        self._calibrations.pop(req_id, None)
        self._last.pop(req_id, None)

    @torch.inference_mode()
    def draft(
        self,
        batch: DraftInput,
        model: DrafterModel,
        *,
        hidden: torch.Tensor,
        draft_to_target: torch.Tensor | None = None,
        last_rows_only: bool = False,
    ) -> Draft:
        """Take the features of a step, then draft a tree of up to k nodes for each request.

        `hidden` [num_rows, hidden_size] belongs to the batch's rows. The drafter's rows are shifted
        (see `take_features`): the last takes the token that was committed last. Each node that is
        gone on from has a row behind it, which takes the node's token and what came out of the row
        of its parent. `draft_to_target` [draft_vocab] int64 maps draft ids to the target's.
        `last_rows_only`: of the features' rows; see `take_features`.
        """
        assert batch.kv is not None
        for request in batch.requests:
            self._learn(request)
        drafting, states = take_features(
            batch, model, hidden=hidden, shifted=True, last_rows_only=last_rows_only
        )
        growths = [self._growth(i, batch.requests[i]) for i in drafting]
        nodes = [(growth, -1) for growth in growths]  # those whose rows were computed last
        row_of = {(growth.index, -1): row for row, growth in enumerate(growths)}  # in `states`
        num_passes = 0
        logits = model.logits(states, 0) if nodes else states
        while True:
            if nodes:
                self._add_children(batch, nodes, logits, draft_to_target)
            chosen = [(growth, growth.expand(num_passes)) for growth in growths]
            chosen = [(growth, numbers) for growth, numbers in chosen if numbers]
            if not chosen:
                break
            nodes = [(growth, number) for growth, numbers in chosen for number in numbers]
            above = [row_of[growth.index, growth.tree.parents[number]] for growth, number in nodes]
            for growth, number in nodes:
                row_of[growth.index, number] = len(row_of)
            rows = batch.kv.tree_rows(
                [growth.index for growth, _ in chosen],
                [growth.num_tokens - 1 for growth, _ in chosen],
                [growth.row_parents for growth, _ in chosen],
                [len(numbers) for _, numbers in chosen],
            )
            token_ids = [growth.tree.token_ids[number] for growth, number in nodes]
            num_passes += 1
            out, logits = run_pass(
                model,
                on_device(token_ids, states.device),
                states[on_device(above, states.device)],
                rows,
                num_passes,
            )
            states = torch.cat([states, out])
        return self._drafts(batch, growths)

    def _learn(self, request: DraftRequest) -> None:
        """Learn from a request's last tree, if tokens were committed since."""
        growth = self._last.get(request.req_id)
        if growth is None or len(request.token_ids) <= growth.num_tokens:
            return
        end = growth.num_tokens + growth.depth
        growth.learn(request.token_ids[growth.num_tokens : end])
        del self._last[request.req_id]

    def _growth(self, index: int, request: DraftRequest) -> _Growth:
        """Return the root of a request's tree; `index` in the batch."""
        return _Growth(
            index=index,
            k=request.k,
            depth=min(self._max_depth, request.max_depth, request.k),
            num_tokens=len(request.token_ids),
            least_log_prob=math.log(request.min_confidence)
            if request.min_confidence
            else -math.inf,
            calibration=self._calibrations.setdefault(request.req_id, Calibration()),
        )

    def _add_children(
        self,
        batch: DraftInput,
        nodes: Sequence[tuple[_Growth, int]],
        logits: torch.Tensor,  # [len(nodes), draft_vocab]
        draft_to_target: torch.Tensor | None,
    ) -> None:
        """Add the best children of each of `nodes`, of which `logits` are what follows it."""
        width = min(_MOST_CHILDREN, max(growth.k for growth, _ in nodes), logits.shape[-1])
        if self._sample:
            assert batch.sampler is not None, "a proposer that samples declares it"
            depths = [0 if n < 0 else growth.tree.depths[n] for growth, n in nodes]
            rows = [growth.index for growth, _ in nodes]
            found = batch.sampler.children(logits, depths, rows, width, draft_to_target)
            token_ids, log_probs = found.token_ids, found.log_probs
        else:
            logits = logits.to(torch.float32)
            best, token_ids = logits.topk(width)
            log_probs = best - logits.logsumexp(dim=-1, keepdim=True)
            if draft_to_target is not None:
                token_ids = draft_to_target[token_ids]
        for (growth, number), ids, each in zip(
            nodes, token_ids.tolist(), log_probs.tolist(), strict=True
        ):
            growth.add(number, ids, each)

    def _drafts(self, batch: DraftInput, growths: Sequence[_Growth]) -> Draft:
        """Return the best of all that grew, and keep the trees to learn from."""
        token_ids: list[list[int]] = [[] for _ in batch.requests]
        parents: list[list[int] | None] = [None for _ in batch.requests]
        for growth in growths:
            self._last[batch.requests[growth.index].req_id] = growth
            numbers = growth.tree.best(growth.k, growth.depth, growth.least_log_prob)
            token_ids[growth.index], parents[growth.index] = growth.tree.draft(numbers)
        return Draft(token_ids, parents)
