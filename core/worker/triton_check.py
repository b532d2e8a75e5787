"""Whether this machine's Triton kernels attend as the torch path does: tried, once for each shape.

A kernel that was right elsewhere may not compile here, for want of shared memory or a driver, or
may be miscompiled. So layers of each kind (dtype, heads, dimensions, options) are tried on a small
random step, texts and a tree, before the kernels serve them: in the first pass of a model, which is
the one that measures its memory. Where they fail the torch path serves, and a warning says why.

Knows neither models nor requests. Needs triton.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from foresay.core.worker.attention import (
    AttentionMetadata,
    AttentionRules,
    TreeLayout,
    paged_attention,
)
from foresay.core.worker.kv_cache import LayerCache, LayerKV
from foresay.core.worker.triton_attention import TritonMetadata, attend

logger = logging.getLogger("foresay")

_SPREAD = 2.5  # of scores: so large that a single key seen wrongly shows
_SHARED_ITEMS = 100  # no fewer than tiles, however narrow: there are 82 rows
# How far a result may be off, of the largest one: both paths round their weights.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the kernels are compiled for."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    layer: LayerKV
    has_window: bool
    has_softcap: bool
    has_sinks: bool


def attend_if_right(
    query: torch.Tensor,
    cache: LayerCache,
    metadata: TritonMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Do as `triton_attention.attend`; None if the kernels can't be relied on for such layers."""
    kind = LayerKind(
        query.device,
        cache.slots.dtype,
        query.shape[1],
        LayerKV(cache.num_kv_heads, query.shape[2], cache.value_dim),
        sliding_window is not None,
        softcap is not None,
        sinks is not None,
    )
    if not are_right(kind):
        return None
    return attend(
        query, cache, metadata, scale=scale, sliding_window=sliding_window, softcap=softcap,
        sinks=sinks,
    )  # fmt: skip


@cache
def are_right(kind: LayerKind) -> bool:
    """Whether the kernels agree with the torch path on layers of a kind; a warning if not."""
    try:
        difference = _difference(kind)
        reason = f"they differ from the torch path by {difference:.2g} of its largest result"
        if difference <= _TOLERANCES[kind.dtype]:  # NaN is not
            return True
    except Exception as error:  # noqa: BLE001  # whatever a compiler or a driver may raise
        reason = f"{type(error).__name__}: {error}"
    logger.warning(
        "attention runs in torch, not in the Triton kernels, for layers of %d heads, %s, %s on %s: "
        "%s", kind.num_heads, kind.layer, kind.dtype, kind.device, reason,
    )  # fmt: skip
    return False


@torch.inference_mode()
def _difference(kind: LayerKind) -> float:
    """Return the largest difference over the largest result of a step that takes every way."""
    device = kind.device
    rng = np.random.default_rng(0)
    tree = np.array([rng.integers(-1, node) for node in range(40)])
    depths: list[int] = []
    for parent in tree.tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    nodes = np.arange(-1, 40)
    trees = [None, None, TreeLayout(70, tree, nodes)]
    positions = [np.arange(30, 70), np.array([1199]), 69 + np.array([0, *depths])]
    lens = [70, 1200, 110]
    slots = np.split(rng.permutation(sum(lens)) + 1, np.cumsum(lens)[:-1])  # slot 0 stays zero
    written = np.concatenate([slots[0][30:], slots[1][-1:], slots[2][69:]])

    def random(*shape: int) -> torch.Tensor:
        numbers = torch.from_numpy(rng.standard_normal(shape))
        return numbers.to(device, kind.dtype)

    cache = LayerCache(kind.layer, random(sum(lens) + 1, kind.layer.width))
    cache.slots[0] = 0
    query = random(len(written), kind.num_heads, kind.layer.head_dim)
    at = torch.from_numpy(written).to(device)
    key, value = cache.key[at], cache.value[at]
    scale = _SPREAD * kind.layer.head_dim**-0.5
    window = 50 if kind.has_window else None
    softcap = 4.0 if kind.has_softcap else None
    sinks = torch.ones(kind.num_heads, device=device) if kind.has_sinks else None
    in_torch = replace(
        AttentionMetadata.build(
            positions, slots, written, 0, AttentionRules(), device, trees=trees
        ),
        triton=None,
    )
    in_triton = TritonMetadata.build(positions, slots, trees, device)
    expected = paged_attention(
        query, key, value, cache, in_torch, scale=scale, sliding_window=window, softcap=softcap,
        sinks=sinks,
    ).float()  # fmt: skip
    differences = []
    # A program has all splits of its tile, or one; or several, and all are merged afterwards.
    shared = replace(in_triton, max_items=_SHARED_ITEMS, plans={})
    for metadata, num_programs in ((in_triton, 1), (in_triton, 1 << 20), (shared, 1 << 20)):
        result = attend(
            query, cache, metadata, scale=scale, sliding_window=window, softcap=softcap,
            sinks=sinks, num_programs=num_programs,
        )  # fmt: skip
        differences.append((result.float() - expected).abs().max())
    return float(torch.stack(differences).max() / expected.abs().max())
