"""The plugin's face: its settings, its spec and its hook. Imports no torch, nor the proposer."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from foresay import hookimpl
from foresay.core.proposer import Proposer, ProposerConfig, ProposerSpec


class ExampleConfig(ProposerConfig):
    """What a user can set, besides the settings that every proposer has."""

    min_count: int = Field(
        default=1, ge=1, description="Draft what followed a token that often in a row."
    )


def _build(config: ExampleConfig) -> Proposer:
    from foresay_custom_example.proposer import ExampleProposer

    return ExampleProposer(config)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `custom_example`."""
    return [ProposerSpec(name="custom_example", config_type=ExampleConfig, build=_build)]
