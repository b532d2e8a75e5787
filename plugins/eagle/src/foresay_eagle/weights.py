"""A head's tensors, under one set of names whatever the published form, each accounted for.

Knows files, names, shapes and vocabularies; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foresay.core.errors import ModelError
from foresay.core.worker.checkpoint import Checkpoint
from foresay_eagle.layout import HeadLayout, is_whole_model

_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's tensors, as they are in the file. What is None is shared with the target."""

    fc: torch.Tensor
    fc_bias: torch.Tensor | None
    # As `decoder.SelfAttention` and `decoder.MLP` take them, and further norms by their names.
    attention: Mapping[str, torch.Tensor]
    mlp: Mapping[str, torch.Tensor]
    norms: Mapping[str, torch.Tensor]
    embeddings: torch.Tensor | None  # [vocab_size, hidden_size]
    # [draft_vocab, hidden_size]; None: the target's, or its rows `draft_to_target`.
    lm_head: torch.Tensor | None
    lm_head_bias: torch.Tensor | None
    draft_to_target: torch.Tensor | None  # [draft_vocab] int64, target ids; None: they are the same


def read_weights(layout: HeadLayout, num_streams: int) -> HeadWeights:
    """Read a head. `num_streams`: of the target, that an EAGLE-3 head takes.

    Raises `ModelError` that names what is missing, misshapen or unknown.
    """
    checkpoint = Checkpoint.open(layout.folder)
    if is_whole_model(checkpoint.names):
        raise ModelError(
            f"{layout.folder!r} holds the tensors of a whole language model, not of an EAGLE head: "
            "there is no 'fc.weight'"
        )
    # Computed from config.json; and what training leaves of the target's.
    checkpoint.ignore(
        name
        for name in checkpoint.names
        if name.endswith("rotary_emb.inv_freq") or name.startswith("verifier_")
    )
    further = next((name for name in checkpoint.names if ".1.self_attn." in f".{name}"), None)
    if further is not None:
        raise ModelError(
            f"{layout.folder!r} is a head of several layers (it has {further!r}); the proposer "
            "'eagle' runs heads of one"
        )
    tensors = _Tensors(checkpoint)
    is_eagle3 = layout.variant == "eagle3"
    size, target_size = layout.hidden_size, layout.target_hidden_size
    width = num_streams * target_size if is_eagle3 else size + target_size
    lm_head, lm_head_bias, draft_to_target = _read_vocabulary(tensors, layout)
    fc_bias = _bias(tensors, "fc.bias", size, required=layout.has_fc_bias)
    weights = HeadWeights(
        fc=tensors.take("fc.weight", [size, width]),
        fc_bias=fc_bias,
        attention=_read_attention(tensors, layout, 2 * size if is_eagle3 else size),
        mlp=_read_mlp(tensors, layout),
        norms=_read_norms(tensors, layout, num_streams),
        embeddings=tensors.take_if_there("embed_tokens.weight", [layout.vocab_size, size]),
        lm_head=lm_head,
        lm_head_bias=lm_head_bias,
        draft_to_target=draft_to_target,
    )
    checkpoint.finish()
    return weights


