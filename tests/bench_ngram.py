"""What one `propose()` of the ngram proposer costs, by the length of the history.

    python tests/bench_ngram.py [--rounds N]

One new token is taken and five are drafted, at histories of 1,000 and 100,000 tokens; the ratio
of the medians should be at most 2. The histories are word-like random ids: Zipf-distributed, with
passages copied from earlier, so that matches of every length occur. Exits 1 above the limit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

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


def main() -> int:
    """Time steps at both lengths, in turns; print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=500, help="steps timed at each length")
    rounds = parser.parse_args().rounds
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
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
