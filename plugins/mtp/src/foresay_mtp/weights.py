"""The modules' tensors, each accounted for: missing, misshapen and unknown ones are named.

Knows files, names, shapes and vocabularies; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from foresay.core.errors import ModelError
from foresay.core.worker.checkpoint import Checkpoint
from foresay_mtp.layout import Layout
from foresay_mtp.shape import MOST_ADDED_IDS, BlockShape

# What computed buffers are called in files.
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias")
# Where a folder of modules may have embeddings, and where a model has its lm_head.
_EMBEDDINGS = ("embed_tokens.weight", "model.embed_tokens.weight")
_HEADS = ("lm_head.weight", *_EMBEDDINGS[::-1])  # tied ones last


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """One module. What is None is the target's."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: torch.Tensor  # [hidden_size, 2 * hidden_size]
    block: Mapping[str, torch.Tensor]  # as `decoder.DecoderBlock` takes them
    output_norm: torch.Tensor
    embeddings: torch.Tensor | None
    lm_head: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All modules, and the reduced head that they share, if there is one."""

    modules: list[ModuleWeights]
    # [draft_vocab, hidden_size], before any module's own; None: the modules' own, the target's, or
    # the target's rows `draft_to_target`.
    lm_head: torch.Tensor | None
    draft_to_target: torch.Tensor | None  # [draft_vocab] int64; None: the ids are the same


def read_weights(layout: Layout, shape: BlockShape, vocab_size: int) -> Weights:
    """Read the modules of a layout, for a target of `vocab_size` tokens.

    In the target's own checkpoint everything else is left alone; a folder of modules may hold,
    besides, embeddings and a reduced head that all of them share. Raises `ModelError`.
    """
    checkpoint = Checkpoint.open(layout.folder, _safetensors(layout))
    checkpoint.ignore(name for name in checkpoint.names if name.endswith(_BUFFERS))
    reader = _Reader(checkpoint, layout, shape)
    modules = [reader.module(number) for number in range(layout.num_modules)]
    lm_head = draft_to_target = None
    if layout.is_drafter:
        lm_head, draft_to_target = _shared_head(checkpoint, layout, shape, vocab_size)
        modules = _with_shared_embeddings(checkpoint, layout, shape, modules)
    else:
        checkpoint.ignore(name for name in checkpoint.names if not layout.belongs(name))
    checkpoint.finish()
    return Weights(modules, lm_head, draft_to_target)


def is_target_head(layout: Layout, weight: torch.Tensor) -> bool:
    """Whether a module's own head is a copy of that of the model it lies in."""
    if layout.is_drafter:
        return False
    checkpoint = Checkpoint.open(layout.folder, _safetensors(layout))
    for name in _HEADS:
        head = checkpoint.take_if_there(name, [None, None])
        if head is not None:
            return torch.equal(head, weight)
    return False


