"""The target model: loads it, chooses how it is run, and offers one forward pass for both ways.

The Llama family runs on `decoder`, everything else on transformers' own modules
(`transformers_model`). It knows models, not requests: batches, KV blocks and drafts come from
outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from foresay.core.errors import ConfigError, ModelError
from foresay.core.proposer import KVLayer, KVRows, TargetView
from foresay.core.registry import ModelAlias
from foresay.core.worker import cpu_kernels, half_linear, int8_linear
from foresay.core.worker.attention import AttentionMetadata, AttentionRules
from foresay.core.worker.capture import Capture
from foresay.core.worker.decoder import FastDecoder, Heads
from foresay.core.worker.half_linear import HalfLinear
from foresay.core.worker.int8_linear import Int8Linear
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.linear import Linear, compute_dtype
from foresay.core.worker.loading import (
    choose_device,
    choose_dtype,
    dtype_name,
    end_of_sequence_ids,
    find_tokenizer,
    length_limit,
    load,
    load_config,
    load_tokenizer,
)
from foresay.core.worker.packed_modules import is_untouched
from foresay.core.worker.sources import find_source
from foresay.core.worker.suitability import check_class, check_config
from foresay.core.worker.transformers_model import TransformersDecoder, private_copy

# What makes the products, by `quantization`, but for "auto".
_LINEARS: dict[str, type[Linear]] = {
    "none": Linear,
    "int8": Int8Linear,
    "float16": HalfLinear,
}


class Decoder(Protocol):
    """How a target model is run."""

    vocab_size: int
    kv_layout: list[LayerKV]
    attention_rules: AttentionRules
    min_rows: int

    @property
    def is_half(self) -> bool:
        """Whether any weight of its products is kept in float16 for want of bfloat16."""
        ...

    @property
    def embeddings(self) -> torch.Tensor:
        """The input embeddings, [vocab_size or more, hidden_size]."""

    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output head: hidden states [n, hidden_size] to logits [n, vocab_size]."""

    def lm_head_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output head for token ids [n] only: weight [n, hidden_size], bias [n] or None."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens]
        output_rows: torch.Tensor,  # [num_output_rows], indices into the rows
        cache: KVCache,
        metadata: AttentionMetadata,
        capture: Capture | None = None,
    ) -> torch.Tensor:  # [num_output_rows, vocab_size]
        """Write the rows' keys and values to the cache and return logits of `output_rows`.

        `capture`, if given, is filled with the hidden states of all rows.
        """
        ...

    def forward_rows(
        self, input_ids: torch.Tensor, output_rows: torch.Tensor, rows: KVRows
    ) -> torch.Tensor:
        """Return the same, over a proposer's own KV layers."""
        ...


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A loaded target model, ready to run."""

    config: Any  # the transformers config
    vocab_size: int  # logits have this many columns; token ids are below it
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    kv_layout: list[LayerKV]  # by attention layer
    attention_rules: AttentionRules  # for `AttentionMetadata.build`
    min_rows: int  # fewer rows than this in a pass cost as much: pad to it
    max_model_len: int | None  # the model's own limit
    tokenizer: Any  # None: ids in, ids out
    eos_token_ids: frozenset[int]  # may be empty
    checkpoint: Path | None  # the folder or file of the weights; None for a model object
    is_fast: bool  # whether foresay's own decoder runs it
    description: str  # one line: what was loaded, and how it is run
    decoder: Decoder

    def forward(
        self,
        input_ids: torch.Tensor,
        output_rows: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        """Run one batch of rows.

        input_ids [num_tokens] int64; their positions are `metadata.positions`. output_rows
        [num_output_rows] int64: indices of the rows whose logits are wanted. Returns logits
        [num_output_rows, vocab_size]; row j predicts the token after `input_ids[output_rows[j]]`.
        `capture` is filled with the hidden states of all rows that it wants.
        """
        return self.decoder.forward(input_ids, output_rows, cache, metadata, capture)

    def forward_rows(
        self, input_ids: torch.Tensor, output_rows: torch.Tensor, rows: KVRows
    ) -> torch.Tensor:
        """Run the model as a drafter: on `rows` laid out in KV layers that are a proposer's own.

        input_ids [num_rows] int64, output_rows [n] int64: as in `forward`. The proposer's
        `Needs.kv_layers` are `kv_layers`. Returns logits [n, vocab_size].
        """
        return self.decoder.forward_rows(input_ids, output_rows, rows)

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """What a proposer declares to run this model by `forward_rows`."""
        return tuple(KVLayer(kv.num_kv_heads, kv.head_dim, kv.value_dim) for kv in self.kv_layout)

    @property
    def embeddings(self) -> torch.Tensor:
        """The input embeddings, [vocab_size or more, hidden_size]."""
        return self.decoder.embeddings

    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The output head: hidden states [n, hidden_size] to logits [n, vocab_size]."""
        return self.decoder.lm_head

    def view(
        self,
        max_model_len: int,
        *,
        embeddings: bool,
        lm_head: bool,
        int8_drafter: bool = False,
    ) -> TargetView:
        """Return what drafters see of the model, with the weights that they asked for."""
        return TargetView(
            config=self.config,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            dtype=self.dtype,
            device=self.device,
            max_model_len=max_model_len,
            checkpoint=self.checkpoint,
            tokenizer=self.tokenizer,
            embeddings=self.embeddings if embeddings else None,
            lm_head=self.lm_head if lm_head else None,
            lm_head_rows=self.decoder.lm_head_rows if lm_head else None,
            int8_drafter=int8_drafter,
        )

    def shallow(self) -> TargetModel:
        """Return a cheap model that computes with the same kernels in the same shapes, if any.

        The fast decoder's layers are alike: one for each sliding window is enough.
        """
        if not isinstance(self.decoder, FastDecoder):
            return self
        decoder = self.decoder.shallow()
        return replace(self, decoder=decoder, kv_layout=decoder.kv_layout)

    def reserve(self, num_positions: int) -> None:
        """Prepare tables for positions below `num_positions`; call it once, before any step."""
        if isinstance(self.decoder, FastDecoder):
            self.decoder.rotary.reserve(num_positions)


