"""The eagle plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it; a head's config.json is read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from foresay import hookimpl
from foresay.core.proposer import KVLayer, Needs, Proposer, ProposerConfig, ProposerSpec
from foresay.core.training import TrainingConfig, TrainingSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any

    import torch

    from foresay.core.proposer import TargetView
    from foresay.core.training import TrainableDrafter


class EagleConfig(ProposerConfig):
    """Settings of the eagle proposer; `drafter` is the folder of a head, and must be given."""

    sample: bool = Field(
        default=True,
        description="At temperatures above 0: draw draft tokens from the head's distribution, "
        "instead of taking the likeliest. More of them are accepted.",
    )
    aux_layers: tuple[int, ...] | None = Field(
        default=None,
        description="EAGLE-3: take the residual streams entering these layers of the target; "
        "None: those that config.json names.",
    )
    tree: bool = Field(
        default=True,
        description="Draft trees: several candidates at each place, num_speculative_tokens in all. "
        "Otherwise chains of that many.",
    )
    max_depth: int = Field(default=5, ge=1, description="Most tokens from a tree's root to a leaf.")


class EagleTraining(TrainingConfig):
    """Settings of training an EAGLE-3 head."""

    num_steps: int = Field(
        default=4, ge=1, description="Steps each chain is unrolled: training-time test."
    )
    loss_decay: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="What a step's loss counts, compared to the one before.",
    )
    aux_layers: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        description="Take the residual streams entering these layers of the target; None: EAGLE-3's"
        " (2, half of the layers, all but 3).",
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
        description="Train an output head of the head's own. Otherwise it shares the target's, "
        "which takes no room in the file.",
    )
    norm_before_residual: bool = Field(
        default=True, description="The layer adds to its normed input, instead of to the input."
    )
    fc_norm: bool = Field(
        default=True, description="Norm each of the target's streams before they are joined."
    )


def _build(config: EagleConfig) -> Proposer:
    from foresay_eagle.proposer import EagleProposer

    return EagleProposer(config)


def _needs(config: EagleConfig, target_config: Any) -> Needs:
    from foresay_eagle.layout import read_layout
    from foresay_eagle.taps import aux_layers

    layout = read_layout(config.drafter)
    text_config = target_config.get_text_config(decoder=True)
    layout.check_target(text_config)
    is_eagle3 = layout.variant == "eagle3"
    taps = aux_layers(layout, config.aux_layers, int(text_config.num_hidden_layers))
    return Needs(
        hidden_state=not is_eagle3,
        aux_layers=taps,
        kv_layers=(KVLayer(layout.num_kv_heads, layout.head_dim),),
        embeddings=True,
        lm_head=True,
        sampled=config.sample,
        tree=config.tree,
        max_context=layout.max_context(text_config),
    )


def _recognises(path: Path) -> str | None:
    from foresay_eagle.layout import recognise

    return recognise(path)


def _build_training(
    config: EagleTraining, target: TargetView, draft_to_target: torch.Tensor | None
) -> TrainableDrafter:
    from foresay_eagle.training import TrainableEagle3

    return TrainableEagle3(config, target, draft_to_target)


def _training_needs(config: EagleTraining, target_config: Any) -> Needs:
    from foresay_eagle.taps import training_layers

    text_config = target_config.get_text_config(decoder=True)
    layers = training_layers(config.aux_layers, int(text_config.num_hidden_layers))
    return Needs(hidden_state=True, aux_layers=layers)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `eagle`."""
    return [
        ProposerSpec(
            name="eagle",
            config_type=EagleConfig,
            build=_build,
            needs=_needs,
            recognises=_recognises,
            training=TrainingSpec(EagleTraining, _build_training, _training_needs),
        )
    ]
