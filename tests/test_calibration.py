"""What is learnt of a drafter's probabilities."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from foresay.core.worker.calibration import Calibration

GRID = [-0.01 * i for i in range(1200)]


def taught(truth: dict[float, float], count: int) -> Calibration:
    """Seen `count` tokens of each promised probability, right as often as `truth` says."""
    rng = random.Random(0)
    calibration = Calibration()
    for _ in range(count):
        for promised, true in truth.items():
            calibration.see(math.log(promised), rng.random() < true)
    return calibration


def test_a_drafter_of_whom_nothing_is_known_is_believed() -> None:
    calibration = Calibration()
    assert [calibration.of(log_prob) for log_prob in GRID] == GRID
    calibration.see(-1.0, True)
    assert calibration.of(-6.0) == -6.0  # nor does it say anything about others


@pytest.mark.parametrize("power", [2.0, 0.4, 1.0], ids=["too sure", "not sure enough", "right"])
def test_what_comes_true_is_learnt(power: float) -> None:
    rng = random.Random(1)
    calibration = Calibration()
    for _ in range(8000):
        log_prob = -5.0 * rng.random() ** 2
        calibration.see(log_prob, rng.random() < math.exp(log_prob) ** power)
    for promised in (0.95, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05):
        found = math.exp(calibration.of(math.log(promised)))
        assert found == pytest.approx(promised**power, rel=0.2, abs=0.03)


def test_less_sure_is_never_likelier_and_nothing_is_likelier_than_certain() -> None:
    # What was promised little came true more often than what was promised much.
    calibration = taught({0.95: 0.5, 0.6: 0.9, 0.3: 0.2, 0.1: 0.6, 0.01: 0.3}, 200)
    found = [calibration.of(log_prob) for log_prob in GRID]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(found))
    assert found[0] <= 0.0
    assert taught({0.8: 1.0}, 200).of(0.0) == 0.0


def test_few_tokens_move_it_little_and_old_ones_are_forgotten() -> None:
    few = taught({0.8: 0.0}, 2)
    assert 0.5 < math.exp(few.of(math.log(0.8))) < 0.8
    calibration = taught({0.8: 0.1}, 4000)
    for i in range(4000):
        calibration.see(math.log(0.8), i % 10 > 0)
    assert math.exp(calibration.of(math.log(0.8))) == pytest.approx(0.9, abs=0.1)


def test_a_step_costs_next_to_nothing() -> None:
    """What a tree of 32 nodes asks and tells: 40 tokens seen, 120 looked up."""
    calibration = Calibration()
    times = []
    for _ in range(30):
        start = time.perf_counter()
        for i in range(40):
            calibration.see(-0.1 * i, i % 3 == 0)
        for i in range(120):
            calibration.of(-0.05 * i)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.0004  # 0.1 ms on one core of a server
