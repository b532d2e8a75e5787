"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864). Knows positions, no models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foresay.core.worker import cpu_kernels

# The rotary table grows by this many positions: a multiple of any vector width, so that the same
# position is always computed in the same lane of the same kernel.
_ROTARY_CHUNK = 4096


class RotaryTable:
    """cos and signed sin of every position, from the model's own rotary module.

    Signed, so that x * cos + roll(x, D / 2) * sin rotates: the first half carries -sin.
    """

    def __init__(
        self, rotary: Callable[..., Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rotary = rotary
        self._like = torch.zeros(1, dtype=dtype, device=device)
        self._cos, self._sin = self._compute(0, _ROTARY_CHUNK)

    def _compute(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, end, device=self._like.device)[None]
        cos, sin = self._rotary(self._like, positions)  # [1, end - start, D]
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        return cos[0], signed[0]

    def reserve(self, num_positions: int) -> None:
        """Make sure positions below `num_positions` are there."""
        start = self._cos.shape[0]
        if num_positions <= start:
            return
        parts = [(self._cos, self._sin)]
        for at in range(start, num_positions, _ROTARY_CHUNK):
            parts.append(self._compute(at, at + _ROTARY_CHUNK))
        self._cos = torch.cat([cos for cos, _ in parts])
        self._sin = torch.cat([sin for _, sin in parts])

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin [num_tokens, 1, D] of `positions` [num_tokens]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [num_tokens, num_heads, D] by its positions' cos and signed sin.

    Products and sum are separate operations: a fused multiply-add may round one element
    differently in a vector loop and in its tail, and rows would no longer be equal to the bit.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(sin))


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Do as `rotate` does, in the place of `x`, and return it.

    To the bit in torch; the CPU's own kernel may round otherwise, for all rows alike.
    """
    if cpu_kernels.serves(x.dtype, x.device) and x.stride()[1:] == (x.shape[2], 1):
        return cpu_kernels.rotate_(x, cos, sin)
    turned = x.roll(x.shape[-1] // 2, dims=-1).mul_(sin)
    return x.mul_(cos).add_(turned)
