"""Reads what a drafter's and a target's files say of them, without loading either.

Drafters' config.json come in many forms: fields are taken wherever the published ones have them.
Knows no proposer but by its needs. Imports torch and transformers when it is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foresay.core.commands.comparison import (
    Comparison,
    Sizes,
    VocabularyComparison,
    compare_vocabularies,
)
from foresay.core.errors import ForesayError
from foresay.core.proposer import Needs

if TYPE_CHECKING:
    from foresay.core.worker.sources import Source

# Where a drafter's config.json may have the fields of its layers. The last one counts.
_NESTED = ("transformer_layer_config", "model", "eagle_config")
_DRAFT_VOCABULARY = ("draft_vocab_size", "truncated_vocab_size")
_DRAFT_TO_TARGET = ("d2t", "model.d2t")


@dataclass(frozen=True, slots=True)
class Files:
    """What is known of a drafter or a target before it is loaded."""

    sizes: Sizes
    tokenizer: Any = None  # None: there is none, or it cannot be read
    unreadable: str = ""  # why it cannot
    made_for: str | None = None  # the target that a drafter's config.json names


def compare(
    own: Files, theirs: Files, needs: Needs | None, *, is_model: bool, made_for: str | None = None
) -> Comparison:
    """Compare a drafter with a target. `needs`: what its proposer asked for; None: it refused.

    `is_model`: the drafter is a whole language model. `made_for`: the target that it was registered
    for; None: whichever its files name.
    """
    vocabulary, no_vocabulary = _compare_tokenizers(own, theirs)
    sizes = own.sizes
    if needs is not None and needs.max_context is not None:
        sizes = replace(sizes, max_length=needs.max_context)
    return Comparison(
        drafter=sizes,
        target=theirs.sizes,
        vocabulary=vocabulary,
        no_vocabulary=no_vocabulary,
        taps=() if needs is None else needs.aux_layers,
        takes_hidden_states=not is_model
        and (needs is None or needs.hidden_state or bool(needs.aux_layers)),
        made_for=made_for or own.made_for,
    )


def read_model(source: Source, config: Any) -> Files:
    """Read what there is of a whole language model, of this transformers config."""
    from foresay.core.worker.loading import length_limit

    text = config.get_text_config(decoder=True)
    sizes = Sizes(
        hidden_size=_number(getattr(text, "hidden_size", None)),
        num_layers=_number(getattr(text, "num_hidden_layers", None)),
        vocab_size=_number(getattr(text, "vocab_size", None)),
        num_parameters=_num_parameters(_tensors(_folder(source))),
        max_length=length_limit(config),
    )
    return Files(sizes, *_tokenizer(source))


def read_drafter(path: Path) -> Files:
    """Read what there is of a drafter that is no whole model; what cannot be read is not known."""
    from foresay.core.worker.sources import Source

    config = _config(path)
    levels = [config, *(config.get(name) for name in _NESTED)]
    levels = [level for level in levels if isinstance(level, dict)]

    def number(*names: str) -> int | None:
        found = (_number(level.get(name)) for name in names for level in reversed(levels))
        return next((value for value in found if value is not None), None)

    tensors = _tensors(path)
    draft_to_target = [tensors[name].shape for name in _DRAFT_TO_TARGET if name in tensors]
    sizes = Sizes(
        hidden_size=number("target_hidden_size", "hidden_size"),
        num_layers=number("num_hidden_layers"),
        vocab_size=number("vocab_size"),
        draft_vocab_size=draft_to_target[0][0] if draft_to_target else number(*_DRAFT_VOCABULARY),
        num_parameters=_num_parameters(tensors),
        max_length=number("max_position_embeddings"),
    )
    source = Source(str(path), str(path), path)
    tokenizer, unreadable = _tokenizer(source) if path.is_dir() else (None, "")
    return Files(sizes, tokenizer, unreadable, _made_for(config))


def _compare_tokenizers(own: Files, theirs: Files) -> tuple[VocabularyComparison | None, str]:
    """Return what the ids mean to both, or None and why that cannot be said."""
    for files, whose in ((own, "the drafter"), (theirs, "the target")):
        if files.unreadable:
            return None, f"the tokenizer of {whose} cannot be read ({files.unreadable})"
        if files.tokenizer is None:
            return None, f"{whose} has no tokenizer of its own"
    special: set[int] = set()
    for tokenizer in (own.tokenizer, theirs.tokenizer):
        special.update(getattr(tokenizer, "added_tokens_decoder", None) or ())
        special.update(tokenizer.all_special_ids)
    vocabularies = own.tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    return compare_vocabularies(*vocabularies, special), ""


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    is_parameter: bool  # and no table of ids


def _tensors(path: Path | None) -> dict[str, _Tensor]:
    """Return the shapes in a folder's or a file's weights; none for files of another kind."""
    if path is None:
        return {}
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        files = sorted([*path.glob("*.bin"), *path.glob("*.pt")])
    tensors: dict[str, _Tensor] = {}
    for file in files:
        try:
            tensors.update(_tensors_of(file))
        except Exception:  # noqa: BLE001  # whoever loads it says what is wrong
            return {}
    return tensors


def _tensors_of(file: Path) -> dict[str, _Tensor]:
    import torch
    from safetensors import safe_open

    tensors = {}
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                part = opened.get_slice(name)
                is_parameter = part.get_dtype().startswith(("F", "BF"))
                tensors[name] = _Tensor(tuple(part.get_shape()), is_parameter)
    elif file.suffix in (".bin", ".pt"):
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        for name, tensor in loaded.items():
            tensors[name] = _Tensor(tuple(tensor.shape), tensor.is_floating_point())
    return tensors


def _num_parameters(tensors: Mapping[str, _Tensor]) -> int | None:
    total = 0
    for tensor in tensors.values():
        size = 1
        for length in tensor.shape:
            size *= length
        total += size * tensor.is_parameter
    return total or None


def _folder(source: Source) -> Path | None:
    """Return where a model's weights lie, if they are files that can be looked into."""
    if source.gguf_file is not None:
        return None
    if source.folder is not None:
        return source.folder
    import huggingface_hub

    hub: Any = huggingface_hub  # its types do not say all that it exports
    cached = hub.try_to_load_from_cache(source.location, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _tokenizer(source: Source) -> tuple[Any, str]:
    """Return a tokenizer, or None and why there is none."""
    from foresay.core.worker.loading import find_tokenizer

    try:
        return find_tokenizer(source), ""
    except ForesayError as error:
        return None, str(error)


def _config(path: Path) -> dict[str, Any]:
    folder = path if path.is_dir() else path.parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads it says what is wrong
        return {}
    return config if isinstance(config, dict) else {}


def _made_for(config: Mapping[str, Any]) -> str | None:
    verifier = config.get("speculators_config")
    verifier = verifier.get("verifier") if isinstance(verifier, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    named = named or config.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
