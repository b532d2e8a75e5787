"""What the suffix proposer gains on texts that come again, and what a step of it costs.

usage: python tests/bench_suffix.py [--replies FILE.jsonl] [--limit 24] [-k 5 16] [--rounds 500]

1. Cost: one new token taken, 16 drafted, at 1,000 and 8,000 tokens of context, with an empty
   memory and with a full one (200,000 tokens), in turns; processor time. The median with a full
   memory and 8,000 tokens should be at most 3 times that with none and 1,000, else it exits 1.
2. Memory: bytes a token of a full memory, and of a request's own contexts.
3. With --replies (rows of `p`, a prompt, and `o`, its greedy reply, as token ids): the first
   `limit` of them decoded twice in one session, replayed without a model, so this is exact: every
   draft is checked against the reply that is known. Tokens per step on the first and the second
   pass, beside the ngram proposer's; for each setting of a short grid at the greatest k.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foresay.core.proposer import DraftInput, DraftRequest, Proposer
from foresay_ngram import NgramConfig
from foresay_ngram.proposer import NgramProposer
from foresay_suffix import SuffixConfig
from foresay_suffix.proposer import SuffixProposer

CONTEXTS = (1_000, 8_000)
REMEMBERED = (0, 200_000)
OUTPUT = 250  # tokens of each remembered output
LIMIT = 3.0
ROW_COST = 0.08  # of a row more in a forward pass, beside the first: a CPU in bfloat16
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"max_draft_factor": 1.0},
    {"max_draft_factor": 2.0},
    {"max_draft_factor": 4.0},
    {"min_probability": 0.1},
    {"min_probability": 0.3},
    {"min_probability": 0.5},
    {"min_match": 2},
    {"max_remembered_tokens": 0},
)


def text(num_tokens: int, rng: random.Random) -> list[int]:
    """Return random token ids that repeat themselves roughly as text does."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        if ids and rng.random() < 0.05:
            start = rng.randrange(len(ids))
            ids += ids[start : start + rng.randrange(4, 20)]
        ids.append(int(rng.paretovariate(0.8)) % 49152)
    return ids[:num_tokens]


# --- 1. and 2. cost


def fill(proposer: SuffixProposer, source: Sequence[int]) -> SuffixProposer:
    """Let a proposer remember a text as outputs of `OUTPUT` tokens."""
    for start in range(0, len(source), OUTPUT):
        ids = source[start : start + OUTPUT]
        proposer.propose(DraftInput([DraftRequest("x", ids, 1, 0, num_prompt_tokens=1)]))
        proposer.release("x")
    return proposer


def cost(rounds: int) -> float:
    """Time steps of all kinds, in turns; return the ratio of the dearest to the cheapest."""
    rng = random.Random(0)
    source = text(REMEMBERED[-1], rng)
    start = time.process_time()
    proposers = {
        size: fill(
            SuffixProposer(SuffixConfig(tree=False, max_remembered_tokens=size)), source[:size]
        )
        for size in REMEMBERED
    }
    took = time.process_time() - start
    held = proposers[REMEMBERED[-1]].memory
    print(f"{held.num_tokens} tokens remembered: {took / held.num_tokens * 1e6:.2f} us a token")
    start = time.process_time()
    fill(proposers[REMEMBERED[-1]], text(20_000, rng))
    took = time.process_time() - start
    print(f"20000 more, for which others are dropped: {took / 20_000 * 1e6:.2f} us a token")
    histories = {}
    for size in REMEMBERED:
        for n in CONTEXTS:
            # A third of the output is what somebody else was answered, in passages.
            history = text(n, rng)
            while len(history) < n + rounds:
                at = rng.randrange(len(source) - 40)
                history += source[at : at + 20] if rng.random() < 0.33 else text(20, rng)
            histories[size, n] = history
            ids = DraftRequest(str(n), history[:n], 1, 16, num_prompt_tokens=n - 1)
            start = time.process_time()
            proposers[size].propose(DraftInput([ids]))
            took = time.process_time() - start
            print(f"{n:>7} tokens of context, {size:>7} remembered: begun in {took * 1e3:.1f} ms")
    seconds: dict[tuple[int, int], list[float]] = {key: [] for key in histories}
    for new in range(1, rounds + 1):
        for (size, n), history in histories.items():
            ids = DraftRequest(str(n), history[: n + new], 1, 16, num_prompt_tokens=n - 1)
            start = time.process_time()
            proposers[size].propose(DraftInput([ids]))
            seconds[size, n].append(time.process_time() - start)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    for (size, n), median in medians.items():
        nearly = statistics.quantiles(seconds[size, n], n=100)[98]
        print(
            f"{n:>7} tokens of context, {size:>7} remembered: {median * 1e6:6.1f} us a step "
            f"(median; 99 %: {nearly * 1e6:.0f} us)"
        )
    ratio = medians[REMEMBERED[-1], CONTEXTS[-1]] / medians[REMEMBERED[0], CONTEXTS[0]]
    print(f"ratio {ratio:.2f} (limit {LIMIT})")
    return ratio


