"""A tiny random llama over bytes, with a chat template, saved as a checkpoint folder.

It says nothing sensible, and the same every time; nothing ends its answers.
"""

from __future__ import annotations

from pathlib import Path

import tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def save_chat_model(
    folder: Path, *, max_position_embeddings: int = 4096, template: str | None = TEMPLATE
) -> Path:
    """Write model and tokenizer, a token a byte; return the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.save_pretrained(folder)
    model = tiny_models.llama(
        vocab_size=len(vocabulary),
        max_position_embeddings=max_position_embeddings,
        eos_token_id=None,
    )
    model.save_pretrained(folder)
    return folder
