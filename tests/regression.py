"""Whether foresay has got slower: `make bench`. A fixed set, a local history, a trend.

usage: make bench [ARGS="..."]
       python tests/regression.py [--proposers ngram,eagle,...] [--limit 1 per task]
           [--max-tokens 32] [--prompt-cap 128] [--rounds 3] [--repeats 20] [--skip batch8,step]
           [--history .bench/history.json] [--picture .bench/trend.svg] [--dry-run]

On a CPU with smollm2 and its shipped drafters, greedy, the prompts that come with foresay:

    batch1, batch8  each proposer's speed over plain decoding's in the same round (`bench_pairs`)
    acceptance      mean acceptance length in the runs of batch1, of what the control lets draft
    step            the forward over its packed products, at 1 and 8 rows (`bench_step`)
    outside         the part of a step that is not the model, with 1 and 32 requests (`bench_step`)

All are ratios, since machines differ. A record (commit, machine, workload, figures with their
spread) is added to the history, which git ignores; the last runs of the same workload on the same
machine are printed beside the new one, and drawn. WORSE: a figure is worse than the median of the
earlier ones by more than its spread; the script then exits 1. It exits 1 too if texts differ from
plain decoding's though rows are invariant, and records nothing then.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from foresay import LLM
from foresay.core.commands.report import judge_differences, note
from foresay.core.commands.table import print_table
from foresay.core.errors import ConfigError, ForesayError

sys.path.insert(0, str(Path(__file__).parent))
import bench_pairs
import bench_step
import trend
from trend import Figure, Record

ROOT = Path(__file__).parent.parent
PROPOSERS = "ngram,suffix,eagle,medusa,auto"
PARTS = ("batch1", "batch8", "step")  # what can be left out
MODEL = "smollm2"
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
NUM_BLOCKS = 1024


# --- where it runs


def commit(root: Path) -> str:
    """Return the commit that is checked out, "-dirty" with changes; "unknown" without git."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    found = subprocess.run(
        [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def machine(dtype: str) -> dict[str, object]:
    """Return what figures depend on besides the commit; `dtype`: the model's."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass  # not Linux
    known = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in known],
        "cores": _num_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": dtype,
    }


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- figures


def figure(values: Sequence[float]) -> Figure:
    """Return the median, the least and the most."""
    return Figure(median(values), min(values), max(values))


def measure_proposers(options: Namespace, names: Sequence[str]) -> dict[str, dict[str, Figure]]:
    """Let every proposer and plain decoding take turns, one by one and in batches."""
    figures: dict[str, dict[str, Figure]] = {}
    different: list[str] = []
    pairs = Namespace(
        model=MODEL, num_blocks=NUM_BLOCKS, adaptive=True, k=None, set=[], drafter=[], data=None,
        limit=options.limit, max_tokens=options.max_tokens, prompt_cap=options.prompt_cap,
    )  # fmt: skip
    with ExitStack() as stack:
        engines = bench_pairs.load_engines(pairs, names, stack)
        source = bench_pairs.read_source(pairs, engines[bench_pairs.PLAIN])
        for condition in ("batch1", "batch8"):
            if condition in options.skip:
                continue
            counts: list[dict[str, tuple[int, int]]] = []

            def workloads(
                number: int,
                condition: str = condition,
                counts: list[dict[str, tuple[int, int]]] = counts,
            ) -> list[bench_pairs.Workload]:
                counts.append(_verified(engines))
                return source.workloads(condition, number)

            rounds = bench_pairs.measure(engines, workloads, options.rounds, condition)
            counts.append(_verified(engines))
            different += bench_pairs.differences(rounds, condition)
            figures[condition] = {}
            for name in names:
                seconds = bench_pairs.pairs_of(rounds, name, bench_pairs.total_seconds)
                figures[condition][name] = figure([plain / own for plain, own in seconds])
            if condition == "batch1":  # the first count is before the warm-up
                figures["acceptance"] = acceptance(counts[1:], names)
        invariant = all(llm.stats.row_invariant for llm in engines.values())
    judge_differences(different, invariant=invariant)
    return figures


def _verified(engines: dict[str, LLM]) -> dict[str, tuple[int, int]]:
    """Return how many tokens were emitted in verify steps, and in how many of these, so far."""
    each = {name: llm.stats for name, llm in engines.items()}
    return {
        name: (stats.num_verified_tokens, stats.num_verify_steps) for name, stats in each.items()
    }


def acceptance(
    counts: Sequence[dict[str, tuple[int, int]]], names: Sequence[str]
) -> dict[str, Figure]:
    """Return mean acceptance lengths by round, of counts before each round and after the last."""
    found = {}
    for name in names:
        lengths = []
        for before, after in pairwise(counts):
            tokens, steps = (b - a for a, b in zip(before[name], after[name], strict=True))
            if steps:
                lengths.append(tokens / steps)
        if lengths:  # else it never drafted
            found[name] = figure(lengths)
    return found


def measure_step(options: Namespace) -> dict[str, dict[str, Figure]]:
    """Measure the step itself; the spread is between the quartiles of its turns."""
    by_rows, by_batch = bench_step.measure(
        bench_step.parser().parse_args(["--model", MODEL, "--repeats", str(options.repeats)])
    )
    return {
        "step": {
            f"{own.rows} row{'s' if own.rows > 1 else ''}": Figure(*own.ratio) for own in by_rows
        },
        "outside": {f"batch {own.num_requests}": Figure(*own.outside) for own in by_batch},
    }


def dtype_of_model() -> str:
    """Return the dtype that the model is run in here."""
    with LLM(MODEL, None, num_blocks=8, max_num_seqs=1, max_model_len=64) as llm:
        return str(bench_step.llm_runner(llm).target.dtype).removeprefix("torch.")


def measure(options: Namespace) -> Record:
    """Measure all that is asked for, and make a record of it."""
    names = options.proposers.split(",")
    figures: dict[str, dict[str, Figure]] = {}
    checked_out = commit(ROOT)  # what is measured, whatever is checked out by the end
    if "step" not in options.skip:
        figures |= measure_step(options)
    if not {"batch1", "batch8"} <= set(options.skip):
        figures |= measure_proposers(options, names)
    return Record(
        commit=checked_out,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(dtype_of_model()),
        workload={
            "model": MODEL,
            "limit": options.limit,
            "max_tokens": options.max_tokens,
            "prompt_cap": options.prompt_cap,
            "rounds": options.rounds,
        },
        figures=figures,
    )


# --- the whole


def report(record: Record, options: Namespace) -> bool:
    """Keep a record, print it beside earlier ones, and draw them; return whether none is worse."""
    before = trend.read(options.history)
    if not options.dry_run:
        trend.append(options.history, record)
    earlier = [other for other in before if other.is_like(record)]
    print(f"{record.commit} on {', '.join(f'{k} {_show(v)}' for k, v in record.machine.items())}")
    print_table(*trend.table(record, earlier))
    if not options.dry_run:
        trend.write(options.picture, trend.draw([*earlier, record]))
        note(f"the trend is drawn in {options.picture}, the record added to {options.history}")
    worse = [change for change in trend.changes(record, earlier) if change.is_worse]
    if not earlier:
        print("the first run of this workload on this machine: nothing to compare it with")
    for change in worse:
        print(
            f"WORSE: {trend.KINDS[change.kind].title}, {change.name}: {change.now.median:.3f}, "
            f"before {change.before:.3f} (median of {len(earlier)} earlier), spread "
            f"{change.spread:.3f}"
        )
    return not worse


def _show(value: object) -> str:
    return "+".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--proposers", default=PROPOSERS, help="names; a chain with '+'")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt-cap", type=int, default=128, help="tokens kept of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="over all prompts")
    parser.add_argument("--repeats", type=int, default=20, help="turns of the step")
    parser.add_argument("--skip", default="", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--history", type=Path, default=ROOT / ".bench" / "history.json")
    parser.add_argument("--picture", type=Path, default=ROOT / ".bench" / "trend.svg")
    parser.add_argument("--dry-run", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(arguments)
    options.skip = [part for part in options.skip.split(",") if part]
    unknown = [part for part in options.skip if part not in PARTS]
    if unknown or set(PARTS) <= set(options.skip):
        parser.error(f"--skip: some of {', '.join(PARTS)}, not all")
    return options


def run(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; the exit code says whether all is well."""
    options = parse(arguments)
    trend.read(options.history)  # a foreign file is found before anything is measured
    return 0 if report(measure(options), options) else 1


def main() -> int:
    """Run, and say in a sentence what stopped it."""
    try:
        return run()
    except ForesayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
