"""RMSNorm against its formula in float64, and its rows against each other."""

from __future__ import annotations

import pytest
import torch

from foresay.core.worker.norms import RMSNorm

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("width", [16, 64, 576, 577, 1536])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_it_is_the_formula(width: int, size: float) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(7, width) * size, torch.randn(width)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_torch(dtype: torch.dtype) -> None:
    for num_rows, width in ((1, 64), (3, 576), (8, 577), (130, 1536)):
        torch.manual_seed(width)
        x, weight = torch.randn(num_rows, width).to(dtype), torch.randn(width).to(dtype)
        expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
        torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [48, 576, 577])
def test_a_row_has_the_same_bits_among_any_others(width: int) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(700, width), RMSNorm(torch.randn(width), 1e-5)
    rows = norm(x)
    for num_rows in [*range(1, 70), 113, 128, 300]:
        assert torch.equal(norm(x[:num_rows]), rows[:num_rows]), num_rows
        assert torch.equal(norm(x[-num_rows:]), rows[-num_rows:]), num_rows


def test_heads_are_normed_one_by_one_where_they_lie() -> None:
    x, norm = torch.randn(5, 12, 64), RMSNorm(torch.randn(64), 1e-6)
    assert torch.equal(norm(x[:, 3:9])[:, 2], norm(x[:, 5].contiguous()))


def test_zeros_stay_zeros() -> None:
    assert torch.equal(RMSNorm(torch.ones(32), 1e-6)(torch.zeros(2, 32)), torch.zeros(2, 32))
