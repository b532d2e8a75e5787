"""What a head's config.json says, in the forms that are published. Reads no weights.

Three forms: fields of a Llama config at the top (the authors' and most others'), the same under
"model", and the `speculators` layout, with the layer's under "transformer_layer_config".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foresay.core.errors import ConfigError, ModelError
from foresay.core.worker.checkpoint import Checkpoint, read_config

Variant = Literal["eagle", "eagle3"]

# RoPE types whose frequencies do not depend on the sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
# Vocabularies of one tokenizer differ by padding and by tokens added later; not by more than this.
_MOST_ADDED_IDS = 4096
# What no other kind of drafter has.
_OF_A_HEAD_ONLY = re.compile(r"(?:model\.)?(?:fc|fusion_fc)\.weight$|(?:model\.)?midlayer\.")
_OF_A_HEAD = re.compile(r"(?:^|\.|fusion_)fc\.weight$|hidden_norm\.weight$")
# What a head does not have: a norm before attention alone, or a second layer.
_OF_A_MODEL = re.compile(r"layers\.0\.input_layernorm\.|\b(?:layers|h|blocks)\.1\.")
# Variations on the architecture that this proposer does not compute, by the value it does.
_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "quantization_config": None,
    "use_mtp_layernorm": False,
    "eh_proj_before_attn": False,
}
_ONLY_BY_VARIANT: Mapping[Variant, Mapping[str, Any]] = {
    "eagle": {"layernorms": False, "add_para_norm": False},
    "eagle3": {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
    },
}


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A head's architecture."""

    folder: str
    variant: Variant
    is_speculators: bool
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    vocab_size: int  # of its target
    draft_vocab_size: int | None  # None: config.json does not say
    max_positions: int
    rope: Mapping[str, Any]  # fields of a Llama config
    window: int | None  # of its attention
    # Biases that must be there; others are used if they are.
    has_fc_bias: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    # EAGLE-3 only.
    aux_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool  # one norm over all streams
    fc_norm: bool  # one norm for each stream
    norm_output: bool  # what goes to the next step is normed

    def check_target(self, text_config: Any) -> None:
        """Raise `ModelError` if the head cannot have been made for a target of this config."""
        hidden_size = int(text_config.hidden_size)
        if self.target_hidden_size != hidden_size:
            raise ModelError(
                f"{self.folder!r} is a head for hidden states of size {self.target_hidden_size}, "
                f"and the target model's have {hidden_size}: it was made for another model"
            )
        vocab_size = int(text_config.vocab_size)
        if abs(self.vocab_size - vocab_size) > _MOST_ADDED_IDS:
            raise ModelError(
                f"{self.folder!r} is a head for a vocabulary of {self.vocab_size} tokens, and the "
                f"target model's has {vocab_size}: it was made for another tokenizer"
            )

    def max_context(self, text_config: Any) -> int | None:
        """Return the head's limit if it is lower than the target's own; None: it is not."""
        limit = getattr(text_config, "max_position_embeddings", None)
        return self.max_positions if limit is None or self.max_positions < limit else None


def read_layout(folder: str | None) -> HeadLayout:
    """Read a head's config.json. Raises `ConfigError` or `ModelError`, with the reason.

    Where config.json leaves open which kind of head it is, the names of the tensors tell.
    """
    if folder is None:
        raise ConfigError(
            "proposer 'eagle' needs a head: give its folder, e.g. drafter='EAGLE3-MY-MODEL'"
        )
    config = read_config(folder)
    return _layout(folder, config, _variant(folder, config))


def recognise(path: Path) -> str | None:
    """Say which kind of head a folder holds; None: none, as far as names tell."""
    if not (path / "config.json").is_file():
        return None
    config = read_config(path)
    kind = config.get("speculators_model_type")
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if kind is not None:
        is_head = kind in ("eagle", "eagle3")
    else:
        is_head = "eagle" in architectures.lower() or any(
            map(_OF_A_HEAD_ONLY.match, Checkpoint.open(path).names)
        )
    if not is_head:
        return None
    is_eagle3 = _variant(str(path), config) == "eagle3"
    return "an EAGLE-3 head" if is_eagle3 else "an EAGLE head"


class _Fields:
    """The fields of a config.json, wherever they stand in it, each checked as it is read."""

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self._folder = folder
        nested = [
            config.get(name) for name in ("transformer_layer_config", "model", "eagle_config")
        ]
        # The last one that has a field counts.
        self._levels = [part for part in (config, *nested) if isinstance(part, dict)]

    def get(self, name: str, default: Any = None) -> Any:
        for level in reversed(self._levels):
            if level.get(name) is not None:
                return level[name]
        return default

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self._folder!r}: config.json has no {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self._folder!r}: config.json has {name!r}: {value!r}; expected a whole number "
                "above 0"
            )
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(
                f"{self._folder!r}: config.json has {name!r}: {value!r}; expected true or false"
            )
        return value


