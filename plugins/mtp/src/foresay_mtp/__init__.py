"""The mtp plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it; the names and shapes of the modules'
tensors are read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from foresay import hookimpl
from foresay.core.errors import ConfigError
from foresay.core.proposer import KVLayer, Needs, Proposer, ProposerConfig, ProposerSpec
from foresay.core.training import TrainingConfig, TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

    import torch

    from foresay.core.proposer import TargetView
    from foresay.core.training import TrainableDrafter


class MTPConfig(ProposerConfig):
    """Settings of the mtp proposer; without a `drafter` it takes the target's own modules."""

    sample: bool = Field(
        default=True,
        description="At temperatures above 0: draw draft tokens from the modules' distributions, "
        "instead of taking the likeliest. More of them are accepted.",
    )
    tree: bool = Field(
        default=True,
        description="Draft trees: several candidates at each place, num_speculative_tokens in all. "
        "Otherwise chains of that many, which several modules draft always.",
    )
    max_depth: int = Field(default=5, ge=1, description="Most tokens from a tree's root to a leaf.")

    def drafts_trees(self, num_modules: int) -> bool:
        """Whether trees are drafted. Raises `ConfigError` if they are asked for and cannot be.

        Several modules draft chains. A row of module i takes the token i + 1 behind it, so that at
        the end of a text each branch of a tree would need i rows of its own there, and so for the
        positions of its committed tokens; a chain has one branch.
        """
        if num_modules == 1:
            return self.tree
        if self.tree and "tree" in self.model_fields_set:
            raise ConfigError(
                f"tree=True: trees are drafted with a single MTP module, and there are "
                f"{num_modules}; leave it out, for chains"
            )
        return False


class MTPTraining(TrainingConfig):
    """Settings of training a module for a target that has none."""

    num_steps: int = Field(
        default=4,
        ge=1,
        description="How often the module is applied in training, to its own output.",
    )
    loss_decay: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="What a step's loss counts, compared to the one before.",
    )
    argmax_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Part of what is learnt that is put on the target's likeliest token, the rest "
        "being the target's distribution: more is accepted in greedy decoding, less in sampling.",
    )
    train_lm_head: bool = Field(
        default=False,
        description="Train an output head of the module's own. Otherwise it shares the target's, "
        "which takes no room in the file.",
    )


def _build(config: MTPConfig) -> Proposer:
    from foresay_mtp.proposer import MTPProposer

    return MTPProposer(config)


def _needs(config: MTPConfig, target_config: Any) -> Needs:
    from foresay_mtp.layout import find_layout
    from foresay_mtp.shape import block_shape

    layout = find_layout(config.drafter, target_config)
    text_config = target_config.get_text_config(decoder=True)
    shape = block_shape(layout, text_config)
    layer = KVLayer(shape.num_kv_heads, shape.head_dim)
    return Needs(
        hidden_state=True,
        kv_layers=(layer,) * layout.num_modules,
        # Module i takes the token i + 1 behind a position.
        kv_reach=layout.num_modules,
        embeddings=True,
        lm_head=True,
        sampled=config.sample,
        tree=config.drafts_trees(layout.num_modules),
        max_context=shape.max_context,
    )


def _serves(folder: Path) -> str | None:
    from foresay_mtp.layout import modules_inside

    return modules_inside(folder)


def _recognises(path: Path) -> str | None:
    from foresay_mtp.layout import recognise

    return recognise(path)


def _build_training(
    config: MTPTraining, target: TargetView, draft_to_target: torch.Tensor | None
) -> TrainableDrafter:
    from foresay_mtp.training import TrainableModule

    return TrainableModule(config, target, draft_to_target)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `mtp`."""
    return [
        ProposerSpec(
            name="mtp",
            config_type=MTPConfig,
            build=_build,
            needs=_needs,
            serves=_serves,
            recognises=_recognises,
            training=TrainingSpec(MTPTraining, _build_training),
        )
    ]
