"""The figures of a run in words, for stderr. What they mean is defined in `foresay.core.stats`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from foresay.core.errors import EngineError
from foresay.core.stats import DraftStats, RequestStats, RunStats, ratio, show


def note(text: str) -> None:
    """Say something beside the output: on stderr, in a line that is recognisably foresay's."""
    print(f"foresay: {text}", file=sys.stderr, flush=True)


def pooled(each: Iterable[RequestStats]) -> RunStats:
    """Return the figures of several requests together: of their counts, not of their figures."""
    total = RunStats()
    for stats in each:
        total.record_request(stats)
    return total


def judge_differences(prompt_ids: Sequence[str], *, invariant: bool) -> None:
    """Raise `EngineError` where texts differ that may not; where rows are not invariant, say so.

    `prompt_ids`: the prompts that got different token ids with different proposers.
    """
    if not prompt_ids:
        return
    which = ", ".join(prompt_ids[:8]) + (", ..." if prompt_ids[8:] else "")
    text = f"the token ids differ on {len(prompt_ids)} of the prompts ({which})"
    if invariant:
        raise EngineError(
            f"{text}: speculation changed the text, which it never may where rows are invariant "
            "(see the lines at the start)"
        )
    note(f"{text}: rows are not invariant here, so tokens that are nearly tied may change places")


def report(stats: RequestStats | RunStats, seconds: float) -> list[str]:
    """Return the lines that `--stats` prints for what took `seconds` in all.

    `stats`: one answer's, or those of several together.
    """
    tokens = stats.num_output_tokens
    average = " on average" if isinstance(stats, RunStats) else ""
    lines = [
        f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s: "
        f"{show(ratio(tokens, seconds), '.1f')} tokens/s, "
        f"first token after {show(stats.time_to_first_token)} s{average}",
    ]
    if not stats.by_proposer:
        return [*lines, "no drafts were verified"]
    lines.append(
        f"mean acceptance length {show(stats.mean_acceptance_length)} over "
        f"{stats.num_verify_steps} steps with a draft; tokens per step "
        f"{show(stats.tokens_per_step)} over all {stats.num_steps}"
    )
    for name, own in stats.by_proposer.items():
        lines.append(
            f"{name}: accepted {own.num_accepted_tokens} of {own.num_draft_tokens} draft tokens "
            f"({show(own.acceptance_rate, '.0%')}){_of_trees(own)}"
        )
    lines.append("draft position " + _columns(range(1, len(stats.acceptance_per_position) + 1)))
    lines.append("accepted       " + _columns(stats.acceptance_per_position))
    lines.append("  if reached   " + _columns(stats.conditional_acceptance_per_position))
    return lines


def in_short(stats: RequestStats, seconds: float, num_cached: int, num_prompt: int) -> str:
    """Return one answer's figures in short.

    Of its prompt of `num_prompt` tokens the prefix cache had `num_cached`.
    """
    tokens = stats.num_output_tokens
    parts = [
        f"{tokens} token{'' if tokens == 1 else 's'}",
        f"{show(ratio(tokens, seconds), '.1f')} tokens/s",
        f"mean acceptance length {show(stats.mean_acceptance_length)}",
        f"first token after {show(stats.time_to_first_token)} s",
        f"{num_cached} of {num_prompt} prompt tokens cached",
    ]
    return ", ".join(parts)


def _of_trees(stats: DraftStats) -> str:
    """Say how large and how deep drafts were, if some were trees."""
    if stats.num_draft_positions == stats.num_draft_tokens:
        return ""
    nodes, depth = show(stats.nodes_per_step, ".1f"), show(stats.mean_draft_depth, ".1f")
    return f", in trees of {nodes} nodes, {depth} deep"


def _columns(values: Sequence[float | int | None]) -> str:
    cells = [str(v) if isinstance(v, int) else show(v) for v in values]
    return " ".join(f"{cell:>5}" for cell in cells)
