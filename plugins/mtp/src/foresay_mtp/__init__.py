"""The mtp plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it; the names and shapes of the modules'
tensors are read before.
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


class MTPConfig(ProposerConfig):
    """Settings of the mtp proposer; without a `drafter` it takes the target's own modules."""

    sample: bool = Field(
        default=True,
        description="At temperatures above 0: draw draft tokens from the modules' distributions, "
        "instead of taking the likeliest. More of them are accepted.",
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
        max_context=shape.max_context,
    )


def _serves(folder: Path) -> str | None:
    from foresay_mtp.layout import modules_inside

    return modules_inside(folder)


def _recognises(path: Path) -> str | None:
    from foresay_mtp.layout import recognise

    return recognise(path)


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
        )
    ]
