"""Two tiny target models with random weights, for tests that run a whole engine in milliseconds.

They take and give token ids: there is no tokenizer. Their texts mean nothing, but repeat themselves
often enough for drafts to be accepted and change often enough for drafts to be wrong, at
temperature 0 and at 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

VOCAB_SIZE = 61  # a prime: no multiple of anything that code may round it up to
MAX_MODEL_LEN = 96

_SHARED: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_SCALE = 0.15  # of the weights: with it, texts repeat themselves and change by turns
_SHARPNESS = 8.0  # random logits are flat: times this, some tokens are likely at temperature 1


@functools.cache
def tiny_llama() -> Any:
    """Return a Llama of two layers: rotary positions, grouped heads; the core's own fast path."""
    from transformers import LlamaConfig

    model = _random_model(
        LlamaConfig(
            **_SHARED,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=False,
        )
    )
    model.model.norm.weight.data *= _SHARPNESS
    return model


@functools.cache
def tiny_gpt2() -> Any:
    """Return a GPT-2 of two layers: learned positions; transformers' own modules run it."""
    from transformers import GPT2Config

    model = _random_model(
        GPT2Config(
            **_SHARED,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=MAX_MODEL_LEN,
        )
    )
    model.transformer.ln_f.weight.data *= _SHARPNESS
    return model


TINY_MODELS: Mapping[str, Callable[[], Any]] = {"llama": tiny_llama, "gpt2": tiny_gpt2}


def _random_model(config: Any) -> Any:
    """Return a model of `config` in float32, with the same weights in every process.

    They are drawn here, by name: how transformers initialises is its own affair. torch's global
    generator is left alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:  # biases stay zeros, norms ones
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _SCALE)
    return model