@dataclass(frozen=True, slots=True)
class _Ingredients:
    """A model as transformers made it, and what is known of it."""

    model: Any
    tokenizer: Any
    checkpoint: Path | None
    note: str
    is_ours: bool  # nobody else holds the model object


def load_target(
    model: str | Path | Any,
    *,
    tokenizer: Any = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "auto",
    row_invariant: bool = True,
    max_model_len: int | None = None,
    aliases: Mapping[str, ModelAlias] | None = None,
    on_config: Callable[[Any], None] = lambda _config: None,
    force_transformers: bool = False,
) -> TargetModel:
    """Load a target model.

    model: an alias of `aliases`, a folder, a GGUF file, an id on the Hugging Face hub, or a
        loaded transformers model. That one is used as it is, in its dtype and on its device, and
        nothing in the object is changed. Its weights are shared where they need no packing: do not
        change them in place afterwards.
    tokenizer: a tokenizer, or where to load one from; None: the model's own, if it has one.
    quantization: "float16" keeps the weights of all products in float16 on a CPU, each matrix of
        which no digit is lost by it that counts (`half_linear`). "auto" does so where products are
        computed in float32, "none" nowhere. "int8" rounds them to int8, on a CPU and for foresay's
        own decoder only. The embeddings, and all that is computed, keep their dtype.
    row_invariant: compute each row independently of its batch, as far as the kernels allow it.
    max_model_len: what the engine was asked for; it decides longrope's form.
    on_config: is given the model's config before any weight is read, and may raise.
    force_transformers: run transformers' modules also where foresay's own decoder could, to
        compare them.

    Raises `ModelError` if there is no such model or it cannot be run exactly, `ConfigError` for a
    wrong dtype or device, or where the quantisation cannot be had.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(tokenizer))
    if isinstance(model, str | Path):
        chosen = choose_device(device)
        _check_quantization(quantization, chosen)

        def check(config: Any) -> None:
            _check_is_fast(quantization, FastDecoder.supports(config))
            on_config(config)

        found = _from_source(str(model), tokenizer, dtype, chosen, aliases or {}, check)
    else:
        found = _from_object(model, tokenizer, dtype, device)
        _check_quantization(quantization, found.model.device)
        on_config(model.config)
    return _build(found, quantization, row_invariant, max_model_len, force_transformers)


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What a model's config says of it."""

    max_model_len: int | None  # the model's own limit
    # As the config has it. Some attention stores something else, which the loaded model knows.
    kv_layers: tuple[KVLayer, ...]


