"""What an engine step costs over the matrix products in it, and how much of it is not the model.

usage: python tests/bench_step.py [--model smollm2] [--dtype auto] [--rows 1,8] [--context 300]
           [--batches 1,32] [--repeats 40] [--threads N] [--profile]

All on real requests of random token ids in one engine, CPU only, with the model's own decoder.

1. Rows: a request with a step of 1 row decodes, one with 8 has 7 drafts verified (random ones, so
   that it advances by one token). `products`: the calls of `Linear` that one forward makes, noted
   once with their inputs and made again in their order, and nothing else. `forward`: the target's,
   inside the engine's step; what lays out its batch is outside. `step`: all of `Engine.advance`.
   They take turns. The forward should take at most 1.25 times its products.
2. Outside: the part of a step that is not the forward (schedule, batch, verify, bookkeeping), with
   so many requests decoding at once, nobody drafting. At most 8 % for one, 15 % for 32.

Medians of the repeats, of a ratio those of the turns' own ratios; in brackets the quartiles. `of
the least`: the fastest forward over the fastest products.
`--profile` adds a step's parts, and the operations of a forward by their own time. Exits 1 above a
limit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from foresay import LLM, SamplingParams
from foresay.core.proposer import Draft, DraftInput, ProposerConfig
from foresay.core.worker.linear import Linear
from foresay.core.worker.target import TargetModel

sys.path.insert(0, str(Path(__file__).parent))
from step_parts import PARTS, Clock, clocked, linears_of, noted_products

RATIO_LIMIT = 1.25  # of a forward over its products
SHARE_LIMITS = {1: 0.08, 32: 0.15}  # of a step outside the model, by the number of requests
WARM_UP_STEPS = 4
BLOCK_SIZE = 16
PROFILED = 5  # forwards


class Spread(NamedTuple):
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Make it of one value or more."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high)

    def show(self, scale: float, form: str) -> str:
        """Return it as text."""
        return (
            f"{self.median * scale:{form}} ({self.low * scale:{form}}..{self.high * scale:{form}})"
        )


# --- requests


class WrongDrafts:
    """Drafts random tokens, as many as it may."""

    def __init__(self, config: ProposerConfig) -> None:
        self._random = random.Random(0)
        self._num_ids = 0

    def load(self, target: Any) -> None:
        """Learn which ids there are."""
        self._num_ids = target.vocab_size

    def propose(self, batch: DraftInput) -> Draft:
        """Draft k of them for everyone."""
        ids = range(self._num_ids)
        return Draft([self._random.choices(ids, k=request.k) for request in batch.requests])


class Decoding:
    """Requests of one engine that decode together, step by step."""

    def __init__(self, llm: LLM, num_requests: int, context: int, num_steps: int) -> None:
        """`context`: how many tokens each has in the middle of `num_steps` steps."""
        draw = random.Random(num_requests)
        prompt_length = max(1, context - num_steps // 2)
        # More than there are steps: a draft may be right by chance.
        params = SamplingParams(temperature=0.0, max_tokens=4 * num_steps + 64, ignore_eos=True)
        engine: Any = llm._running_engine()
        self._engine = engine
        vocabulary = range(llm_runner(llm).target.vocab_size)
        self._generations = [
            llm._make(draw.choices(vocabulary, k=prompt_length), params)
            for _ in range(num_requests)
        ]
        for generation in self._generations:
            engine.add(generation)
        while any(not generation.first.num_output_tokens for generation in self._generations):
            engine.advance()
        for _ in range(WARM_UP_STEPS):
            engine.advance()

    def advance(self) -> None:
        """Run a step."""
        self._engine.advance()

    def step(self, clock: Clock) -> float:
        """Run a step; return its seconds. Those of its parts are in `clock`."""
        clock.spans.clear()
        start = time.perf_counter()
        self.advance()
        seconds = time.perf_counter() - start
        assert all(generation.output is None for generation in self._generations)
        assert len(clock.spans["forward"]) == 1
        return seconds

    def close(self) -> None:
        """End them all."""
        self._engine.drop(self._generations)


def llm_runner(llm: LLM) -> Any:
    """Return the engine's worker, which lives in this process."""
    engine: Any = llm._running_engine()
    return engine._runner


