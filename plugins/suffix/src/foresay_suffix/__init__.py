"""The suffix plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, field_validator

from foresay import hookimpl
from foresay.core.proposer import Proposer, ProposerConfig, ProposerSpec


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
        description="Most tokens to draft per token that matches.",
    )
    min_probability: float = Field(
        default=0.2,
        ge=0.0,
        le=1.0,
        description="A draft ends before a token whose estimated probability is lower.",
    )
    max_remembered_tokens: int = Field(
        default=200_000,
        ge=0,
        description="Most tokens to keep of earlier requests' outputs, least recently used "
        "outputs dropped first (about 250 bytes a token); 0: draft from the request alone.",
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


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `suffix`."""
    return [ProposerSpec(name="suffix", config_type=SuffixConfig, build=_build)]
