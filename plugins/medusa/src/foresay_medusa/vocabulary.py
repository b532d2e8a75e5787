"""Which tokens the rows of the heads' output matrices stand for. Knows shapes, computes nothing.

A reduced vocabulary comes with `d2t`, *offsets* (target id = row + d2t[row]), as EAGLE-3 has it, or
with `token_map`, target ids, as vLLM has it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foresay.core.errors import ModelError
from foresay.core.worker.checkpoint import Checkpoint
from foresay_medusa.layout import MedusaLayout, is_same_vocabulary

logger = logging.getLogger("foresay")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [num_rows, hidden_size], and a bias [num_rows] if there is one."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def rows(self, index: torch.Tensor | slice) -> Matrix:
        """Return some of the rows."""
        return Matrix(self.weight[index], None if self.bias is None else self.bias[index])


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Output matrices, over tokens that the target has."""

    # One a head; or one for all; or none: the target's own, or its rows `draft_to_target`.
    matrices: Sequence[Matrix]
    draft_to_target: torch.Tensor | None  # [num_rows] int64; None: rows are the target's ids


def fit_vocabulary(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    layout: MedusaLayout,
    matrices: Sequence[Matrix],
    vocab_size: int,
) -> Vocabulary:
    """Cut the matrices to a target of `vocab_size` tokens, and find out what their rows stand for.

    `names`: of "d2t", "t2d" and "token_map" in this file. Raises `ModelError` if rows and tokens do
    not go together.
    """
    if not matrices:
        ids = _shared_ids(checkpoint, names, layout, vocab_size)
        over = "" if ids is None else f", over {len(ids)} of its {vocab_size} tokens"
        logger.info("medusa: the heads of %s share the target's lm_head%s", layout.folder, over)
        return Vocabulary((), ids)
    num_rows = len(matrices[0].weight)
    ids = _target_ids(checkpoint, names, layout, num_rows, vocab_size)
    if ids is None:
        if not is_same_vocabulary(num_rows, vocab_size):
            raise ModelError(
                f"{layout.folder!r} holds heads of {num_rows} rows, a token each, and the target "
                f"model has {vocab_size} tokens: they were made for another tokenizer (or 'd2t' or "
                "'token_map' is missing, which would say which tokens theirs are)"
            )
        return Vocabulary([matrix.rows(slice(vocab_size)) for matrix in matrices], None)
    if num_rows > len(ids):  # whole matrices, and a map of what is to be used of them
        matrices = [matrix.rows(ids) for matrix in matrices]
    is_shared = _are_the_targets(layout, ids, vocab_size)
    if not is_shared.all():
        matrices, ids = [matrix.rows(is_shared) for matrix in matrices], ids[is_shared]
    logger.info("medusa: %s drafts %d of the target's tokens", layout.folder, len(ids))
    return Vocabulary(matrices, ids)


def _shared_ids(
    checkpoint: Checkpoint, names: Mapping[str, str], layout: MedusaLayout, vocab_size: int
) -> torch.Tensor | None:
    """Return which of the target's own rows are used, by `d2t`; None: all of them."""
    num_rows = _draft_vocab_size(layout, vocab_size)
    if num_rows is None:
        if names["d2t"] not in checkpoint:
            return None
        num_rows = len(checkpoint.take(names["d2t"], [None]))
    ids = _ids_by_offsets(checkpoint, names, layout, num_rows, vocab_size)
    return ids[_are_the_targets(layout, ids, vocab_size)]


def _are_the_targets(layout: MedusaLayout, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return whether the target has each of `ids`; `ModelError` if it has none of them."""
    are_shared = ids < vocab_size
    if not are_shared.any():
        raise ModelError(f"{layout.folder!r} drafts no token id that the target has")
    return are_shared


def _draft_vocab_size(layout: MedusaLayout, vocab_size: int) -> int | None:
    """Return what config.json says of `d2t`; it counts only if it is less than everything."""
    declared = layout.draft_vocab_size
    return declared if declared is not None and declared < _whole(layout, vocab_size) else None


def _whole(layout: MedusaLayout, vocab_size: int) -> int:
    return layout.vocab_size or vocab_size


def _ids_by_offsets(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    layout: MedusaLayout,
    num_rows: int,
    vocab_size: int,
) -> torch.Tensor:
    """Return the target ids that `d2t` leads to, checked against `t2d` if it is there."""
    offsets = checkpoint.take(names["d2t"], [num_rows])
    rows = torch.arange(num_rows)
    ids = _checked(layout, "d2t", offsets, rows, max(_whole(layout, vocab_size), vocab_size))
    _check_mask(checkpoint, names["t2d"], layout, ids)
    return ids


def _target_ids(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    layout: MedusaLayout,
    num_rows: int,
    vocab_size: int,
) -> torch.Tensor | None:
    """Return the target ids that are drafted, in the order of the rows; None: it is all of them."""
    whole = _whole(layout, vocab_size)
    declared = _draft_vocab_size(layout, vocab_size)
    truncated = layout.truncated_vocab_size  # it counts likewise
    if truncated is not None and truncated >= whole:
        truncated = None
    if names["d2t"] in checkpoint or declared is not None:
        if declared is not None and declared != num_rows:
            raise ModelError(
                f"{layout.folder!r}: config.json has 'draft_vocab_size': {declared}, and the "
                f"output matrix has {num_rows} rows"
            )
        return _ids_by_offsets(checkpoint, names, layout, num_rows, vocab_size)
    if names["token_map"] not in checkpoint and truncated is None:
        return None
    ids = checkpoint.take(names["token_map"], [truncated])
    if truncated is None and len(ids) < num_rows:
        checkpoint.ignore([names["token_map"]])
        logger.info(
            "medusa: 'token_map' of %s is not used: config.json has no 'truncated_vocab_size'",
            layout.folder,
        )
        return None
    if len(ids) > num_rows:
        raise ModelError(
            f"{layout.folder!r}: 'token_map' names {len(ids)} tokens, and the output matrix has "
            f"{num_rows} rows"
        )
    return _checked(layout, "token_map", ids, 0, max(whole, vocab_size, num_rows))


def _checked(
    layout: MedusaLayout, name: str, stored: torch.Tensor, base: torch.Tensor | int, whole: int
) -> torch.Tensor:
    """Return the ids that `stored` says, once they are ids; `base` is added to them."""
    if stored.is_floating_point():
        raise ModelError(
            f"{layout.folder!r}: {name!r} is of {stored.dtype}; expected whole numbers"
        )
    ids = stored.to(torch.int64) + base
    outside = ((ids < 0) | (ids >= whole)).nonzero()
    if len(outside):
        first = int(outside[0])
        means = "target id = row + d2t[row]" if name == "d2t" else "target id = token_map[row]"
        raise ModelError(
            f"{layout.folder!r}: {name!r} says that row {first} is the target id "
            f"{int(ids[first])}, and there are {whole} ({means})"
        )
    return ids


def _check_mask(checkpoint: Checkpoint, name: str, layout: MedusaLayout, ids: torch.Tensor) -> None:
    """Raise if `t2d` [vocab_size], a mask, says something else than `d2t`."""
    mask = checkpoint.take_if_there(name, [None])
    if mask is None:
        return
    drafted = torch.zeros(max(len(mask), int(ids.max()) + 1), dtype=torch.bool)
    drafted[ids] = True
    if not torch.equal(drafted, mask.to(torch.bool)):
        raise ModelError(
            f"{layout.folder!r}: 'd2t' and 't2d' contradict each other: they name "
            f"{int(drafted.sum())} and {int(mask.to(torch.bool).sum())} tokens, not the same ones"
        )
