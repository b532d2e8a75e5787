"""The heads' tensors, by the names they have in published files, each one accounted for.

Names of the Medusa authors: `{h}.{l}.linear.weight` and `.bias` for the residual block l of head h,
then `{h}.{num_layers}.weight`, its output matrix. vLLM's: `blocks.{h}.layers.{l}.weight` and
`lm_heads.{h}.weight`. `medusa_heads.` may stand in front of all. Knows shapes, computes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foresay.core.worker.checkpoint import Checkpoint
from foresay_medusa.layout import MedusaLayout
from foresay_medusa.vocabulary import Matrix, Vocabulary, fit_vocabulary

logger = logging.getLogger("foresay")

_PREFIXES = ("medusa_heads.", "medusa_head.")
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_SHARED = "lm_head"


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """The tensors of the heads, as they are in the files."""

    blocks: Sequence[Sequence[Matrix]]  # by head, then by layer; a head may have no layer
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class _Names:
    """How tensors are named in one file."""

    prefix: str
    is_vllm: bool
    num_layers: int

    @staticmethod
    def of(checkpoint: Checkpoint, num_layers: int) -> _Names:
        names = checkpoint.names
        prefix = next((p for p in _PREFIXES if any(name.startswith(p) for name in names)), "")
        vllms = (f"{prefix}blocks.", f"{prefix}lm_heads.")
        return _Names(prefix, any(name.startswith(vllms) for name in names), num_layers)

    def block(self, head: int, layer: int) -> str:
        own = f"blocks.{head}.layers.{layer}" if self.is_vllm else f"{head}.{layer}.linear"
        return self.prefix + own

    def matrix(self, head: int) -> str:
        own = f"lm_heads.{head}" if self.is_vllm else f"{head}.{self.num_layers}"
        return self.prefix + own

    def of_head(self, head: int) -> set[str]:
        """Return the names of everything that a head may have."""
        stems = [self.matrix(head), *(self.block(head, i) for i in range(self.num_layers))]
        return {f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")}


def read_weights(layout: MedusaLayout, *, hidden_size: int, vocab_size: int) -> MedusaWeights:
    """Read all heads of the layout for a target of these sizes.

    Raises `ModelError` for tensors that are missing, that have another shape, or that are unknown.
    """
    checkpoint = _open(layout.folder)
    names = _Names.of(checkpoint, layout.num_layers)
    # What belongs to no head may have the prefix, or be without.
    common = {
        name: names.prefix + name if names.prefix + name in checkpoint else name
        for name in (f"{_SHARED}.weight", f"{_SHARED}.bias", "d2t", "t2d", "token_map")
    }
    _check_hidden_size(checkpoint, names, layout, hidden_size)
    blocks = _blocks(checkpoint, names, layout, hidden_size)
    matrices = _matrices(checkpoint, names, common[f"{_SHARED}.weight"], layout, hidden_size)
    vocabulary = fit_vocabulary(checkpoint, common, layout, matrices, vocab_size)
    _leave_out_surplus_heads(checkpoint, names, layout)
    checkpoint.finish()
    return MedusaWeights(blocks, vocabulary)


def _open(folder: str) -> Checkpoint:
    """Open the heads' own file if there is one: a trainer's files may lie beside it."""
    for name in _FILES:
        if (Path(folder) / name).is_file():
            return Checkpoint.open(Path(folder) / name)
    return Checkpoint.open(folder)


def _check_hidden_size(
    checkpoint: Checkpoint, names: _Names, layout: MedusaLayout, hidden_size: int
) -> None:
    """Say it in so many words if the first head is of another model's size."""
    looked_at = checkpoint.under("")  # to look at a tensor is not to use it
    for name in (f"{names.block(0, 0)}.weight", f"{names.matrix(0)}.weight"):
        if name in looked_at:
            size = looked_at.take(name, [None, None]).shape[1]
            layout.check_hidden_size(size, hidden_size)


def _blocks(
    checkpoint: Checkpoint, names: _Names, layout: MedusaLayout, hidden_size: int
) -> list[list[Matrix]]:
    """Return the residual blocks; either all have a bias or none has."""
    stems = [
        [names.block(head, layer) for layer in range(layout.num_layers)]
        for head in range(layout.num_heads)
    ]
    has_bias = layout.has_block_bias
    if has_bias is None:  # the authors' blocks have one; vLLM's have none unless it is said
        has_bias = not names.is_vllm
    has_bias = has_bias or any(f"{stem}.bias" in checkpoint for head in stems for stem in head)
    return [
        [
            Matrix(
                checkpoint.take(f"{stem}.weight", [hidden_size, hidden_size]),
                checkpoint.take(f"{stem}.bias", [hidden_size]) if has_bias else None,
            )
            for stem in head
        ]
        for head in stems
    ]


def _matrices(
    checkpoint: Checkpoint,
    names: _Names,
    shared: str,
    layout: MedusaLayout,
    hidden_size: int,
) -> list[Matrix]:
    """Return each head's output matrix, or the one of all, or none if the target's is shared."""

    def take(weight_name: str, num_rows: int | None = None) -> Matrix:
        weight = checkpoint.take(weight_name, [num_rows, hidden_size])
        bias_name = f"{weight_name.removesuffix('weight')}bias"
        return Matrix(weight, checkpoint.take_if_there(bias_name, [len(weight)]))

    own = [f"{names.matrix(head)}.weight" for head in range(layout.num_heads)]
    if shared in checkpoint:
        logger.info("medusa: the heads of %s share an lm_head of their own", layout.folder)
        return [take(shared)]
    if layout.shares_first_matrix:
        logger.info("medusa: the heads of %s share the first one's matrix", layout.folder)
        checkpoint.ignore(own[1:])
        return [take(own[0])]
    if not any(name in checkpoint for name in own):
        # So it is with heads of the authors' earlier code ("version": "2") and its followers.
        return []
    logger.info("medusa: the heads of %s have an lm_head each", layout.folder)
    first = take(own[0])
    return [first, *(take(name, len(first.weight)) for name in own[1:])]


def _leave_out_surplus_heads(checkpoint: Checkpoint, names: _Names, layout: MedusaLayout) -> None:
    """Leave out heads beyond those that are used: published folders hold more than they say."""
    num_heads = layout.num_heads
    while any(name in checkpoint for name in names.of_head(num_heads)):
        checkpoint.ignore(names.of_head(num_heads))
        num_heads += 1
    if num_heads > layout.num_heads:
        logger.warning(
            "medusa: %s holds %d heads, and %d are used (config.json's number; the setting "
            "num_heads=%d would use all)",
            layout.folder,
            num_heads,
            layout.num_heads,
            num_heads,
        )
