"""What can be a target model: says why a config, a class or a checkpoint cannot. Loads no weights.

It judges by what transformers and the files declare. What shows only when a model runs (how many
times it calls its attention, under which masks) is checked by `transformers_model`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from foresay.core.errors import ModelError

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
_STATE_TYPES = {"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"}
# Keys of a config.json that only drafters have.
_DRAFTER_KEYS = {
    "medusa_num_heads": "Medusa heads",
    "speculators_model_type": "a drafter in the speculators layout",
    "eagle_config": "an EAGLE drafter",
    "draft_vocab_size": "an EAGLE-3 drafter",
}
_DRAFTER_NAME = re.compile(r"eagle|medusa|speculator|mtp", re.IGNORECASE)
# Tensors of EAGLE drafters, whose config may be that of a small Llama.
_DRAFTER_TENSORS = re.compile(r"(model\.)?(fc\.weight|midlayer\..*)")


def check_config_dict(name: str, config: Mapping[str, Any]) -> None:
    """Refuse, by its config.json, a checkpoint that transformers would take for something else.

    A drafter for a small Llama, say; or a classifier, whose missing head it would make up.
    """
    for key, what in _DRAFTER_KEYS.items():
        if config.get(key) is not None:
            raise _drafter(name, f"its config has {key!r}, so it holds {what}")
    architectures = [str(a) for a in config.get("architectures") or ()]
    if not architectures or set(_causal_classes()).intersection(architectures):
        return
    listed = ", ".join(map(repr, architectures))
    if any(_DRAFTER_NAME.search(architecture) for architecture in architectures):
        raise _drafter(name, f"its architecture is {listed}")
    known = [a for a in architectures if hasattr(transformers, a)]
    if not known:
        raise ModelError(
            f"the model {name!r} has the architecture {listed}, which transformers "
            f"{transformers.__version__} does not know; foresay runs no code from checkpoints"
        )
    # A base model ("GPT2Model") may have all that is needed; its weights will tell.
    if config.get("is_encoder_decoder") or any(a.endswith("Model") for a in known):
        return
    raise ModelError(
        f"the model {name!r} is a {listed}, not a decoder-only causal language model: it cannot "
        "generate text"
    )


def check_config(config: Any) -> None:
    """Refuse a config whose layers cannot be decoded with rollback over a KV cache."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{kind!r} is an encoder-decoder model; foresay runs decoder-only language models"
        )
    if getattr(config, "add_cross_attention", False):
        raise ModelError(
            f"{kind!r} attends to an encoder (add_cross_attention); foresay runs decoder-only "
            "language models"
        )
    text = config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if states := [layer_type for layer_type in foreign if layer_type in _STATE_TYPES]:
        raise _recurrent(f"{kind!r}", f"layers of type {states[0]!r} keep")
    if foreign:
        raise ModelError(
            f"{kind!r} has layers of type {', '.join(map(repr, foreign))}; foresay's attention "
            "sees all earlier tokens ('full_attention') or a window of them ('sliding_attention')"
        )


def check_class(model_class: Any) -> None:
    """Refuse a transformers class that keeps a state, or whose attention cannot be replaced."""
    name = model_class.__name__
    if getattr(model_class, "_is_stateful", False):
        raise _recurrent(name, "it keeps")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{name} does not let its attention be replaced (in transformers "
            f"{transformers.__version__} its _supports_attention_backend is False), so it cannot "
            "use a paged KV cache"
        )


def causal_class(name: str, config: Any) -> Any:
    """Return the transformers class that loads this config as a causal language model."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"the model {name!r} is of type {config.model_type!r}, which transformers "
            f"{transformers.__version__} does not have as a causal language model"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def check_weights(name: str, missing: list[str], unused: list[str]) -> None:
    """Refuse a checkpoint that lacks tensors: transformers would fill them with random numbers."""
    if not missing:
        return
    if any(_DRAFTER_TENSORS.fullmatch(tensor) for tensor in unused):
        raise _drafter(name, f"it has {listing(unused)}, and lacks {listing(missing)}")
    raise ModelError(f"the checkpoint of {name!r} lacks {listing(missing)}")


def listing(names: list[str], most: int = 4) -> str:
    """Join names with commas; of many, name the first ones and count the rest."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _causal_classes() -> list[str]:
    names: list[str] = []
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names += [value] if isinstance(value, str) else value
    return names


def _drafter(name: str, reason: str) -> ModelError:
    return ModelError(
        f"{name!r} is a drafter, not a target model: {reason}; give the model it was trained for "
        "as the model, and this as the drafter"
    )


def _recurrent(who: str, what: str) -> ModelError:
    return ModelError(
        f"{who} cannot be decoded speculatively: {what} a recurrent state, which cannot be rolled "
        "back when a draft is rejected"
    )
