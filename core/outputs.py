"""What a caller gets back: finished outputs, and chunks of one that still grows. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foresay.core.stats import RequestStats

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One text for one prompt.

    `token_ids` end with the stop token, the end of sequence, or the token that completed the stop
    string; `text` is cut before the stop, and is "" without a tokenizer. `stop_reason` is the stop
    string or stop token id, or with `finish_reason` "error" what went wrong. `logprobs`, None
    unless asked for, has one dict per token: token id -> log probability, before all sampling
    parameters; the token itself comes first, then the likeliest.
    """

    index: int  # its place among the `n` of its prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request: its prompt, its `n` outputs, and how their decoding went, together."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats


@dataclass(slots=True)
class StreamChunk:
    """What came since the last chunk.

    `text` may be "" while a character or a possible stop string is incomplete. `stats` are the
    request's figures; they go on growing with it. The last chunk has a `finish_reason`, and the
    whole result in `output`. `logprobs` are those of `token_ids`, None unless asked for.
    """

    request_id: str
    text: str
    token_ids: list[int]
    stats: RequestStats
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    logprobs: list[dict[int, float]] | None = None
