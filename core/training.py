"""What the author of a drafter that can be trained reads. Imports no torch.

`foresay train NAME` answers prompts with the target, keeps the target's hidden states, runs the
training, and measures what came of it. A proposer adds to this what only it knows, as the
`training` of its `ProposerSpec`: which states it takes, and a module that makes a loss of them and
saves itself in the form that the proposer loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from foresay.core.proposer import Needs, TargetView

if TYPE_CHECKING:
    import torch


class TrainingConfig(BaseModel):
    """Settings every training has; subclass it to add your own, each with a `description`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft_vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="Draft only so many tokens, those most frequent in the replies; None: all.",
    )


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Whole texts, one after another: prompts with the target's own replies.

    Row r of the states is the target's at `token_ids[r]`, having seen the text up to it. Text i has
    the rows `starts[i]` to `starts[i + 1]`, its prompt the first `num_prompt_tokens[i]` of them. A
    reply has two tokens or more.
    """

    token_ids: torch.Tensor  # [num_rows] int64
    starts: tuple[int, ...]  # num_texts + 1 of them
    num_prompt_tokens: tuple[int, ...]
    hidden_states: torch.Tensor  # [num_rows, hidden_size]: what the target's lm_head takes
    aux_hidden_states: torch.Tensor | None = None  # [num_rows, num_aux_layers, hidden_size]


@dataclass(frozen=True, slots=True)
class TrainingLoss:
    """What a module says of a batch.

    A *chain* begins where an engine would draft: at each position whose next token was just
    committed, from the reply's first token on. Step j of the chain at position i predicts the token
    at i + 2 + j. Chains come text after text; a reply of n tokens has n - 1.
    """

    loss: torch.Tensor  # []: what is minimised, a mean over the chains
    hits: torch.Tensor  # [num_chains, num_steps] bool: the likeliest token is the text's
    valid: torch.Tensor  # [num_chains, num_steps] bool: the text reaches so far


@runtime_checkable
class TrainableDrafter(Protocol):
    """A `torch.nn.Module` that `TrainingSpec.build` returns; its parameters are trained.

    What it shares with the target, and does not train, are buffers with `persistent=False`.
    """

    def __call__(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the loss of a batch, with its gradient."""
        ...

    def save(self, folder: Path) -> None:
        """Write config.json and the weights into an existing folder, as the proposer loads them."""
        ...


@runtime_checkable
class MeasuredDrafter(Protocol):
    """A `TrainableDrafter` that keeps figures with its weights, for drafting to use."""

    def save_measured(self, folder: Path, held_out: Iterable[TrainingBatch]) -> None:
        """Measure trained weights on the texts held out; add a file to what `save` wrote.

        Called once, after `save`. The batches are on the parameters' device; all of them may be too
        many to keep.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """How drafters for a proposer are trained: `ProposerSpec.training`.

    `needs(config, target_config)` says which aux layers it takes; the last hidden states come
    always. `build(config, target, draft_to_target)` makes the module, on `target.device` in float32
    and with random numbers from torch's generator; it imports the heavy code. `target` has
    embeddings and lm_head. `draft_to_target` [draft_vocab_size] int64, ascending, are the target
    ids to be drafted; None: all.
    """

    config_type: type[TrainingConfig]
    build: Callable[[Any, TargetView, torch.Tensor | None], TrainableDrafter]
    needs: Callable[[Any, Any], Needs] = lambda _config, _target_config: Needs(hidden_state=True)
