"""The eagle proposer: loads a head for a target and drafts with it."""

from __future__ import annotations

import logging

from foresay.core.proposer import Draft, DraftInput, TargetView
from foresay.core.worker.drafting import draft
from foresay.core.worker.tree_drafting import TreeDrafter
from foresay_eagle import EagleConfig
from foresay_eagle.heads import Eagle3Head, EagleHead, build_head
from foresay_eagle.layout import read_layout
from foresay_eagle.taps import aux_layers
from foresay_eagle.weights import read_weights

logger = logging.getLogger("foresay")


class EagleProposer:
    """Drafts trees or chains of tokens with an EAGLE, EAGLE-2 or EAGLE-3 head.

    What it remembers of a request are the keys and values of its one layer, in the core's blocks;
    and its last tree, to learn from what came of it.
    """

    def __init__(self, config: EagleConfig) -> None:
        self._config = config
        self._head: EagleHead | Eagle3Head | None = None
        self._trees = TreeDrafter(config.max_depth, sample=config.sample) if config.tree else None

    def load(self, target: TargetView) -> None:
        """Read the head and fit it to the target."""
        layout = read_layout(self._config.drafter)
        taps = aux_layers(layout, self._config.aux_layers, target.num_layers)
        if taps:
            logger.info(
                "eagle: %s takes the residual streams entering the target's layers %s",
                layout.folder,
                ", ".join(map(str, taps)),
            )
        self._head = build_head(layout, read_weights(layout, len(taps)), target)

    def propose(self, batch: DraftInput) -> Draft:
        """Take the step's features, then draft k tokens for each request."""
        head = self._head
        assert head is not None, "load() comes first"
        is_eagle3 = isinstance(head, Eagle3Head)
        hidden = batch.aux_hidden_states if is_eagle3 else batch.hidden_states
        assert hidden is not None, "it is asked for"
        if self._trees is not None:
            return self._trees.draft(
                batch,
                head,
                hidden=hidden,
                draft_to_target=head.draft_to_target,
                last_rows_only=True,
            )
        return draft(
            batch,
            head,
            hidden=hidden,
            shifted=True,
            sample=self._config.sample,
            draft_to_target=head.draft_to_target,
            last_rows_only=True,
        )

    def dummy_run(self, batch: DraftInput) -> None:
        """Draft for nobody, so that the core can capture the passes: the later ones are alike."""
        self.propose(batch)

    def release(self, req_id: str) -> None:
        """Forget a request."""
        if self._trees is not None:
            self._trees.release(req_id)
