"""The face of the CPU path's own kernels: the parts of a decoder layer, and a layer in one call.

A step of few rows is bound by how fast weights are read, and by how often something is started, not
by arithmetic: torch takes some sixty operations a layer besides the products, each with a few
microseconds around it. These are in C (`kernels/cpu.c`), built where there is a compiler when
foresay is installed; without them, or with `FORESAY_CPU_KERNELS=0` in the environment, torch's
operations serve. All of them are for rows in float32; products take weights in float16 or int8.

A row's result never depends on the other rows, nor on the number of threads: no padding, no masks,
no copies are needed for it. Attention reads the keys where they lie in the pool, the nodes above a
tree's node as if they were the text behind the prompt. Knows rows, slots and trees; no models.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from foresay.core.worker.kv_cache import LayerCache

if TYPE_CHECKING:
    from foresay.core.worker.attention_layout import TreeLayout

try:
    from foresay.core.worker.kernels import _cpu as _built
except ImportError:  # no compiler, or none that could build them
    _built = None  # type: ignore[assignment]
_VERSION = 1  # of what the two say to each other; an older build may lie beside a newer source
_is_wanted = os.environ.get("FORESAY_CPU_KERNELS", "1") != "0"
_kernels = _built if _is_wanted and getattr(_built, "VERSION", None) == _VERSION else None

# Rows of a request that are attended to together: keys are fetched once for them. At most 8, and
# the fewer, the more evenly few rows are shared among threads.
_ROWS_PER_TILE = 4
_MAX_DIM = 256
_MAX_FOLD = 16
_DIM_STEP = 4
_PANEL = 32
_NO_OWN = np.iinfo(np.int64).max


def is_available() -> bool:
    """Whether they are built, and not switched off."""
    return _kernels is not None


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether they take such rows."""
    return _kernels is not None and dtype == torch.float32 and device.type == "cpu"


@cache
def attends(num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int) -> bool:
    """Whether `attend` serves layers of such heads; what they keep must be as it `serves`."""
    dims = (head_dim, value_dim)
    return (
        num_heads % num_kv_heads == 0
        and num_heads <= num_kv_heads * _MAX_FOLD
        and all(dim % _DIM_STEP == 0 and dim <= _MAX_DIM for dim in dims)
    )


def _expect(*tensors: torch.Tensor) -> None:
    """Raise `ValueError` for what is no float32: it would be read as if it were."""
    for x in tensors:
        if x.dtype != torch.float32:
            raise ValueError(f"the kernels take float32, not {x.dtype}")


def instructions() -> str:
    """Return which instructions they use: "avx512", "avx2" or "baseline"."""
    assert _kernels is not None
    name: str = _kernels.used()
    return name


def has_products() -> bool:
    """Whether there are matrix products for this CPU's instructions."""
    return _kernels is not None and _kernels.has_products()


def likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest columns of `logits` [n, num_columns] and their log probs [n, width].

    As `foresay.core.worker.likeliest` says. A few of many: it looks for each place one by one.
    """
    assert _kernels is not None
    _expect(logits)
    if width < 1:
        raise ValueError(f"a width of {width}: expected 1 or more")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, num_columns = logits.shape
    columns = torch.empty(num_rows, width, dtype=torch.int64, device="cpu")
    log_probs = torch.empty(num_rows, width, dtype=torch.float32, device="cpu")
    _kernels.likeliest(
        logits.data_ptr(), columns.data_ptr(), log_probs.data_ptr(), num_rows, num_columns, width,
        logits.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return columns, log_probs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight of `x` [..., width], over the last dimension."""
    assert _kernels is not None
    width = x.shape[-1]
    _expect(x, weight)
    if weight.shape != (width,):
        raise ValueError(f"a weight of {list(weight.shape)} for rows of {width}")
    x = x.contiguous()
    y = torch.empty_like(x)
    num_rows = x.numel() // width
    _kernels.rms_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), num_rows, width, width,
        torch.get_num_threads(), eps,
    )  # fmt: skip
    return y


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gate * sigmoid(gate) * up of `gate_up` [num_rows, 2 * width]: [num_rows, width]."""
    assert _kernels is not None
    _expect(gate_up)
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(num_rows, width)
    _kernels.silu_mul(
        gate_up.data_ptr(), y.data_ptr(), num_rows, width, 2 * width, torch.get_num_threads()
    )
    return y


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [num_rows, num_heads, D] in its place and return it; see `rotary.rotate`.

    A row's heads lie side by side. `cos`, `sin`: [num_rows, 1, D], contiguous.
    """
    assert _kernels is not None
    num_rows, num_heads, dim = x.shape
    _expect(x, cos, sin)
    if not cos.shape == sin.shape == (num_rows, 1, dim):
        raise ValueError(f"angles of {list(cos.shape)} for {num_rows} rows of heads of {dim}")
    _kernels.rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_rows, num_heads, dim, x.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    return x


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix [out_features, in_features] in float16 or int8 as `product` reads it.

    A panel holds 32 of the outputs, input by input; what is left of the last one is zero. The
    matrix is what they hold times 2^exponent, and in int8 times the scale of each output.
    """

    values: torch.Tensor  # [num_panels, in_features, 32] float16 or int8
    out_features: int
    exponent: int = 0
    scales: torch.Tensor | None = None  # [out_features] float32, in int8

    @staticmethod
    def in_float16(weight: torch.Tensor, exponent: int) -> Panels:
        """Lay out `weight` [out_features, in_features] float32, divided by 2^exponent.

        It should be in float16's numbers then.
        """
        return Panels(_panels((weight * 2.0**-exponent).half()), len(weight), exponent)

    @staticmethod
    def in_int8(integers: torch.Tensor, scales: torch.Tensor) -> Panels:
        """Lay out `integers` [out_features, in_features] int8; `scales` [out_features] float32."""
        return Panels(_panels(integers), len(integers), scales=scales)

    @property
    def in_features(self) -> int:
        """How many inputs there are."""
        return int(self.values.shape[1])

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` [n] of the matrix, [n, in_features] float32."""
        rows = self.values[ids // _PANEL, :, ids % _PANEL].float() * 2.0**self.exponent
        return rows if self.scales is None else rows * self.scales[ids, None]

    def fields(self, bias: torch.Tensor | None) -> tuple[int, int, int, int]:
        """Return the addresses of the panels, `bias` and the scales, and the exponent."""
        scales = 0 if self.scales is None else self.scales.data_ptr()
        return self.values.data_ptr(), _address(bias), scales, self.exponent


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out_features, in_features] as [num_panels, in_features, 32]."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // _PANEL)
    padded = weight.new_zeros(num_panels * _PANEL, in_features)
    padded[:out_features] = weight
    return padded.view(num_panels, _PANEL, in_features).transpose(1, 2).contiguous()


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def product(
    x: torch.Tensor,  # [num_rows, in_features]
    weight: Panels,
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None = None,  # [num_rows, out_features]
) -> torch.Tensor:
    """Return x W^T + bias + residual, [num_rows, out_features]; all in float32."""
    assert _kernels is not None
    _expect(x)
    x = x.contiguous()
    num_rows, in_features = x.shape
    if in_features != weight.in_features:
        raise ValueError(f"{in_features} inputs for a matrix of {weight.in_features}")
    y = x.new_empty(num_rows, weight.out_features)
    if residual is not None:
        _expect(residual)
        if residual.shape != y.shape:
            raise ValueError(f"a residual of {list(residual.shape)} for {list(y.shape)}")
        residual = residual.contiguous()
    panels, bias_at, scales, exponent = weight.fields(bias)
    _kernels.product(
        x.data_ptr(), panels, y.data_ptr(), bias_at, _address(residual), scales, exponent,
        num_rows, in_features, weight.out_features, in_features, torch.get_num_threads(),
    )  # fmt: skip
    return y


