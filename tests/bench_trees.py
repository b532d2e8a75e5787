"""What trees bring over chains of the same drafter: tokens per verify step, and speed, in pairs.

usage: python tests/bench_trees.py --data FILE.jsonl [--proposers eagle,medusa] [--nodes 32]
           [--chain-k K] [--conditions batch1,batch8,batch32] [--limit 4 per task]
           [--max-tokens 64] [--prompt-cap N] [--pairs 3] [--no-adaptive] [--json OUT]
       python tests/bench_trees.py --data FILE.jsonl --curve 1,2,4,8,16,32 --svg OUT.svg ...

Plain decoding, and each proposer once with `tree=False` and once with trees of up to so many nodes,
have an engine each and take turns, workload by workload. A row has, for a task or for all, the mean
acceptance length of both forms and what the tree's is over the chain's; the speed of both over
plain decoding; and the median over the rounds of chain seconds / tree seconds, with the 95 % bound
on its bad side and its range (see `bench_pairs`).

With --curve: the mean acceptance length of trees of at most so many nodes each, drafted in every
step, and of the chain, as a table and a picture. Greedy; token ids are compared with plain
decoding's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from bench_pairs import ALL, BATCHES, Source, Workload, in_turn, lower_bound

from foresay import LLM
from foresay.core.commands.fitting import fit_prompts
from foresay.core.commands.prompts import read_prompts, select, shipped
from foresay.core.commands.report import judge_differences, note, pooled
from foresay.core.errors import ForesayError
from foresay.core.stats import RequestStats, show

PLAIN = "none"
HEADING = (
    f"{'':<8} {'task':<14} {'proposer':<9} {'length: chain':>13} {'tree':>6} {'gain':>6} "
    f"{'nodes':>6} {'speed: chain':>12} {'tree':>6} {'tree/chain':>10} {'bound':>6} {'range':>13}"
)


class Answers(NamedTuple):
    """What an engine made of a workload."""

    seconds: float
    token_ids: dict[str, list[int]]
    stats: list[RequestStats]


Round = dict[str, dict[str, Answers]]  # by workload, then by engine


def answer(llm: LLM, workload: Workload, max_tokens: int | None = None) -> Answers:
    """Answer a workload, call by call."""
    seconds, ids, stats = 0.0, {}, []
    for call in workload.calls:
        params = [
            p.params
            if max_tokens is None
            else p.params.model_copy(update={"max_tokens": max_tokens})
            for p in call
        ]
        start = time.perf_counter()
        outputs = llm.generate([p.token_ids for p in call], params)
        seconds += time.perf_counter() - start
        for prompt, output in zip(call, outputs, strict=True):
            ids[prompt.id] = output.outputs[0].token_ids
            stats.append(output.stats)
    return Answers(seconds, ids, stats)


def engine(
    options: argparse.Namespace, proposer: str | None, nodes: int | None, adaptive: bool
) -> LLM:
    """Load the model; `nodes` None: chains."""
    settings: dict[str, Any] = {"tree": nodes is not None}
    return LLM(
        options.model,
        proposer,
        proposer_settings=settings if proposer else {},
        num_speculative_tokens=nodes if nodes is not None else options.chain_k,
        adaptive=adaptive,
        num_blocks=options.num_blocks,
        max_num_seqs=max(BATCHES.values()),
        enable_prefix_caching=False,
    ) if proposer else LLM(
        options.model, None, num_blocks=options.num_blocks, max_num_seqs=max(BATCHES.values()),
        enable_prefix_caching=False,
    )  # fmt: skip


def play(
    engines: Mapping[str, LLM], source: Source, condition: str, num_rounds: int
) -> list[Round]:
    """Let the engines take turns for so many rounds, after a warm-up of each."""
    for llm in engines.values():
        work = source.workloads(condition, 0)[0]
        answer(llm, work._replace(calls=work.calls[:1]), 8)
    rounds = []
    for number in range(num_rounds):
        done: Round = {}
        for index, work in enumerate(source.workloads(condition, number)):
            order = in_turn(list(engines), number + index)
            done[work.name] = {name: answer(engines[name], work) for name in order}
        rounds.append(done)
        note(f"{condition}: round {number + 1} of {num_rounds}")
    return rounds


def differences(rounds: Sequence[Round]) -> list[str]:
    """Name the prompts whose token ids were others than plain decoding's."""
    return [
        f"{work} {prompt} with {name}"
        for done in rounds
        for work, each in done.items()
        for name, answers in each.items()
        for prompt, ids in answers.token_ids.items()
        if ids != each[PLAIN].token_ids[prompt]
    ]


