"""Paged attention against a plain per-row softmax in float64, and its rows' independence."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from foresay.core.worker import attention_rules
from foresay.core.worker.attention import AttentionMetadata, AttentionRules, paged_attention
from foresay.core.worker.kv_cache import KVCache, LayerKV, block_bytes

CPU = torch.device("cpu")


class Sequence:
    """One request's whole history: its queries, keys and values, and where its blocks lie."""

    def __init__(self, rng: np.random.Generator, length: int, shape: tuple[int, int, int, int]):
        num_heads, num_kv_heads, head_dim, value_dim = shape
        self.query = torch.from_numpy(rng.standard_normal((length, num_heads, head_dim))).float()
        self.key = torch.from_numpy(rng.standard_normal((length, num_kv_heads, head_dim))).float()
        self.value = torch.from_numpy(rng.standard_normal((length, num_kv_heads, value_dim)))
        self.value = self.value.float()
        self.slots = np.empty(0, dtype=np.int64)


def reference(
    seq: Sequence,
    position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for one position by the definition, in float64; [num_heads, value_dim]."""
    first = 0 if window is None else max(0, position - window + 1)
    fold = seq.query.shape[1] // seq.key.shape[1]
    rows = []
    for head in range(seq.query.shape[1]):
        keys = seq.key[first : position + 1, head // fold].double()
        values = seq.value[first : position + 1, head // fold].double()
        scores = keys @ seq.query[position, head].double() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum()
        if sinks is not None:
            total = total + sinks[head].double().exp()
        rows.append((weights / total) @ values)
    return torch.stack(rows)


def run(
    cache: KVCache,
    parts: list[tuple[Sequence, int, int]],
    rules: AttentionRules,
    **options: object,
) -> torch.Tensor:
    """Attend for rows start..end of each sequence in one step; flat rows."""
    metadata = AttentionMetadata.build(
        [np.arange(start, end) for _, start, end in parts],
        [seq.slots[:end] for seq, _, end in parts],
        np.concatenate([seq.slots[start:end] for seq, start, end in parts]),
        cache.null_slot,
        rules,
        CPU,
    )

    def flat(name: str) -> torch.Tensor:
        return torch.cat([getattr(seq, name)[start:end] for seq, start, end in parts])

    out = paged_attention(
        flat("query"),
        flat("key"),
        flat("value"),
        cache.layers[0],
        metadata,
        scale=0.3,
        **options,  # type: ignore[arg-type]
    )
    assert metadata.positions.tolist() == [p for _, a, b in parts for p in range(a, b)]
    return out


def rules_for(shape: tuple[int, int, int, int]) -> AttentionRules:
    num_heads, num_kv_heads, head_dim, _ = shape
    return AttentionRules.choose(
        CPU,
        torch.float32,
        torch.float32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        row_invariant=True,
    )


def place(rng: np.random.Generator, block_size: int, *lengths: int) -> tuple[list[np.ndarray], int]:
    """Deal shuffled blocks to sequences; returns each one's slots and the number of blocks."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = rng.permutation(sum(counts))
    slots, at = [], 0
    for count, length in zip(counts, lengths, strict=True):
        mine = blocks[at : at + count, None] * block_size + np.arange(block_size)
        slots.append(mine.ravel()[:length])
        at += count
    return slots, sum(counts)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((4, 2, 16, 16), {}, id="grouped"),
        pytest.param((6, 6, 8, 8), {}, id="multi-head"),
        pytest.param((4, 1, 8, 8), {"sliding_window": 8}, id="window"),
        pytest.param((4, 2, 8, 8), {"softcap": 2.0}, id="softcap"),
        pytest.param((4, 2, 8, 8), {"softcap": 3.0, "sliding_window": 5}, id="softcap-window"),
        pytest.param((4, 2, 8, 8), {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, id="sinks"),
        pytest.param((4, 2, 12, 8), {}, id="narrow-values"),
    ],
)
def test_ragged_steps_equal_a_plain_softmax(
    block_size: int, shape: tuple[int, int, int, int], options: dict[str, object]
) -> None:
    rng = np.random.default_rng(7)
    lengths = (150, 41, 9, 700)
    sequences = [Sequence(rng, length, shape) for length in lengths]
    placed, num_blocks = place(rng, block_size, *lengths)
    for seq, slots in zip(sequences, placed, strict=True):
        seq.slots = slots
    layout = [LayerKV(shape[1], shape[2], shape[3])]
    cache = KVCache(layout, num_blocks, block_size, torch.float32, CPU)
    a, b, c, d = sequences
    steps = [
        [(a, 0, 140), (c, 0, 1), (d, 0, 400)],
        [(b, 0, 37), (c, 1, 6), (a, 140, 141), (d, 400, 697)],
        [(b, 37, 41), (c, 6, 9), (a, 141, 150), (d, 697, 700)],
    ]
    for step in steps:
        out = run(cache, step, rules_for(shape), **options)
        at = 0
        for seq, start, end in step:
            for position in sorted({start, (start + end) // 2, end - 1}):
                expected = reference(
                    seq,
                    position,
                    0.3,
                    options.get("sliding_window"),  # type: ignore[arg-type]
                    options.get("softcap"),  # type: ignore[arg-type]
                    options.get("sinks"),  # type: ignore[arg-type]
                )
                got = out[at + position - start].double()
                assert (got - expected).abs().max() < 2e-5, (start, end, position)
            at += end - start


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "value_dim", "width"),
    [
        pytest.param(6, 2, 8, 8, 6 * 8 + 4 * 8, id="whole heads beside"),
        pytest.param(4, 2, 12, 8, 4 * 12 + 2 * 20, id="part of a head beside"),
        pytest.param(1, 1, 8, 8, 13, id="one head"),
        pytest.param(4, 4, 8, 8, 32, id="nothing beside"),
    ],
)
@pytest.mark.parametrize("parts", [[(0, 1)], [(5, 9)], [(0, 40)], [(7, 8), (0, 5), (3, 39)]])
def test_queries_may_be_a_slice_of_something_wider(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    width: int,
    parts: list[tuple[int, int]],
) -> None:
    """As of a fused projection, whatever lies behind them in a row."""
    shape = (num_heads, num_kv_heads, head_dim, value_dim)
    rng = np.random.default_rng(0)
    slots, num_blocks = place(rng, 4, *[end for _, end in parts])
    num_tokens = sum(end - start for start, end in parts)
    wide = torch.from_numpy(rng.standard_normal((num_tokens, 3 + width))).float()
    query = wide[:, 3 : 3 + num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    key, value = (
        torch.from_numpy(rng.standard_normal((num_tokens, num_kv_heads, dim))).float()
        for dim in (head_dim, value_dim)
    )
    found = []
    for each in (query, query.contiguous()):
        cache = KVCache(
            [LayerKV(num_kv_heads, head_dim, value_dim)], num_blocks, 4, torch.float32, CPU
        )
        metadata = AttentionMetadata.build(
            [np.arange(start, end) for start, end in parts],
            slots,
            np.concatenate([each[start:] for each, (start, _) in zip(slots, parts, strict=True)]),
            cache.null_slot,
            rules_for(shape),
            CPU,
        )
        found.append(paged_attention(each, key, value, cache.layers[0], metadata, scale=0.3))
    assert found[0].shape == (num_tokens, num_heads, value_dim)
    assert torch.equal(*found)


def test_a_rejected_run_is_written_over() -> None:
    shape = (4, 2, 16, 16)
    rng = np.random.default_rng(3)
    seq, wrong = Sequence(rng, 40, shape), Sequence(rng, 40, shape)
    seq.slots = wrong.slots = place(rng, 4, 40)[0][0]
    cache = KVCache([LayerKV(2, 16, 16)], 10, 4, torch.float32, CPU)
    run(cache, [(seq, 0, 20)], rules_for(shape))
    run(cache, [(wrong, 20, 28)], rules_for(shape))  # drafts, all rejected
    out = run(cache, [(seq, 20, 23)], rules_for(shape))
    assert (out[2].double() - reference(seq, 22, 0.3, None, None, None)).abs().max() < 2e-5


def test_stale_slots_past_the_context_are_never_read_even_if_not_a_number() -> None:
    shape = (4, 2, 16, 16)
    rng = np.random.default_rng(4)
    seq = Sequence(rng, 30, shape)
    seq.slots = place(rng, 16, 30)[0][0]
    cache = KVCache([LayerKV(2, 16, 16)], 2, 16, torch.float32, CPU)
    clean = run(cache, [(seq, 0, 10)], rules_for(shape))
    for tensor in (cache.layers[0].key, cache.layers[0].value):
        tensor[torch.from_numpy(seq.slots[10:])] = math.nan
    assert torch.equal(run(cache, [(seq, 0, 10)], rules_for(shape)), clean)


@pytest.mark.parametrize("shape", [(9, 3, 64, 64), (8, 8, 32, 32), (8, 1, 64, 64)])
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int, int, int]) -> None:
    """Rests on the CPU kernels: one row alone against windows, chunks and batches holding it."""
    rng = np.random.default_rng(5)
    lengths = (1100, 700)
    seq, other = (Sequence(rng, length, shape) for length in lengths)
    (seq.slots, other.slots), num_blocks = place(rng, 16, *lengths)
    cache = KVCache([LayerKV(*shape[1:])], num_blocks, 16, torch.float32, CPU)
    rules = rules_for(shape)
    run(cache, [(seq, 0, 1100), (other, 0, 700)], rules)
    for start in (0, 125, 250, 508, 1020):
        alone = torch.cat([run(cache, [(seq, p, p + 1)], rules) for p in range(start, start + 4)])
        for num_rows in (2, 5, 8, 17, 70):
            window = run(cache, [(seq, start, start + num_rows)], rules)
            assert torch.equal(window[:4], alone[:num_rows]), (start, num_rows)
        for before in (1, 13, 29, 125, 190):
            early = max(0, start - before)
            chunk = run(cache, [(seq, early, start + 4)], rules)
            assert torch.equal(chunk[start - early :], alone), (start, before)
        batch = run(cache, [(other, 600, 603), (seq, start, start + 4), (other, 30, 31)], rules)
        assert torch.equal(batch[3:7], alone), start


