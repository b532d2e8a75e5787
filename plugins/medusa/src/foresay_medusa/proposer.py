"""The medusa proposer: loads heads for a target and drafts with them, trees or chains.

A draft takes the hidden state of the newest computed position and nothing else, so whatever lies
before it, a prefix hit, a preemption, a stretch without drafts, is all the same to it. (What trees
remember of a request is for learning what the heads are worth.)
"""

from __future__ import annotations

import torch

from foresay.core.proposer import Draft, DraftInput, TargetView
from foresay.core.worker.drafting import TokenPicker
from foresay_medusa import MedusaConfig
from foresay_medusa.accuracies import Accuracies
from foresay_medusa.heads import MedusaHeads
from foresay_medusa.layout import read_layout
from foresay_medusa.trees import MedusaTrees
from foresay_medusa.weights import read_weights

# What the core asks for at most where no number is set, of a chain.
_DEFAULT_NUM_DRAFT_TOKENS = 5


class MedusaProposer:
    """Head h's tokens are for the place at +h+2 of the newest computed position.

    All distributions are there before any token is drawn, and none depends on a token drawn, so a
    sampled chain may be verified by any rule. A tree combines each head's best tokens.
    """

    def __init__(self, config: MedusaConfig) -> None:
        self._config = config
        self._heads: MedusaHeads | None = None
        self._trees: MedusaTrees | None = None

    def load(self, target: TargetView) -> None:
        """Read the heads and fit them to the target; heads that are never reached are not kept."""
        config = self._config
        layout = read_layout(config.drafter, config.num_heads)
        weights = read_weights(layout, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        most = config.num_speculative_tokens
        if most is None:
            most = layout.num_heads if config.tree else _DEFAULT_NUM_DRAFT_TOKENS
        num_heads = min(layout.num_heads, most)
        self._heads = MedusaHeads(weights, num_heads, target)
        if config.tree:
            accuracies = Accuracies.read(layout.folder, num_heads)
            self._trees = MedusaTrees(accuracies, sample=config.sample)

    def release(self, req_id: str) -> None:
        """Forget a request."""
        if self._trees is not None:
            self._trees.release(req_id)

    @torch.inference_mode()
    def propose(self, batch: DraftInput) -> Draft:
        """Run the heads that a draft may reach on each request's newest row; pick tokens."""
        heads, trees, hidden, starts = (
            self._heads,
            self._trees,
            batch.hidden_states,
            batch.row_starts,
        )
        assert heads is not None, "load() comes first"
        assert hidden is not None
        assert starts is not None
        requests = batch.requests
        if trees is not None:
            trees.learn(requests)
        drafting = [
            index
            for index, request in enumerate(requests)
            if request.k and starts[index + 1] > starts[index]
        ]
        if not drafting:
            return Draft([[] for _ in requests])
        newest = [starts[index + 1] - 1 for index in drafting]
        if len(newest) < len(hidden):
            hidden = hidden.index_select(0, torch.tensor(newest, device=hidden.device))
        depths = [
            min(requests[index].k, requests[index].max_depth, heads.num_heads) for index in drafting
        ]
        members = [
            [row for row, depth in enumerate(depths) if depth > head] for head in range(max(depths))
        ]
        rows = [
            None if len(wanted) == len(depths) else torch.tensor(wanted, device=hidden.device)
            for wanted in members
        ]
        logits = heads.logits(hidden, rows)
        if trees is not None:
            return trees.draft(batch, drafting, depths, logits, members, heads.draft_to_target)
        picker = TokenPicker(batch, self._config.sample, heads.draft_to_target)
        for step, parts in enumerate(logits):  # of ended drafts, too
            picker.pick(parts, step, [drafting[row] for row in members[step]])
        return Draft(picker.token_ids)
