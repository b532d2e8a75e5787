"""Sizes of the modules' decoder blocks, from config.json or the target's config. Imports no torch.

Modules inside the target's checkpoint are shaped as its config says. A folder of modules has a
config.json of its own; what it leaves out is as in the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foresay.core.errors import ModelError
from foresay_mtp.layout import Layout

# Vocabularies of one tokenizer differ by padding and by tokens added later; not by more than this.
MOST_ADDED_IDS = 4096
# RoPE types whose frequencies do not depend on the sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")
# Models whose attention has these whatever their config says.
_WITH_QKV_BIAS = ("qwen2", "mimo")
_WITH_QK_NORM = ("qwen3",)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a decoder block of the Llama kind is made of."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    max_positions: int
    max_context: int | None  # the modules' own limit, if it is lower than the target's
    rope: Mapping[str, Any]  # fields of a Llama config
    # Tensors that must be there; others of the kind are used if they are.
    has_qkv_bias: bool
    has_qk_norm: bool
    zero_centred_norms: bool


def block_shape(layout: Layout, text_config: Any) -> BlockShape:
    """Return the shape of a layout's blocks for a target with this text config.

    Raises `ModelError` if they were made for another model, or cannot be run.
    """
    fields = _Fields(layout, text_config)
    where = str(layout.folder)
    hidden_size = int(text_config.hidden_size)
    own_size = fields.own("hidden_size")
    norm_shape = layout.shapes.get(layout.joint(0, layout.family.hidden_norm))
    if own_size is None and norm_shape is not None and len(norm_shape) == 1:
        own_size = norm_shape[0]
    if own_size is not None and own_size != hidden_size:
        raise ModelError(
            f"{where!r} holds MTP modules for hidden states of size {own_size}, and the target "
            f"model's have {hidden_size}: they were made for another model"
        )
    vocab_size = fields.own("vocab_size")
    if vocab_size is not None and abs(vocab_size - text_config.vocab_size) > MOST_ADDED_IDS:
        raise ModelError(
            f"{where!r} holds MTP modules for a vocabulary of {vocab_size} tokens, and the target "
            f"model's has {text_config.vocab_size}: they were made for another tokenizer"
        )
    num_heads = fields.number("num_attention_heads")
    num_kv_heads = fields.number("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where!r}: {num_heads} attention heads and {num_kv_heads} key heads, which do not "
            "divide them"
        )
    own_heads = fields.own("num_attention_heads") is not None
    head_dim = fields.own("head_dim") if own_heads else fields.get("head_dim")
    limit = fields.own("max_position_embeddings")
    target_limit = getattr(text_config, "max_position_embeddings", None)
    is_lower = limit is not None and (target_limit is None or limit < target_limit)
    model_type = str(fields.get("model_type") or "")
    return BlockShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(head_dim or hidden_size // num_heads),
        intermediate_size=fields.number("intermediate_size"),
        eps=float(fields.get("rms_norm_eps") or 1e-6),
        max_positions=int(limit or target_limit or 2048),
        max_context=limit if is_lower else None,
        rope=fields.rope(),
        has_qkv_bias=fields.flag("attention_bias", model_type.startswith(_WITH_QKV_BIAS)),
        has_qk_norm=fields.flag("use_qk_norm", model_type.startswith(_WITH_QK_NORM)),
        zero_centred_norms=layout.is_zero_centred(model_type),
    )


class _Fields:
    """A folder's config.json, and behind it the target's config."""

    def __init__(self, layout: Layout, text_config: Any) -> None:
        self._where = str(layout.folder)
        self._own = layout.config if layout.is_drafter else {}
        self._text_config = text_config
        self._refuse_what_is_not_computed()

    def own(self, name: str) -> Any:
        """Return a field of the folder's own config.json."""
        return self._own.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._own.get(name)
        if value is None:
            value = getattr(self._text_config, name, None)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self._where!r}: config.json has {name!r}: {value!r}; expected a whole number "
                "above 0"
            )
        return value

    def flag(self, name: str, by_type: bool) -> bool:
        """Return a field of which the model's type may be the answer."""
        value = self._own.get(name)
        if value is None:
            value = by_type or getattr(self._text_config, name, False)
        return bool(value)

    def rope(self) -> Mapping[str, Any]:
        own = {name: self._own[name] for name in _ROPE_FIELDS if self._own.get(name) is not None}
        rope = own or {"rope_parameters": getattr(self._text_config, "rope_parameters", None)}
        parameters = rope.get("rope_parameters") or rope.get("rope_scaling") or {}
        if not own and not rope["rope_parameters"]:
            raise ModelError(
                f"{self._where!r}: config.json has no 'rope_theta', and the target model has no "
                "rotary positions"
            )
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if any(isinstance(value, dict) for value in parameters.values()):
            kind = "different for each kind of layer"
        if kind not in _STATIC_ROPE:
            raise ModelError(
                f"{self._where!r}: MTP modules with rope of the type {kind!r}; proposer 'mtp' "
                f"computes {', '.join(_STATIC_ROPE)}"
            )
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise self._not_computed("partial_rotary_factor", parameters["partial_rotary_factor"])
        return rope

    def _refuse_what_is_not_computed(self) -> None:
        for name, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
            value = self.get(name, only)
            if value != only:
                raise self._not_computed(name, value)

    def _not_computed(self, name: str, value: Any) -> ModelError:
        return ModelError(
            f"{self._where!r}: MTP modules with {name} {value!r}, which proposer 'mtp' does not "
            "compute"
        )