def memory(source: Sequence[int], name: str) -> None:
    """Print what a full memory and a request's contexts take, by token."""
    tracemalloc.start()
    proposer = fill(SuffixProposer(SuffixConfig(tree=False)), source)
    held, num_tokens = tracemalloc.get_traced_memory()[0], proposer.memory.num_tokens
    print(f"{name}: {num_tokens} tokens remembered, {held / num_tokens:.0f} bytes each", end="")
    del proposer
    before = tracemalloc.get_traced_memory()[0]
    proposer = SuffixProposer(SuffixConfig(tree=False))
    ids = source[: CONTEXTS[-1]]
    proposer.propose(DraftInput([DraftRequest("x", ids, 1, 16, num_prompt_tokens=1)]))
    held = tracemalloc.get_traced_memory()[0] - before
    print(f"; a request of {len(ids)} tokens: {held / len(ids):.0f} bytes each")
    tracemalloc.stop()


# --- 3. replay


class Pass(NamedTuple):
    """One pass over all replies."""

    tokens: int
    steps: int
    drafted: int
    accepted: int

    def __str__(self) -> str:
        rate = self.accepted / max(1, self.drafted)
        cost = self.steps + ROW_COST * self.drafted
        return (
            f"{self.tokens / self.steps:6.2f} tokens per step, {self.drafted / self.steps:4.1f} "
            f"drafted, {rate:4.0%} accepted, {self.tokens / cost:5.2f}x"
        )


def replay(proposer: Proposer, rows: Sequence[dict[str, list[int]]], k: int, name: str) -> Pass:
    """Decode known replies one after the other, each with an id of its own."""
    tokens = steps = num_drafted = num_accepted = 0
    for number, row in enumerate(rows):
        prompt, output = row["p"], row["o"]
        done = 1
        while done < len(output):
            wanted = min(k, len(output) - done - 1)
            history = [*prompt, *output[:done]]
            request = DraftRequest(
                f"{name}{number}", history, 1, wanted, num_prompt_tokens=len(prompt)
            )
            # As the engine has it: a step in which nobody wants a draft is shown to no proposer.
            drafted = proposer.propose(DraftInput([request])).token_ids[0] if wanted else []
            accepted = 0
            while accepted < len(drafted) and drafted[accepted] == output[done + accepted]:
                accepted += 1
            done += accepted + 1
            tokens += accepted + 1
            steps += 1
            num_drafted += len(drafted)
            num_accepted += accepted
        proposer.release(f"{name}{number}")  # type: ignore[attr-defined]
    return Pass(tokens, steps, num_drafted, num_accepted)


def passes(rows: Sequence[dict[str, list[int]]], ks: Sequence[int]) -> None:
    """Print both passes, for ngram and suffix, then for the grid of settings."""
    print(f"\n{len(rows)} replies twice in one session; x: simulated, {ROW_COST} a row drafted")
    for k in ks:
        for name in ("ngram", "suffix"):
            proposer: Proposer = (
                SuffixProposer(SuffixConfig(tree=False))
                if name == "suffix"
                else NgramProposer(NgramConfig(tree=False))
            )
            for number in ("first", "second"):
                print(f"{f'{name}, k={k}, {number} pass':45} {replay(proposer, rows, k, number)}")
    for settings in GRID:
        by = SuffixProposer(SuffixConfig(tree=False, **settings))
        told = ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"
        for number in ("first", "second"):
            print(f"{f'{told}, {number}':45} {replay(by, rows, ks[-1], number)}", flush=True)


def main() -> int:
    """Measure what is asked for; the exit code says whether the cost is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replies", type=Path, help="JSON Lines of token ids: p and o")
    parser.add_argument("--limit", type=int, default=24, help="replies to take")
    parser.add_argument("-k", type=int, nargs="+", default=[5, 16], help="most drafted a step")
    parser.add_argument("--rounds", type=int, default=500, help="steps timed of each kind")
    options = parser.parse_args()
    ratio = cost(options.rounds)
    print()
    memory(text(REMEMBERED[-1], random.Random(1)), "random text")
    if options.replies is not None:
        with options.replies.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        random.Random(0).shuffle(rows)  # they come source by source
        memory([token for row in rows[:1500] for token in row["o"]][: REMEMBERED[-1]], "replies")
        passes([row for row in rows if len(row["o"]) > 1][: options.limit], options.k)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
