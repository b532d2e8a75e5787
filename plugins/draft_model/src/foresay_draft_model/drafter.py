"""The draft model as the draft loop runs it, and what of it is known before it is loaded.

Knows a model over KV rows and ids of two vocabularies; no requests and no tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foresay.core.errors import ModelError
from foresay.core.proposer import KVLayer, KVRows, Needs, TargetView
from foresay.core.worker.checkpoint import Checkpoint
from foresay.core.worker.target import TargetModel, load_target, outline
from foresay_draft_model import DraftModelConfig

# Heads may have the config.json of a small Llama. A whole model embeds its tokens, outside of any
# layer; EAGLE heads may do so too, and join that with something.
_EMBEDDINGS = re.compile(
    r"(?:[a-z_]+\.)*(?:embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings?)\.weight$"
)
_OF_A_HEAD = re.compile(r"(?:model\.)?(?:fc|fusion_fc)\.weight$|(?:model\.)?midlayer\.")


def declared_needs(config: DraftModelConfig) -> Needs:
    """Return what the drafter needs by its config, before any weight is loaded.

    Raises `ModelError` if it cannot be a draft model.
    """
    assert config.drafter is not None, "the settings see to it"
    try:
        found = outline(config.drafter)
    except ModelError as error:
        raise _unusable(error) from error
    return needs_of(config, found.kv_layers, found.max_model_len)


def recognise(path: Path) -> str | None:
    """Say that a folder or a GGUF file is a language model; None: it is a head with such a config.

    Raises `ModelError` for what is no language model that can be run.
    """
    outline(str(path))
    if path.is_dir():
        names = Checkpoint.open(path).names
        if any(map(_OF_A_HEAD.match, names)) or not any(map(_EMBEDDINGS.match, names)):
            return None
    return "a language model"


def needs_of(config: DraftModelConfig, kv_layers: tuple[KVLayer, ...], limit: int | None) -> Needs:
    """Return the needs of a drafter whose KV lies in the core's blocks."""
    return Needs(kv_layers=kv_layers, sampled=config.sample, draft_slots=1, max_context=limit)


def load_drafter(config: DraftModelConfig, target: TargetView) -> TargetModel:
    """Load the draft model in the target's dtype, on its device; `ModelError` if that fails."""
    assert config.drafter is not None, "the settings see to it"
    try:
        return load_target(
            config.drafter,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            row_invariant=False,  # its rows decide how many drafts are accepted, nothing else
            max_model_len=target.max_model_len,
        )
    except ModelError as error:
        raise _unusable(error) from error


def _unusable(error: ModelError) -> ModelError:
    return ModelError(f"proposer 'draft_model' drafts with a whole language model: {error}")


@dataclass(slots=True)
class LoopModel:
    """A draft model as `foresay.core.worker.drafting.draft` runs it.

    From `forward` come logits already, of the rows that end a range: transformers' models compute
    them in one call, caps and scales included.
    """

    model: TargetModel
    # [target's vocabulary] int64, what stands for each of its tokens; None: the same ids.
    to_draft: torch.Tensor | None = None
    # The columns of logits that count: as many of the first ones, or these [n] int64.
    columns: int | torch.Tensor | None = None
    # Whether the rows of the first step come in the drafter's own ids.
    starts_translated: bool = False

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,  # noqa: ARG002  # of no use to it
        rows: KVRows,
        step: int,
    ) -> torch.Tensor:
        """Return logits [num_ranges, draft vocabulary]."""
        if self.to_draft is not None and (step or not self.starts_translated):
            token_ids = self.to_draft[token_ids]
        return self.model.forward_rows(token_ids, rows.last_rows, rows)

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:  # noqa: ARG002
        """Return the columns that count of what `forward` returned."""
        if isinstance(self.columns, torch.Tensor):
            return hidden.index_select(1, self.columns)
        return hidden[:, : self.columns]


def stand_ins(model: TargetModel, target_vocab_size: int) -> torch.Tensor | None:
    """Return what stands for each token of a target that has more than the drafter's; or None.

    A token that the drafter does not know is shown to it as its unknown, else its end of text.
    """
    if target_vocab_size <= model.vocab_size:
        return None
    candidates: Sequence[int | None] = (
        getattr(model.tokenizer, "unk_token_id", None),
        *sorted(model.eos_token_ids),
        0,
    )
    stand_in = next(i for i in candidates if i is not None and 0 <= i < model.vocab_size)
    ids = torch.arange(target_vocab_size, device=model.device)
    return torch.where(ids < model.vocab_size, ids, stand_in)