def is_whole_model(names: list[str]) -> bool:
    """Whether tensors of these names are a language model, not a head: a head joins its inputs."""
    return any(map(_OF_A_MODEL.search, names)) and not any(map(_OF_A_HEAD.search, names))


def _variant(folder: str, config: Mapping[str, Any]) -> Variant:
    """Tell an EAGLE-1 or 2 head from an EAGLE-3 one, and from what is no such head at all."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind == "eagle3":
            return "eagle3"
        if kind == "eagle":
            return "eagle"
        raise ModelError(
            f"{folder!r} holds a speculator of the type {kind!r}; the proposer 'eagle' takes "
            "'eagle' and 'eagle3'"
        )
    if "medusa_num_heads" in config:
        raise ModelError(f"{folder!r} holds Medusa heads; run them with --proposer medusa")
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if "eagle3" in architectures.lower():
        return "eagle3"
    if "eagle" in architectures.lower():
        return "eagle"
    names = Checkpoint.open(folder).names  # no tensor is read
    if any("midlayer." in name or name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if is_whole_model(names):
        raise ModelError(
            f"{folder!r} is a whole language model ({architectures or 'no architecture named'}), "
            "not an EAGLE head, which has one layer and a tensor 'fc.weight'; run a whole model as "
            "drafter with --proposer draft_model"
        )
    return "eagle"


def _layout(folder: str, config: Mapping[str, Any], variant: Variant) -> HeadLayout:
    fields = _Fields(folder, config)
    for name, only in {**_ONLY, **_ONLY_BY_VARIANT[variant]}.items():
        value = fields.get(name, only)
        if value != only:
            raise ModelError(
                f"{folder!r}: config.json has {name!r}: {value!r}; the proposer 'eagle' runs heads "
                f"with {only!r} only"
            )
    is_speculators = "speculators_model_type" in config
    hidden_size = fields.number("hidden_size")
    num_heads = fields.number("num_attention_heads")
    num_kv_heads = fields.number("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{folder!r}: config.json has {num_heads} attention heads and {num_kv_heads} key "
            "heads, which do not divide them"
        )
    draft_vocab_size = fields.get("draft_vocab_size")
    has_attention_bias = fields.flag("attention_bias") or fields.flag("qkv_bias")
    return HeadLayout(
        folder=folder,
        variant=variant,
        is_speculators=is_speculators,
        hidden_size=hidden_size,
        target_hidden_size=fields.number("target_hidden_size", hidden_size),
        intermediate_size=fields.number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.number("head_dim", max(1, hidden_size // num_heads)),
        eps=float(fields.get("rms_norm_eps", 1e-6)),
        vocab_size=fields.number("vocab_size"),
        draft_vocab_size=None if draft_vocab_size is None else fields.number("draft_vocab_size"),
        max_positions=fields.number("max_position_embeddings", 2048),
        rope=_rope(fields, folder),
        window=_window(fields),
        # The authors' code gives an EAGLE-1 head's fc a bias unless told otherwise.
        has_fc_bias=variant == "eagle"
        and (fields.flag("fusion_bias") if is_speculators else fields.flag("bias", default=True)),
        has_attention_bias=has_attention_bias,
        has_mlp_bias=fields.flag("mlp_bias"),
        aux_layer_ids=_aux_layer_ids(fields, folder),
        norm_before_residual=fields.flag("norm_before_residual", default=is_speculators),
        norm_before_fc=fields.flag("norm_before_fc"),
        fc_norm=fields.flag("fc_norm"),
        norm_output=fields.flag("norm_output") or fields.flag("return_hidden_post_norm"),
    )


def _rope(fields: _Fields, folder: str) -> dict[str, Any]:
    """Return the rope's fields as transformers' Llama config takes them."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{folder!r}: config.json has a rope that is no JSON object: {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _STATIC_ROPE:
        raise ModelError(
            f"{folder!r}: config.json has a rope of the type {kind!r}; expected one of "
            f"{', '.join(_STATIC_ROPE)}"
        )
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    rope = {name: value for name, value in rope.items() if name != "type"}
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def _window(fields: _Fields) -> int | None:
    """Return the attention's window; a Llama config has one only if it says so by layer type."""
    layer_types = fields.get("layer_types")
    if not layer_types or layer_types[0] != "sliding_attention":
        return None
    return fields.number("sliding_window")


def _aux_layer_ids(fields: _Fields, folder: str) -> tuple[int, ...] | None:
    ids = fields.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        raise ModelError(
            f"{folder!r}: config.json has 'eagle_aux_hidden_state_layer_ids': {ids!r}; expected a "
            "list of layer numbers"
        )
    return tuple(ids)
