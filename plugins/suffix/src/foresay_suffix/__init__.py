"""The suffix plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, field_validator

from foresay import hookimpl
from foresay.core.proposer import Needs, Proposer, ProposerConfig, ProposerSpec


class SuffixConfig(ProposerConfig):
    """Settings of the suffix proposer; the README says how their defaults were measured."""

    min_match: int = Field(
        default=1,
        ge=1,
        le=32,
        description="Fewest tokens at the end of the request's text that must match; at most 32.",
    )
    max_draft_factor: float = Field(
        default=1.5,
        gt=0.0,
        description="Most tokens to draft per token that matches, of a chain. (In a tree it is "
        "what is likely.)",
    )
    min_probability: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="A draft ends before a token whose estimated probability is lower; None: 0.05 "
        "in a tree, 0.2 in a chain.",
    )
    max_remembered_tokens: int = Field(
        default=200_000,
        ge=0,
        description="Most tokens to keep of earlier requests' outputs, least recently used "
        "outputs dropped first (about 250 bytes a token); 0: draft from the request alone.",
    )

    tree: bool = Field(
        default=True,
        description="Draft a tree of the likeliest continuations, k being the number of its nodes, "
        "instead of the one that is likeliest.",
    )
    max_depth: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens in a row of a tree; None: as many as are likely, up to k.",
    )

    @field_validator("drafter")
    @classmethod
    def _no_weights(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("suffix drafts from texts that were there before and loads no drafter")
        return value


def _build(config: SuffixConfig) -> Proposer:
    from foresay_suffix.proposer import SuffixProposer

    return SuffixProposer(config)


def _needs(config: SuffixConfig, _target_config: Any) -> Needs:
    return Needs(tree=config.tree)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `suffix`."""
    return [ProposerSpec(name="suffix", config_type=SuffixConfig, build=_build, needs=_needs)]
