"""The plugin's face: its settings, its spec and its hook. Imports no torch.

The drafter's config is read when an engine asks what is needed, its weights when it is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from foresay import hookimpl
from foresay.core.proposer import Needs, Proposer, ProposerConfig, ProposerSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Any


class DraftModelConfig(ProposerConfig):
    """Settings of the draft_model proposer."""

    drafter: str | None = Field(
        default=None,
        description="The draft model: an alias, a folder, a GGUF file, a hub id, or a registered "
        "drafter.",
    )
    sample: bool = Field(
        default=True,
        description="Draw the drafts of requests that are sampled from the draft model's "
        "distribution; False: always take its likeliest token.",
    )
    vocabulary: Literal["auto", "same"] = Field(
        default="auto",
        description="'auto': a draft model with another tokenizer drafts the tokens that the "
        "target has too; 'same': another tokenizer is an error.",
    )
    kv_tokens: int = Field(
        default=32768,
        ge=16,
        description="With another tokenizer: the tokens, of all requests together, that the draft "
        "model's own KV cache has room for. A request that finds none is not drafted for.",
    )

    @model_validator(mode="after")
    def _has_drafter(self) -> DraftModelConfig:
        if self.drafter is None:
            raise ValueError(
                "no drafter: draft_model drafts with a language model, smaller than the target, "
                "that --drafter M (or drafter=M) names as --model names the target"
            )
        return self


def _build(config: DraftModelConfig) -> Proposer:
    from foresay_draft_model.proposer import DraftModelProposer

    return DraftModelProposer(config)


def _needs(config: DraftModelConfig, _target_config: Any) -> Needs:
    from foresay_draft_model.drafter import declared_needs

    return declared_needs(config)


def _recognises(path: Path) -> str | None:
    from foresay_draft_model.drafter import recognise

    return recognise(path)


@hookimpl
def foresay_register_proposers() -> Iterable[ProposerSpec]:
    """Offer the proposer `draft_model`."""
    return [
        ProposerSpec(
            name="draft_model",
            config_type=DraftModelConfig,
            build=_build,
            needs=_needs,
            drafter_is_model=True,
            recognises=_recognises,
        )
    ]
