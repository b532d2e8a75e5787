"""Root mean square normalisation with few operations. Knows nothing of models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from foresay.core.worker import cpu_kernels


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension (arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Take a copy of `weight` [width], in the dtype and on the device that x will have."""
        self.weight = weight.detach().clone()
        self.eps = eps
        self._is_own = cpu_kernels.serves(weight.dtype, weight.device)
        # Without those kernels, on a CPU, torch composes the norm of more operations than these,
        # and behind a matrix product each costs a few microseconds. The width is in the weight and
        # in eps. Each is rounded by itself: `hypot`, say, is computed otherwise in the tail of a
        # vector loop, and rows would no longer be equal to the bit.
        self._composed = weight.device.type == "cpu" and weight.dtype == torch.float32
        if self._composed:
            width = weight.shape[-1]
            self._sum_eps = width * eps
            self._scaled_weight = self.weight * math.sqrt(width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed `x` [..., width]; a row's bits do not depend on the others."""
        if self._is_own:
            return cpu_kernels.rms_norm(x, self.weight, self.eps)
        if not self._composed:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # x * x: the kernel of the other products, where `square` takes one of its own.
        scale = (x * x).sum(-1, keepdim=True).add_(self._sum_eps).rsqrt_()
        return (x * scale).mul_(self._scaled_weight)
