"""What a worker in another process costs, per step, against one in the engine's own.

usage: python tests/bench_border.py [--model smollm2] [--proposer ngram] [--prompts 6]
           [--max-tokens 64] [--repeats 3]

Greedy, batch 1, the shipped prompts, chat template. Two measurements:
- The cost itself: what the engine waits for the calls of a step (execute and draft), less what the
  worker needs for them by its own clock, is pickling, the socket and the switch between processes.
- Inline and process by turns, prompt by prompt: seconds per step of each, and their ratio. On a
  machine that others use, its spread is wider than the cost.
And how long a round trip takes with a worker that does nothing, and how many bytes cross.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from foresay import LLM, SamplingParams, hookimpl
from foresay.core.border import Order
from foresay.core.channel import MARKER_BYTES, Channel, ChannelClosedError
from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from foresay.core.plugins import PluginManager
from foresay.core.remote import RemoteRunner, make_order
from foresay.core.runner import Runner
from foresay.core.stats import StepStats
from foresay.core.worker.serve import build, serve

TIMES = "FORESAY_BENCH_BORDER_TIMES"  # the file where the worker leaves its own times


class TimedRunner:
    """Notes how long each call takes, and writes it down when the engine is done."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        start = time.perf_counter()
        output = self._runner.execute(step)
        self.seconds.append(time.perf_counter() - start)
        return output

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        start = time.perf_counter()
        drafts = self._runner.draft(finished_req_ids)
        self.seconds.append(time.perf_counter() - start)
        return drafts


def timed_worker(end: socket.socket, marker: bytes) -> None:
    """A worker that leaves its own times behind."""
    runners = []

    def timed(order: Order) -> Any:
        runners.append(TimedRunner(build(order)))
        return runners[0]

    serve(end, marker, timed)
    Path(os.environ[TIMES]).write_text(json.dumps(runners[0].seconds), encoding="utf-8")


def echo_worker(end: socket.socket, marker: bytes) -> None:
    """A worker that answers with the call."""
    channel = Channel(end, marker)
    try:
        while True:
            channel.send(*channel.receive_next())
    except ChannelClosedError:
        return


@dataclass(slots=True)
class Call:
    """One call and its answer, as the engine sees it."""

    is_step: bool  # execute with something to compute; then comes the step's draft
    seconds: float
    bytes_down: int
    bytes_up: int


class MeasuredRunner(RemoteRunner):
    """Notes how long the engine waits for each call, and how many bytes cross."""

    def __init__(self, order: Order) -> None:
        self.calls: list[Call] = []
        super().__init__(order, timed_worker)

    def _ask(self, message: object) -> Any:
        start = time.perf_counter()
        answer = super()._ask(message)
        seconds = time.perf_counter() - start
        sizes = [len(pickle.dumps(what, pickle.HIGHEST_PROTOCOL)) for what in (message, answer)]
        is_step = isinstance(message, SchedulerOutput) and bool(message.num_scheduled_tokens)
        self.calls.append(Call(is_step, seconds, *sizes))
        return answer


class MeasuredLLM(LLM):
    """An LLM with a worker in another process that is measured from both ends."""

    runner: MeasuredRunner

    def _build_runner(self, plugins: PluginManager, *loaded: Any) -> Runner:
        self.runner = MeasuredRunner(make_order(self.config, plugins))
        return self.runner


class StepClock:
    """Sums what the engine's steps took."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_steps = 0

    @hookimpl
    def foresay_step_end(self, stats: StepStats) -> None:
        """Take a step's figures."""
        self.seconds += stats.schedule_seconds + stats.execute_seconds
        self.seconds += stats.commit_seconds + stats.draft_seconds
        self.num_steps += 1

    def take(self) -> float:
        """Return seconds per step since the last call."""
        mean = self.seconds / self.num_steps
        self.seconds, self.num_steps = 0.0, 0
        return mean


def clocked() -> tuple[StepClock, PluginManager]:
    """Return a clock and plugins with it."""
    clock, plugins = StepClock(), PluginManager.load()
    plugins.register(clock, "clock")
    return clock, plugins


