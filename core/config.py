"""The settings of an engine and of a request: pydantic at the border, plain data inside.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from foresay.core.errors import ConfigError, nearest

MAX_SEED = 2**64
GREEDY_BELOW = 1e-5  # a temperature below this is greedy

Settings = TypeVar("Settings", bound=BaseModel)


def build_settings(kind: type[Settings], values: Mapping[str, Any], where: str = "") -> Settings:
    """Build a settings object; what pydantic rejects becomes a `ConfigError` in one sentence.

    `where` names the owner in messages, e.g. "proposer 'ngram'". An unknown name is answered with
    the nearest known one and the list of all.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(describe(error, kind, where)) from None


def describe(error: ValidationError, kind: type[BaseModel], where: str = "") -> str:
    """Word a pydantic error as sentences: the setting, its value in `repr`, what was expected."""
    prefix = f"{where}: " if where else ""
    known = list(kind.model_fields)
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(
                f"{prefix}no setting {name!r}{nearest(name, known)} (known: {', '.join(known)})"
            )
        elif not item["loc"]:
            parts.append(prefix + str(item["msg"]).removeprefix("Value error, "))
        else:
            message = str(item["msg"]).removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            parts.append(f"{prefix}{name}={item['input']!r}: {message}")
    return "; ".join(parts)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingParams(_Frozen):
    """How one request is sampled and when it stops. A wrong value or name is a `ConfigError`."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self), "SamplingParams")) from None

    temperature: float = Field(
        default=1.0, ge=0.0, allow_inf_nan=False, description="0 (below 1e-5): greedy."
    )
    top_k: int = Field(
        default=-1,
        ge=-1,
        description="Keep the k likeliest tokens, ties at the k-th kept; -1 or 0: off.",
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Keep the likeliest mass top_p.")
    min_p: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Drop tokens below min_p times the likeliest."
    )
    seed: int | None = Field(
        default=None,
        description="Same seed, same text, whatever the proposer or the batch; modulo 2**64.",
    )
    max_tokens: int = Field(default=16, ge=1, description="Most output tokens.")
    min_tokens: int = Field(
        default=0, ge=0, description="No end of sequence and no stop before that many tokens."
    )
    stop: tuple[str, ...] = Field(default=(), description="Strings that end the output.")
    stop_token_ids: tuple[int, ...] = Field(default=(), description="Tokens that end the output.")
    ignore_eos: bool = Field(default=False, description="Go on after the end of sequence.")
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Most drafts per step for this request; 0: none. It can only lower the "
        "engine's setting.",
    )
    n: int = Field(
        default=1, ge=1, description="How many outputs for the prompt; greedy ones are all equal."
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        description="Report the log probability of each output token and of that many of the "
        "likeliest; None: of none.",
    )
    logit_bias: dict[int, float] = Field(
        default_factory=dict, description="Added to the logits of these token ids."
    )
    allowed_token_ids: tuple[int, ...] | None = Field(
        default=None, min_length=1, description="The only tokens to choose from; None: all."
    )
    bad_words: tuple[str, ...] = Field(default=(), description="Texts that are never produced.")
    repetition_penalty: float = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="Above 1: tokens of the prompt and the output become less likely.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="Subtracted from the logit of each token that the output has.",
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="The same, times how often the output has it.",
    )
    prediction: str | tuple[int, ...] | None = Field(
        default=None,
        description="What the output will probably be, as text or token ids, for proposers that "
        "draft from it. It changes the time only.",
    )

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string(cls, value: Any) -> Any:
        if value is None:
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_stop_ids(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("prediction", mode="before")
    @classmethod
    def _in_order(cls, value: Any) -> Any:
        if isinstance(value, Set):
            raise ValueError("a set has no order: expected a text or a list of token ids")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _no_bias(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _consistent(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}"
            )
        if "" in self.stop:
            raise ValueError("stop: an empty string would stop every output at once")
        for token_id, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise ValueError(
                    f"logit_bias: {bias} for token id {token_id}: expected a number, or -inf to "
                    "ban the token"
                )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every position."""
        return self.temperature < GREEDY_BELOW


