"""The medusa proposer: loads heads for a target and drafts with them. Keeps no state of requests.

A draft takes the hidden state of the newest computed position and nothing else, so whatever lies
before it, a prefix hit, a preemption, a stretch without drafts, is all the same to it.
"""

from __future__ import annotations

import torch

from foresay.core.proposer import Draft, DraftInput, TargetView
from foresay.core.worker.drafting import TokenPicker
from foresay_medusa import MedusaConfig
from foresay_medusa.heads import MedusaHeads
from foresay_medusa.layout import read_layout
from foresay_medusa.weights import read_weights

# What the core asks for at most where no number is set.
_DEFAULT_NUM_DRAFT_TOKENS = 5


class MedusaProposer:
    """Drafts a chain: head h's token is the one at +h+2 of the newest computed position.

    All distributions are there before any token is drawn, and none depends on a token drawn, so a
    sampled draft may be verified by any rule.
    """

    def __init__(self, config: MedusaConfig) -> None:
        self._config = config
        self._heads: MedusaHeads | None = None

    def load(self, target: TargetView) -> None:
        """Read the heads and fit them to the target; heads that k never reaches are not kept."""
        layout = read_layout(self._config.drafter, self._config.num_heads)
        weights = read_weights(layout, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
        most = self._config.num_speculative_tokens or _DEFAULT_NUM_DRAFT_TOKENS
        self._heads = MedusaHeads(weights, min(layout.num_heads, most), target)

    @torch.inference_mode()
    def propose(self, batch: DraftInput) -> Draft:
        """Run the first k heads on each request's newest row; pick tokens until a draft ends."""
        heads, hidden, starts = self._heads, batch.hidden_states, batch.row_starts
        assert heads is not None, "load() comes first"
        assert hidden is not None
        assert starts is not None
        picker = TokenPicker(batch, self._config.sample, heads.draft_to_target)
        drafting = [
            index
            for index, request in enumerate(batch.requests)
            if request.k and starts[index + 1] > starts[index]
        ]
        if not drafting:
            return Draft(picker.token_ids)
        newest = [starts[index + 1] - 1 for index in drafting]
        if len(newest) < len(hidden):
            hidden = hidden.index_select(0, torch.tensor(newest, device=hidden.device))
        ks = [min(batch.requests[index].k, heads.num_heads) for index in drafting]
        members = [[row for row, k in enumerate(ks) if k > head] for head in range(max(ks))]
        rows = [
            None if len(wanted) == len(ks) else torch.tensor(wanted, device=hidden.device)
            for wanted in members
        ]
        for step, logits in enumerate(heads.logits(hidden, rows)):  # of ended drafts, too
            picker.pick(logits, step, [drafting[row] for row in members[step]])
        return Draft(picker.token_ids)
