"""Whether a drafter is good for its target: judged by what it did, explained by what it is.

Knows the figures of a run and a comparison of files; runs nothing. A drafter is bad if something is
wrong with it: it was turned off, broke the contract, drafted nothing, or next to nothing of what it
drafted was accepted, at the first position or from a later one on. A drafter that is only weak or
slow is told so, and passes: what it gains is `foresay bench`'s to measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from foresay.core.commands.comparison import Comparison
from foresay.core.stats import RunStats, ratio, show

# Of the first draft tokens. A drafter that says a frequent word every time, or repeats the last
# one, stays below it; one of the target's own family that was hardly trained does not.
NEAR_ZERO = 0.1
_WEAK = 0.3
# A later position where this much less is accepted than at the one before it. Good drafters get
# worse step by step: one that is right once and never again was not run as it was trained.
_COLLAPSED, _BEFORE = 0.05, 0.25
_ENOUGH = 20  # drafts: with fewer, a rate says little
# The verification's own, which no proposer is to blame for.
_HARMLESS = ("zero_residual",)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence, and what there is to add."""

    good: bool
    text: str
    notes: tuple[str, ...] = ()


def drafting_share(stats: RunStats) -> float | None:
    """Return the part of the decode steps' time that drafting took; None: no time was spent.

    The passes over prompts are left out: they last as long as the prompts are long.
    """
    seconds = (
        stats.schedule_seconds
        + stats.execute_seconds
        + stats.commit_seconds
        + stats.draft_seconds
        - stats.seconds_to_first_tokens
    )
    return ratio(min(stats.draft_seconds, seconds), seconds) if seconds > 0 else None


def faults_of(stats: RunStats) -> dict[str, int]:
    """Return the faults that speak against a proposer, by kind."""
    return {kind: count for kind, count in stats.faults.items() if kind not in _HARMLESS}


def unusable(error: str, comparison: Comparison) -> Verdict:
    """Judge a drafter that could not be loaded for its target."""
    return Verdict(
        good=False,
        text=f"bad: it cannot be used with this model: {error}",
        notes=tuple(comparison.doubts()),
    )


def judge(stats: RunStats, comparison: Comparison) -> Verdict:
    """Judge a drafter by a run."""
    problems = []
    notes: list[str] = []
    faults = faults_of(stats)
    if "dropped" in faults:
        problems.append("the proposer failed and was turned off")
    if faults:
        problems.append(f"the proposer broke its contract ({in_words(faults)})")
    first = next(iter(stats.acceptance_per_position), None)
    if first is None:
        problems.append(f"nothing was drafted in {stats.num_steps} steps")
    elif first < NEAR_ZERO:
        problems.append(
            f"next to nothing is accepted ({first:.1%} of the first draft tokens), so something "
            "does not fit"
        )
        notes += _reasons(comparison)
    else:
        collapse = _collapse(stats)
        if collapse is not None:
            problem, note = collapse
            problems.append(problem)
            notes.append(note)
        elif comparison.doubts():
            notes += (f"and yet: {doubt}" for doubt in comparison.doubts())
    if first is not None:
        notes += _on_the_amount(stats, comparison)
    if problems:
        return Verdict(good=False, text=f"bad: {'; '.join(problems)}", notes=tuple(notes))
    assert first is not None, "that nothing was drafted is a problem"
    tokens = f"{show(stats.tokens_per_step)} tokens a step where plain decoding has 1"
    weak = " but weak" if first < _WEAK else ""
    share = drafting_share(stats)
    if share is not None and (stats.tokens_per_step or 0) * (1 - share) < 1:
        notes.append(
            f"drafting takes {share:.0%} of the time, more than it saves here: plain decoding is "
            "faster"
        )
    return Verdict(
        good=True,
        text=f"good{weak}: {first:.0%} of the first draft tokens are accepted, {tokens}",
        notes=tuple(notes),
    )


def _on_the_amount(stats: RunStats, comparison: Comparison) -> list[str]:
    """Say where it drafted seldom, or too few drafts were verified to tell."""
    notes = []
    drafts, own, theirs = stats.num_verify_steps, comparison.drafter, comparison.target
    if drafts < stats.num_steps / 2:
        limit = ""
        if own.max_length is not None and own.max_length < (theirs.max_length or math.inf):
            limit = f": it takes texts of {own.max_length:,} tokens at most"
        notes.append(f"it drafted in only {drafts} of {stats.num_steps} steps{limit}")
    if drafts < _ENOUGH:
        notes.append(
            f"only {drafts} drafts were verified, too few for a firm verdict: raise --max-tokens "
            "or --limit"
        )
    return notes


def in_words(faults: Mapping[str, int]) -> str:
    """Word counted faults."""
    return ", ".join(f"{kind} {count}x" for kind, count in sorted(faults.items())) or "none"


def _reasons(comparison: Comparison) -> list[str]:
    """Return what may be wrong where next to nothing is accepted: first what the files show."""
    made_for = comparison.made_for
    named = f": it names {made_for!r} as its target" if made_for else ""
    reasons = [
        *comparison.doubts(),
        f"it may be of the wrong model, one of the same sizes{named}",
    ]
    if comparison.taps:
        taps = ", ".join(map(str, comparison.taps))
        reasons.append(
            f"its layer taps may be wrong: it takes the streams entering layers {taps}; were these "
            "the ones it was trained with?"
        )
    if comparison.drafter.draft_vocab_size is not None:
        reasons.append(
            "its vocabulary offsets may be wrong: the map from its draft vocabulary must lead to "
            "the ids of the target's tokenizer (a 'd2t' holds offsets, not ids)"
        )
    elif comparison.vocabulary is None:
        reasons.append(
            "its vocabulary may be shifted, by added tokens say: its ids must be the target's"
        )
    return reasons


def _collapse(stats: RunStats) -> tuple[str, str] | None:
    """Find where acceptance breaks off; return the problem and what may explain it."""
    rates = stats.conditional_acceptance_per_position
    for position, (before, rate) in enumerate(pairwise(rates), 1):
        if before is None or rate is None or stats.num_drafts_reaching[position] < _ENOUGH:
            break
        if rate < _COLLAPSED and before >= _BEFORE:
            return (
                f"draft token {position + 1} is accepted {rate:.0%} of the time it is reached, the "
                f"one before it {before:.0%}",
                "what it hands from one draft token to the next may be wrong (its hidden state, "
                f"its positions, its KV), or it was made to draft {position}: compare with "
                f"-k {position}",
            )
    return None
