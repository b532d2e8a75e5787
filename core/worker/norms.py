"""Root mean square normalisation with few operations. Knows nothing of models."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension (arXiv 1910.07467)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """Take a copy of `weight` [width], in the dtype and on the device that x will have."""
        self.weight = weight.detach().clone()
        self.eps = eps
        # On a CPU torch composes the norm of these operations and some more that do nothing to
        # float32, and behind a matrix product each costs a few microseconds.
        self._composed = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed `x` [..., width]; a row's bits do not depend on the others."""
        if not self._composed:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        scale = x.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (x * scale).mul_(self.weight)