class SpeculativeConfig(_Frozen):
    """What proposes drafts, and how they are verified."""

    proposer: str | None = Field(
        default="auto",
        description="A proposer's name, 'module:Class', a chain of these ('a,b': the first that "
        "has a draft), 'auto', or None (plain decoding).",
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Most drafts per step; None: the proposer's own best; 0: none.",
    )
    proposer_settings: dict[str, Any] = Field(
        default_factory=dict,
        description="The proposer's own settings; for a chain, each proposer's by its name.",
    )
    drafter: str | dict[str, str] | None = Field(
        default=None,
        description="The drafter's weights: a folder or a registered name, or for a draft model "
        "what names a model; for a chain, by the proposer's name.",
    )

    adaptive: bool = Field(
        default=True,
        description="Draft as much as pays, by times and acceptance measured as it goes, down to "
        "nothing; False: always as many tokens as there may be.",
    )
    draft_tokens_by_batch: dict[int, int] | None = Field(
        default=None,
        description="Draft tokens by the number of requests in a step instead: the entry of the "
        "largest number that is not above it. None of them above num_speculative_tokens.",
    )

    @field_validator("draft_tokens_by_batch")
    @classmethod
    def _numbers_of_requests(cls, value: dict[int, int] | None) -> dict[int, int] | None:
        if value is not None and (not value or min(value) < 1 or min(value.values()) < 0):
            raise ValueError(
                f"{value!r}: expected numbers of requests from 1 on, and numbers of draft tokens "
                "from 0 on, e.g. {1: 5, 8: 3, 32: 0}"
            )
        return value

    drafter_quantization: Literal["auto", "int8", "none"] = Field(
        default="auto",
        description="'int8': a drafter's weights are rounded to int8, on a CPU; its drafts cost "
        "less, and the text is the same. 'auto': where that was found to pay (a CPU that "
        "computes in float32, with foresay's own kernels or integer instructions). For heads: "
        "eagle, medusa, mtp.",
    )

    @field_validator("drafter", mode="before")
    @classmethod
    def _a_name_or_names(cls, value: Any) -> Any:
        if value is None or isinstance(value, str | Mapping):
            return value
        if isinstance(value, Path):
            return str(value)
        raise ValueError("expected a folder or a registered name, or these by proposer's name")

    verification: Literal["auto", "coupled", "rejection", "block"] = Field(
        default="auto",
        description="How drafts that were sampled are verified; 'auto': 'coupled' for requests "
        "with a seed, whose text then depends on the seed alone, else 'block'. Trees, and chains "
        "drawn beside sampled trees, follow the seed whatever this says.",
    )


class EngineConfig(_Frozen):
    """Everything `LLM(...)` takes, except a model, tokenizer or proposer given as an object."""

    model: str = Field(
        default="smollm2", description="An alias, a folder, a GGUF file, or a hub id."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="'auto': the checkpoint's own on a GPU and on a CPU that computes in it; "
        "else float32.",
    )
    device: str = Field(default="auto", description="'auto', 'cpu', 'cuda', 'cuda:1', ...")
    quantization: Literal["auto", "none", "int8", "float16"] = Field(
        default="auto",
        description="How weights are kept on a CPU. 'float16': those of bfloat16 and float16 "
        "checkpoints in float16, to every digit that counts, and computed with in float32: the "
        "same model in half the bytes; others as they are. 'auto': so where products are "
        "computed in float32. 'none': as they are. 'int8', for the families of foresay's own "
        "decoder: rounded to int8 with one scale for each output. Another model by a little, and a "
        "smaller one; faster yet with foresay's own kernels, or where there are integer "
        "instructions. Speculation is as exact on it as on any.",
    )

    @field_validator("quantization", mode="before")
    @classmethod
    def _none_is_none(cls, value: Any) -> Any:
        return "none" if value is None else value

    seed: int = Field(default=0, description="Seeds the requests that have no seed of their own.")
    block_size: int = Field(default=16, ge=1, description="Tokens per KV block.")
    num_blocks: int | None = Field(
        default=None, ge=1, description="KV blocks in the pool; None: what fits."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Most requests in one step.")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="Most rows in one step.")
    chunked_prefill_size: int | None = Field(
        default=None, ge=1, description="Most prompt tokens of a request per step; None: no limit."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and output; None: the model's limit."
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Reuse KV blocks of equal prefixes."
    )
    row_invariant: bool = Field(
        default=True,
        description="Compute each row independently of its batch where the library kernels "
        "allow it; False trades that for speed.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="On a GPU, run every pass operation by operation: no CUDA graphs.",
    )
    worker: Literal["inline", "process"] = Field(
        default="inline",
        description="Where the model runs: in this process, or in one of its own.",
    )
    strict: bool = Field(default=False, description="Raise on a proposer's fault (for tests).")
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)

    @field_validator("model", mode="before")
    @classmethod
    def _path_to_str(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value
