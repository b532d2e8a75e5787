"""The eagle plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it; a head's config.json is read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from foresay import hookimpl
from foresay.core.proposer import KVLayer, Needs, Proposer, ProposerConfig, ProposerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any


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
        max_context=layout.max_context(text_config),
    )


def _recognises(path: Path) -> str | None:
    from foresay_eagle.layout import recognise

    return recognise(path)


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
        )
    ]