def outline(model: str, aliases: Mapping[str, ModelAlias] | None = None) -> ModelOutline:
    """Say what is known of a model that `load_target` would take, without reading its weights.

    Raises `ModelError` if there is no such model, or if its config shows that it cannot be run.
    """
    config = read_config(model, aliases)
    text_config = config.get_text_config(decoder=True)
    heads = Heads.of(text_config)
    return ModelOutline(
        max_model_len=length_limit(config),
        kv_layers=(KVLayer(heads.num_kv_heads, heads.head_dim),) * text_config.num_hidden_layers,
    )


def read_config(model: str, aliases: Mapping[str, ModelAlias] | None = None) -> Any:
    """Return the transformers config of a model that `load_target` would take, before any weight.

    Raises `ModelError` if there is no such model.
    """
    return load_config(find_source(model, aliases or {}))


def _from_source(
    name: str,
    tokenizer: Any,
    dtype: str,
    device: torch.device,
    aliases: Mapping[str, ModelAlias],
    on_config: Callable[[Any], None],
) -> _Ingredients:
    choose_dtype(dtype, torch.float32, device)  # a wrong name is an error before any download
    source = find_source(name, aliases)
    loaded = load(source, dtype, device, on_config)
    if tokenizer is None:
        tokenizer = find_tokenizer(source)
    return _Ingredients(loaded.model, tokenizer, loaded.checkpoint, loaded.note, is_ours=True)


