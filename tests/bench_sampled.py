"""Whether drawing drafts pays at temperature 1: against taking the likeliest, prompt by prompt.

usage: python tests/bench_sampled.py [--model smollm2] [--proposer eagle] [--drafter DIR]
                                     [--data FILE.jsonl] [--limit N per task] [--samples 4]
                                     [--max-tokens 64]

Every prompt is answered `samples` times each way, at temperature 1 without a seed of its own, so
drawn drafts are verified by `block`. Printed are the mean acceptance lengths (pooled: all tokens
over all verify steps), and the mean of the differences by prompt with its 95 % bootstrap interval.
No times are taken: a busy machine does not matter. Exits 1 unless the lower bound is above 0.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from statistics import fmean

from foresay import LLM, SamplingParams
from foresay.core.commands.prompts import read_prompts, select, shipped


def lengths(
    model: str,
    proposer: str,
    drafter: str | None,
    prompts: list[str],
    samples: int,
    max_tokens: int,
    *,
    sample: bool,
) -> tuple[list[float], float]:
    """Return each prompt's mean acceptance length, and the pooled one."""
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, n=samples, ignore_eos=True)
    settings = {"sample": sample}
    with LLM(
        model,
        proposer,
        drafter=drafter,
        proposer_settings=settings,
        max_num_seqs=16,
        seed=1,
        adaptive=False,
    ) as llm:
        outs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params)
        found = [out.stats.mean_acceptance_length for out in outs]
        pooled = llm.stats.mean_acceptance_length
    assert pooled is not None
    assert all(length is not None for length in found)
    return [length for length in found if length is not None], pooled


def interval(differences: list[float], rounds: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    draw = random.Random(0)
    means = sorted(fmean(draw.choices(differences, k=len(differences))) for _ in range(rounds))
    return means[round(0.025 * rounds)], means[round(0.975 * rounds) - 1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Sampled drafts against argmax drafts.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--proposer", default="eagle")
    parser.add_argument("--drafter")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    rows = select(read_prompts(options.data or shipped("prompts.jsonl")), None, options.limit)
    prompts = [row.text for row in rows]
    asked = (options.model, options.proposer, options.drafter)
    common = (*asked, prompts, options.samples, options.max_tokens)
    drawn, drawn_pooled = lengths(*common, sample=True)
    likeliest, likeliest_pooled = lengths(*common, sample=False)
    differences = [a - b for a, b in zip(drawn, likeliest, strict=True)]
    low, high = interval(differences)
    print(f"{options.proposer}, temperature 1, {len(prompts)} prompts x {options.samples} samples:")
    print(f"mean acceptance length: drawn {drawn_pooled:.3f}, likeliest {likeliest_pooled:.3f}")
    print(f"difference by prompt: {fmean(differences):+.3f}, 95 % [{low:+.3f}, {high:+.3f}]")
    return 0 if low > 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
