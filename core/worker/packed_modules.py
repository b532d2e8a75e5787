"""Packed matrix products inside transformers' models, on a CPU: as fast and row-invariant as ours.

Replaces linear layers by ones with packed weights, see `linear`. Knows no model: a layer is
replaced if it is exactly torch's `Linear` or GPT-2's `Conv1D` and nobody hooked into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from foresay.core.worker.linear import Linear


class PackedLinear(nn.Module):
    """A linear layer for x [..., in_features]."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: type[Linear] = Linear,
    ) -> None:
        """`linear` makes the product."""
        super().__init__()
        self._linear = linear(weight, bias, weight.dtype, pack=True)

    @property
    def is_half(self) -> bool:
        """Whether the weight is kept in float16."""
        return self._linear.is_half

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features]."""
        rows = self._linear(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], rows.shape[-1])

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a copy of the weight's rows `ids` [n], and of the bias."""
        return self._linear.rows(ids)


def is_untouched(module: nn.Module) -> bool:
    """Whether a module's forward pass is its class's, without hooks."""
    hooks: Any = module
    return not (hooks._forward_hooks or hooks._forward_pre_hooks or "forward" in vars(module))


def pack_linears(model: nn.Module, linear: type[Linear] = Linear) -> Callable[[], None]:
    """Replace the linear layers of `model`; returns a function that puts the old ones back.

    `linear` makes their products.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    packed: dict[int, PackedLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, Conv1D) or not is_untouched(child):
                continue
            if id(child) not in packed:
                layer: Any = child
                weight = layer.weight.t() if isinstance(child, Conv1D) else layer.weight
                packed[id(child)] = PackedLinear(weight.detach(), layer.bias, linear)
            setattr(parent, name, packed[id(child)])
            replaced.append((parent, name, child))

    def undo() -> None:
        for parent, name, child in replaced:
            setattr(parent, name, child)

    return undo
