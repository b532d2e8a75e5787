"""The limits of one engine, and k: how many tokens a request may draft.

Knows settings and one request at a time; not who runs, and no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from foresay.core.errors import ConfigError
from foresay.core.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one engine, resolved: no None that means "decide later"."""

    block_size: int
    num_blocks: int
    max_num_seqs: int  # most requests in one step
    max_num_batched_tokens: int  # most rows in one step
    chunked_prefill_size: int | None  # most prompt tokens of one request per step; None: no limit
    max_model_len: int  # prompt and output never exceed it
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0  # the engine's k; 0: plain decoding
    has_draft_trees: bool = False  # whether more drafts can be of use than tokens are left
    max_context: int | None = None  # prompt, output and drafts of a drafting request
    has_proposer_kv: bool = False  # whether drafting writes to KV layers of the proposer's own
    draft_slots: int = 0  # rows per request that a proposer adds to its own batch
    kv_reach: int = 1  # tokens behind a position that its proposers' KV depends on

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size", 1),
            ("num_blocks", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("chunked_prefill_size", 1),
            ("max_model_len", 2),
            ("num_speculative_tokens", 0),
            ("max_context", 1),
            ("kv_reach", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value!r}: must be at least {least}")
        num_needed = -(-self.max_model_len // self.block_size)
        if self.num_blocks < num_needed:
            raise ConfigError(
                f"num_blocks={self.num_blocks!r} of block_size={self.block_size!r} cannot hold one "
                f"request of max_model_len={self.max_model_len!r}: that takes {num_needed} blocks; "
                "raise num_blocks or lower max_model_len"
            )
        own = f" + {self.draft_slots} of the proposer's own" if self.draft_slots else ""
        each = 1 + self.num_speculative_tokens + self.draft_slots
        num_rows = self.max_num_seqs * each
        if self.max_num_batched_tokens < num_rows:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens!r}: must be at least "
                f"max_num_seqs * (1 + num_speculative_tokens{own}) = {self.max_num_seqs!r} * "
                f"{each} = {num_rows}; raise it, or lower max_num_seqs or num_speculative_tokens"
            )


def num_lookahead_slots(config: SchedulerConfig, k: int) -> int:
    """Return the slots, after those of this step's rows, that drafting k tokens writes to.

    The drafter's first pass writes at committed positions, each later one a position further, and
    one that adds rows of its own begins a position later.
    """
    return k - 1 + config.draft_slots if config.has_proposer_kv and k else 0


def num_draft_tokens(config: SchedulerConfig, request: Request, num_tokens: int) -> int:
    """Return k: how many tokens to draft when `request` has `num_tokens` committed ones.

    The only place that knows. It depends on the past only and never grows with `num_tokens`, so
    that, taken before a commit with the least length the commit can lead to, it is an upper bound.
    """
    num_left = request.max_tokens - (num_tokens - request.num_prompt_tokens) - 1
    k = min(config.num_speculative_tokens, config.max_model_len - num_tokens - 1)
    if num_left < 1 or not config.has_draft_trees:
        k = min(k, num_left)
    if request.num_speculative_tokens is not None:
        k = min(k, request.num_speculative_tokens)
    if config.max_context is not None:
        k = min(k, config.max_context - num_tokens)
    if request.draft_plan is not None:
        k = min(k, max(request.draft_plan.num_draft_tokens))
    return max(k, 0)