def _from_object(model: Any, tokenizer: Any, dtype: str, device: str) -> _Ingredients:
    kind = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel):
        raise ModelError(
            f"model is a {kind}; expected a name, a folder, or a transformers model with a "
            "language-modelling head (a wrapper's inner model, an adapter merged into its model)"
        )
    check_config(model.config)
    check_class(type(model))
    causal: Any = model
    if causal.get_output_embeddings() is None:
        raise ModelError(
            f"the {kind} object has no language-modelling head: load it with AutoModelForCausalLM"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise ModelError(
            f"the {kind} object lies on {', '.join(sorted(map(str, devices)))}; foresay runs a "
            "model on one device, 'cpu' or 'cuda:N'"
        )
    if device != "auto" and choose_device(device) != model.device:
        raise ConfigError(
            f"device={device!r}, but the {kind} object is on {str(model.device)!r}: move it "
            "(model.to(...)) or leave device at 'auto'"
        )
    if dtype != "auto" and choose_dtype(dtype, model.dtype, model.device)[0] != model.dtype:
        raise ConfigError(
            f"dtype={dtype!r}, but the {kind} object is in {dtype_name(model.dtype)!r}: load it in "
            "that dtype or leave dtype at 'auto'"
        )
    return _Ingredients(model, tokenizer, None, "a loaded model", is_ours=False)


def _build(
    found: _Ingredients,
    quantization: str,
    row_invariant: bool,
    max_model_len: int | None,
    force_transformers: bool,
) -> TargetModel:
    model, config = found.model, copy.deepcopy(found.model.config)
    text_config = config.get_text_config(decoder=True)
    limit = length_limit(config)
    dtype, device = model.dtype, model.device
    reason = "asked for" if force_transformers else _why_not_fast(model)
    _check_is_fast(quantization, reason)
    linear = _linear_for(quantization, dtype, device)
    decoder: FastDecoder | TransformersDecoder
    if reason is None:
        decoder = FastDecoder(
            model,
            device=device,
            dtype=dtype,
            row_invariant=row_invariant,
            linear=linear,
        )
        how = "foresay's own decoder"
        if decoder.cpu_layers is not None:
            how += f" and kernels ({cpu_kernels.instructions()})"
    else:
        own = model if found.is_ours else private_copy(model)
        decoder = TransformersDecoder(
            own,
            limit=limit,
            max_model_len=max_model_len,
            row_invariant=row_invariant,
            linear=linear,
        )
        limit = decoder.max_model_len
        how = "transformers' modules"
    num_embeddings = model.get_input_embeddings().num_embeddings
    if num_embeddings < decoder.vocab_size:
        raise ModelError(
            f"{type(model).__name__} has {decoder.vocab_size} columns of logits but embeds only "
            f"{num_embeddings} tokens"
        )
    precision = f"{dtype_name(dtype)} on {device}" + (f" ({found.note})" if found.note else "")
    if quantization == "int8":
        precision += ", int8 weights"
    elif decoder.is_half:
        precision += ", float16 weights"
    return TargetModel(
        config=config,
        vocab_size=decoder.vocab_size,
        hidden_size=int(text_config.hidden_size),
        num_layers=int(text_config.num_hidden_layers),
        dtype=dtype,
        device=device,
        kv_layout=decoder.kv_layout,
        attention_rules=decoder.attention_rules,
        min_rows=decoder.min_rows,
        max_model_len=limit,
        tokenizer=found.tokenizer,
        eos_token_ids=end_of_sequence_ids(model, found.tokenizer, decoder.vocab_size),
        checkpoint=found.checkpoint,
        is_fast=reason is None,
        description=f"{config.model_type}, {precision}, {how}",
        decoder=decoder,
    )


def _check_quantization(quantization: str, device: torch.device) -> None:
    if quantization in ("auto", "none"):
        return
    if device.type != "cpu":
        raise ConfigError(
            f"quantization={quantization!r} is for a CPU, and the model's device is "
            f"{str(device)!r}: set device to 'cpu' or leave quantization out"
        )
    module = int8_linear if quantization == "int8" else half_linear
    if not module.is_available():
        raise ConfigError(
            f"quantization={quantization!r}: torch {torch.__version__} has no products for it on "
            "this CPU (oneDNN has those of int8, FBGEMM those of float16), and foresay's own "
            "kernels are not built, or have none here either"
        )


def _check_is_fast(quantization: str, reason: str | None) -> None:
    if quantization == "int8" and reason is not None:
        raise ConfigError(
            f"quantization={quantization!r} needs foresay's own decoder, which does not run this "
            f"model: {reason}"
        )


def _linear_for(quantization: str, dtype: torch.dtype, device: torch.device) -> type[Linear]:
    """Return what makes a model's products."""
    if quantization != "auto":
        return _LINEARS[quantization]
    in_float32 = device.type == "cpu" and compute_dtype(dtype, device) == torch.float32
    return HalfLinear if in_float32 and half_linear.is_available() else Linear


def _why_not_fast(model: Any) -> str | None:
    """Return why the fast decoder does not run `model`, or None if it does.

    It reads weights only, so every module must be the plain one whose weights say everything:
    no adapters, no hooks, no quantised layers, no subclass with a forward pass of its own.
    """
    reason = FastDecoder.supports(model.config)
    if reason is not None:
        return reason
    if type(model).__module__.split(".")[0] != "transformers":
        return f"{type(model).__name__} is not transformers' own class"
    for name, module in model.named_modules():
        if not is_untouched(module):
            return f"{name!r} has hooks"
        package = type(module).__module__.split(".")[0]
        if type(module) is torch.nn.Linear or type(module) is torch.nn.Embedding:
            continue
        if any(True for _ in module.parameters(recurse=False)) and not (
            package == "transformers" and type(module).__name__.endswith("RMSNorm")
        ):
            return f"{name!r} is a {type(module).__name__}"
    return None
