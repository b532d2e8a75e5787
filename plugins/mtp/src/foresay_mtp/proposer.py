"""The mtp proposer: loads the modules for a target and drafts with them."""

from __future__ import annotations

from foresay.core.proposer import Draft, DraftInput, TargetView
from foresay.core.worker.drafting import draft
from foresay.core.worker.tree_drafting import TreeDrafter
from foresay_mtp import MTPConfig
from foresay_mtp.layout import find_layout
from foresay_mtp.modules import Modules
from foresay_mtp.several import SeveralModules
from foresay_mtp.shape import block_shape
from foresay_mtp.weights import read_weights


class MTPProposer:
    """Drafts trees or chains of tokens with multi-token-prediction modules.

    A single module keeps nothing of a request but keys and values in the core's blocks, and its
    last tree, to learn from what came of it.
    """

    def __init__(self, config: MTPConfig) -> None:
        self._config = config
        self._modules: Modules | None = None
        self._several: SeveralModules | None = None
        self._trees: TreeDrafter | None = None

    def load(self, target: TargetView) -> None:
        """Read the modules and fit them to the target."""
        layout = find_layout(self._config.drafter, target.config)
        shape = block_shape(layout, target.config.get_text_config(decoder=True))
        weights = read_weights(layout, shape, target.vocab_size)
        self._modules = Modules(layout, shape, weights, target)
        if len(self._modules) > 1:
            self._several = SeveralModules(self._modules)
        if self._config.drafts_trees(len(self._modules)):
            self._trees = TreeDrafter(self._config.max_depth, sample=self._config.sample)

    def propose(self, batch: DraftInput) -> Draft:
        """Take the step's features, then draft k tokens for each request."""
        assert self._modules is not None, "load() comes first"
        if self._several is not None:
            return self._several.draft(batch, sample=self._config.sample)
        if self._trees is not None:
            assert batch.hidden_states is not None, "they are asked for"
            return self._trees.draft(
                batch,
                self._modules,
                hidden=batch.hidden_states,
                draft_to_target=self._modules.draft_to_target,
                last_rows_only=True,
            )
        return draft(
            batch,
            self._modules,
            hidden=batch.hidden_states,
            shifted=True,
            sample=self._config.sample,
            draft_to_target=self._modules.draft_to_target,
            last_rows_only=True,
        )

    def dummy_run(self, batch: DraftInput) -> None:
        """Draft for nobody, so that the core can capture the passes: the later ones are alike."""
        self.propose(batch)

    def release(self, req_id: str) -> None:
        """Forget a request."""
        if self._several is not None:
            self._several.release(req_id)
        if self._trees is not None:
            self._trees.release(req_id)
