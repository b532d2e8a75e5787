"""Matrix products on a CPU with weights kept in int8. Knows nothing of models.

A weight has one scale for each output, set when it is packed. foresay's own product (`cpu_kernels`)
takes rows of float32 as they are, so what is lost is the weights' rounding alone.

Without it, a row of the input is written as two rows of integers, a coarse one and what it leaves
over, of 15 bits together (of 13 on CPUs without instructions for them, see `input_levels`): twice
the rows, which cost little more, and again nothing else is lost. Integers have exact sums: a row of
the result has the same bits however many rows are computed, by whichever kernel.

Why not otherwise (torch 2.13, AVX512-VNNI): torch's product of float rows and int8 weights
(`_weight_int8pack_mm`) takes longer than float32, 2.4 times at one row and 19 at eight; and the
coarse rows alone are 1.1 (at one row) to 1.5 (at 32) times as fast as both, but ten times as far
from the model in its logits' divergence.
"""

from __future__ import annotations

import functools

import torch

from foresay.core.worker import cpu_kernels
from foresay.core.worker.cpu_kernels import Panels
from foresay.core.worker.linear import Linear

WEIGHT_LEVELS = 127
# Rows of a weight that are rounded together, so that little memory is needed besides.
_CHUNK = 4096
TINY = 1e-30  # in place of the largest element of a row of zeros


def is_available() -> bool:
    """Whether there are products for this CPU: foresay's own, or torch's, which are tried."""
    return cpu_kernels.has_products() or torch_has_them()


def torch_has_them() -> bool:
    """Whether this torch has integer products for this CPU."""
    return torch.backends.mkldnn.is_available() and _has_products()


@functools.cache
def _has_products() -> bool:
    try:
        input_levels()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


@functools.cache
def input_levels() -> int:
    """Return the largest integer that stands for an element of a row: 127, or 63.

    CPUs without an instruction for it (AVX512-VNNI, AVX-VNNI) add products in pairs of 16 bits,
    which overflow at 127. At 63 no pair does.
    """
    x = torch.full((2, 64), 255, dtype=torch.uint8)
    weight = torch.full((32, 64), WEIGHT_LEVELS, dtype=torch.int8)
    scale = torch.ones(32, dtype=torch.float32)
    y = _product(x, 0, torch.ops.onednn.qlinear_prepack(weight, None), scale)
    return 127 if bool((y == 64 * 255 * WEIGHT_LEVELS).all()) else 63


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `weight` [out, in] in int8, and what a step of each row is, [out] float32."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    steps = torch.empty(len(weight), dtype=torch.float32)
    parts = zip(
        weight.detach().split(_CHUNK), integers.split(_CHUNK), steps.split(_CHUNK), strict=True
    )
    for part, into, step in parts:
        part = part.to(torch.float32)
        torch.amax(part.abs(), dim=1, out=step)
        step.clamp_min_(TINY)
        into.copy_((part * (WEIGHT_LEVELS / step)[:, None]).round_())
        step.div_(WEIGHT_LEVELS)
    return integers, steps


class Int8Linear(Linear):
    """y = x W^T + b with a weight that is rounded to int8, packed, and kept as nothing else.

    It stands in for a `Linear`, and always has row invariance.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        pack: bool = True,  # noqa: ARG002  # always
        row_invariant: bool = True,  # noqa: ARG002  # always
    ) -> None:
        """Round `weight` [out_features, in_features], on a CPU. `dtype` is x's and y's.

        `pack` and `row_invariant` are a `Linear`'s, and change nothing.
        """
        self.dtype = dtype
        self.compute = torch.float32  # of everything but the product
        self.bias = None if bias is None else bias.detach().to(self.compute)
        self.packed = True
        self.max_rows = None
        self.min_rows = 1
        integers, self._rounded_to = rounded(weight)
        if cpu_kernels.has_products():
            self.panels = Panels.in_int8(integers, self._rounded_to)
            return
        self.weight = torch.ops.onednn.qlinear_prepack(integers, None)
        levels = input_levels()
        self._levels = torch.tensor(float(levels), dtype=self.compute)
        self._zero_point = levels + 1  # the kernels take what is not negative
        self._finer = 2.0 * levels  # so many steps of the second row make one of the first
        self._scale = self._rounded_to / (levels * self._finer)

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight's rows `ids` [n], as rounded, and of the bias, in x's dtype."""
        bias = None if self.bias is None else self.bias[ids].to(self.dtype)
        if self.panels is not None:
            return self.panels.rows(ids).to(self.dtype), bias
        weight = self.weight.to_dense().t()[ids] * self._rounded_to[ids, None]
        return weight.to(self.dtype), bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + y, [num_rows, out_features]."""
        if self.panels is not None and self.dtype == self.compute:
            return cpu_kernels.product(x, self.panels, self.bias, residual)
        return self(x).add_(residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.panels is not None:
            return cpu_kernels.product(x, self.panels, self.bias)
        # Each operation is rounded by itself: a fused one may round otherwise in the tail of a
        # vector loop, which lies elsewhere with other rows beside.
        num_rows = x.shape[0]
        largest = torch.amax(x.abs(), dim=1, keepdim=True).clamp_min_(TINY)
        scaled = x * (self._levels / largest)
        both = x.new_empty(2 * num_rows, x.shape[1])
        coarse, fine = both[:num_rows], both[num_rows:]
        torch.round(scaled, out=coarse)
        torch.sub(scaled, coarse, out=fine).mul_(self._finer)
        integers = both.add_(self._zero_point + 0.5).to(torch.uint8)
        y = _product(integers, self._zero_point, self.weight, self._scale)
        y = y[:num_rows].mul_(self._finer).add_(y[num_rows:]).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)


def _product(
    x: torch.Tensor,  # [num_rows, in_features] uint8
    zero_point: int,
    weight: torch.Tensor,  # packed
    scale: torch.Tensor,  # [out_features]
) -> torch.Tensor:
    """Return (x - zero_point) W^T, times `scale`: [num_rows, out_features] in float32."""
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, zero_point, weight, scale, _no_zero_points(), None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return out


@functools.cache
def _no_zero_points() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int32)
