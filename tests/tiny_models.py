"""Tiny random causal language models, in float32, one builder a family.

Every call builds a new model from a new config, with the same weights for the same seed. Weights
are large enough that the likeliest tokens differ from row to row and logits lie well apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB_SIZE = 160
MAX_POSITIONS = 256

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 96}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def build(config: Any, seed: int = 0) -> Any:
    """Return a random model of `config`, in evaluation mode, with its own eager attention."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias") or "sinks" in name:
                    # Initialised to zeros and ones, which would hide a norm or bias left out.
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    finally:
        torch.random.set_rng_state(state)
    return model.float().eval()


def llama(**changes: Any) -> Any:
    return build(transformers.LlamaConfig(**{**_GROUPED, **changes}))


def mistral(**changes: Any) -> Any:
    """A sliding window of 8 in every layer."""
    return build(transformers.MistralConfig(**{**_GROUPED, "sliding_window": 8, **changes}))


def qwen2(**changes: Any) -> Any:
    return build(transformers.Qwen2Config(**{**_GROUPED, **changes}))


def qwen2_sliding(**changes: Any) -> Any:
    """A sliding window of 8 in the first and the last layer."""
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": _LAYER_TYPES}
    return qwen2(**{**window, **changes})


def qwen3(**changes: Any) -> Any:
    return build(transformers.Qwen3Config(**{**_GROUPED, "head_dim": 16, **changes}))


def gpt2(**changes: Any) -> Any:
    """Learned positions, tied embeddings."""
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
             "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}  # fmt: skip
    settings = {names.get(key, key): value for key, value in _COMMON.items()}
    return build(transformers.GPT2Config(**{**settings, "tie_word_embeddings": True, **changes}))


def gpt_neox(**changes: Any) -> Any:
    """Rope on a quarter of each head, a parallel residual."""
    return build(transformers.GPTNeoXConfig(**{**_COMMON, "intermediate_size": 96, **changes}))


def phi(**changes: Any) -> Any:
    return build(transformers.PhiConfig(**{**_GROUPED, **changes}))


def gemma2(**changes: Any) -> Any:
    """A sliding window of 8 in two layers of three, soft caps on scores and logits."""
    settings = {
        **_GROUPED,
        "head_dim": 16,
        "query_pre_attn_scalar": 10,
        "sliding_window": 8,
        "layer_types": _LAYER_TYPES,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    }
    return build(transformers.Gemma2Config(**{**settings, **changes}))


def phi3_longrope(**changes: Any) -> Any:
    """Longrope whose short form reaches 64 of 256 positions."""
    settings = {
        **_GROUPED,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
        },
    }
    return build(transformers.Phi3Config(**{**settings, **changes}))


def mixtral(**changes: Any) -> Any:
    """Four experts, two a token."""
    settings = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    return build(transformers.MixtralConfig(**{**settings, **changes}))


def deepseek_v3(**changes: Any) -> Any:
    """Latent attention: values of 8 numbers a head, keys of 16; experts after the first layer."""
    settings = {
        **_GROUPED,
        **_MOE,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
    }
    return build(transformers.DeepseekV3Config(**{**settings, **changes}))


def gpt_oss(**changes: Any) -> Any:
    """Attention sinks, a sliding window of 8 in two layers of three, experts."""
    settings = {
        **_GROUPED,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": _LAYER_TYPES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return build(transformers.GptOssConfig(**{**settings, **changes}))


BUILDERS: dict[str, Callable[..., Any]] = {
    builder.__name__: builder
    for builder in (
        llama,
        mistral,
        qwen2,
        qwen2_sliding,
        qwen3,
        gpt2,
        gpt_neox,
        phi,
        gemma2,
        phi3_longrope,
        mixtral,
        deepseek_v3,
        gpt_oss,
    )
}
