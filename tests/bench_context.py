"""What a step and a draft cost, by the length of the text: attention's reads, and nothing else.

usage: python tests/bench_context.py [--model smollm2] [--dtype auto] [--rows 1,8]
           [--contexts 256,1024,4096,8192] [--repeats 20] [--scattered] [--threads N]
       python tests/bench_context.py --contexts 256,1024 --proposers-only

1. A step of the worker (batch, forward, verification; CPU) for one request whose text has so many
   tokens: 1 row decodes, 8 verify 7 random drafts. No prompt is computed: the cache is filled with
   random numbers. `added`: the step over that of the shortest text; `floor`: what reading the keys
   and values of the added tokens once takes at the speed at which this process reads memory, which
   is measured in the same turns. `--scattered`: the request's blocks lie in any order.
2. `propose()` of the ngram and the suffix proposer for one new token and 8 drafts, on random text
   that repeats itself. The longest text's median should be at most 2 times the shortest's, else it
   exits 1.

Medians of the repeats, in turns; in brackets the quartiles.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from foresay import LLM
from foresay.core.messages import NewRequest, SamplingData, SchedulerOutput
from foresay.core.proposer import DraftInput, DraftRequest, Proposer
from foresay_ngram import NgramConfig
from foresay_ngram.proposer import NgramProposer
from foresay_suffix import SuffixConfig
from foresay_suffix.proposer import SuffixProposer

sys.path.insert(0, str(Path(__file__).parent))
from bench_ngram import text
from bench_step import BLOCK_SIZE, Spread, llm_runner, numbers

READ_BYTES = 2**28  # far more than the processor's caches hold
WARM_UP_STEPS = 3
NUM_DRAFTS = 8  # of the proposers
LIMIT = 2.0
GREEDY = SamplingData(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, stop_token_ids=()
)


# --- 1. steps


class Request:
    """A request of the worker with a history that nobody computed."""

    def __init__(self, runner: Any, rows: int, context: int, num_steps: int, order: list[int]):
        """`context`: how many tokens it has after `num_steps` steps; `order`: of the blocks."""
        self.rows, self.context = rows, context
        self._runner = runner
        self._random = random.Random(context + rows)
        self._vocabulary = range(runner.vocab_size)
        self._id = f"{rows}.{context}"
        # A draft may be right by chance, and it advances by one more.
        self._num_computed = max(0, context - rows - num_steps - 4)
        num_blocks = -(-context // BLOCK_SIZE)
        self._new = [
            NewRequest(
                req_id=self._id,
                token_ids=self._random.choices(self._vocabulary, k=self._num_computed + 1),
                num_prompt_tokens=self._num_computed + 1,
                num_computed_tokens=self._num_computed,
                block_ids=order[:num_blocks],
                sampling=GREEDY,
            )
        ]

    def step(self, number: int) -> float:
        """Run a step; return its seconds."""
        drafts = self._random.choices(self._vocabulary, k=self.rows - 1)
        step = SchedulerOutput(
            step_id=number,
            num_scheduled_tokens={self._id: self.rows},
            scheduled_spec_decode_tokens={self._id: drafts} if drafts else {},
            num_output_rows={self._id: self.rows},
            num_draft_tokens={},
            new_requests=self._new,
        )
        self._new = []
        start = time.perf_counter()
        output = self._runner.execute(step)
        self._runner.draft([])
        seconds = time.perf_counter() - start
        if output.failed:
            raise SystemExit(f"error: a step with {self.context} tokens failed: {output.failed}")
        return seconds


def seconds_to_read(source: torch.Tensor) -> float:
    """Return how long reading a tensor once takes."""
    start = time.perf_counter()
    source.sum()
    return time.perf_counter() - start


@torch.inference_mode()
def steps(options: argparse.Namespace) -> None:
    """Time steps at all lengths, in turns; print them beside attention's floor."""
    num_steps = options.repeats + WARM_UP_STEPS
    longest = max(options.contexts)
    num_blocks = -(-longest // BLOCK_SIZE)
    with LLM(
        options.model, None, dtype=options.dtype, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        max_model_len=longest, max_num_seqs=2 * len(options.contexts),
    ) as llm:  # fmt: skip
        runner = llm_runner(llm)
        generator = torch.Generator().manual_seed(0)
        for layer in runner.cache.layers:
            for stored in (layer.key, layer.value):
                stored.normal_(generator=generator)
        order = list(range(num_blocks))
        if options.scattered:
            random.Random(0).shuffle(order)
        requests = [
            Request(runner, rows, context, num_steps, order)
            for rows in options.rows
            for context in options.contexts
        ]
        bytes_per_token = runner.target.dtype.itemsize * sum(
            layer.width for layer in runner.target.kv_layout
        )
        source = torch.ones(READ_BYTES // 4)
        seconds: dict[tuple[int, int], list[float]] = {}
        reads = []
        for turn in range(num_steps):
            for number, request in enumerate(requests[:: -1 if turn % 2 else 1]):
                took = request.step(turn * len(requests) + number)
                if turn >= WARM_UP_STEPS:
                    seconds.setdefault((request.rows, request.context), []).append(took)
            reads.append(seconds_to_read(source))
    speed = READ_BYTES / median(reads)
    print(
        f"\n{options.model}, threads {torch.get_num_threads()}, blocks "
        f"{'scattered' if options.scattered else 'in order'}; keys and values "
        f"{bytes_per_token / 1e3:.1f} kB a token; memory is read at {speed / 1e9:.1f} GB/s "
        f"(at best {READ_BYTES / min(reads) / 1e9:.1f})"
    )
    print("rows  context  step ms                   added ms  floor ms  added/floor  over shortest")
    shortest = min(options.contexts)
    for rows in options.rows:
        least = median(seconds[rows, shortest])
        for context in options.contexts:
            own = seconds[rows, context]
            added = median(own) - least
            floor = (context - shortest) * bytes_per_token / speed
            times = f"{added / floor:11.2f}" if floor else f"{'':11}"
            print(
                f"{rows:4}  {context:7}  {Spread.of(own).show(1e3, '.2f'):24} {added * 1e3:9.2f} "
                f"{floor * 1e3:9.2f}  {times}  {median(own) / least:12.3f}x"
            )


# --- 2. drafts


def drafts(contexts: Sequence[int], rounds: int) -> bool:
    """Time `propose()` at all lengths, in turns; return whether it is flat."""
    print("\nproposer  context  us a draft")
    is_flat = True
    makers: dict[str, Any] = {
        "ngram": lambda: NgramProposer(NgramConfig()),
        "suffix": lambda: SuffixProposer(SuffixConfig()),
    }
    histories = {n: text(n + rounds, random.Random(0)) for n in contexts}
    for name, make in makers.items():
        proposer: Proposer = make()
        seconds: dict[int, list[float]] = {n: [] for n in contexts}
        for new in range(rounds + 1):
            for n, history in histories.items():
                request = DraftRequest(
                    str(n), history[: n + new], 1, NUM_DRAFTS, num_prompt_tokens=n
                )
                start = time.perf_counter()
                proposer.propose(DraftInput([request]))
                seconds[n].append(time.perf_counter() - start)
        medians = {}
        for n, own in seconds.items():
            del own[0]  # the prompt is taken in
            medians[n] = median(own)
            print(f"{name:8} {n:8}  {Spread.of(own).show(1e6, '.1f')}")
        ratio = medians[max(contexts)] / medians[min(contexts)]
        verdict = "" if ratio <= LIMIT else "  above it"
        print(f"{name:8} longest over shortest {ratio:.2f} (limit {LIMIT}){verdict}")
        is_flat &= not verdict
    return is_flat


def main() -> int:
    """Measure what is asked for; the exit code says whether drafts are flat."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=numbers, default=[1, 8])
    parser.add_argument("--contexts", type=numbers, default=[256, 1024, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=400, help="drafts timed at each length")
    parser.add_argument("--scattered", action="store_true")
    parser.add_argument("--proposers-only", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    least = max(options.rows) + options.repeats + WARM_UP_STEPS + 8
    if min(options.contexts) < least:
        parser.error(f"--contexts: at least {least} tokens with these --rows and --repeats")
    if not options.proposers_only:
        steps(options)
    return 0 if drafts(options.contexts, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
