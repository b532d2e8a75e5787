"""Matrix products on a CPU with weights kept in float16 and computed in float32. Knows no models.

A CPU without bfloat16 instructions computes a bfloat16 model in float32, and a step of a few rows
takes as long as it takes to read the weights: twice the bytes that the checkpoint has. Float16 has
more digits than bfloat16 and fewer exponents. So a matrix is multiplied by a power of two that
takes its largest weight near float16's, and the products are divided by it, neither of which costs
a digit. What then still needs digits below float16's smallest number is less than 2^-30 of the
largest weight, and rounded by at most 2^-39 of it, where a float32 sum rounds by 2^-24 of itself.
A matrix with more digits than bfloat16 and float16 have stays in float32.

So the model is the same: the products are those of float32, summed in another order. They are
foresay's own (`cpu_kernels`), which read the weights as fast as memory gives them, so that up to 8
rows take little longer than one; else FBGEMM's, as torch has them.
"""

from __future__ import annotations

import functools
import math

import torch

from foresay.core.worker import cpu_kernels
from foresay.core.worker.cpu_kernels import Panels
from foresay.core.worker.linear import Linear

_CHUNK = 256  # rows that are looked at together
_TOP = 15  # a scaled weight is below 2^15, and float16 ends at 2^16
_MOST_SCALE = 100  # as a power of two: a float32, too, and what is scaled by it
_NOT_BFLOAT16 = 0xFFFF  # the digits of a float32 that bfloat16 has not


def is_available() -> bool:
    """Whether there is a product for this CPU: foresay's own, or torch's, which is tried."""
    return cpu_kernels.has_products() or _torch_has_it()


@functools.cache
def _torch_has_it() -> bool:
    x, weight = (torch.full((n, 16), 0.5, dtype=torch.float32) for n in (2, 16))
    try:
        y = torch.ops.quantized.linear_dynamic_fp16(x, _packed(weight))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((y == 4.0).all())


def scale_for(weight: torch.Tensor) -> float | None:
    """Return the power of two by which float16 has `weight` [out, in], float32, as said above.

    1.0 wherever that does; None if the weight is not one of bfloat16 or float16.
    """
    largest = max(abs(float(end)) for end in torch.aminmax(weight))
    if not math.isfinite(largest):
        return None
    parts = weight.contiguous().split(_CHUNK)
    if all(bool((part.half().float() == part).all()) for part in parts):
        return 1.0
    if any(bool((part.view(torch.int32) & _NOT_BFLOAT16).any()) for part in parts):
        return None
    scale = _TOP - math.frexp(largest)[1]
    return 2.0**scale if scale <= _MOST_SCALE else None


class HalfLinear(Linear):
    """y = x W^T + b with a weight that is kept in float16 if `scale_for` has a scale for it.

    It stands in for a `Linear`, and always has row invariance.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        pack: bool = True,
        row_invariant: bool = True,
    ) -> None:
        """Take `weight` [out_features, in_features], on a CPU. `dtype` is x's and y's.

        `pack` and `row_invariant` count for a weight that stays in float32.
        """
        full = weight.detach().to(torch.float32)
        scale = scale_for(full)
        self.is_half = scale is not None
        if scale is None:
            super().__init__(weight, bias, dtype, pack=pack, row_invariant=row_invariant)
            return
        if cpu_kernels.has_products():
            self.panels = Panels.in_float16(full, -int(math.log2(scale)))
        else:
            self._half = _packed(full if scale == 1.0 else full * scale)
            self._run = torch.ops.quantized.linear_dynamic_fp16.default
            self._unscale = 1.0 / scale
        self.dtype = dtype
        self.compute = torch.float32
        self.bias = None if bias is None else bias.detach().to(self.compute)
        self.packed = True
        self.max_rows = None
        self.min_rows = 1

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a copy of the weight's rows `ids` [n], and of the bias, in x's dtype."""
        if not self.is_half:
            return super().rows(ids)
        bias = None if self.bias is None else self.bias[ids].to(self.dtype)
        if self.panels is not None:
            return self.panels.rows(ids).to(self.dtype), bias
        weight, _ = torch.ops.quantized.linear_unpack_fp16(self._half)
        return (weight[ids] * self._unscale).to(self.dtype), bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + y, [num_rows, out_features]."""
        if not self.is_half:
            return super().add_to(residual, x)
        if self.dtype != self.compute:
            return self(x).add_(residual)
        if self.panels is not None:
            return cpu_kernels.product(x, self.panels, self.bias, residual)
        if self.bias is not None:
            return self(x).add_(residual)
        y = self._run(x, self._half)
        return torch.add(residual, y, alpha=self._unscale, out=y)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_half:
            return super()._product(x)
        if self.panels is not None:
            return cpu_kernels.product(x, self.panels, self.bias)
        y: torch.Tensor = self._run(x, self._half)
        if self._unscale != 1.0:
            y.mul_(self._unscale)
        return y if self.bias is None else y.add_(self.bias)


def _packed(weight: torch.Tensor) -> torch.ScriptObject:
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)
    return packed
