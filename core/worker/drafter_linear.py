"""Matrix products of a drafter's own weights: in int8 where that pays. Knows nothing of models.

`Int8Linear` with the CPU's own kernels is fastest. Without these it makes integers of its input in
operations of its own, and FBGEMM's product (`quantized::linear_dynamic`) is three times as fast at
one row: a drafter alters no text, so its rows need not have the same bits in every batch, nor an
input more than the 8 bits that this kernel itself rounds it to.

The kernel has one scale for all rows of a call, and none so small that numbers of 1e-5 would be
seen. So several rows are brought to the same size first: the states of a text's first token are a
thousand times those of the others in some models. And all that is rounded is multiplied by a power
of two, by which the products are divided.

Where this torch has not that product, `Int8Linear` serves.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch

from foresay.core.worker import cpu_kernels, int8_linear
from foresay.core.worker.int8_linear import TINY, WEIGHT_LEVELS, Int8Linear
from foresay.core.worker.linear import Linear, compute_dtype

if TYPE_CHECKING:
    from foresay.core.proposer import TargetView

# What is rounded is multiplied by it. The kernel's least step is 6e-5, of 255: from here on a row
# has all its digits down to a largest element of 2e-6.
_UP = 2.0**12
# From this width on a drafter's weights do not stay in the cache between two steps, so that it
# gains to read less of them.
_LEAST_WIDTH = 256


def pays_for_drafters(dtype: torch.dtype, device: torch.device, hidden_size: int) -> bool:
    """Whether a drafter beside a target of this dtype and width is faster in int8.

    On a CPU that computes in float32, with the CPU's own kernels (measured with AVX512) or
    instructions for integer products. In bfloat16 there are half as many bytes to read, and nothing
    was measured.
    """
    return (
        device.type == "cpu"
        and compute_dtype(dtype, device) == torch.float32
        and hidden_size >= _LEAST_WIDTH
        and (
            cpu_kernels.has_products()
            or (int8_linear.torch_has_them() and int8_linear.input_levels() == WEIGHT_LEVELS)
        )
    )


def drafter_linear(target: TargetView) -> type[Linear]:
    """Return what makes the products of a drafter's own weights beside `target`."""
    if not target.int8_drafter:
        return Linear
    use_dynamic = not cpu_kernels.has_products() and has_dynamic_products()
    return DynamicInt8Linear if use_dynamic else Int8Linear


@functools.cache
def has_dynamic_products() -> bool:
    """Whether this torch rounds and multiplies as said above on this CPU: it is tried.

    CPUs without an instruction for it add products in pairs of 16 bits, which overflow.
    """
    x = torch.ones(2, 64, dtype=torch.float32)
    x[1] = -1.0
    weight = torch.full((32, 64), 0.5, dtype=torch.float32)
    try:
        y = DynamicInt8Linear(weight, None, torch.float32)(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(y, x[:, :32] * 32, rtol=0.01)


class DynamicInt8Linear(Linear):
    """y = x W^T + b with a weight that is rounded to int8 and packed, and rows rounded to 8 bits.

    It stands in for a `Linear`. Its rows' bits depend on the rows beside them.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        pack: bool = True,  # noqa: ARG002  # always
        row_invariant: bool = False,  # noqa: ARG002  # never
    ) -> None:
        """Round `weight` [out_features, in_features], on a CPU. `dtype` is x's and y's.

        `pack` and `row_invariant` are a `Linear`'s, and change nothing.
        """
        self.dtype = dtype
        self.compute = torch.float32
        self.bias = None if bias is None else bias.detach().to(self.compute)
        self.packed = True
        self.max_rows = None
        self.min_rows = 1
        integers, steps = int8_linear.rounded(weight)
        zeros = torch.zeros(len(steps), dtype=torch.int64)
        with warnings.catch_warnings():  # that torch means to drop it: then this is not available
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(integers, steps / _UP, zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(quantised, None)
        self._run = torch.ops.quantized.linear_dynamic.default

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight's rows `ids` [n], as rounded, and of the bias, in x's dtype."""
        weight, _ = torch.ops.quantized.linear_unpack(self._packed)
        bias = None if self.bias is None else self.bias[ids].to(self.dtype)
        return (weight.dequantize()[ids] * _UP).to(self.dtype), bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + y, [num_rows, out_features]."""
        return self(x).add_(residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        # NaN and infinities, of a request that fails, are not for the kernel: it may raise, or
        # round all other rows by them. What comes of such a row itself is anything.
        if x.shape[0] == 1:
            y: torch.Tensor = self._run((x * _UP).nan_to_num_(0.0), self._packed, False)
        else:
            largest = torch.amax(x.abs(), dim=1, keepdim=True).clamp_min_(TINY)
            scaled = (x / (largest / _UP)).nan_to_num_(0.0)
            y = self._run(scaled, self._packed, False).mul_(largest)
        return y if self.bias is None else y.add_(self.bias)
