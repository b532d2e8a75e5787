"""The worker as the engine sees it: two calls, and what was settled when it was built.

The only thing that the scheduling wing's side and the worker's side agree on besides `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """Holds the target model, its KV cache and at most one proposer."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer; None: token ids in, token ids out."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text; may be empty."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in range(vocab_size)."""

    @property
    def max_model_len(self) -> int:
        """Prompt and output together never exceed it."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in the pool."""

    @property
    def num_speculative_tokens(self) -> int:
        """The engine's k: most drafts per request and step; 0: plain decoding."""

    @property
    def max_context(self) -> int | None:
        """Requests longer than this are not drafted for; None: no limit."""

    @property
    def proposer_name(self) -> str | None:
        """Who drafts, "a,b" for a chain; None: nobody."""

    @property
    def proposer_members(self) -> tuple[tuple[str, int], ...]:
        """The chain of proposers: each one's name and its own most draft tokens per step."""

    @property
    def tree_members(self) -> tuple[str, ...]:
        """Those of the chain whose drafts may be trees: their draft tokens are nodes."""

    @property
    def max_contexts(self) -> dict[str, int]:
        """By name, for members of the chain with a limit: requests longer than it get no draft."""

    @property
    def takes_prediction(self) -> bool:
        """Whether a proposer drafts from the output that a caller expects."""

    @property
    def draft_slots(self) -> int:
        """Rows per request that a proposer adds to its own batch."""

    @property
    def has_proposer_kv(self) -> bool:
        """Whether a proposer has KV layers of its own, in the requests' blocks."""

    @property
    def kv_reach(self) -> int:
        """How many tokens behind a position the proposers' KV depends on, at most; see `Needs`."""

    @property
    def row_invariant(self) -> bool:
        """Whether a row's logits were found independent of the rows around it."""

    @property
    def summary(self) -> str:
        """One line: what was loaded, and what was chosen for settings that were left open."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; it may hold nothing but news of requests that ended."""
        ...

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        """Draft after the step executed last, but not for the finished; None: nothing to say."""
        ...

    def hidden_states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], max_tokens: int
    ) -> list[torch.Tensor]:
        """Run the target on whole texts on their own: for each [num_tokens, len(layers), H].

        `layers` as `LLM.hidden_states` has them. A pass runs at most `max_tokens` tokens, or one
        text. Requests are not disturbed. Raises `RequestError`.
        """
        ...

    def close(self) -> None:
        """Let go of the model. Calling it again changes nothing."""
        ...
