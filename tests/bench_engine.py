"""How fast plain and speculative decoding are, by task; and what a batch gains.

usage: python tests/bench_engine.py --data FILE.jsonl [--model DIR] [--dtype auto] [-k K]
           [--proposer ngram] [--per-task 4] [--max-tokens 128] [--repeats 3]
       python tests/bench_engine.py --batch --data FILE.jsonl ...   (16 prompts at once or singly)

Greedy, batch 1, chat template, first turn; tokens per second are output tokens over the wall
seconds of the calls, prefill included. Plain and speculative decoding take turns, prompt by
prompt, and the medians of the repeats are summed by task: the ratio is of one run. The spread is
the least and the largest ratio of the repeats over ALL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from foresay import LLM, SamplingParams


def read(path: Path, per_task: int) -> list[tuple[str, str]]:
    """Return (task, first turn) of the first prompts of each task, in the file's order."""
    seen: Counter[str] = Counter()
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        seen[row["task"]] += 1
        if seen[row["task"]] <= per_task:
            prompts.append((row["task"], row["turns"][0]))
    return prompts


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[Any]]:
    """Return wall seconds and outputs of one call."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, outputs


def speculation(options: argparse.Namespace, prompts: list[tuple[str, str]]) -> None:
    """Plain and speculative decoding in turns, by task."""
    common = {"model": options.model, "dtype": options.dtype, "enable_prefix_caching": False}
    names = ["none", options.proposer]
    llms = [
        LLM(proposer=None, **common),
        LLM(proposer=options.proposer, num_speculative_tokens=options.k, **common),
    ]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    tokens: dict[str, int] = defaultdict(int)
    # seconds[repeat][task][which]
    seconds: list[dict[str, list[float]]] = [
        defaultdict(lambda: [0.0, 0.0]) for _ in range(options.repeats)
    ]
    steps: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    num_equal = 0
    ids = [llms[0].chat_prompt([{"role": "user", "content": text}]) for _, text in prompts]
    for llm in llms:
        timed(llm, ids[:1], SamplingParams(temperature=0.0, max_tokens=16))
    for (task, _), prompt in zip(prompts, ids, strict=True):
        for repeat in range(options.repeats):
            results = [timed(llm, [prompt], params) for llm in llms]
            for key in (task, "ALL"):
                for which, (elapsed, _) in enumerate(results):
                    seconds[repeat][key][which] += elapsed
        plain, drafting = (outputs[0] for _, outputs in results)
        num_equal += plain.outputs[0].token_ids == drafting.outputs[0].token_ids
        for key in (task, "ALL"):
            tokens[key] += len(plain.outputs[0].token_ids)
            stats = drafting.stats
            for i, count in enumerate(
                (stats.num_steps, stats.num_verify_steps, stats.num_verified_tokens)
            ):
                steps[key][i] += count
    print(f"{'task':16} {'tokens':>6} {'none':>7} {names[1]:>7} speedup  MAL   tokens/step")
    for task in [*dict.fromkeys(task for task, _ in prompts), "ALL"]:
        medians = [
            statistics.median(seconds[repeat][task][which] for repeat in range(options.repeats))
            for which in (0, 1)
        ]
        speeds = [tokens[task] / median for median in medians]
        num_steps, num_verify, num_verified = steps[task]
        length = f"{num_verified / num_verify:.2f}" if num_verify else "n/a"
        print(
            f"{task:16} {tokens[task]:6} {speeds[0]:7.1f} {speeds[1]:7.1f} "
            f"{speeds[1] / speeds[0]:6.2f}x {length:>5} {tokens[task] / num_steps:8.2f}"
        )
    ratios = [
        seconds[repeat]["ALL"][0] / seconds[repeat]["ALL"][1] for repeat in range(options.repeats)
    ]
    print(
        f"ALL, by repeat: {min(ratios):.2f}x to {max(ratios):.2f}x; "
        f"equal ids: {num_equal} of {len(ids)}"
    )


def batch(options: argparse.Namespace, prompts: list[tuple[str, str]]) -> None:
    """Sixteen prompts in one call against sixteen calls, plain, every text at full length."""
    llm = LLM(model=options.model, proposer=None, dtype=options.dtype, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    ids = [llm.chat_prompt([{"role": "user", "content": text}]) for _, text in prompts[:16]]
    timed(llm, ids[:2], SamplingParams(temperature=0.0, max_tokens=16))
    ratios = []
    for _ in range(options.repeats):
        together, outputs = timed(llm, ids, params)
        singles = [timed(llm, [prompt], params) for prompt in ids]
        alone = sum(elapsed for elapsed, _ in singles)
        equal = sum(
            a.outputs[0].token_ids == b[0].outputs[0].token_ids
            for a, (_, b) in zip(outputs, singles, strict=True)
        )
        num_tokens = len(ids) * options.max_tokens
        ratios.append(alone / together)
        print(
            f"{len(ids)} prompts, {sum(map(len, ids))} prompt tokens: one call "
            f"{num_tokens / together:.1f} tokens/s, {len(ids)} calls {num_tokens / alone:.1f}, "
            f"ratio {ratios[-1]:.2f}; equal ids {equal} of {len(ids)}",
            flush=True,
        )
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument("-k", type=int)
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", action="store_true")
    options = parser.parse_args()
    prompts = read(options.data, options.per_task)
    (batch if options.batch else speculation)(options, prompts)


if __name__ == "__main__":
    main()