def test_zeroed_blocks_are_zero_in_every_layer_and_others_are_kept() -> None:
    cache = KVCache([LayerKV(2, 4, 4), LayerKV(1, 4, 2)], 3, 2, torch.float32, CPU)
    for layer in cache.layers:
        layer.key.fill_(1.0)
        layer.value.fill_(math.nan)
    cache.zero_blocks([1])
    for layer in cache.layers:
        assert layer.key[2:4].eq(0).all()
        assert layer.value[2:4].eq(0).all()
        assert layer.key[:2].eq(1).all()
        assert layer.key[4:].eq(1).all()


def test_slots_that_move_are_all_read_before_any_is_written() -> None:
    kinds = ([LayerKV(2, 4, 4), LayerKV(1, 4, 2)], [LayerKV(1, 4, 4)])
    cache = KVCache(kinds[0], 4, 2, torch.float32, CPU, kinds[1])
    layers = (*cache.layers, *cache.proposer_layers)
    for layer in layers:
        layer.slots.normal_()
    before = [layer.slots.clone() for layer in layers]
    cache.move([], [])
    cache.move(np.array([3, 5, 6]), [2, 3, 5])
    for old, layer in zip(before, cache.layers, strict=False):
        assert torch.equal(layer.slots[[2, 3, 5]], old[[3, 5, 6]])
        kept = [0, 1, 4, 6, 7, 8, 9, 10, 11]
        assert torch.equal(layer.slots[kept], old[kept])
    assert torch.equal(cache.proposer_layers[0].slots, before[-1])  # the proposers' stay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_length_that_is_summed_otherwise_is_not_taken(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = {256, 320}

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attn_mask: torch.Tensor
    ) -> torch.Tensor:
        scores = query.float() @ keys.float().transpose(2, 3) + attn_mask.float()
        weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
        parts = [*zip(weights.split(64, dim=-1), values.float().split(64, dim=2), strict=True)]
        total = sum(weight.sum(dim=-1, keepdim=True) for weight, _ in parts)
        if keys.shape[2] in unsafe:
            parts.reverse()
        return (sum(weight @ value for weight, value in parts) / total).to(dtype)

    monkeypatch.setattr(attention_rules.F, "scaled_dot_product_attention", attend)
    assert attention_rules._safe_key_lens(dtype, 8, 3, 64) == (64, 128, 192, 384, 448, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_cache_is_all_zeros(dtype: torch.dtype) -> None:
    cache = KVCache([LayerKV(2, 4, 6)], 3, 2, dtype, CPU)
    (layer,) = cache.layers
    assert (layer.key.shape, layer.value.shape) == ((10, 2, 4), (10, 2, 6))
    assert layer.key.dtype == layer.value.dtype == dtype
    assert not layer.key.any()
    assert not layer.value.any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory as Linux shows it")
def test_a_large_pool_takes_memory_only_as_it_is_written() -> None:
    # In a process of its own: what another test has given back may be handed out again, and zeroed.
    script = """
import os, pathlib, torch
from foresay.core.worker.kv_cache import KVCache, LayerKV

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
cache = KVCache([LayerKV(8, 64, 64)] * 4, 4096, 16, torch.float32, torch.device("cpu"))  # 1 GiB
made = resident()
cache.layers[0].key[:1024].fill_(1.0)
print(made - before, resident() - made)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    made, written = map(int, done.stdout.split())
    assert made < 64 * 2**20
    assert written > 0


def test_a_blocks_size_in_bytes() -> None:
    # 16 tokens x (3 heads x (64 + 64)) numbers x 2 layers x 2 bytes
    assert block_bytes([LayerKV(3, 64, 64)] * 2, 16, torch.bfloat16) == 16 * 384 * 2 * 2


@pytest.mark.parametrize("value_dim", [4, 6])
def test_keys_and_values_are_written_the_same_from_one_tensor_or_from_two(value_dim: int) -> None:
    """As slices of one projection they lie side by side and are written in one copy."""
    torch.manual_seed(0)
    projected = torch.randn(5, 3 * 4 + 2 * 4 + 2 * value_dim)
    query_key, value = projected.split([20, 2 * value_dim], dim=1)
    key, value = query_key[:, 12:].view(5, 2, 4), value.view(5, 2, value_dim)
    slots = torch.tensor([7, 2, 0, 9, 4])
    contents = []
    for pair in (
        (key, value),
        (key.clone(), value.clone()),
        (key, value.clone()),
        (key.transpose(1, 2).contiguous().transpose(1, 2), value),
    ):
        cache = KVCache([LayerKV(2, 4, value_dim)], 4, 4, torch.float32, CPU)
        cache.layers[0].write(slots, *pair)
        contents.append(cache.layers[0].slots)
        assert torch.equal(cache.layers[0].key[slots], key)
        assert torch.equal(cache.layers[0].value[slots], value)
    swapped = KVCache([LayerKV(2, value_dim, 4)], 4, 4, torch.float32, CPU)
    swapped.layers[0].write(slots, value, key)
    assert torch.equal(swapped.layers[0].key[slots], value)
    assert all(torch.equal(contents[0], other) for other in contents[1:])
