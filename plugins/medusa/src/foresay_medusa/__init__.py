"""The medusa plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it; the heads' config.json is read before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from foresay import hookimpl
from foresay.core.proposer import Needs, Proposer, ProposerConfig, ProposerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any


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
        description="Use the first so many heads; None: as many as config.json says. Some folders "
        "hold more than that.",
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
        max_draft_tokens=layout.num_heads,
    )


def _recognises(path: Path) -> str | None:
    from foresay_medusa.layout import recognise

    return recognise(path)


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
        )
    ]
