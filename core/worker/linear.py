"""Matrix products with weights packed once: the decoder's GEMMs. Knows nothing of models.

On a CPU the weight is packed for oneDNN, whose packed kernels are both faster and, within the
rules below, row-invariant: a row of the result has the same bits however many rows are computed.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
import torch.nn.functional as F

from foresay.core.worker.cpu_kernels import Panels

# Measured, torch 2.13 (oneDNN): rows keep their bits with at most 128 of them in one bfloat16 GEMM
# (AMX), and with at least 2 in any (a single row takes another kernel: in float32; with AVX512-bf16
# in bfloat16 too, where sums are long).
MAX_ROWS_BFLOAT16 = 128
MIN_ROWS = 2
# The row count the packing is made for. 1 in bfloat16; in float32 packing for one row takes a
# kernel whose rows differ from the batched one's, and 32 was the fastest at 1 to 16 rows on AVX2.
_PACK_ROWS = {torch.bfloat16: 1, torch.float32: 32}


def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for `dtype` that the packed kernels use.

    Otherwise float32 computes in its place. On an x86 CPU with AVX512 alone the kernels take
    bfloat16 as well, but make float32 of every weight as they go, which takes twice the time.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    if dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype the products are computed in: `dtype`, or float32 on a CPU without it.

    Computing bfloat16 values in float32 and rounding each result to bfloat16 is what a native
    bfloat16 GEMM with float32 accumulation does, up to the order of the sums.
    """
    if device.type != "cpu" or computes_natively(dtype):
        return dtype
    return torch.float32


@functools.cache
def _packed_ops() -> Any:
    """Return the overloads of oneDNN's product; to choose among them anew takes as long again."""
    return torch.ops.mkldnn._linear_pointwise


class Linear:
    """y = x W^T + b, for x [num_rows, in_features]."""

    is_half = False  # whether the weight is kept in float16: see `half_linear`
    panels: Panels | None = None  # the weight, where the CPU's own kernels make the product

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        pack: bool,
        row_invariant: bool = True,
    ) -> None:
        """Take `weight` [out_features, in_features]; `pack` on CPU only. `dtype` is x's and y's.

        Without `row_invariant` rows are never padded or split to keep their bits: a fifth faster
        at one row, and a drafter, which alters no text, can do without.
        """
        self.dtype = dtype
        device = weight.device
        self.compute = compute_dtype(dtype, device)
        weight = weight.detach().to(self.compute)
        self.bias = None if bias is None else bias.detach().to(self.compute)
        self.packed = pack and device.type == "cpu" and computes_natively(self.compute)
        self.max_rows: int | None = None
        self.min_rows = 1
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(
                weight.contiguous(), _PACK_ROWS[self.compute]
            )
            if row_invariant:
                self.min_rows = MIN_ROWS
                if self.compute == torch.bfloat16:
                    self.max_rows = MAX_ROWS_BFLOAT16
        self.weight = weight

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a copy of the weight's rows `ids` [n], and of the bias, in x's dtype."""
        weight = self.weight.to_dense() if self.weight.is_mkldnn else self.weight
        bias = None if self.bias is None else self.bias[ids].to(self.dtype)
        return weight[ids].to(self.dtype), bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + y, [num_rows, out_features]: one operation where the kernel can."""
        if not self.packed or self.compute != torch.float32 or self.dtype != torch.float32:
            return residual + self(x)
        if x.shape[0] < self.min_rows:
            return residual + self(x)
        out: torch.Tensor = _packed_ops().binary(x, residual, self.weight, self.bias, "add")
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, out_features] in x's dtype."""
        if self.compute != self.dtype:
            x = x.to(self.compute)
        if self.max_rows is not None and x.shape[0] > self.max_rows:
            y = torch.cat([self._product(part) for part in x.split(self.max_rows)])
        elif x.shape[0] < self.min_rows:
            padding = x.new_zeros(self.min_rows - x.shape[0], x.shape[1])
            y = self._product(torch.cat([x, padding]))[: x.shape[0]]
        else:
            y = self._product(x)
        return y.to(self.dtype) if self.compute != self.dtype else y

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            out: torch.Tensor = _packed_ops().default(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)
