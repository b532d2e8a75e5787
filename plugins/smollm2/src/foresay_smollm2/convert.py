"""From the Q4_1 GGUF file to a folder that transformers loads: bfloat16 weights and a tokenizer.

It knows transformers' GGUF reader and what that leaves out; nothing of downloads or caches.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `gguf` into `folder`.

    Each weight is what Q4_1 stands for, rounded to bfloat16.
    """
    # transformers shows progress bars of its own, and not all of them can be turned off.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        if hasattr(model.config, "quantization_config"):  # what is saved is plain
            del model.config.quantization_config
        model.save_pretrained(folder)
        read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        assert isinstance(read, PreTrainedTokenizerFast)
        _as_in_the_file(read, model.config).save_pretrained(folder)
    # safetensors are written for the owner alone; a cache may be shared.
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)


def _as_in_the_file(
    read: PreTrainedTokenizerFast, config: PretrainedConfig
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with what transformers' GGUF reader drops or gets wrong.

    The file asks for the pre-tokenizer "smollm", which splits digits off before anything else;
    the reader builds a plain GPT-2 one. They differ in white space before digits, and the model
    writes what the former gives: "\\n\\n" before a digit is one token. Some versions of
    transformers also take the wrong end of sequence, none for padding, and a decoder for
    SentencePiece, which turns "\u2581" into a space.
    """
    backend = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: backend.id_to_token(getattr(config, f"{name}_id")) for name in names}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer
