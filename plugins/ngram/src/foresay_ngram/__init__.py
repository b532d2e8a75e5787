"""The ngram plugin's face: its settings, its spec and its hook. Imports no torch.

The proposer itself is imported when an engine builds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from foresay import hookimpl
from foresay.core.proposer import Needs, Proposer, ProposerConfig, ProposerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class NgramConfig(ProposerConfig):
    """Settings of the ngram proposer; the README says how their defaults were measured."""

    prompt_lookup_min: int = Field(
        default=1, ge=1, description="Fewest tokens at the end of the history that must match."
    )
    prompt_lookup_max: int = Field(
        default=5, ge=1, description="Most tokens at the end of the history that are compared."
    )
    tree: bool = Field(
        default=True,
        description="Draft a tree of what followed in several places, k being the number of its "
        "nodes, instead of the one continuation of the most recent place.",
    )
    max_depth: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens in a row of a tree; None: as many as are likely, up to k.",
    )
    lookup: Literal["auto", "index", "triton"] = Field(
        default="auto",
        description="Where chains are looked up: in an index on the host, or by Triton kernels on "
        "the target's GPU; auto: the kernels for large batches, where there are a GPU and triton.",
    )

    @field_validator("drafter")
    @classmethod
    def _no_weights(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("ngram drafts from the request's own history and loads no drafter")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must not exceed "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _kernels_draft_chains(self) -> NgramConfig:
        if self.lookup == "triton" and self.tree:
            raise ValueError(
                "lookup='triton' finds chains, and tree=True asks for trees, which come from the "
                "index; set tree=False as well"
            )
        return self


def _build(config: NgramConfig) -> Proposer:
    from foresay_ngram.proposer import NgramProposer

    return NgramProposer(config)


def _needs(config: NgramConfig, _target_config: Any) -> Needs:
    return Needs(prediction=True, tree=config.tree)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `ngram`."""
    return [ProposerSpec(name="ngram", config_type=NgramConfig, build=_build, needs=_needs)]
