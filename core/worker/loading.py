"""Loads a target model and its tokenizer with transformers, and reads facts off its config.

Device and dtype, weights, tokenizer, end-of-sequence ids, length limit. It does not know how the
model is run over the KV cache. What a user gets wrong ends in a `ModelError` or `ConfigError`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.utils.hub import cached_file

from foresay.core.errors import ConfigError, ForesayError, ModelError, nearest, one_line
from foresay.core.worker.linear import computes_natively
from foresay.core.worker.sources import Source
from foresay.core.worker.suitability import (
    causal_class,
    check_class,
    check_config,
    check_config_dict,
    check_weights,
    listing,
)

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What transformers made of a source."""

    model: Any  # a ...ForCausalLM in evaluation mode, on its device
    checkpoint: Path  # the folder or GGUF file of the weights
    note: str  # what is not obvious about the dtype; may be empty


def choose_device(device: str) -> torch.device:
    """Return the device for a setting: "auto" takes the first GPU if there is one."""
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda", 0) if has_cuda else torch.device("cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device={device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device == "cpu":
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError(
            f"device={device!r}: torch {torch.__version__} finds no CUDA device here; use 'auto' "
            "or 'cpu'"
        )
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    return torch.device("cuda", index)


def choose_dtype(dtype: str, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype to compute in and, if it is not the one asked for or stored, the reason.

    "auto": the checkpoint's own on a GPU and on a CPU that computes in it, else float32.
    """
    if dtype in _DTYPES:
        return _DTYPES[dtype], ""
    if dtype != "auto":
        raise ConfigError(
            f"dtype={dtype!r}: expected 'auto', {', '.join(map(repr, _DTYPES))}"
            f"{nearest(dtype, ['auto', *_DTYPES])}"
        )
    if stored not in _DTYPES.values():
        return torch.float32, f"the checkpoint is in {dtype_name(stored)}"
    if device.type != "cpu" or stored == torch.float32 or computes_natively(stored):
        return stored, ""
    return torch.float32, f"this CPU does not compute in {dtype_name(stored)}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def load(
    source: Source, dtype: str, device: torch.device, on_config: Callable[[Any], None]
) -> LoadedModel:
    """Load a model; refuse what is no decoder-only causal language model.

    `on_config` sees the config before any weight is read, and may raise.
    """
    with _worded(source):
        return _load(source, dtype, device, on_config)


def load_config(source: Source) -> Any:
    """Return a model's config; refuse what is no decoder-only causal language model."""
    with _worded(source):
        return _load_config(source, _options(source))


def load_tokenizer(location: str, options: Mapping[str, Any] | None = None) -> Any:
    """Load a tokenizer from a folder or a hub id."""
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(
                location, trust_remote_code=False, **(options or {})
            )
    except Exception as error:
        raise ModelError(
            f"cannot load the tokenizer of {location!r}: {one_line(error)}; another one can be "
            "given with tokenizer=..."
        ) from error


def find_tokenizer(source: Source) -> Any:
    """Return a source's tokenizer, or None if it has none: then ids go in and come out."""
    options = dict(source.options)
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    elif not any(_cached(source.location, file, options) for file in _TOKENIZER_FILES):
        # Asked without any file, transformers would make an empty tokenizer of the model's type.
        return None
    return load_tokenizer(source.location, options)


def end_of_sequence_ids(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Return the ids that generation config, config and tokenizer name, together."""
    holders = (
        getattr(model, "generation_config", None),
        model.config,
        model.config.get_text_config(decoder=True),
        tokenizer,
    )
    ids: set[Any] = set()
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)


def length_limit(config: Any) -> int | None:
    """Return the most positions the config says the model is made for; None if it says nothing.

    A YaRN factor over the original length counts. Longrope's short form is the limit; its long
    form needs an explicit `max_model_len`, see `transformers_model`.
    """
    text = config.get_text_config(decoder=True)
    limit = next((v for key in _LENGTH_KEYS if (v := getattr(text, key, None))), None)
    if limit is None:
        return None
    for rope in rope_parameters(text):
        original = rope.get("original_max_position_embeddings") or limit
        if rope.get("rope_type") == "yarn":
            limit = max(limit, int(original * (rope.get("factor") or 1)))
    return int(limit)


def rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """Return the rope settings of a config: one, or one for each type of layer; maybe none."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([dict(rope)] if rope else [])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the screen; errors are raised as ever."""
    log: Any = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    if bars:
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


@contextmanager
def _worded(source: Source) -> Iterator[None]:
    """Keep transformers quiet, and word what it raises."""
    try:
        with quiet_transformers():
            yield
    except ForesayError:
        raise
    except Exception as error:
        raise ModelError(f"cannot load the model {source.name!r}: {one_line(error)}") from error


def _options(source: Source) -> dict[str, Any]:
    """Return what every call of transformers takes to read a source."""
    file = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    return {**source.options, **file}


def _load_config(source: Source, options: Mapping[str, Any]) -> Any:
    if source.gguf_file is None:
        check_config_dict(source.name, _config_dict(source))
    config = transformers.AutoConfig.from_pretrained(
        source.location, trust_remote_code=False, **options
    )
    check_config(config)
    check_class(causal_class(source.name, config))
    return config


def _load(
    source: Source, dtype: str, device: torch.device, on_config: Callable[[Any], None]
) -> LoadedModel:
    options = _options(source)
    config = _load_config(source, options)
    on_config(config)
    stored = _stored_dtype(config, source)
    chosen, note = choose_dtype(dtype, stored, device)
    if source.gguf_file is not None:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        note = "; ".join(filter(None, ["dequantised from GGUF", note]))
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised:
        # Such weights cannot be moved afterwards.
        options["device_map"] = {"": device}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source.location,
        config=config,
        dtype=chosen,
        output_loading_info=True,
        trust_remote_code=False,
        **options,
    )
    model, info = loaded
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    check_weights(source.name, missing, unused)
    if unused:
        logger.warning(
            "tensors of %r that the model does not use: %s", source.name, listing(unused)
        )
    if source.gguf_file is not None:
        # Dense weights now, to everyone who reads the config.
        model.config.__dict__.pop("quantization_config", None)
        model.__dict__.pop("hf_quantizer", None)
        model.is_quantized = False
    if not quantised:
        model = model.to(device)
    checkpoint = source.folder or Path(_cached(source.location, "config.json", options)).parent
    if source.gguf_file is not None:
        checkpoint = checkpoint / source.gguf_file
    return LoadedModel(model.eval().requires_grad_(False), checkpoint, note)


def _config_dict(source: Source) -> dict[str, Any]:
    """Return config.json as it is: drafters are seen there, and may be unknown to transformers."""
    path = Path(_cached(source.location, "config.json", source.options))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"the config.json of {source.name!r} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"the config.json of {source.name!r} holds no JSON object")
    return content


def _stored_dtype(config: Any, source: Source) -> torch.dtype:
    """Return the dtype of a checkpoint: what its config says, else its first floating tensor's.

    A GGUF file has many; bfloat16 is what its numbers are dequantised to.
    """
    if source.gguf_file is not None:
        return torch.bfloat16
    for holder in (config, config.get_text_config(decoder=True)):
        dtype = getattr(holder, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return dtype
    for path in sorted(source.folder.glob("*.safetensors")) if source.folder else ():
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no mapping
                name = file.get_slice(key).get_dtype()
                if name in _STORED_DTYPES:
                    return _STORED_DTYPES[name]
    return torch.float32


def _cached(location: str, file: str, options: Mapping[str, Any]) -> str:
    """Return the local path of a file of a folder or a hub id; empty if it does not exist."""
    try:
        found = cached_file(location, file, _raise_exceptions_for_missing_entries=False, **options)
    except OSError as error:
        raise ModelError(f"cannot fetch {file} of {location!r}: {one_line(error)}") from error
    return found or ""