def open_engine(options: argparse.Namespace, num_drafts: int) -> LLM:
    """Load the model, to decode or to have so many drafts of a request verified in every step."""
    num_tokens = options.context + 4 * options.repeats + 200
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "num_blocks": max(options.batches) * (num_tokens // BLOCK_SIZE + 1),
        "block_size": BLOCK_SIZE,
        "max_num_seqs": max(options.batches),
        "enable_prefix_caching": False,
    }
    if num_drafts:
        settings |= {"num_speculative_tokens": num_drafts, "adaptive": False}
    return LLM(options.model, WrongDrafts if num_drafts else None, **settings)


# --- measuring


@dataclass
class RowTimes:
    """Seconds of steps with so many rows, by turn."""

    rows: int
    num_products: int
    products: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Spread:
        """A forward over its products."""
        ratios = [own / alone for own, alone in zip(self.forward, self.products, strict=True)]
        return Spread.of(ratios)

    @property
    def least_ratio(self) -> float:
        """The fastest forward over the fastest products: where others compute, less disturbed."""
        return min(self.forward) / min(self.products)

    @property
    def step_ratio(self) -> Spread:
        """A whole step over its products."""
        ratios = [own / alone for own, alone in zip(self.step, self.products, strict=True)]
        return Spread.of(ratios)


@dataclass
class BatchTimes:
    """Seconds of steps with so many requests that decode, and those of their parts."""

    num_requests: int
    step: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def outside(self) -> Spread:
        """The part of a step that is not the model's forward."""
        forward = [parts["forward"] for parts in self.parts]
        return Spread.of([1 - own / step for own, step in zip(forward, self.step, strict=True)])


@torch.inference_mode()
def measure_rows(options: argparse.Namespace, llms: dict[int, LLM]) -> list[RowTimes]:
    """Let products and steps take turns, for each number of rows."""
    times, decodings = [], []
    replays: list[list[Callable[[], object]]] = []
    with clocked() as clock:
        for rows in options.rows:
            num_steps = options.repeats + WARM_UP_STEPS
            decoding = Decoding(llms[rows], 1, options.context, num_steps)
            with noted_products() as calls:
                decoding.step(clock)
            missing = _num_missing(llm_runner(llms[rows]).target.decoder, calls)
            if missing:
                raise SystemExit(f"error: {missing} of the decoder's products were not noted")
            decodings.append(decoding)
            replays.append([call for _, call in calls])
            times.append(RowTimes(rows, len(calls)))
        for turn in range(options.repeats):
            for own, decoding, replay in zip(times, decodings, replays, strict=True):
                if turn % 2:
                    own.products.append(_seconds(replay))
                own.step.append(decoding.step(clock))
                own.forward.append(clock.seconds("forward"))
                if not turn % 2:
                    own.products.append(_seconds(replay))
        for decoding in decodings:
            decoding.close()
    return times


def _num_missing(decoder: object, calls: Sequence[tuple[Linear, object]]) -> int:
    called = {id(linear) for linear, _ in calls}
    held = {id(linear) for linear in linears_of(decoder)}
    if not held:
        raise SystemExit("error: the model does not run on foresay's own decoder")
    return len(held - called)