def spread(values: Sequence[float], unit: float, digits: int = 1) -> str:
    """Word the median, and where the middle 80 % lie."""
    ordered = sorted(values)
    low, high = (ordered[int(len(ordered) * share)] for share in (0.1, 0.9))
    shown = [f"{value / unit:.{digits}f}" for value in (statistics.median(ordered), low, high)]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def round_trips(size: int) -> None:
    """Print how long a call of that many bytes takes that asks for nothing."""
    here, there = socket.socketpair()
    marker = os.urandom(MARKER_BYTES)
    process = multiprocessing.get_context("spawn").Process(target=echo_worker, args=(there, marker))
    process.start()
    there.close()
    channel = Channel(here, marker, process.is_alive)
    number = 0
    for pause in (0.0, 0.01):
        seconds = []
        for _ in range(300):
            time.sleep(pause)
            number += 1
            start = time.perf_counter()
            channel.send(number, bytes(size))
            channel.receive(number)
            seconds.append(time.perf_counter() - start)
        print(
            f"a round trip of {size} bytes, every {pause * 1e3:.0f} ms: {spread(seconds, 1e-6)} us"
        )
    channel.close()
    process.join()


def measure(options: argparse.Namespace) -> None:
    """Run the prompts by turns and print what they show."""
    lines = files("foresay.core.commands").joinpath("showcase.jsonl").read_text("utf-8")
    texts = [json.loads(line)["turns"][0] for line in lines.splitlines()][: options.prompts]
    settings = {
        "model": options.model,
        "proposer": None if options.proposer == "none" else options.proposer,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
    }
    clocks, managers = zip(*(clocked() for _ in range(2)), strict=True)
    inline = LLM(**settings, plugins=managers[0])
    start = time.perf_counter()
    remote = MeasuredLLM(**settings, plugins=managers[1])
    print(f"a worker in another process was ready after {time.perf_counter() - start:.1f} s")
    runner = remote.runner
    order = runner.calls.pop()
    print(f"its order has {order.bytes_down} bytes, its facts {order.bytes_up}")
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    prompts = [inline.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    for llm, clock in zip((inline, remote), clocks, strict=True):
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=8))
        clock.take()
    first = len(runner.calls)
    ratios, steps = [], []
    for prompt in prompts:
        for _ in range(options.repeats):
            texts = [llm.generate([prompt], params)[0].outputs[0] for llm in (inline, remote)]
            assert texts[0] == texts[1], "the outputs differ"
            means = [clock.take() for clock in clocks]
            steps.append(means)
            ratios.append(means[1] / means[0])
    calls = runner.calls[first:]
    remote.close()
    worked = json.loads(Path(os.environ[TIMES]).read_text(encoding="utf-8"))[first:]
    pairs = [(i, i + 1) for i, call in enumerate(calls[:-1]) if call.is_step]
    whole = [calls[i].seconds + calls[j].seconds for i, j in pairs]
    costs = [sum(calls[i].seconds - worked[i] for i in pair) for pair in pairs]
    down = [sum(calls[i].bytes_down for i in pair) for pair in pairs]
    up = [sum(calls[i].bytes_up for i in pair) for pair in pairs]
    share = statistics.median(cost / step for cost, step in zip(costs, whole, strict=True))
    print(f"{len(costs)} steps; a step's two calls take {spread(whole, 1e-3, 2)} ms")
    print(f"  of which the border: {spread(costs, 1e-6)} us, {share:.2%}")
    print(f"  bytes down: {spread(down, 1, 0)}; up: {spread(up, 1, 0)}")
    print(f"by turns, {len(ratios)} pairs:")
    for name, which in (("inline", 0), ("process", 1)):
        print(f"  {name}: {spread([pair[which] for pair in steps], 1e-3, 2)} ms a step")
    print(f"  process / inline: {spread(ratios, 1, 3)}")
    round_trips(round(statistics.median(down) / 2))


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--proposer", default="ngram")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TIMES] = str(Path(folder) / "times.json")
        measure(options)


if __name__ == "__main__":
    main()
