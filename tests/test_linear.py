"""Products with packed weights: their values, and a row's bits in every batch."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F

from foresay.core.worker import linear
from foresay.core.worker.linear import Linear, compute_dtype, computes_natively

CPU = torch.device("cpu")
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 128, 129, 200)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(
    out_features: int, in_features: int, dtype: torch.dtype, *, bias: bool, pack: bool = True
) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    weight = numbers(out_features, in_features, dtype=dtype, seed=1)
    offset = numbers(out_features, dtype=dtype, seed=2) if bias else None
    return Linear(weight, offset, dtype, pack=pack), weight, offset


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "not packed"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 48), (7, 5), (48, 200)])
def test_products_are_those_of_float64_but_for_rounding(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool, pack: bool
) -> None:
    ours, weight, offset = make(out_features, in_features, dtype, bias=bias, pack=pack)
    for num_rows in (1, 5, 33, 130):
        x = numbers(num_rows, in_features, dtype=dtype)
        expected = F.linear(
            x.double(), weight.double(), None if offset is None else offset.double()
        )
        y = ours(x)
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        # Rounding of the result, and of sums of numbers of the size of their norms' product.
        size = expected.abs() + x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
        assert ((y.double() - expected).abs() <= ROUNDING[dtype] * size).all()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(160, 48), (7, 5), (576, 1536)])
def test_a_row_has_the_same_bits_in_every_batch(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    bias: bool,
    num_threads: int,
) -> None:
    """Rests on the CPU's packed kernels."""
    ours, _, _ = make(out_features, in_features, dtype, bias=bias)
    assert ours.packed
    x = numbers(max(NUM_ROWS), in_features, dtype=dtype)
    before = torch.get_num_threads()
    alone = torch.cat([ours(row) for row in x.split(1)])
    torch.set_num_threads(num_threads)
    try:
        for num_rows in NUM_ROWS:
            assert torch.equal(ours(x[:num_rows]), alone[:num_rows]), num_rows
            assert torch.equal(ours(x[-num_rows:]), alone[-num_rows:]), num_rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "not packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_rows_give_no_rows(dtype: torch.dtype, pack: bool) -> None:
    ours, _, _ = make(9, 5, dtype, bias=True, pack=pack)
    y = ours(numbers(0, 5, dtype=dtype))
    assert (y.shape, y.dtype) == ((0, 9), dtype)


def test_bfloat16_is_computed_in_float32_where_the_cpu_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "computes_natively", lambda dtype: dtype == torch.float32)
    ours, weight, _ = make(96, 300, torch.bfloat16, bias=False)
    x = numbers(4, 300, dtype=torch.bfloat16)
    expected = F.linear(x.float(), weight.float())
    # Rounded once: nowhere further than half a bfloat16 step, but for the order of the sums.
    step = 2.0 ** (expected.abs().log2().floor() - 7)
    assert ((ours(x).float() - expected).abs() <= 0.501 * step + 1e-4).all()
    assert ours.compute == torch.float32
    assert ours.min_rows == 2


def test_bfloat16_rows_are_cut_into_products_of_128_where_the_cpu_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, weight, _ = make(6, 4, torch.float32, bias=False, pack=False)
    ours.max_rows = 128
    sizes: list[int] = []
    product = ours._product

    def watched(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return product(x)

    monkeypatch.setattr(ours, "_product", watched)
    x = numbers(300, 4, dtype=torch.float32)
    assert torch.allclose(ours(x), x @ weight.T, atol=1e-6)
    assert sizes == [128, 128, 44]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_row_invariance_all_rows_are_one_product_as_they_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = numbers(6, 4, dtype=dtype, seed=1)
    ours = Linear(weight, None, dtype, pack=True, row_invariant=False)
    sizes: list[int] = []
    product = ours._product

    def watched(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return product(x)

    monkeypatch.setattr(ours, "_product", watched)
    for num_rows in (1, 300):
        x = numbers(num_rows, 4, dtype=dtype)
        expected = x.double() @ weight.double().T
        assert torch.allclose(ours(x).double(), expected, atol=20 * ROUNDING[dtype])
        residual = numbers(num_rows, 6, dtype=dtype, seed=3)
        total = ours.add_to(residual, x).double()
        assert torch.allclose(total, residual.double() + expected, atol=20 * ROUNDING[dtype])
    assert set(sizes) <= {1, 300}
    assert len(sizes) >= 2


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        pytest.param(torch.float32, "cpu", torch.float32, id="float32"),
        pytest.param(torch.float16, "cpu", torch.float32, id="float16 on a CPU"),
        pytest.param(torch.float16, "cuda", torch.float16, id="float16 on a GPU"),
        pytest.param(torch.bfloat16, "cuda", torch.bfloat16, id="bfloat16 on a GPU"),
    ],
)
def test_the_dtype_of_the_products(dtype: torch.dtype, device: str, expected: torch.dtype) -> None:
    assert compute_dtype(dtype, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "amx", "native"),
    [
        ("x86_64", False, False, False),  # the kernels take it, and widen every weight
        ("x86_64", True, False, True),
        ("AMD64", False, True, True),
        ("aarch64", False, False, True),
    ],
)
def test_bfloat16_is_native_where_the_cpu_has_instructions_for_it(
    machine: str, avx512_bf16: bool, amx: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    onednn = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert computes_natively(torch.bfloat16) is (onednn and native)
    expected = torch.bfloat16 if onednn and native else torch.float32
    assert compute_dtype(torch.bfloat16, CPU) == expected


def test_a_torch_without_onednn_computes_in_float32_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not computes_natively(torch.bfloat16)
    ours, weight, _ = make(6, 4, torch.float32, bias=False)
    assert not ours.packed
    x = numbers(3, 4, dtype=torch.float32)
    assert torch.equal(ours(x), F.linear(x, weight))
