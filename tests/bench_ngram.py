"""What one `propose()` of the ngram proposer costs, by the length of the history and the batch.

    python tests/bench_ngram.py [--rounds N] [--batch-sizes 64,256,1024] [--history 1000]

One new token is taken and five are drafted, at histories of 1,000 and 100,000 tokens; the ratio
of the medians should be at most 2. The histories are word-like random ids: Zipf-distributed, with
passages copied from earlier, so that matches of every length occur. Exits 1 above the limit.

On a GPU batches follow: every request has taken two new tokens and drafts five, by the index and by
the Triton kernels in turns. The clock stops when the drafts are lists of the host. The last batch
size comes again with one history a hundred times as long. Where there is no GPU it can be tried
with TRITON_INTERPRET=1 in the environment and --device cpu; the kernels' times mean nothing then.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from foresay.core.proposer import DraftInput, DraftRequest
from foresay_ngram import NgramConfig
from foresay_ngram.proposer import NgramProposer

LENGTHS = (1_000, 100_000)
LIMIT = 2.0


def text(num_tokens: int, rng: random.Random) -> list[int]:
    """Return random token ids that repeat themselves roughly as text does."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        if ids and rng.random() < 0.05:
            start = rng.randrange(len(ids))
            ids += ids[start : start + rng.randrange(4, 20)]
        ids.append(int(rng.paretovariate(0.8)) % 49152)
    return ids[:num_tokens]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=500, help="steps timed at each length")
    parser.add_argument(
        "--batch-sizes",
        type=lambda listed: [int(size) for size in listed.split(",")],
        default=[64, 256, 1024],
        help="requests of the batches on a GPU",
    )
    parser.add_argument("--history", type=int, default=1000, help="their tokens")
    parser.add_argument("--steps", type=int, default=50, help="steps timed for each batch")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(arguments)


def batch_step_seconds(lengths: list[int], num_steps: int, device: str) -> dict[str, list[float]]:
    """Time steps of a batch with histories of these lengths, by each lookup, in turns."""
    rng = random.Random(1)
    most_new = 2 * (num_steps + 1)
    texts = [text(length + most_new, rng) for length in lengths]
    target: Any = SimpleNamespace(device=torch.device(device))
    proposers = {}
    for lookup in ("index", "triton"):
        proposers[lookup] = NgramProposer(NgramConfig(tree=False, lookup=lookup))
        proposers[lookup].load(target)
    seconds: dict[str, list[float]] = {lookup: [] for lookup in proposers}
    for new in range(0, most_new, 2):
        batch = DraftInput(
            [
                DraftRequest(str(i), ids[: length + new], 2, 5)
                for i, (ids, length) in enumerate(zip(texts, lengths, strict=True))
            ]
        )
        drafts = []
        for lookup, proposer in proposers.items():
            start = time.perf_counter()
            drafts.append(proposer.propose(batch).token_ids)
            seconds[lookup].append(time.perf_counter() - start)
        assert drafts[0] == drafts[1], "the lookups differ"
    return seconds


def compare_lookups(options: argparse.Namespace) -> None:
    """Print what a step takes by the index and by the kernels, for each batch."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU: batches looked up by the Triton kernels are not measured")
        return
    print(
        f"{'requests':>8} {'longest':>9} {'index ms':>9} {'triton ms':>9} {'ratio':>6} "
        f"{'first ms, index':>15} {'triton':>8}"
    )
    batches = [[options.history] * size for size in options.batch_sizes]
    batches.append([*batches[-1][1:], 100 * options.history])
    for lengths in batches:
        seconds = batch_step_seconds(lengths, options.steps, options.device)
        medians = [statistics.median(values[1:]) * 1e3 for values in seconds.values()]
        first = [values[0] * 1e3 for values in seconds.values()]  # all of the prompts
        print(
            f"{len(lengths):>8} {max(lengths):>9} {medians[0]:>9.3f} {medians[1]:>9.3f} "
            f"{medians[0] / medians[1]:>6.2f} {first[0]:>15.1f} {first[1]:>8.1f}"
        )


def main() -> int:
    """Time steps at both lengths, in turns; print the medians and their ratio; then batches."""
    options = parse()
    rounds = options.rounds
    proposer = NgramProposer(NgramConfig(tree=False))
    histories = {n: text(n + rounds, random.Random(0)) for n in LENGTHS}
    seconds: dict[int, list[float]] = {n: [] for n in LENGTHS}

    for n, history in histories.items():  # the prompt, indexed by the first step
        start = time.perf_counter()
        proposer.propose(DraftInput([DraftRequest(str(n), history[:n], 1, 5)]))
        took = time.perf_counter() - start
        print(f"{n:>7} tokens indexed in {took * 1e3:9.1f} ms, {took / n * 1e6:5.2f} us a token")
    for new in range(1, rounds + 1):
        for n, history in histories.items():
            batch = DraftInput([DraftRequest(str(n), history[: n + new], 1, 5)])
            start = time.perf_counter()
            proposer.propose(batch)
            seconds[n].append(time.perf_counter() - start)
    medians = {n: statistics.median(values) for n, values in seconds.items()}
    for n, median in medians.items():
        worst = max(seconds[n])
        print(f"{n:>7} tokens: {median * 1e6:6.2f} us a step (median), worst {worst * 1e6:.0f} us")
    ratio = medians[LENGTHS[1]] / medians[LENGTHS[0]]
    print(f"ratio {ratio:.2f} (limit {LIMIT})")
    compare_lookups(options)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
