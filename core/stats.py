"""The figures of speculative decoding: what is counted, and what each name means. No torch.

Counts come from what the scheduler committed; taking them never waits for a device.

- *emitted* tokens are output tokens that reached the user: a stop within accepted drafts cuts the
  rest, and what is cut counts nowhere as accepted or emitted.
- a *decode step* of a request is a step that emitted tokens for it, the one that completed its
  prompt included; `num_steps` counts them.
- a *verify step* is a decode step in which the target judged at least one draft token of it;
  `num_verify_steps` counts them, `num_draft_tokens` the draft tokens judged, `num_accepted_tokens`
  those of them that were emitted.
- `acceptance_rate` = accepted / drafted.
- a draft may be a *tree*: its draft tokens are nodes then, and its positions are depths, so that it
  "has" position j if it has a node with j nodes above it. `nodes_per_step` = draft tokens judged /
  verify steps, `mean_draft_depth` = positions of drafts / verify steps; equal for chains.
- `mean_acceptance_length` = tokens emitted in verify steps / verify steps; the recovered or bonus
  token is included, so it is 1 where every draft is rejected.
- `tokens_per_step` = tokens emitted / decode steps. Steps without a draft count, so a proposer that
  seldom drafts looks no better than it is.
- `acceptance_per_position[j]` (marginal) = verify steps that emitted draft token j / verify steps
  with at least j + 1 draft tokens.
- `conditional_acceptance_per_position[j]` = verify steps that emitted draft token j / verify steps
  that *reached* it: all before it were accepted, and a token came out at its place (the draft token
  itself, or the one that replaced it). A step that stopped before position j did not reach it.
- `time_to_first_token`: seconds from when the engine took the request, its prompt tokenized, to
  the commit of its first token, waiting included; over several requests their mean.

The samples of a request (`n` > 1) are counted together, each with its own steps; the first token is
that of whichever has one first.

A ratio of nothing (0/0) is None in data and prints as `n/a`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def ratio(numerator: float, denominator: float) -> float | None:
    """Divide; None for 0/0. The denominator counts cases, so it is 0 only if the numerator is."""
    return numerator / denominator if denominator else None


def show(figure: float | None, format_spec: str = ".2f") -> str:
    """Print a figure: `n/a` for None."""
    return "n/a" if figure is None else format(figure, format_spec)


@dataclass(slots=True)
class DraftStats:
    """How well drafts did. Counts are plain sums; the figures are derived when asked for."""

    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verified_tokens: int = 0  # emitted in verify steps: accepted, recovered and bonus
    num_draft_positions: int = 0  # how deep drafts were, summed; of chains their lengths
    # By position in the draft: how many drafts had it, reached it, had it accepted.
    num_drafts_with: list[int] = field(default_factory=list)
    num_drafts_reaching: list[int] = field(default_factory=list)
    num_accepted_at: list[int] = field(default_factory=list)

    def record_verify_step(
        self, num_drafts: int, num_accepted: int, num_emitted: int, depth: int | None = None
    ) -> None:
        """Count one request's step with `num_drafts` >= 1 draft tokens judged.

        `depth` of the draft, if it is a tree; None: a chain.
        """
        depth = num_drafts if depth is None else depth
        self.num_verify_steps += 1
        self.num_draft_positions += depth
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_verified_tokens += num_emitted
        for counts, length in (
            (self.num_drafts_with, depth),
            (self.num_drafts_reaching, min(depth, num_emitted)),
            (self.num_accepted_at, num_accepted),
        ):
            counts += [0] * (depth - len(counts))
            for position in range(length):
                counts[position] += 1

    def add(self, other: DraftStats) -> None:
        """Count what `other` counted as well."""
        self.num_verify_steps += other.num_verify_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_verified_tokens += other.num_verified_tokens
        self.num_draft_positions += other.num_draft_positions
        for counts, more in (
            (self.num_drafts_with, other.num_drafts_with),
            (self.num_drafts_reaching, other.num_drafts_reaching),
            (self.num_accepted_at, other.num_accepted_at),
        ):
            counts += [0] * (len(more) - len(counts))
            for position, count in enumerate(more):
                counts[position] += count

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens."""
        return ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted per verify step, the recovered or bonus token included."""
        return ratio(self.num_verified_tokens, self.num_verify_steps)

    @property
    def nodes_per_step(self) -> float | None:
        """Draft tokens judged per verify step."""
        return ratio(self.num_draft_tokens, self.num_verify_steps)

    @property
    def mean_draft_depth(self) -> float | None:
        """How deep drafts were: of chains their length."""
        return ratio(self.num_draft_positions, self.num_verify_steps)

    @property
    def acceptance_per_position(self) -> list[float | None]:
        """Marginal: of the drafts that had the position."""
        pairs = zip(self.num_accepted_at, self.num_drafts_with, strict=True)
        return [ratio(accepted, drafts) for accepted, drafts in pairs]

    @property
    def conditional_acceptance_per_position(self) -> list[float | None]:
        """Of the drafts whose earlier positions were all accepted and emitted."""
        pairs = zip(self.num_accepted_at, self.num_drafts_reaching, strict=True)
        return [ratio(accepted, drafts) for accepted, drafts in pairs]

    def as_dict(self) -> dict[str, Any]:
        """Return counts and figures under their names, for JSON."""
        return {
            "num_verify_steps": self.num_verify_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "nodes_per_step": self.nodes_per_step,
            "mean_draft_depth": self.mean_draft_depth,
            "acceptance_per_position": self.acceptance_per_position,
            "conditional_acceptance_per_position": self.conditional_acceptance_per_position,
        }


@dataclass(slots=True)
class _DecodeStats(DraftStats):
    """What a request and a whole run have in common."""

    num_steps: int = 0
    num_output_tokens: int = 0
    by_proposer: dict[str, DraftStats] = field(default_factory=dict)

    def record_step(
        self,
        num_drafts: int,
        num_accepted: int,
        num_emitted: int,
        proposer: str | None,
        depth: int | None = None,
    ) -> None:
        """Count one request's decode step; `proposer` made its drafts, `depth`: of a tree."""
        self.num_steps += 1
        self.num_output_tokens += num_emitted
        if num_drafts:
            self.record_verify_step(num_drafts, num_accepted, num_emitted, depth)
            if proposer is not None:
                own = self.by_proposer.setdefault(proposer, DraftStats())
                own.record_verify_step(num_drafts, num_accepted, num_emitted, depth)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens emitted per decode step, with or without a draft."""
        return ratio(self.num_output_tokens, self.num_steps)

    def as_dict(self) -> dict[str, Any]:
        """Return counts and figures under their names, for JSON."""
        return {
            "num_steps": self.num_steps,
            "num_output_tokens": self.num_output_tokens,
            "tokens_per_step": self.tokens_per_step,
            # Not super(): in a class with slots, dataclass makes a new class that it can't find.
            **DraftStats.as_dict(self),
            "by_proposer": {name: own.as_dict() for name, own in self.by_proposer.items()},
        }


@dataclass(slots=True)
class RequestStats(_DecodeStats):
    """The figures of one request."""

    time_to_first_token: float | None = None  # seconds

    def as_dict(self) -> dict[str, Any]:
        """Return counts and figures under their names, for JSON."""
        return {**_DecodeStats.as_dict(self), "time_to_first_token": self.time_to_first_token}


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step, as `foresay_step_end` gets it. Times are seconds of wall clock."""

    step_id: int
    req_ids: tuple[str, ...]  # the requests that ran in this step; all samples of one count once
    num_scheduled_tokens: int  # rows of the target's forward: prompt, committed and draft tokens
    num_draft_tokens: int  # of them, draft tokens that were judged
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_proposed_tokens: int  # draft tokens made at the end of this step, for later ones
    faults: Mapping[str, int]  # of drafts, mended or survived in this step, by kind
    schedule_seconds: float
    execute_seconds: float
    commit_seconds: float
    draft_seconds: float

    @property
    def num_requests(self) -> int:
        """How many requests ran in this step."""
        return len(self.req_ids)


