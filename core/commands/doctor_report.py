"""What `foresay doctor` prints: tables for a person, or one object for scripts. Judges nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from foresay.core.commands.diagnosis import Expected, Speed, Timed, rate_ratio
from foresay.core.commands.reasons import Findings, Verdict, counted, drafts_of, listed, percent
from foresay.core.commands.table import print_table
from foresay.core.commands.verdict import in_words
from foresay.core.errors import ConfigError
from foresay.core.scheduling.acceptance import Rates
from foresay.core.stats import DraftStats, RunStats, show


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found."""

    findings: Findings
    verdict: Verdict
    ks: Sequence[int]  # the numbers of draft tokens that were tried, from 0 on
    by_k: Mapping[int, Sequence[Timed]]  # what came after the first tokens
    stats: RunStats  # of all requests that had drafts
    num_prompts: int
    num_tasks: int
    num_pairs: int
    is_complete: bool

    def measured_at(self, k: int) -> float | None:
        """Return how much faster than without drafts the tokens after the first ones came."""
        return rate_ratio(self.by_k.get(k, ()), self.by_k.get(0, ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints; its keys are stable. Seconds, and parts of 1."""
        found, economy = self.findings, self.findings.economy
        best = economy.best()
        cost = economy.cost
        return {
            "proposer": ",".join(economy.names),
            "batch_size": economy.num_requests,
            "prompts": self.num_prompts,
            "complete": self.is_complete,
            "step_seconds_by_rows": [list(point) for point in cost.verifying.points()],
            "plain_step_seconds": economy.plain.seconds,
            "drafting_seconds_by_tokens": {
                name: [list(point) for point in cost.drafting_points(name, economy.num_requests)]
                for name in economy.names
            },
            "acceptance": {
                name: {
                    "there": list(rates.there),
                    "accepted": list(rates.accepted),
                    "is_tree": rates.is_tree,  # by rank then, else by place given the one before
                }
                for name, rates in zip(economy.names, economy.rates, strict=True)
            },
            "lengths": [self._length(economy.expect(k)) for k in self.ks],
            "best": self._length(best),
            "best_k": best.k,
            "break_even_acceptance": economy.break_even(best.ks),
            "acceptance_rate": economy.found(best.ks),
            "expected_speedup": economy.speedup(best),
            "measured_speedup": None if found.measured is None else asdict(found.measured),
            "measured_by_task": {task: asdict(own) for task, own in found.tasks.items()},
            "pairs": self.num_pairs,
            "prompt_share": found.prompt_share,
            "steps": found.num_steps,
            "drafts": found.num_drafts,
            "faults": dict(found.faults),
            "stats": self.stats.as_dict(),
            "helps": self.verdict.helps,
            "cause": self.verdict.cause,
            "verdict": self.verdict.text,
            "notes": list(self.verdict.notes),
        }

    def _length(self, expected: Expected) -> dict[str, Any]:
        economy = self.findings.economy
        return {
            "k": expected.k,
            "k_by_proposer": dict(zip(economy.names, expected.ks, strict=True)),
            "rows": expected.rows,
            "tokens_per_step": expected.tokens,
            "step_seconds": expected.step_seconds,
            "drafting_seconds": expected.drafting_seconds,
            "expected_speedup": economy.speedup(expected),
            "measured_speedup": self.measured_at(expected.k) if _is_even(expected) else None,
            "break_even_acceptance": economy.break_even(expected.ks),
            "acceptance_rate": economy.found(expected.ks),
        }


def check_writable(out: str | None) -> None:
    """Find out before the run that its result could not be written."""
    if out in (None, "-"):
        return
    path = Path(str(out))
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json {out!r}: {error.strerror}") from None


def print_report(report: Report, out: str | None, run: Mapping[str, Any]) -> None:
    """Print tables and verdict, and write the object, with what was `run`, if `out` says where."""
    text = json.dumps({**run, **report.as_dict()}, indent=2)
    if out == "-":
        print(text)
        return
    _print_tables(report, run)
    if out is not None:
        try:
            Path(out).write_text(text + "\n", encoding="utf-8")
        except OSError as error:  # it could be written at the start; the tables are printed
            raise ConfigError(f"--json {out!r}: {error.strerror}") from None


def _print_tables(report: Report, run: Mapping[str, Any]) -> None:
    found, economy = report.findings, report.findings.economy
    together = f", {economy.num_requests} at a time" if economy.num_requests > 1 else ""
    print(
        f"{','.join(economy.names)} for {run['model']}: {counted(report.num_prompts, 'prompt')} of "
        f"{counted(report.num_tasks, 'task')}{together}, up to {run['max_tokens']} tokens each"
    )
    print()
    print("what a step costs")
    print_table(
        [
            drafts_of(economy),
            "rows",
            "step (ms)",
            "over plain",
            *(f"{n} (ms)" for n in economy.names),
        ],
        [_cost_row(report, k) for k in report.ks],
    )
    print()
    print("how far drafts get")
    _print_acceptance(report)
    print()
    print("what comes of it, after the first token")
    print_table(
        [drafts_of(economy), "tokens a step", "expected", "measured", "acceptance", "break-even"],
        [_gain_row(report, k) for k in report.ks if k],
    )
    print()
    print(_best(report))
    print(f"measured: {_measured(report)}")
    if len(found.tasks) > 1:
        tasks = (f"{task} {own.median:.2f}x" for task, own in found.tasks.items())
        print(f"by task: {', '.join(tasks)}")
    print(f"faults: {in_words(found.faults)}")
    print()
    print(f"verdict: {report.verdict.text}")
    for line in report.verdict.notes:
        print(f"  - {line}")


def _cost_row(report: Report, k: int) -> list[str]:
    economy = report.findings.economy
    cost, number = economy.cost, economy.num_requests
    rows = number * (1 + k)
    seconds = cost.step(rows, number)
    cells = [str(k), str(rows)]
    if seconds is None or not cost.verifying.num_samples(rows):
        cells += ["n/a", "n/a"]  # no draft was so long
    else:
        cells += [f"{1000 * seconds:.2f}", f"{seconds / economy.plain.seconds:.2f}x"]
    for name, rates in zip(economy.names, economy.rates, strict=True):
        known = k and k <= len(rates.there) and cost.drafting_points(name, number)
        cells.append(f"{1000 * cost.drafting(name, number, k):.2f}" if known else "")
    return cells


def _print_acceptance(report: Report) -> None:
    most = max((len(own.num_drafts_with) for own in report.stats.by_proposer.values()), default=0)
    economy = report.findings.economy
    if not most:
        print(f"there was no draft in {report.findings.num_steps} steps")
        return
    rows = []
    for name, own in report.stats.by_proposer.items():
        lacking = most - len(own.num_drafts_with)
        accepted = [show(rate, ".0%") for rate in own.conditional_acceptance_per_position]
        rates = economy.rates[economy.names.index(name)]
        # Of calls that were allowed so many tokens: counts would be of those that were not, too.
        there = [percent(part) for part in _reaching(rates, own)]
        rows.append([name, "calls that draft it", *there, *[""] * lacking])
        rows.append(["", "accepted if reached", *accepted, *[""] * lacking])
    print_table(["", "draft token", *map(str, range(1, most + 1))], rows)
    for name, own in report.stats.by_proposer.items():
        if economy.rates[economy.names.index(name)].is_tree:
            nodes, depth = show(own.nodes_per_step, ".1f"), show(own.mean_draft_depth, ".1f")
            print(f"{name} drafts trees: {nodes} nodes a step, {depth} deep; above, by depth")


def _reaching(rates: Rates, own: DraftStats) -> list[float]:
    """Return what part of the calls drafts a token at each place, of a tree at each depth."""
    number = len(own.conditional_acceptance_per_position)
    if rates.is_tree:
        share = rates.there[0] / max(own.num_drafts_with[:1], default=1)
        return [share * drafts for drafts in own.num_drafts_with[:number]]
    return [prod(rates.there[: place + 1]) for place in range(number)]


def _gain_row(report: Report, k: int) -> list[str]:
    economy = report.findings.economy
    expected = economy.expect(k)
    needed = economy.break_even(expected.ks)
    measured = report.measured_at(k)
    return [
        str(k),
        f"{expected.tokens:.2f}",
        f"{economy.speedup(expected):.2f}x",
        "n/a" if measured is None else f"{measured:.2f}x",
        show(economy.found(expected.ks), ".0%"),
        "never" if needed is None else f"{needed:.0%}",
    ]


def _best(report: Report) -> str:
    economy = report.findings.economy
    best = economy.best()
    has, speedup = economy.found(best.ks), economy.speedup(best)
    noun = "draft token" if economy.noun == "token" else "node"
    number = counted(best.k, noun)
    if not _is_even(best):
        each = [f"{name} {k}" for name, k in zip(economy.names, best.ks, strict=True)]
        number = f"{listed(each)} draft tokens"
    if has is None:
        return f"best: no {noun}s, as there is no draft"
    accepted = f"{has:.0%} of {drafts_of(economy)} are accepted"
    line = f"best: {number} a step, {speedup:.2f}x expected; {accepted}"
    paying = best if speedup >= 1 else economy.easiest()
    if paying is None:
        return f"{line}, and if all were it would not pay"
    needed = show(economy.break_even(paying.ks), ".0%")
    if paying.ks == best.ks:
        return f"{line}, it pays from {needed}"
    return f"{line}, {counted(paying.k, economy.noun)} would pay from {needed}"


def _measured(report: Report) -> str:
    own: Speed | None = report.findings.measured
    if own is None:
        return "n/a"
    pairs = counted(report.num_pairs, "pair")
    spread = f"{own.least:.2f}x to {own.most:.2f}x in {pairs} of runs"
    share = percent(report.findings.prompt_share)
    return f"{own.median:.2f}x ({spread}; the prompts included, {share} of plain decoding's time)"


def _is_even(expected: Expected) -> bool:
    """Whether all members may draft as much; then the number of draft tokens says it all."""
    return len(set(expected.ks)) <= 1