def _seconds(replay: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in replay:
        call()
    return time.perf_counter() - start


def measure_batch(options: argparse.Namespace, llm: LLM, num_requests: int) -> BatchTimes:
    """Time steps of so many requests that decode."""
    own = BatchTimes(num_requests)
    with clocked() as clock:
        decoding = Decoding(llm, num_requests, options.context, options.repeats + WARM_UP_STEPS)
        for _ in range(options.repeats):
            own.step.append(decoding.step(clock))
            own.parts.append(clock.parts(own.step[-1]))
        decoding.close()
    return own


def measure(options: argparse.Namespace) -> tuple[list[RowTimes], list[BatchTimes]]:
    """Measure both parts; with `options.profile` print a profile as well."""
    with ExitStack() as stack:
        plain = stack.enter_context(open_engine(options, 0))
        llms = {
            rows: stack.enter_context(open_engine(options, rows - 1)) if rows > 1 else plain
            for rows in options.rows
        }
        by_rows = measure_rows(options, llms)
        by_batch = [measure_batch(options, plain, size) for size in options.batches]
        if options.profile:
            for rows in options.rows:
                print_operations(options, llms[rows], rows)
            print_parts(by_batch)
    return by_rows, by_batch


# --- tables


def print_operations(options: argparse.Namespace, llm: LLM, rows: int) -> None:
    """Print the operations of a forward by their own time."""
    microseconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    inner = TargetModel.forward

    def profiled(*arguments: Any, **keywords: Any) -> Any:
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            result = inner(*arguments, **keywords)
        for event in profile.key_averages():
            microseconds[event.key] += event.self_cpu_time_total
            counts[event.key] += event.count
        return result

    decoding = Decoding(llm, 1, options.context, PROFILED + 1)
    TargetModel.forward = profiled  # type: ignore[method-assign]
    try:
        decoding.advance()  # the first profile is slower
        microseconds.clear()
        counts.clear()
        for _ in range(PROFILED):
            decoding.advance()
    finally:
        TargetModel.forward = inner  # type: ignore[method-assign]
    decoding.close()
    total = sum(microseconds.values())
    print(f"\noperations of a forward of {rows} rows, {total / PROFILED / 1e3:.2f} ms profiled")
    print(f"{'':44} {'calls':>6} {'ms':>8} {'share':>6}")
    for name in sorted(microseconds, key=microseconds.__getitem__, reverse=True)[:24]:
        own = microseconds[name]
        print(
            f"{name[:44]:44} {counts[name] / PROFILED:6.0f} {own / PROFILED / 1e3:8.3f} "
            f"{own / total:6.1%}"
        )


def print_parts(by_batch: Sequence[BatchTimes]) -> None:
    """Print where the time of a step goes."""
    print("\nparts of a step, us" + "".join(f"{name:>14}" for name in PARTS))
    for own in by_batch:
        cells = [median(parts[name] for parts in own.parts) * 1e6 for name in PARTS]
        print(f"batch {own.num_requests:<13}" + "".join(f"{cell:14.0f}" for cell in cells))


def print_tables(by_rows: Sequence[RowTimes], by_batch: Sequence[BatchTimes]) -> bool:
    """Print both tables; return whether all is within the limits."""
    is_within = True
    print("\nrows  products ms              forward ms               step ms                  "
          "forward/products     of the least  step/products")  # fmt: skip
    for own in by_rows:
        products, forward, step = (
            Spread.of(seconds).show(1e3, ".2f") for seconds in (own.products, own.forward, own.step)
        )
        verdict = "" if own.ratio.median <= RATIO_LIMIT else f"  above {RATIO_LIMIT}"
        is_within &= not verdict
        print(
            f"{own.rows:4}  {products:24} {forward:24} {step:24} {own.ratio.show(1, '.3f'):20} "
            f"{own.least_ratio:12.3f}  {own.step_ratio.show(1, '.3f')}{verdict}"
        )
    print("\nbatch  step ms                  outside the model")
    for batch in by_batch:
        limit = SHARE_LIMITS.get(batch.num_requests)
        verdict = ""
        if limit is not None:
            is_below = batch.outside.median < limit
            verdict = f" (limit {limit:.0%}){'' if is_below else '  above it'}"
            is_within &= is_below
        step = Spread.of(batch.step).show(1e3, ".2f")
        print(f"{batch.num_requests:5}  {step:24} {batch.outside.show(100, '.1f')} %{verdict}")
    return is_within


def numbers(text: str) -> list[int]:
    """Read numbers with commas between, each at least 1."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line; its defaults are what `regression` measures with."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--rows", type=numbers, default=[1, 8])
    made.add_argument("--batches", type=numbers, default=[1, 32])
    made.add_argument("--context", type=int, default=300)
    made.add_argument("--repeats", type=int, default=40)
    made.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    made.add_argument("--profile", action="store_true")
    return made


def main() -> int:
    """Measure and print; the exit code says whether all is within the limits."""
    options = parser().parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    by_rows, by_batch = measure(options)
    threads = torch.get_num_threads()
    print(
        f"\n{options.model}, {threads} thread{'s' if threads > 1 else ''}, context "
        f"{options.context}, {options.repeats} turns, {by_rows[0].num_products} products a forward"
    )
    return 0 if print_tables(by_rows, by_batch) else 1


if __name__ == "__main__":
    sys.exit(main())
