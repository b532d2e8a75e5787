"""Matrix products on a CPU with weights kept in float16 and computed in float32. Knows no models.

A CPU without bfloat16 instructions computes a bfloat16 model in float32, and a step of a few rows
takes as long as it takes to read the weights: twice the bytes that the checkpoint has. Float16 has
more digits than bfloat16 and fewer exponents, so most such weights are in it exactly; a weight that
is not stays in float32. Nothing is lost: the products are those of float32, summed in another
order. From about 16 rows on (prompts) the kernel is slower than the packed float32 one.
"""

from __future__ import annotations

import functools

import torch

from foresay.core.worker.linear import Linear

_CHUNK = 4096  # rows that are compared together, so that little memory is needed besides


@functools.cache
def is_available() -> bool:
    """Whether this torch has the product for this CPU: it is tried."""
    x, weight = (torch.full((n, 16), 0.5, dtype=torch.float32) for n in (2, 16))
    try:
        y = torch.ops.quantized.linear_dynamic_fp16(x, _packed(weight))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((y == 4.0).all())


def is_exact(weight: torch.Tensor) -> bool:
    """Whether float16 has every element of `weight`, which is float32."""
    return all(bool((part.half().float() == part).all()) for part in weight.split(_CHUNK))


class HalfLinear(Linear):
    """y = x W^T + b with a weight that is kept in float16 if it is in it exactly.

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
        exact = weight.detach().to(torch.float32)
        self._half = _packed(exact) if is_exact(exact) else None
        if self._half is None:
            super().__init__(weight, bias, dtype, pack=pack, row_invariant=row_invariant)
            return
        self.dtype = dtype
        self.compute = torch.float32
        self.bias = None if bias is None else bias.detach().to(self.compute)
        self.packed = True
        self.max_rows = None
        self.min_rows = 1

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a copy of the weight's rows `ids` [n], and of the bias, in x's dtype."""
        if self._half is None:
            return super().rows(ids)
        weight, _ = torch.ops.quantized.linear_unpack_fp16(self._half)
        bias = None if self.bias is None else self.bias[ids].to(self.dtype)
        return weight[ids].to(self.dtype), bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + y, [num_rows, out_features]."""
        return super().add_to(residual, x) if self._half is None else self(x).add_(residual)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._half is None:
            return super()._product(x)
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._half)
        return y if self.bias is None else y.add_(self.bias)


def _packed(weight: torch.Tensor) -> torch.ScriptObject:
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), None)
    return packed
