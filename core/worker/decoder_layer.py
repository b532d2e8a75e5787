"""One layer of the Llama family, as the decoder and drafters of its shape run it.

Fused QKV and gate/up products with packed weights, one rotation for queries and keys together, few
operations. It knows weights and rows; where keys and values are kept is told by who calls.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from foresay.core.proposer import KVRows
from foresay.core.worker import cpu_kernels
from foresay.core.worker.linear import Linear
from foresay.core.worker.norms import RMSNorm
from foresay.core.worker.rotary import rotate_

# Beside so many rows whose output nobody takes, or more, it pays to run the others apart, though
# the weights of keys and values are read twice then. Measured on a CPU: a gain from 20 on beside
# one row, from 40 on beside 8. For a GPU, which takes as long for one row as for a few hundred, it
# is an estimate.
_FEW_OTHERS = 32
_FEW_OTHERS_ON_GPU = 512
# torch shares an elementwise operation on more elements than this among threads.
_ELEMENTS_PER_THREAD = 32768


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x) of `x` [num_rows, width]; a row's bits do not depend on the others.

    On a CPU each thread gets an equal share of the elements, and what its vector loop leaves over
    is computed by scalar code, whose exp may round differently. Where shares would end within a
    row, the rows are computed in parts that split evenly.
    """
    if x.device.type != "cpu":
        return F.silu(x)
    sizes = _even_parts(*x.shape, torch.get_num_threads())
    if len(sizes) < 2:
        return F.silu(x)
    return torch.cat([F.silu(part) for part in x.split(sizes)])


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of `gate_up` [num_rows, 2 * width]: [num_rows, width]."""
    if cpu_kernels.serves(gate_up.dtype, gate_up.device):
        return cpu_kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


@functools.lru_cache(maxsize=1024)
def _even_parts(num_rows: int, width: int, num_threads: int) -> list[int]:
    """Return numbers of rows, in sum `num_rows`, each shared among threads at whole rows."""
    sizes = []
    while num_rows:
        size = num_rows
        while size > 1 and size % min(num_threads, -(-size * width // _ELEMENTS_PER_THREAD)):
            size -= 1
        sizes.append(size)
        num_rows -= size
    return sizes


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: Any) -> Heads:
        """Read the shape from a Llama-like config."""
        num_heads = int(config.num_attention_heads)
        return Heads(
            num_heads,
            int(getattr(config, "num_key_value_heads", None) or num_heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        )


class Attend(Protocol):
    """Stores keys and values and attends: `foresay.core.proposer.KVRows.attend` is one."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim], rope applied
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], rope applied
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads, head_dim]."""
        ...


class SelfAttention:
    """Attention with rope and grouped heads, between its norm and the residual stream.

    `tensors` are named as in checkpoints: `q_proj.weight` [num_heads * head_dim, input_size],
    `k_proj.weight`, `v_proj.weight`, `o_proj.weight`; biases of these, `q_norm.weight` and
    `k_norm.weight` [head_dim] if there are any. The input may be wider than the output.
    `kv_apart`: for a drafter that calls `last_rows`, whose keys and values have a product of their
    own then, besides.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        heads: Heads,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
        kv_apart: bool = False,
    ) -> None:
        self.heads = heads
        fused = functools.partial(_fused, tensors, dtype, device, row_invariant, linear)
        self.qkv = fused("q_proj", "k_proj", "v_proj")
        self.kv = fused("k_proj", "v_proj") if kv_apart else None
        self.out = fused("o_proj")
        self.query_key_norm = None
        if "q_norm.weight" in tensors:
            self.query_key_norm = (
                RMSNorm(tensors["q_norm.weight"].to(device, dtype), eps),
                RMSNorm(tensors["k_norm.weight"].to(device, dtype), eps),
            )
        self.scale = heads.head_dim**-0.5
        self.window = window

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, input_size], normed
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return `residual` and what is attended to, added; [num_tokens, hidden_size]."""
        num_tokens, heads = x.shape[0], self.heads
        num_rotated = heads.num_heads + heads.num_kv_heads
        qkv = self.qkv(x).view(num_tokens, num_rotated + heads.num_kv_heads, heads.head_dim)
        query_key, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self.query_key_norm is not None:
            query_norm, key_norm = self.query_key_norm
            query_key = torch.cat(
                [
                    query_norm(query_key[:, : heads.num_heads]),
                    key_norm(query_key[:, heads.num_heads :]),
                ],
                dim=1,
            )
        rotate_(query_key, cos, sin)  # beside the values: they are stored together
        attended = attend(
            query_key[:, : heads.num_heads],
            query_key[:, heads.num_heads :],
            value,
            scale=self.scale,
            sliding_window=self.window,
        )
        return self.out.add_to(residual, attended.reshape(num_tokens, -1))

    def last_rows(
        self,
        x: torch.Tensor,  # [num_tokens, input_size], normed
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: KVRows,
        layer: int,
    ) -> torch.Tensor:
        """Do as a call does over a proposer's KV `layer`; return the rows `rows.last_rows` alone.

        [num_ranges, hidden_size]. Of many other rows only keys and values are computed.
        """
        last = rows.last_rows
        num_others = x.shape[0] - last.shape[0]
        if num_others < (_FEW_OTHERS if x.device.type == "cpu" else _FEW_OTHERS_ON_GPU):
            residual = self(x, residual, cos, sin, functools.partial(rows.attend, layer))
            return residual.index_select(0, last) if num_others else residual
        assert self.kv is not None, "made with kv_apart"
        num_kv_heads = self.heads.num_kv_heads
        kv = self.kv(x).view(x.shape[0], 2 * num_kv_heads, self.heads.head_dim)
        key, value = kv[:, :num_kv_heads], kv[:, num_kv_heads:]
        if self.query_key_norm is not None:
            key = self.query_key_norm[1](key)
        rows.store(layer, rotate_(key, cos, sin), value)
        x, residual, cos, sin = (each.index_select(0, last) for each in (x, residual, cos, sin))
        return self(x, residual, cos, sin, functools.partial(rows.last().attend, layer))


class MLP:
    """The gated MLP, between its norm and the residual stream.

    `tensors`: `gate_proj.weight` and `up_proj.weight` [intermediate_size, hidden_size],
    `down_proj.weight`, and biases of these if there are any.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
    ) -> None:
        fused = functools.partial(_fused, tensors, dtype, device, row_invariant, linear)
        self.gate_up = fused("gate_proj", "up_proj")
        self.down = fused("down_proj")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual` and the MLP's output of the normed `x`, added; the shape of both."""
        return self.down.add_to(residual, silu_mul(self.gate_up(x)))


class DecoderBlock:
    """One layer: attention and MLP, each behind an RMSNorm, each added to the residual stream.

    `tensors` are named as in checkpoints: `input_layernorm.weight`,
    `post_attention_layernorm.weight`, and those of `SelfAttention` and `MLP` under `self_attn.`
    and `mlp.`. Without an `input_layernorm.weight` attention takes the residual stream as it is.
    `row_invariant`: see `Linear`; a drafter does without. `linear`: what makes the products.
    `kv_apart`: see `SelfAttention`.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        heads: Heads,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        row_invariant: bool = True,
        linear: type[Linear] = Linear,
        kv_apart: bool = False,
    ) -> None:
        self.attention = SelfAttention(
            under(tensors, "self_attn."),
            heads,
            eps=eps,
            dtype=dtype,
            device=device,
            window=window,
            row_invariant=row_invariant,
            linear=linear,
            kv_apart=kv_apart,
        )
        self.mlp = MLP(
            under(tensors, "mlp."), dtype, device, row_invariant=row_invariant, linear=linear
        )
        self.attention_norm = None
        if "input_layernorm.weight" in tensors:
            self.attention_norm = RMSNorm(tensors["input_layernorm.weight"].to(device, dtype), eps)
        self.mlp_norm = RMSNorm(tensors["post_attention_layernorm.weight"].to(device, dtype), eps)
        self.window = window

    def __call__(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """Return the residual stream after this layer; [num_tokens, hidden_size]."""
        residual = self.attention(self._normed(residual), residual, cos, sin, attend)
        return self.mlp(self.mlp_norm(residual), residual)

    def last_rows(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: KVRows,
        layer: int,
    ) -> torch.Tensor:
        """Do as a call does; return the rows `rows.last_rows` alone: `SelfAttention.last_rows`."""
        x = self._normed(residual)
        residual = self.attention.last_rows(x, residual, cos, sin, rows, layer)
        return self.mlp(self.mlp_norm(residual), residual)

    def _normed(self, residual: torch.Tensor) -> torch.Tensor:
        return residual if self.attention_norm is None else self.attention_norm(residual)


def under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _fused(
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    row_invariant: bool,
    linear: type[Linear],
    *names: str,
) -> Linear:
    """Return one product for several of the same input; either all have a bias or none has."""
    weight, bias = (
        [tensors[f"{name}.{kind}"].detach() for name in names if f"{name}.{kind}" in tensors]
        for kind in ("weight", "bias")
    )
    assert len(bias) in (0, len(weight))
    return linear(
        torch.cat([part.to(device, dtype) for part in weight]),
        torch.cat([part.to(device, dtype) for part in bias]) if bias else None,
        dtype,
        pack=True,
        row_invariant=row_invariant,
    )
