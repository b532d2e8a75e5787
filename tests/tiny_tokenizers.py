"""Tokenizers of a few hundred tokens, for models that speak of nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN, BOS, EOS = "<unk>", "<s>", "</s>"


def byte_level(
    words: Sequence[str] = (),
    *,
    specials: Sequence[str] = (BOS, EOS),
    shuffled: int | None = None,
    last: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2's: all bytes, and `words` with everything they begin with.

    `specials`: the beginning of a text, its end, and others. `shuffled`: give out the ids in the
    order of this seed. `last`: a special token with the last id.
    """
    names = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = _merge(names, [word.replace(" ", "Ġ").replace("\n", "Ċ") for word in words])
    if last is not None:
        names.append(last)
    if shuffled is not None:
        random.Random(shuffled).shuffle(names)
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=specials[0],
        eos_token=specials[1],
        additional_special_tokens=[*specials[2:], *([last] if last else [])],
    )


def with_byte_fallback(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A BPE over characters with "▁" for a space and a token for each byte, as Llama 2's."""
    names = [UNKNOWN, BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += [chr(c) for c in range(ord("a"), ord("z") + 1)]
    merges = _merge(names, [word.replace(" ", "▁") for word in words])
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BOS, eos_token=EOS
    )


def _merge(names: list[str], words: Sequence[str]) -> list[tuple[str, str]]:
    """Add the words and their beginnings to `names`; return the merges that make them."""
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in names:
                names.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return merges
