"""Memory over many requests: nothing may stay behind of a request that has ended.

usage: python tests/bench_memory.py [--model M] [--requests 1000] [--proposers ngram,eagle,...]

Runs short requests with a proposer of each kind, a small pool, preemptions and prefix hits.
Afterwards every block is free and no state is kept; the process's resident memory after all
requests is at most 1.05 times that after a fifth of them. (The kernels' libraries keep what they
made for each new shape of a batch, some tens of megabytes until all shapes were met: with a tiny
model in place of a real one that alone is more than 5 %.)
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from foresay import LLM, SamplingParams
from foresay.core.plugins import PluginManager

sys.path.insert(0, str(Path(__file__).parent))
from bench_drafting import heads

LIMIT = 1.05
NUM_BLOCKS = 64


def resident_bytes() -> int:
    """The process's resident memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def drafters(config: Any, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Proposers' names, and the folders of their weights, which are random."""
    yield "ngram", None
    for label, proposer, path in heads(config, folder):
        if label != "eagle":  # eagle3 stands for both
            yield proposer, str(path)


def run(model: str, proposer: str, drafter: str | None, num_requests: int) -> tuple[float, bool]:
    """Return the ratio of resident memory, and whether nothing stayed behind."""
    rng = random.Random(0)
    early = 0
    with LLM(
        model=model, proposer=proposer, drafter=drafter, block_size=4, num_blocks=NUM_BLOCKS,
        max_model_len=100, max_num_seqs=8, num_speculative_tokens=3,
        adaptive=False,
    ) as llm:  # fmt: skip
        for start in range(0, num_requests, 20):
            prompts = [
                [*range(3, 3 + rng.choice((0, 8, 21))), *rng.choices(range(3, 150), k=8)]
                for _ in range(20)
            ]
            params = [
                SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=i, max_tokens=8)
                for i in range(20)
            ]
            llm.generate(prompts, params)
            if start + 20 == num_requests // 5:
                early = resident_bytes()
        engine: Any = llm._engine
        engine._scheduler.check_integrity()
        clean = (
            engine._scheduler.blocks.num_free_blocks == NUM_BLOCKS
            and not engine._runner._states
            and all(
                not member.num_stored and (member.queue is None or not member.queue._pending)
                for member in engine._runner.proposers.members
            )
        )
        return resident_bytes() / early, clean


def main() -> int:
    """Print a line for each proposer; the exit code says whether all are within the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--proposers", default="ngram,eagle,medusa,mtp")
    options = parser.parse_args()
    alias = PluginManager.load().model(options.model)
    config = AutoConfig.from_pretrained(alias.resolve() if alias is not None else options.model)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for proposer, drafter in drafters(config, Path(folder)):
            if proposer not in options.proposers.split(","):
                continue
            ratio, clean = run(options.model, proposer, drafter, options.requests)
            failed |= ratio > LIMIT or not clean
            print(
                f"{proposer}: {ratio:.3f} times the resident memory of a fifth of the requests; "
                f"{'nothing stayed behind' if clean else 'SOMETHING STAYED BEHIND'}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
