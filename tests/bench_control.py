"""What a decision of the draft-length control costs, in milliseconds of processor time.

usage: python tests/bench_control.py

In a simulated world (`control_world`) requests draft by one member, by a chain of two, and by one
that drafts trees; and by one that is never right, where steps are plain but for trials.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent))
from control_world import Drafter, World, greedy_request

from foresay.core.scheduling.draft_control import DraftControl
from foresay.core.scheduling.request import Request

STEPS = 400


def head(rate: float) -> Drafter:
    return Drafter("head", 5, lambda request, place: rate, lambda n, tokens: tokens * (1 + n / 20))


def timed(control: DraftControl, taken: list[float]) -> Callable[..., None]:
    """Return its `decide`, whose milliseconds go to `taken`."""
    decide = control.decide

    def measure(requests: Sequence[Request], num_waiting: int = 0) -> None:
        began = time.thread_time()
        decide(requests, num_waiting)
        taken.append(1000 * (time.thread_time() - began))

    return measure


def main() -> None:
    lookup = Drafter("lookup", 8, lambda request, place: 0.8, has_draft=0.3)
    tree = Drafter("tree", 32, lambda request, rank: 0.34 / (1 + rank), is_tree=True)
    settings = {
        "one": [head(0.5)],
        "two": [lookup, head(0.5)],
        "tree": [tree],
        "useless": [head(0.0)],
    }
    print(f"{'requests':>8}" + "".join(f"{name:>10}" for name in settings))
    for size in (1, 8, 32):
        line = f"{size:8d}"
        for drafters in settings.values():
            world = World(lambda rows: 37 * (1 + 0.02 * rows), drafters, noise=0.1)
            control, taken = world.control(), list[float]()
            control.decide = timed(control, taken)  # type: ignore[method-assign]
            world.run(control, [greedy_request(str(i)) for i in range(size)], STEPS)
            line += f"{mean(taken):10.3f}"
        print(line)


if __name__ == "__main__":
    main()