@dataclass(slots=True)
class RunStats(_DecodeStats):
    """All requests of an engine, since it was made. `num_steps` counts each request's own steps."""

    row_invariant: bool = False  # what the self-check at load found
    num_requests: int = 0  # accepted
    num_finished_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # positions whose KV the prefix cache held, resumptions included
    num_preemptions: int = 0
    num_first_tokens: int = 0
    seconds_to_first_tokens: float = 0.0  # summed over `num_first_tokens` requests
    num_engine_steps: int = 0
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    commit_seconds: float = 0.0
    draft_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    def record_request(self, stats: RequestStats) -> None:
        """Count a finished request, which this engine did not count step by step.

        So figures of several requests are pooled: counts are summed, and figures derived of them.
        """
        self.num_requests += 1
        self.num_finished_requests += 1
        self.num_steps += stats.num_steps
        self.num_output_tokens += stats.num_output_tokens
        self.add(stats)
        for name, own in stats.by_proposer.items():
            self.by_proposer.setdefault(name, DraftStats()).add(own)
        if stats.time_to_first_token is not None:
            self.record_first_token(stats.time_to_first_token)

    def record_first_token(self, seconds: float) -> None:
        """Count a request's first token, `seconds` after the engine took the request."""
        self.num_first_tokens += 1
        self.seconds_to_first_tokens += seconds

    def record_engine_step(self, step: StepStats) -> None:
        """Add what is known per engine step; tokens are counted per request, in `record_step`."""
        self.num_engine_steps += 1
        self.schedule_seconds += step.schedule_seconds
        self.execute_seconds += step.execute_seconds
        self.commit_seconds += step.commit_seconds
        self.draft_seconds += step.draft_seconds
        self.faults.update(step.faults)

    @property
    def time_to_first_token(self) -> float | None:
        """Mean seconds from taking a request to its first token."""
        return ratio(self.seconds_to_first_tokens, self.num_first_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return counts and figures under their names, for JSON."""
        return {
            **_DecodeStats.as_dict(self),
            "time_to_first_token": self.time_to_first_token,
            "row_invariant": self.row_invariant,
            "num_requests": self.num_requests,
            "num_finished_requests": self.num_finished_requests,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "num_engine_steps": self.num_engine_steps,
            "schedule_seconds": self.schedule_seconds,
            "execute_seconds": self.execute_seconds,
            "commit_seconds": self.commit_seconds,
            "draft_seconds": self.draft_seconds,
            "faults": dict(self.faults),
        }
