"""Of each range the last row alone goes through a drafter's whole layer: as if all rows had gone.

In torch, and with attention's kernels in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import HAS_TRITON, interpreted
from last_row_passes import INNER, PASSES, SIZE, run, run_with_kernels

from foresay.core.worker import decoder_layer, int8_linear
from foresay.core.worker.int8_linear import Int8Linear
from foresay.core.worker.linear import Linear

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, normed heads, a window": {"biased": True, "normed": True, "window": 9},
    "bfloat16": {"dtype": torch.bfloat16, "tolerance": 0.03},
    "int8": {"linear": Int8Linear},
}


@pytest.mark.parametrize(
    "few", [1, 32, 1000], ids=["always apart", "long ones apart", "never apart"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_last_rows_are_those_of_a_pass_of_all_rows(kind: str, few: int) -> None:
    settings = dict(KINDS[kind])
    if settings.get("linear") is Int8Linear and not int8_linear.is_available():
        pytest.skip("this torch has no integer products")
    tolerance = settings.pop("tolerance", 1e-5)
    for (found, expected), parts in zip(run(few, **settings), PASSES, strict=True):
        assert found.shape == (len(parts), SIZE)
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < tolerance


@pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")
def test_the_kernels_give_what_torch_gives() -> None:
    passes = [[(0, range(9)), (1, range(17))], [(0, range(9, 10)), (1, range(17, 20))]]
    in_torch, in_triton = run(1, passes), interpreted(run_with_kernels, 1, passes)
    for (expected, _), (found, of_all_rows) in zip(in_torch, in_triton, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, of_all_rows, rtol=1e-4, atol=1e-4)


def test_of_many_other_rows_only_keys_and_values_are_computed() -> None:
    taken: list[tuple[int, int]] = []

    class Counting(Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            taken.append((self.width, len(x)))
            return super().__call__(x)

        def __init__(self, weight: torch.Tensor, *arguments: Any, **settings: Any) -> None:
            self.width = len(weight)
            super().__init__(weight, *arguments, **settings)

    run(decoder_layer._FEW_OTHERS, linear=Counting)
    all_three, kv, gate_up = 128, 64, 2 * INNER  # what products are as wide as
    passes = []
    for parts in PASSES:
        num_rows, num_last = sum(len(span) for _, span in parts), len(parts)
        passes += [(all_three, num_rows), (gate_up, num_rows)]  # the pass of all rows
        if num_rows - num_last >= decoder_layer._FEW_OTHERS:
            passes += [(kv, num_rows), (all_three, num_last)]
        else:
            passes += [(all_three, num_rows)]
        passes += [(gate_up, num_last)]
    assert [each for each in taken if each[0] != SIZE] == passes
