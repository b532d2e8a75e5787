"""A decoder layer in one call of the CPU's own kernels, where they serve all of it.

For weights in float16 or int8, and rows in float32. The same kernels in the same order as
`decoder_layer` takes them one by one, so the same bits; without Python and torch between them,
which at a few rows would take as long again as attention does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from foresay.core.worker import cpu_kernels
from foresay.core.worker.cpu_kernels import CPURows
from foresay.core.worker.decoder_layer import DecoderBlock
from foresay.core.worker.kv_cache import LayerCache

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class CPULayers:
    """The layers of a decoder, as the kernels take them."""

    def __init__(self, blocks: Sequence[DecoderBlock], fields: Sequence[np.ndarray]) -> None:
        self._blocks = blocks  # they hold the tensors whose addresses the fields are
        self._fields = fields
        self._eps = blocks[0].mlp_norm.eps
        hidden, num_heads, num_kv_heads, head_dim, wide = fields[0][:5].tolist()
        qkv = (num_heads + 2 * num_kv_heads) * head_dim
        self._scratch = 2 * hidden + qkv + num_heads * head_dim + 3 * wide  # numbers a row

    @staticmethod
    def of(blocks: Sequence[DecoderBlock], dtype: torch.dtype) -> CPULayers | None:
        """Return them, or None where the kernels do not serve all."""
        if dtype != torch.float32 or not cpu_kernels.has_products():
            return None
        fields = [fields for block in blocks if (fields := _fields(block)) is not None]
        epsilons = {block.mlp_norm.eps for block in blocks}
        if not fields or len(fields) < len(blocks) or len(epsilons) > 1:
            return None
        return CPULayers(blocks, fields)

    def over(
        self,
        caches: Sequence[LayerCache],
        slot_mapping: torch.Tensor,  # [num_rows] int64
        rows: CPURows,
    ) -> list[Layer]:
        """Return the layers of one pass, as functions of `residual`, `cos` and `sin`.

        [num_rows, hidden] and twice [num_rows, 1, head_dim], all contiguous; they return the
        residual stream after the layer.
        """
        scratch = torch.empty(len(rows.rows) * self._scratch, dtype=torch.float32, device="cpu")
        return [
            functools.partial(
                cpu_kernels.run_layer,
                fields.ctypes.data,
                layer=layer,
                slot_mapping=slot_mapping,
                rows=rows,
                scratch=scratch,
                eps=self._eps,
            )
            for fields, layer in zip(self._fields, caches, strict=True)
        ]


def _fields(block: DecoderBlock) -> np.ndarray | None:
    """Return a layer's fields in the order of `cpu.c`, or None."""
    attention, mlp = block.attention, block.mlp
    heads = attention.heads
    dims = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
    products = []
    for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down):
        if linear.panels is None:
            return None
        products.append(linear.panels.fields(linear.bias))
        wide = linear.panels.in_features  # of the last
    if block.attention_norm is None or not cpu_kernels.attends(*dims, heads.head_dim):
        return None
    norms = [block.attention_norm, block.mlp_norm, *(attention.query_key_norm or (None, None))]
    if len({norm.eps for norm in norms if norm is not None}) > 1:
        return None
    return np.array(
        [
            block.mlp_norm.weight.shape[0],
            *dims,
            wide,
            block.window or 0,
            *(0 if norm is None else norm.weight.data_ptr() for norm in norms),
            *(number for product in products for number in product),
        ],
        dtype=np.int64,
    )