def rows(rounds: Sequence[Round], condition: str, proposers: Sequence[str]) -> list[dict[str, Any]]:
    """Make a row for each proposer, of each task and of all."""
    found = []
    tasks = list(rounds[0])
    for task in [*tasks, ALL] if len(tasks) > 1 else [ALL]:
        works = tasks if task == ALL else [task]

        def seconds(done: Round, name: str, works: Sequence[str] = works) -> float:
            return sum(done[work][name].seconds for work in works)

        for proposer in proposers:
            chain, tree = f"{proposer}/chain", f"{proposer}/tree"
            stats = {
                name: pooled(s for done in rounds for work in works for s in done[work][name].stats)
                for name in (chain, tree)
            }
            lengths = [stats[name].mean_acceptance_length for name in (chain, tree)]
            ratios = [seconds(done, chain) / seconds(done, tree) for done in rounds]
            found.append(
                {
                    "condition": condition,
                    "task": task,
                    "proposer": proposer,
                    "chain_length": lengths[0],
                    "tree_length": lengths[1],
                    "gain": None if None in lengths else lengths[1] / lengths[0] - 1,  # type: ignore[operator]
                    "nodes_per_step": stats[tree].nodes_per_step,
                    "chain_speed": median(seconds(d, PLAIN) / seconds(d, chain) for d in rounds),
                    "tree_speed": median(seconds(d, PLAIN) / seconds(d, tree) for d in rounds),
                    "tree_over_chain": median(ratios),
                    "bound": lower_bound(ratios),
                    "range": (min(ratios), max(ratios)),
                }
            )
    return found


def line(row: Mapping[str, Any]) -> str:
    """Return a row for a person."""
    low, high = row["range"]
    return (
        f"{row['condition']:<8} {row['task']:<14} {row['proposer']:<9} "
        f"{show(row['chain_length']):>13} {show(row['tree_length']):>6} "
        f"{show(row['gain'], '+.0%'):>6} {show(row['nodes_per_step'], '.1f'):>6} "
        f"{row['chain_speed']:>11.2f}x {row['tree_speed']:>5.2f}x {row['tree_over_chain']:>10.3f} "
        f"{show(row['bound'], '.3f'):>6} {low:>6.3f}-{high:.3f}"
    )


def curve(options: argparse.Namespace, source: Source, sizes: Sequence[int]) -> None:
    """Print and draw acceptance against nodes."""
    works = source.workloads("batch1", 0)
    points: dict[str, list[tuple[int, float]]] = {}
    chains: dict[str, float] = {}
    for proposer in options.proposers:
        for nodes in [None, *sizes]:
            with engine(options, proposer, nodes, adaptive=False) as llm:
                stats = pooled(s for work in works for s in answer(llm, work).stats)
            length = stats.mean_acceptance_length or 1.0
            if nodes is None:
                chains[proposer] = length
            else:
                points.setdefault(proposer, []).append((nodes, length))
            print(
                f"{proposer:<9} {'chain' if nodes is None else nodes:>6} nodes: mean acceptance "
                f"length {length:.3f}, {show(stats.nodes_per_step, '.1f')} nodes a step, "
                f"{show(stats.mean_draft_depth, '.1f')} deep",
                flush=True,
            )
    if options.svg is not None:
        options.svg.write_text(picture(points, chains), encoding="utf-8")


