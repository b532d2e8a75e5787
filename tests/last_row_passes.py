"""Passes over a decoder block whose last rows alone go through all of it, beside whole ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from static_passes import kernels_on_cpu

from foresay.core.proposer import DraftRequest, KVLayer
from foresay.core.worker import decoder_layer
from foresay.core.worker.decoder import DecoderBlock, Heads
from foresay.core.worker.drafter_kv import PrivateKV
from foresay.core.worker.linear import Linear

HEADS, SIZE, INNER = Heads(4, 2, 16), 48, 80
CPU = torch.device("cpu")
Passes = Sequence[Sequence[tuple[int, range]]]  # by pass: requests and their positions
# Prompts of three lengths, two of them in chunks; then accepted rows.
PASSES: Passes = (
    ((0, range(30)), (1, range(18))),
    ((0, range(30, 37)), (1, range(18, 40)), (2, range(1))),
    ((0, range(37, 38)), (1, range(40, 43)), (2, range(1, 3))),
)


def block(
    dtype: torch.dtype, linear: type[Linear], window: int | None, *, biased: bool, normed: bool
) -> DecoderBlock:
    generator = torch.Generator().manual_seed(0)
    width, kv_width = HEADS.num_heads * HEADS.head_dim, HEADS.num_kv_heads * HEADS.head_dim
    shapes = {
        "self_attn.q_proj": (width, SIZE),
        "self_attn.k_proj": (kv_width, SIZE),
        "self_attn.v_proj": (kv_width, SIZE),
        "self_attn.o_proj": (SIZE, width),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    if biased:
        for name, (rows, _) in shapes.items():
            tensors[f"{name}.bias"] = torch.randn(rows, generator=generator)
    norms = {"input_layernorm": SIZE, "post_attention_layernorm": SIZE}
    if normed:
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), HEADS.head_dim)
    for name, size in norms.items():
        tensors[f"{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.3
    return DecoderBlock(
        tensors, HEADS, eps=1e-5, dtype=dtype, device=CPU, window=window, row_invariant=False,
        linear=linear, kv_apart=True,
    )  # fmt: skip


@torch.inference_mode()
def run(
    few: int,
    passes: Passes = PASSES,
    *,
    dtype: torch.dtype = torch.float32,
    linear: type[Linear] = Linear,
    window: int | None = None,
    biased: bool = False,
    normed: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run all passes; return by pass what `last_rows` gives, and what it should.

    The latter comes from passes of all rows, over a KV of their own. From `few` other rows on the
    last ones are run apart.
    """
    layer = block(dtype, linear, window, biased=biased, normed=normed)
    generator = torch.Generator().manual_seed(1)
    cos, sin = torch.randn(2, 64, 1, HEADS.head_dim, generator=generator).to(dtype)
    asked = [DraftRequest(name, range(64), 1, 1) for name in "abc"]
    pools = [
        PrivateKV([KVLayer(HEADS.num_kv_heads, HEADS.head_dim)], 256, dtype, CPU) for _ in range(2)
    ]
    for kv in pools:
        for one in asked:
            assert kv.hold(one.req_id, 64)
    found = []
    before, decoder_layer._FEW_OTHERS = decoder_layer._FEW_OTHERS, few
    try:
        for parts in passes:
            views = [kv.view(asked) for kv in pools]
            members, spans = zip(*parts, strict=True)
            whole, apart = (view.rows(members, spans) for view in views)
            x = torch.randn(len(whole.positions), SIZE, generator=generator).to(dtype)
            turns = cos[whole.positions], sin[whole.positions]
            all_rows = layer(x, *turns, functools.partial(whole.attend, 0))
            last = layer.last_rows(x, *turns, apart, 0)
            found.append((last, all_rows[whole.last_rows]))
            for view in views:
                assert view.missing([dict(parts).get(i, range(0)) for i in range(3)]) is None
    finally:
        decoder_layer._FEW_OTHERS = before
    return found


def run_with_kernels(few: int, passes: Passes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Do the same where the CPU is taken for a device with Triton kernels."""
    with kernels_on_cpu():
        return run(few, passes)