class _Reader:
    """Reads modules out of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout, shape: BlockShape) -> None:
        self._checkpoint = checkpoint
        self._layout = layout
        self._shape = shape

    def module(self, module: int) -> ModuleWeights:
        """Read one; they count from 0."""
        family, size = self._layout.family, self._shape.hidden_size
        own = {
            kind: self._checkpoint.take_if_there(self._layout.joint(module, name), [None, size])
            for kind, name in (("embeddings", family.embeddings), ("lm_head", family.lm_head))
            if name is not None
        }
        return ModuleWeights(
            embedding_norm=self._norm(self._layout.joint(module, family.embedding_norm), size),
            hidden_norm=self._norm(self._layout.joint(module, family.hidden_norm), size),
            projection=self._checkpoint.take(
                self._layout.joint(module, family.projection), [size, 2 * size]
            ),
            block=self._block(self._layout.block(module)),
            output_norm=self._norm(self._layout.joint(module, family.output_norm), size),
            embeddings=own.get("embeddings"),
            lm_head=own.get("lm_head"),
        )

    def _block(self, prefix: str) -> dict[str, torch.Tensor]:
        shape = self._shape
        size, inner = shape.hidden_size, shape.intermediate_size
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        attention, mlp = "self_attn.", "mlp."
        found = {
            name: self._norm(prefix + name, size)
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        }
        required = shape.has_qkv_bias
        qkv = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        found |= self._products(prefix, attention, qkv, size, biased=required)
        found |= self._products(prefix, attention, {"o_proj": size}, width)
        found |= self._products(prefix, mlp, {"gate_proj": inner, "up_proj": inner}, size)
        found |= self._products(prefix, mlp, {"down_proj": size}, inner)
        norms = [f"{attention}{name}.weight" for name in ("q_norm", "k_norm")]
        if shape.has_qk_norm or any(prefix + name in self._checkpoint for name in norms):
            found |= {name: self._norm(prefix + name, shape.head_dim) for name in norms}
        return found

    def _products(
        self,
        prefix: str,
        part: str,
        rows: Mapping[str, int],
        columns: int,
        *,
        biased: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Read matrices of one input; if one has a bias, all must."""
        found = {}
        biased = biased or any(f"{prefix}{part}{name}.bias" in self._checkpoint for name in rows)
        for name, num_rows in rows.items():
            weight = f"{part}{name}.weight"
            found[weight] = self._checkpoint.take(prefix + weight, [num_rows, columns])
            if biased:
                bias = f"{part}{name}.bias"
                found[bias] = self._checkpoint.take(prefix + bias, [num_rows])
        return found

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._checkpoint.take(name, [size])
        return weight.float() + 1.0 if self._shape.zero_centred_norms else weight


def _shared_head(
    checkpoint: Checkpoint, layout: Layout, shape: BlockShape, vocab_size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a folder's `lm_head.weight`, and the target ids of its rows if it has `d2t`.

    With `d2t` alone the rows are the target's own.
    """
    lm_head = checkpoint.take_if_there("lm_head.weight", [None, shape.hidden_size])
    if lm_head is None and "d2t" not in checkpoint:
        return None, None
    own = layout.family.lm_head
    for module in range(layout.num_modules):
        if own is not None and layout.joint(module, own) in checkpoint:
            shared = "d2t" if lm_head is None else "lm_head.weight"
            raise ModelError(
                f"{checkpoint.source!r} has both {shared!r} and {layout.joint(module, own)!r}: a "
                "module has one head"
            )
    size = None if lm_head is None else len(lm_head)
    # A vocabulary that is padded otherwise needs no map: the first ids are the same.
    if (
        "d2t" not in checkpoint
        and size is not None
        and size >= vocab_size - MOST_ADDED_IDS
        and size > vocab_size // 2
    ):
        return lm_head, None
    offsets = checkpoint.take("d2t", [size])
    checkpoint.ignore(["t2d"])  # the same, by target id
    if offsets.is_floating_point():
        raise ModelError(
            f"{checkpoint.source!r}: 'd2t' is of {offsets.dtype}; expected whole numbers"
        )
    ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise ModelError(
            f"{checkpoint.source!r}: 'd2t' leads from draft id {first} to the target id "
            f"{int(ids[first])}, and there are {vocab_size}; it must hold offsets: target id = "
            "draft id + d2t[draft id]"
        )
    return lm_head, ids


def _with_shared_embeddings(
    checkpoint: Checkpoint, layout: Layout, shape: BlockShape, modules: list[ModuleWeights]
) -> list[ModuleWeights]:
    """Return the modules with the folder's embeddings, if it has some for all of them."""
    for name in _EMBEDDINGS:
        shared = checkpoint.take_if_there(name, [None, shape.hidden_size])
        if shared is None:
            continue
        for module, weights in enumerate(modules):
            if weights.embeddings is not None:
                raise ModelError(
                    f"{checkpoint.source!r} has both {name!r} and "
                    f"{layout.joint(module, layout.family.embeddings or '')!r}: a module has one "
                    "embedding of tokens"
                )
        return [replace(weights, embeddings=shared) for weights in modules]
    return modules


def _safetensors(layout: Layout) -> list[str]:
    return [path.name for path in layout.folder.glob("*.safetensors")]
