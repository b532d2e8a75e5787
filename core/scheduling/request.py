"""One request as the scheduling wing sees it: its tokens, its blocks, and when it stops.

Knows the stop rules and their order. Does not know the tokenizer (a `TextSink` does), the other
requests, or how tokens are computed.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Literal, Protocol

from foresay.core.messages import DraftPlan, SamplingData

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()  # never started
    RUNNING = enum.auto()  # holds blocks, the worker knows it
    PREEMPTED = enum.auto()  # gave its blocks back, waits to be computed anew
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self in _FINISH_REASONS

    @property
    def finish_reason(self) -> FinishReason | None:
        """The public word for how the request ended; None while it lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class TextSink(Protocol):
    """What turns output tokens into text and looks for stop strings."""

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        """Take the next output token; return the stop string it completed, else None.

        With `may_stop` False no stop string counts (`min_tokens` is not reached).
        """
        ...


class Request:
    """A prompt, its output so far, and what the scheduler keeps about it.

    `token_ids` holds committed tokens only, prompt and output; `spec_token_ids` the drafts to
    verify next, re-bound and never mutated. There is no prefill or decode phase:
    `num_computed_tokens` chases `num_tokens_with_spec`.

    `num_speculative_tokens` can only lower the engine's k; None leaves it. `prediction_ids` are
    what the caller expects as output: for the worker. `extra_keys` is everything besides the token
    ids that the KV of this request depends on: requests share blocks only if theirs are equal.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "draft_plan",
        "extra_keys",
        "logprobs",
        "max_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_speculative_tokens",
        "num_stored_blocks",
        "num_times_passed_over",
        "prediction_ids",
        "prefix_ids",
        "req_id",
        "sampling",
        "spec_token_ids",
        "status",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingData,
        max_tokens: int,
        text: TextSink | None = None,
        num_speculative_tokens: int | None = None,
        prediction_ids: Sequence[int] = (),
        extra_keys: tuple[Hashable, ...] = (),
    ) -> None:
        self.req_id = req_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.text = text
        self.num_speculative_tokens = num_speculative_tokens
        self.prediction_ids = prediction_ids
        self.extra_keys = extra_keys

        self.spec_token_ids: list[int] = []
        self.draft_plan: DraftPlan | None = None  # the control's wish for its next draft
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.status = RequestStatus.WAITING
        self.stop_reason: str | int | None = None
        # One per output token; None if nobody asked.
        self.logprobs: list[dict[int, float]] | None = None if sampling.logprobs is None else []

        # Kept by the scheduler.
        self.arrival = -1  # its place in the order of `add_request`; samples of one prompt share it
        self.num_times_passed_over = 0  # later requests that were started before it
        # Kept by the block manager.
        # What the prefix cache calls the tokens up to the end of each block that it was offered.
        self.prefix_ids: list[int] = []
        self.num_stored_blocks = 0  # leading blocks that the proposers' layers have filled, too

    @property
    def num_tokens(self) -> int:
        """Committed tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Committed tokens and drafts to verify: the only place where drafts are counted."""
        return len(self.token_ids) + len(self.spec_token_ids)

    @property
    def num_lacking_tokens(self) -> int:
        """Committed tokens whose KV is not computed; in flight, drafts can make it negative."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_draft(self) -> bool:
        """Whether drafts are wanted for it at all."""
        return self.num_speculative_tokens != 0

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the committed output."""
        return self.token_ids[self.num_prompt_tokens :]

    def output_logprobs(self, start: int = 0) -> list[dict[int, float]] | None:
        """Return those of the output tokens from `start` on; None if nobody asked."""
        return None if self.logprobs is None else self.logprobs[start : self.num_output_tokens]

    def append_output_token(
        self, token_id: int, max_model_len: int, logprobs: dict[int, float] | None = None
    ) -> bool:
        """Commit one output token with its `logprobs`; return whether it finished the request.

        The first that holds wins: a stop id (it ends `token_ids` and never reaches the text), a
        stop string, a length cap. A token stops the request only if `min_tokens` output tokens
        stand before it, which is when the worker no longer masks stop ids.
        """
        may_stop = self.num_output_tokens >= self.sampling.min_tokens
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)  # first: a token never goes without, if Ctrl-C comes
        self.token_ids.append(token_id)
        if may_stop and token_id in self.sampling.stop_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = token_id
            return True
        if self.text is not None:
            stop_string = self.text.append(token_id, may_stop=may_stop)
            if stop_string is not None:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = stop_string
                return True
        if self.num_output_tokens >= self.max_tokens or self.num_tokens >= max_model_len:
            self.status = RequestStatus.FINISHED_LENGTH
            return True
        return False

    def __repr__(self) -> str:
        return (
            f"Request({self.req_id!r}, {self.status.name}, {self.num_prompt_tokens} prompt and "
            f"{self.num_output_tokens} output tokens, {self.num_computed_tokens} computed, "
            f"{len(self.spec_token_ids)} drafts, {len(self.block_ids)} blocks)"
        )
