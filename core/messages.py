"""What crosses the border between the engine and its worker: plain picklable data, nothing else.

Down goes `SchedulerOutput`; up come `ModelRunnerOutput` and, after the tokens were committed,
`DraftTokenIds`. Draft tokens cross in two places only: `scheduled_spec_decode_tokens` and
`DraftTokenIds`. No torch here, no pydantic objects, no callables, no shared references.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# How a draft that the sampler drew is verified; any other draft is deterministic.
VerificationRule = Literal["coupled", "rejection", "block"]


@dataclass(frozen=True, slots=True)
class SamplingData:
    """The part of a request's sampling parameters that the worker needs, resolved and plain.

    `temperature` below 1e-5 is greedy. `top_k` 0 is off. `seed` is in [0, 2**64). Until
    `min_tokens` output tokens exist, every id of `stop_token_ids` (EOS included unless ignored)
    is masked on the row that would produce it. `logprobs` None: none are wanted; else of how many
    of the likeliest tokens, beside the sampled one. `sample_index` is the output's index among the
    `n` of its prompt, which share a seed.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that must not come about
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    logprobs: int | None = None
    sample_index: int = 0
    verification: VerificationRule = "coupled"


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a request is to be drafted for, where that is decided by what drafts are worth.

    `num_draft_tokens[m]`: the most draft tokens of member m of the chain of proposers; 0: it is not
    asked. `min_confidence[m]` (0 if there is none): its draft ends where the drafter's own
    probability that all of it is right, as far as it is known before the next token is drawn, falls
    below this. A tree leaves out the nodes whose way from the root is less likely to be right.
    """

    num_draft_tokens: tuple[int, ...]
    min_confidence: tuple[float, ...] = ()

    def confidence_of(self, member: int) -> float:
        """Return the least confidence of a member's draft."""
        return self.min_confidence[member] if self.min_confidence else 0.0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the worker does not hold: new, or resumed after a preemption. Sent in full."""

    req_id: str
    token_ids: list[int]  # committed: the prompt, and after a preemption the output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # positions whose KV is in the blocks already (prefix hit)
    block_ids: list[int]
    sampling: SamplingData
    prediction_ids: list[int] = field(default_factory=list)  # what the caller expects as output
    may_draft: bool = True  # False: k is 0 for it in every step
    # It ends when it has so many tokens, prompt included: no path of a draft tree need be longer.
    max_num_tokens: int = 1 << 30


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """For a running request: cut its block table to `num_kept` blocks, then append `block_ids`."""

    num_kept: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. Request order is the order of `num_scheduled_tokens`.

    For request r the model's input is the `num_scheduled_tokens[r]` positions that start at its
    number of computed tokens: committed tokens first, then `scheduled_spec_decode_tokens[r]`.
    The worker derives the number of computed tokens as the scheduler does: it advances by
    `num_scheduled_tokens[r]` and gives back the rejected drafts.
    """

    step_id: int
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]  # only requests with >= 1 draft
    # Rows to take logits of, from the end: 0 while committed tokens remain uncomputed after this
    # step, else 1 + drafts. Said, never inferred from lengths.
    num_output_rows: dict[str, int]
    # k to draft after this step, an upper bound from before the commit; only requests with k >= 1.
    num_draft_tokens: dict[str, int]
    new_requests: list[NewRequest] = field(default_factory=list)
    block_table_updates: dict[str, BlockTableUpdate] = field(default_factory=dict)
    block_ids_to_zero: list[int] = field(default_factory=list)  # before anything is written
    finished_req_ids: list[str] = field(default_factory=list)  # forget them; maybe never sent
    preempted_req_ids: list[str] = field(default_factory=list)  # forget them until sent anew
    # How to draft, within `num_draft_tokens`; without a plan, whoever comes first drafts up to k.
    draft_plans: dict[str, DraftPlan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step produced, for the requests with `num_output_rows` >= 1.

    `sampled_token_ids[r]`: accepted drafts, then one recovered or bonus token; 1..1+drafts ids.
    `failed[r]`: why request r can't go on (a non-finite row, no token allowed); r then has no
    sampled ids. A request is in exactly one of the two. `logprobs[r]`, for who asked: one dict per
    sampled id, token id -> log probability before all sampling parameters; the sampled id comes
    first, then the likeliest. `faults` counts what verification met and survived, by kind.
    `accepted_drafts[r]`, for a draft that is a tree: which of request r's drafts were accepted, by
    their place, ascending; of any other draft it is the first ones.
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]]
    failed: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[dict[int, float]]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    accepted_drafts: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Drafts made after a step, with the committed length (number of tokens) each was made for.

    A draft whose length is not the request's `num_tokens` is dropped by the scheduler.
    `faults` counts what the core mended or survived in this call, by kind. `proposers` names who
    made each draft. `num_stored_tokens[r]`: how many leading positions of request r the proposers'
    own KV layers hold; empty where they have none. `seconds` says how long each proposer that was
    called took. `parents[r]`, for a draft that is a tree: by token the place of the one above it,
    -1 at the top. They are told for statistics; the worker keeps them for verification.
    """

    draft_token_ids: dict[str, list[int]]
    num_tokens: dict[str, int]
    faults: dict[str, int] = field(default_factory=dict)
    proposers: dict[str, str] = field(default_factory=dict)
    num_stored_tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    parents: dict[str, list[int]] = field(default_factory=dict)
