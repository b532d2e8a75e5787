"""What distributions offer besides proposers: model aliases and drafter weights. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A short name for a target model, e.g. `smollm2`.

    `resolve()` returns a folder that transformers can load, fetching or converting it if need be
    (progress on stderr), and raises `ModelError` if it cannot. `locate()` returns the folder only
    if it is there already, without doing any work.
    """

    name: str
    description: str
    resolve: Callable[[], Path]
    locate: Callable[[], Path | None] = lambda: None


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Weights for a proposer, trained for one target model.

    `model` is the name or alias of the target they were trained for; `path()` returns their folder.
    `mean_acceptance_length`, measured on held-out prompts, ranks drafters for `--proposer auto`.
    """

    name: str
    proposer: str
    model: str
    path: Callable[[], Path]
    mean_acceptance_length: float
