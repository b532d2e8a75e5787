"""What the engine accepts of a drafter, on prompts that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay import LLM, SamplingParams
from foresay.core.errors import EngineError
from foresay.core.plugins import PluginManager

MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures, as `foresay.core.stats` defines them; None: nothing was drafted."""

    num_prompts: int
    num_tokens: int
    mean_acceptance_length: float | None
    tokens_per_step: float | None
    acceptance: list[float | None]  # by draft position, of the drafts that had it
    conditional_acceptance: list[float | None]  # of the drafts whose earlier ones were accepted
    num_faults: int

    def lines(self) -> list[str]:
        """Return the figures in words."""
        found = [
            f"mean acceptance length {show(self.mean_acceptance_length)}, tokens per step "
            f"{show(self.tokens_per_step)} (engine, greedy, {self.num_prompts} held-out prompts, "
            f"{self.num_tokens} tokens)",
            "draft position " + _columns(range(1, len(self.acceptance) + 1)),
            "accepted       " + _columns(self.acceptance),
            "  if reached   " + _columns(self.conditional_acceptance),
        ]
        return [*found, f"faults: {self.num_faults}"] if self.num_faults else found


def measure(
    model: str,
    proposer: str,
    drafter: Path,
    prompts: Sequence[list[int]],
    plugins: PluginManager,
    **engine: Any,
) -> Measured:
    """Let the engine answer prompts, greedily, with the drafter as anybody would load it.

    It drafts chains, so that figures of drafters can be compared with each other and the curves.
    """
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    has_trees = "tree" in plugins.resolve_proposer(proposer).config_type.model_fields
    settings = {"tree": False} if has_trees else {}
    with LLM(
        model,
        proposer,
        drafter=drafter,
        proposer_settings=settings,
        plugins=plugins,
        adaptive=False,
        **engine,
    ) as llm:
        fitting = [prompt for prompt in prompts if len(prompt) < llm.max_model_len]
        for output in llm.generate(fitting, params):
            if output.outputs[0].finish_reason == "error":
                raise EngineError(f"an answer ended early: {output.outputs[0].stop_reason}")
        stats = llm.stats
    return Measured(
        num_prompts=len(fitting),
        num_tokens=stats.num_output_tokens,
        mean_acceptance_length=stats.mean_acceptance_length,
        tokens_per_step=stats.tokens_per_step,
        acceptance=stats.acceptance_per_position,
        conditional_acceptance=stats.conditional_acceptance_per_position,
        num_faults=stats.faults.total(),
    )


def show(figure: float | None) -> str:
    """Print a figure: `n/a` for None."""
    return "n/a" if figure is None else f"{figure:.2f}"


def _columns(values: Sequence[float | int | None]) -> str:
    return " ".join(f"{v if isinstance(v, int) else show(v):>5}" for v in values)
