"""The medusa plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it; the heads' config.json is read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from foresay import hookimpl
from foresay.core.proposer import Needs, Proposer, ProposerConfig, ProposerSpec
from foresay.core.training import TrainingConfig, TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

    import torch

    from foresay.core.proposer import TargetView
    from foresay.core.training import TrainableDrafter


class MedusaConfig(ProposerConfig):
    """Settings of the medusa proposer; `drafter` is the folder of its heads, and must be given."""

    sample: bool = Field(
        default=True,
        description="At temperatures above 0: draw draft tokens from the heads' distributions, "
        "instead of taking the likeliest. More of them are accepted.",
    )
    num_heads: int | None = Field(
        default=None,
        ge=1,
        description="Use the first so many heads, which is how deep a tree gets; None: as many as "
        "config.json says. Some folders hold more than that.",
    )
    tree: bool = Field(
        default=True,
        description="Draft a tree of the heads' best tokens, k being the number of its nodes, "
        "instead of a chain of one token a head.",
    )


class MedusaTraining(TrainingConfig):
    """Settings of training Medusa heads."""

    num_heads: int = Field(default=4, ge=1, description="Heads, and so the most tokens in a row.")
    num_layers: int = Field(default=1, ge=0, description="Residual blocks of each head.")
    loss_decay: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="What a head's loss counts, compared to the one before.",
    )
    argmax_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Part of what is learnt that is put on the target's likeliest token, the rest "
        "being the target's distribution: more is accepted in greedy decoding, less in sampling.",
    )
    train_lm_head: bool = Field(
        default=True,
        description="Train an output head that all heads share. Otherwise they share the target's, "
        "which takes no room in the file.",
    )


def _build(config: MedusaConfig) -> Proposer:
    from foresay_medusa.proposer import MedusaProposer

    return MedusaProposer(config)


def _needs(config: MedusaConfig, target_config: Any) -> Needs:
    from foresay_medusa.layout import read_layout

    layout = read_layout(config.drafter, config.num_heads)
    layout.check_target(target_config.get_text_config(decoder=True))
    return Needs(
        hidden_state=True,
        lm_head=True,  # for heads that share it
        sampled=config.sample,
        tree=config.tree,
        max_draft_tokens=None if config.tree else layout.num_heads,
    )


def _recognises(path: Path) -> str | None:
    from foresay_medusa.layout import recognise

    return recognise(path)


def _build_training(
    config: MedusaTraining, target: TargetView, draft_to_target: torch.Tensor | None
) -> TrainableDrafter:
    from foresay_medusa.training import TrainableMedusa

    return TrainableMedusa(config, target, draft_to_target)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `medusa`."""
    return [
        ProposerSpec(
            name="medusa",
            config_type=MedusaConfig,
            build=_build,
            needs=_needs,
            recognises=_recognises,
            training=TrainingSpec(MedusaTraining, _build_training),
        )
    ]
