"""The shape of a layer like the target's, for drafters that are trained. Knows configs only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.core.worker.decoder import Heads

# RoPE types whose frequencies do not depend on the sequence.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_DEFAULT_MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A Llama layer's sizes: the target's, where its config has them."""

    hidden_size: int
    intermediate_size: int
    heads: Heads
    eps: float
    max_positions: int
    rope: Mapping[str, Any]  # fields of "rope_parameters"

    @staticmethod
    def of(target_config: Any) -> LayerShape:
        """Return the shape of a layer for a target; what its config does not say is as in Llama."""
        config = target_config.get_text_config(decoder=True)
        hidden_size = int(config.hidden_size)
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if rope.get("rope_type", "default") not in _STATIC_ROPE or "rope_theta" not in rope:
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", _DEFAULT_THETA)}
        return LayerShape(
            hidden_size=hidden_size,
            intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
            heads=Heads.of(config),
            eps=float(getattr(config, "rms_norm_eps", None) or 1e-5),
            max_positions=int(
                getattr(config, "max_position_embeddings", None) or _DEFAULT_MAX_POSITIONS
            ),
            rope=rope,
        )

    def rotary(self) -> nn.Module:
        """Return transformers' rotary module for these heads."""
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=self.hidden_size,
                num_attention_heads=self.heads.num_heads,
                num_key_value_heads=self.heads.num_kv_heads,
                head_dim=self.heads.head_dim,
                max_position_embeddings=self.max_positions,
                rope_parameters=dict(self.rope),
            )
        )

    def config(self) -> dict[str, Any]:
        """Return the fields of a config.json."""
        return {
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads.num_heads,
            "num_key_value_heads": self.heads.num_kv_heads,
            "head_dim": self.heads.head_dim,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.max_positions,
            "rope_theta": float(self.rope["rope_theta"]),
            "rope_scaling": None if self.rope["rope_type"] == "default" else dict(self.rope),
        }