class _Tensors:
    """A checkpoint's tensors, asked for by one set of names, and reported by the file's own.

    The names asked for are those of the EAGLE-1 authors, which `speculators` uses for EAGLE-3 too.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._under_model = {
            n.removeprefix("model.") for n in checkpoint.names if n[:6] == "model."
        }
        known = self._under_model.union(checkpoint.names)
        # The EAGLE-3 authors' layer, then what `speculators` calls the parts of EAGLE-1.
        self._prefixes = {
            asked: published
            for asked, published in (
                ("layers.0.", "midlayer."),
                ("layers.0.", "transformer."),
                ("fc.", "fusion_fc."),
            )
            if any(name.startswith(published) for name in known)
        }

    def take(self, name: str, shape: Sequence[int | None]) -> torch.Tensor:
        """Return a tensor that must be there."""
        return self._checkpoint.take(self._published(name), shape)

    def take_if_there(self, name: str, shape: Sequence[int | None]) -> torch.Tensor | None:
        """Return a tensor that may be left out; None if it is."""
        return self._checkpoint.take_if_there(self._published(name), shape)

    def __contains__(self, name: str) -> bool:
        return self._published(name) in self._checkpoint

    def _published(self, name: str) -> str:
        for asked, published in self._prefixes.items():
            if name.startswith(asked):
                name = published + name.removeprefix(asked)
                break
        return f"model.{name}" if name in self._under_model else name


def _bias(tensors: _Tensors, name: str, size: int, *, required: bool) -> torch.Tensor | None:
    """Return a bias: one that is there is used, whatever config.json says."""
    if required:
        return tensors.take(name, [size])
    return tensors.take_if_there(name, [size])


def _read_attention(tensors: _Tensors, layout: HeadLayout, width: int) -> dict[str, torch.Tensor]:
    prefix = "layers.0.self_attn."
    sizes = dict.fromkeys(_QKV, layout.num_kv_heads * layout.head_dim)
    sizes["q_proj"] = layout.num_heads * layout.head_dim
    found = {
        f"{name}.weight": tensors.take(f"{prefix}{name}.weight", [size, width])
        for name, size in sizes.items()
    }
    found["o_proj.weight"] = tensors.take(
        f"{prefix}o_proj.weight", [layout.hidden_size, sizes["q_proj"]]
    )
    biased = layout.has_attention_bias or _any_there(tensors, prefix, _QKV)
    for name, size in sizes.items():
        if biased:
            found[f"{name}.bias"] = tensors.take(f"{prefix}{name}.bias", [size])
    bias = tensors.take_if_there(f"{prefix}o_proj.bias", [layout.hidden_size])
    if bias is not None:
        found["o_proj.bias"] = bias
    if _any_there(tensors, prefix, ("q_norm", "k_norm"), "weight"):
        for name in ("q_norm", "k_norm"):
            found[f"{name}.weight"] = tensors.take(f"{prefix}{name}.weight", [layout.head_dim])
    return found


def _read_mlp(tensors: _Tensors, layout: HeadLayout) -> dict[str, torch.Tensor]:
    prefix = "layers.0.mlp."
    size, inner = layout.hidden_size, layout.intermediate_size
    found = {}
    for name in ("gate_proj", "up_proj"):
        found[f"{name}.weight"] = tensors.take(f"{prefix}{name}.weight", [inner, size])
    found["down_proj.weight"] = tensors.take(f"{prefix}down_proj.weight", [size, inner])
    if layout.has_mlp_bias or _any_there(tensors, prefix, ("gate_proj", "up_proj")):
        for name in ("gate_proj", "up_proj"):
            found[f"{name}.bias"] = tensors.take(f"{prefix}{name}.bias", [inner])
    bias = _bias(tensors, f"{prefix}down_proj.bias", size, required=layout.has_mlp_bias)
    if bias is not None:
        found["down_proj.bias"] = bias
    return found


def _any_there(tensors: _Tensors, prefix: str, names: tuple[str, ...], kind: str = "bias") -> bool:
    return any(f"{prefix}{name}.{kind}" in tensors for name in names)


def _read_norms(tensors: _Tensors, layout: HeadLayout, num_streams: int) -> dict[str, torch.Tensor]:
    """Return the norms' weights, by name without "layers.0." and ".weight"."""
    size, target_size = layout.hidden_size, layout.target_hidden_size
    norm = "post_attention_layernorm"
    found = {norm: tensors.take(f"layers.0.{norm}.weight", [size])}
    if layout.variant == "eagle":
        return found
    for norm in ("input_layernorm", "hidden_norm"):
        found[norm] = tensors.take(f"layers.0.{norm}.weight", [size])
    found["norm"] = tensors.take("norm.weight", [size])
    if layout.norm_before_fc or "input_norm.weight" in tensors:
        found["input_norm"] = tensors.take("input_norm.weight", [num_streams * target_size])
    each = [f"fc_norm.{number}" for number in range(num_streams)]
    if layout.fc_norm or any(f"{norm}.weight" in tensors for norm in each):
        for norm in each:
            found[norm] = tensors.take(f"{norm}.weight", [target_size])
    return found


def _read_vocabulary(
    tensors: _Tensors, layout: HeadLayout
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the head's output matrix, its bias, and the target id of each of its rows.

    Without a matrix it is the target's; with a reduced vocabulary, those of its rows.
    """
    size = layout.draft_vocab_size
    if size is None and "d2t" in tensors:
        size = len(tensors.take("d2t", [None]))
    if size is None:
        size = layout.vocab_size
    is_reduced = size != layout.vocab_size
    offsets = tensors.take("d2t", [size]) if is_reduced or "d2t" in tensors else None
    lm_head = bias = None
    if "lm_head.weight" in tensors:
        lm_head = tensors.take(
            "lm_head.weight", [None if offsets is None else size, layout.hidden_size]
        )
        if len(lm_head) != size:
            raise ModelError(
                f"{layout.folder!r}: tensor 'lm_head.weight' is {list(lm_head.shape)}, expected "
                f"[{size}, {layout.hidden_size}]; to be over fewer tokens than the target has it "
                "needs a tensor 'd2t', and there is none"
            )
        bias = tensors.take_if_there("lm_head.bias", [size])
    mask = tensors.take_if_there("t2d", [layout.vocab_size])
    if offsets is None:
        return lm_head, bias, None
    return lm_head, bias, _target_ids(layout, offsets, mask)


def _target_ids(
    layout: HeadLayout, offsets: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the target ids of d2t's *offsets*, checked against the mask of the ids drafted."""
    if offsets.is_floating_point():
        raise ModelError(f"{layout.folder!r}: 'd2t' is of {offsets.dtype}; expected whole numbers")
    ids = torch.arange(len(offsets)) + offsets.to(torch.int64)
    outside = ((ids < 0) | (ids >= layout.vocab_size)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise ModelError(
            f"{layout.folder!r}: 'd2t' leads from draft id {first} to the target id "
            f"{int(ids[first])}, and there are {layout.vocab_size}; it must hold offsets: target "
            "id = draft id + d2t[draft id]"
        )
    # Where no id is left out, some trainers leave the mask empty.
    if mask is not None and (mask.any() or len(offsets) != layout.vocab_size):
        drafted = torch.zeros(layout.vocab_size, dtype=torch.bool)
        drafted[ids] = True
        differing = (drafted != mask.to(torch.bool)).nonzero()
        if len(differing):
            first = int(differing[0])
            told = "is" if drafted[first] else "is not"
            raise ModelError(
                f"{layout.folder!r}: 'd2t' and 't2d' contradict each other: by d2t the target id "
                f"{first} {told} drafted, by t2d it is the other way (so with {len(differing)} ids)"
            )
    return ids