def picture(points: Mapping[str, Sequence[tuple[int, float]]], chains: Mapping[str, float]) -> str:
    """Return an SVG: mean acceptance length against nodes; dashed: the chain's."""
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
    width, height, left, top = 420, 260, 48, 24
    most = max(nodes for line_ in points.values() for nodes, _ in line_)
    longest = max([length for line_ in points.values() for _, length in line_] + [1.5])

    def at(nodes: float, length: float) -> tuple[float, float]:
        return left + width * nodes / most, top + height * (1 - (length - 1) / (longest - 1))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 180} {height + 70}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width + 180}" height="{height + 70}" fill="white"/>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="black"/>',
        f'<text x="{left}" y="{top - 8}">mean acceptance length; dashed: the chain</text>',
        f'<text x="{left + width / 2}" y="{top + height + 36}">nodes at most</text>',
    ]
    for tick in range(5):
        length = 1 + (longest - 1) * tick / 4
        parts.append(f'<text x="8" y="{at(0, length)[1] + 4:.1f}">{length:.2f}</text>')
    for nodes in sorted({nodes for line_ in points.values() for nodes, _ in line_}):
        x = at(nodes, 1)[0]
        parts.append(f'<text x="{x - 6:.1f}" y="{top + height + 16}">{nodes}</text>')
    for number, (name, line_) in enumerate(points.items()):
        colour = colours[number % len(colours)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line_))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = at(0, chains[name])[1]
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="{colour}" '
            'stroke-dasharray="4"/>'
        )
        parts.append(
            f'<text x="{left + width + 8}" y="{at(*line_[-1])[1] + 4:.1f}" fill="{colour}">{name} '
            f"{line_[-1][1]:.2f} ({chains[name]:.2f})</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="rows {id, task, turns}; default: the shipped")
    parser.add_argument("--proposers", default="eagle,medusa")
    parser.add_argument("--nodes", type=int, default=32, help="most nodes of a tree")
    parser.add_argument("--chain-k", type=int, help="most tokens of a chain; default: its own")
    parser.add_argument("--conditions", default="batch1")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-cap", type=int, help="keep the last so many tokens of a prompt")
    parser.add_argument("--pairs", type=int, default=3, help="rounds")
    parser.add_argument("--num-blocks", type=int, default=2048, help="KV blocks of each engine")
    parser.add_argument("--adaptive", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--curve", help="sizes of trees, instead of pairs")
    parser.add_argument("--svg", type=Path, help="where the curve's picture goes")
    parser.add_argument("--json", type=Path, help="where the rows go too")
    options = parser.parse_args()
    options.proposers = options.proposers.split(",")
    return options


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for."""
    with ExitStack() as stack:
        engines = {PLAIN: stack.enter_context(engine(options, None, None, adaptive=False))}
        prompts = read_prompts(options.data or shipped("prompts.jsonl"))
        num_tasks = len({prompt.task for prompt in prompts})
        enough = max(options.limit, -(-max(BATCHES.values()) // num_tasks))
        by_task: dict[str, list[tuple[str, list[int]]]] = {}
        for prompt, ids in fit_prompts(select(prompts, None, enough), engines[PLAIN]):
            by_task.setdefault(prompt.task, []).append((prompt.id, ids))
        source = Source(
            by_task, len(engines[PLAIN].tokenizer), limit=options.limit,
            max_tokens=options.max_tokens, prompt_cap=options.prompt_cap,
        )  # fmt: skip
        if options.curve:
            curve(options, source, [int(size) for size in options.curve.split(",")])
            return 0
        for name in options.proposers:
            for form, nodes in (("chain", None), ("tree", options.nodes)):
                llm = engine(options, name, nodes, options.adaptive)
                engines[f"{name}/{form}"] = stack.enter_context(llm)
        print(HEADING, flush=True)
        every: list[dict[str, Any]] = []
        different: list[str] = []
        for condition in options.conditions.split(","):
            rounds = play(engines, source, condition, options.pairs)
            new = rows(rounds, condition, options.proposers)
            print(*map(line, new), sep="\n", flush=True)
            every += new
            different += differences(rounds)
        if options.json is not None:
            options.json.write_text(json.dumps(every, indent=2) + "\n")
        invariant = all(llm.stats.row_invariant for llm in engines.values())
    judge_differences(different, invariant=invariant)
    return 0


def main() -> int:
    """Run, and say in a sentence what stopped it."""
    try:
        return run(parse())
    except ForesayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
