"""The figures of a run in words, for stderr. What they mean is defined in `foresay.core.stats`."""

from __future__ import annotations

from collections.abc import Sequence

from foresay.core.stats import RequestStats, ratio, show


def report(stats: RequestStats, seconds: float) -> list[str]:
    """Return the lines that `--stats` prints for one answer that took `seconds` in all."""
    tokens = stats.num_output_tokens
    lines = [
        f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s: "
        f"{show(ratio(tokens, seconds), '.1f')} tokens/s, "
        f"first token after {show(stats.time_to_first_token)} s",
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
            f"({show(own.acceptance_rate, '.0%')})"
        )
    lines.append("draft position " + _columns(range(1, len(stats.acceptance_per_position) + 1)))
    lines.append("accepted       " + _columns(stats.acceptance_per_position))
    lines.append("  if reached   " + _columns(stats.conditional_acceptance_per_position))
    return lines


def _columns(values: Sequence[float | int | None]) -> str:
    cells = [str(v) if isinstance(v, int) else show(v) for v in values]
    return " ".join(f"{cell:>5}" for cell in cells)