@dataclass(frozen=True, slots=True)
class CPURows:
    """A step's rows as `attend` sees them, request after request."""

    # [n] int64: by request those of its keys, then those of nodes' paths. Of a single text the
    # caller's own array: the rows are for one pass.
    slots: np.ndarray
    # [num_tokens, 4] int64: where its keys begin in `slots`, how many it sees, from which on it has
    # keys of its own, and where these begin
    rows: np.ndarray
    tiles: np.ndarray  # [num_tiles, 2] int64: the first row of each, and how many; of one request
    addresses: tuple[int, int, int]  # of the three, in this order

    @staticmethod
    def build(
        positions: Sequence[np.ndarray],
        slots: Sequence[np.ndarray],
        trees: Sequence[TreeLayout | None] | None,
    ) -> CPURows:
        """Lay out one step; arguments as those of `AttentionMetadata.build`."""
        rows: list[tuple[int, int, int, int]] = []
        tiles: list[tuple[int, int]] = []
        parts = list(slots)
        first_key, num_slots = 0, sum(map(len, slots))
        for index, (of_rows, of_keys) in enumerate(zip(positions, slots, strict=True)):
            start, num_rows = len(rows), len(of_rows)
            rows += [(first_key, position + 1, _NO_OWN, 0) for position in of_rows.tolist()]
            tiles += [
                (start + done, min(num_rows - done, _ROWS_PER_TILE))
                for done in range(0, num_rows, _ROWS_PER_TILE)
            ]
            tree = None if trees is None else trees[index]
            if tree is not None:
                if len(tree.nodes) != num_rows:
                    raise ValueError(
                        f"{len(tree.nodes)} nodes for {num_rows} query rows: give one for each"
                    )
                first, parents = tree.first, tree.parents.tolist()
                for row, node in enumerate(tree.nodes.tolist(), start):
                    if node >= 0:
                        path = _path(node, parents)
                        rows[row] = first_key, first + len(path), first, num_slots
                        parts.append(of_keys[[first + above for above in path]])
                        num_slots += len(path)
            first_key += len(of_keys)
        all_slots = np.concatenate(parts) if len(parts) > 1 else parts[0]
        arrays = (
            np.ascontiguousarray(all_slots, dtype=np.int64),
            np.array(rows, dtype=np.int64),
            np.array(tiles, dtype=np.int64),
        )
        slots_at, rows_at, tiles_at = (array.ctypes.data for array in arrays)
        return CPURows(*arrays, (slots_at, rows_at, tiles_at))


def _path(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from the root's child down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], rope applied
    layer: LayerCache,
    rows: CPURows,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend for rows whose keys and values are in the cache, as `paged_attention` does.

    Returns [num_tokens, num_heads, value_dim]. For layers that it `attends`.
    """
    assert _kernels is not None
    num_tokens, num_heads, head_dim = query.shape
    _expect(query)
    _expect(layer.slots)
    if num_tokens != len(rows.rows) or head_dim != layer.key.shape[2]:
        raise ValueError(
            f"queries {list(query.shape)} for {len(rows.rows)} rows and keys of "
            f"{layer.key.shape[2]}"
        )
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        query = query.contiguous()
    pool = layer.slots
    out = query.new_empty(num_tokens, num_heads, layer.value_dim)
    _kernels.attend(
        query.data_ptr(), pool.data_ptr(), out.data_ptr(), *rows.addresses, len(rows.tiles),
        query.stride(0), pool.stride(0), num_heads, layer.num_kv_heads, head_dim, layer.value_dim,
        sliding_window or 0, torch.get_num_threads(), scale,
    )  # fmt: skip
    return out


def run_layer(
    fields: int,
    residual: torch.Tensor,  # [num_rows, hidden], contiguous
    cos: torch.Tensor,  # [num_rows, 1, head_dim], contiguous
    sin: torch.Tensor,
    *,
    layer: LayerCache,
    slot_mapping: torch.Tensor,  # [num_rows] int64
    rows: CPURows,
    scratch: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Run a decoder layer whose fields are at an address; see `cpu_layer`, which makes them.

    Returns the residual stream after it, and keeps keys and values in the cache.
    """
    assert _kernels is not None
    _expect(residual, cos, sin, layer.slots)
    num_rows = len(rows.rows)
    if not residual.shape[0] == cos.shape[0] == sin.shape[0] == num_rows == len(slot_mapping):
        raise ValueError(f"{list(residual.shape)} and angles {list(cos.shape)} for {num_rows} rows")
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slots are int64, not {slot_mapping.dtype}")
    y = torch.empty_like(residual)
    _kernels.layer(
        fields, residual.data_ptr(), y.data_ptr(), scratch.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), slot_mapping.data_ptr(), layer.slots.data_ptr(), *rows.addresses,
        len(rows.tiles), layer.slots.stride(0), residual.shape[0], torch.get_num_threads(), eps,
    )  # fmt: skip
    return y
