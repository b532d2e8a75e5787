"""Dense copies hold what gathering would give, whatever was written, moved, freed or left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from foresay.core.worker.attention import AttentionMetadata, AttentionRules, paged_attention
from foresay.core.worker.dense_kv import DenseCopies, DensePlan, SlotStamps
from foresay.core.worker.kv_cache import KVCache, LayerKV

CPU = torch.device("cpu")
LAYOUT = [LayerKV(2, 4, 6), LayerKV(1, 8, 8)]
SLOT_BYTES = 4 * (20 + 16)


def make_cache(
    max_columns: int, num_blocks: int = 32, dtype: torch.dtype = torch.float32
) -> KVCache:
    return KVCache(LAYOUT, num_blocks, 4, dtype, CPU, max_dense_bytes=max_columns * SLOT_BYTES)


def write(cache: KVCache, slots: np.ndarray) -> list[torch.Tensor]:
    """Write random keys and values, as a forward does after its step was laid out.

    Returns what each layer stored.
    """
    stored = []
    for kind, layer in zip(LAYOUT, cache.layers, strict=True):
        key, value = (
            torch.randn(len(slots), kind.num_kv_heads, dim).to(layer.slots.dtype)
            for dim in (kind.head_dim, kind.value_dim)
        )
        stored.append(layer.write(torch.from_numpy(slots), key, value))
    return stored


def holds_all(
    cache: KVCache,
    plan: DensePlan,
    dtype: torch.dtype,
    stored: list[torch.Tensor],
    layers: Sequence[int] = (0, 1),
) -> bool:
    slots = torch.from_numpy(plan.key_slots.ravel())
    pairs = [
        (of_copy, gathered)
        for number in layers
        for of_copy, gathered in zip(
            cache.layers[number].dense(plan, dtype, stored[number]),
            cache.layers[number].gather(slots, len(plan.key_slots), dtype),
            strict=True,
        )
    ]
    return all(torch.equal(of_copy, gathered) for of_copy, gathered in pairs)


@pytest.mark.parametrize(
    ("max_columns", "dtype"),
    [(100_000, torch.float32), (700, torch.float32), (100_000, torch.bfloat16)],
)
def test_a_copy_holds_what_gathering_gives(max_columns: int, dtype: torch.dtype) -> None:
    """Random steps: requests join, grow, share, shrink and leave; slots move and are zeroed."""
    chance = random.Random(3)
    torch.manual_seed(0)
    cache = make_cache(max_columns, dtype=dtype)
    copies = cache.dense_copies
    assert copies is not None
    texts: dict[str, list[int]] = {}  # slots by position
    num_laid_out = num_stale = num_columns = num_direct = 0
    for step in range(400):
        if chance.random() < 0.2 and len(texts) < 6:
            known = chance.choice([*texts.values(), []])
            texts[f"r{step}"] = known[: chance.randrange(0, len(known) + 1)] + [
                chance.randrange(128) for _ in range(chance.randrange(1, 20))
            ]
        if chance.random() < 0.1 and texts:
            del texts[chance.choice(list(texts))]
        if chance.random() < 0.1:
            cache.zero_blocks([chance.randrange(32)])
        if chance.random() < 0.1:
            places = chance.sample(range(128), 6)
            cache.move(places[:3], places[3:])
        running = [owner for owner in texts if chance.random() < 0.9]
        chance.shuffle(running)
        if chance.random() < 0.3:
            del running[1:]
        new = []
        for owner in running:
            if chance.random() < 0.2:
                del texts[owner][chance.randrange(1, len(texts[owner]) + 1) :]
            new += [chance.randrange(128) for _ in range(chance.randrange(1, 3))]
            texts[owner] += new[-1:]
        written = np.unique(np.array(new, dtype=np.int64))
        copies.begin(written)
        plans = []
        for row_len in (32, 64):
            group = [o for o in running if (len(texts[o]) > 32) == (row_len == 64)]
            group = [o for o in group if len(texts[o]) <= 64]
            if not group:
                continue
            found = copies.arrange(group, row_len)
            if found is None:
                assert max_columns == 700
                continue
            copy, order = found
            assert sorted(order) == list(range(len(group)))
            key_slots = np.full(
                (len(group), max(len(texts[owner]) for owner in group)), cache.null_slot
            )
            for row, place in enumerate(order):
                key_slots[row, : len(texts[group[place]])] = texts[group[place]]
            plans.append(copies.plan(copy, key_slots))
            num_laid_out += 1
            num_stale += len(plans[-1].columns)
            num_columns += key_slots.size
        stored = write(cache, written)
        num_direct += sum(plan.only_written and len(plan.columns) > 0 for plan in plans)
        if chance.random() < 0.1:
            continue  # the forward failed before it attended
        layers = [0] if chance.random() < 0.1 else [0, 1]  # or between two layers
        for plan in plans:
            assert holds_all(cache, plan, torch.float32, stored, layers)
    assert num_laid_out > 300
    assert num_direct > 10  # the step's own rows were all that was lacking
    if max_columns > 700:
        assert num_stale < 0.5 * num_columns  # most of it was there


def test_who_stays_keeps_the_place_when_others_come_and_go() -> None:
    cache = make_cache(10_000)
    copies = cache.dense_copies
    assert copies is not None

    def changed(owners: str) -> int:
        copies.begin(np.array([], dtype=np.int64))
        copy, order = copies.arrange(owners, 32) or pytest.fail("no room")
        slots = np.array(
            [[10 * "abcdef".index(owners[place]) + i for i in range(8)] for place in order]
        )
        return len(copies.plan(copy, slots).columns)

    assert changed("abc") == 24
    assert changed("abc") == 0
    assert changed("cba") == 0
    assert changed("cbad") == 8
    assert changed("cbd") == 8  # d moves to a's place
    assert changed("bcd") == 0
    assert changed("bce") == 8


def test_only_what_was_written_changes() -> None:
    cache = make_cache(10_000)
    copies = cache.dense_copies
    assert copies is not None
    slots = np.array([[4, 5, 6, 7, cache.null_slot]])
    numbers = []
    for written in ([4, 5, 6, 7], [7], [8], []):
        copies.begin(np.array(written, dtype=np.int64))
        copy, _ = copies.arrange(["a"], 32) or pytest.fail("no room")
        numbers.append(copies.plan(copy, slots).slots.tolist())
    assert numbers == [[4, 5, 6, 7, cache.null_slot], [7], [], []]


def test_memory_is_bounded_and_the_oldest_copy_goes_first() -> None:
    forgotten: list[int] = []
    copies = DenseCopies(SlotStamps(64), 4 * 32 + 64, forgotten.append)

    def used(owners: list[str], row_len: int) -> int | None:
        copies.begin(np.array([], dtype=np.int64))
        found = copies.arrange(owners, row_len)
        return found and found[0].number

    first = used(["a"], 32)
    assert used(["a", "b"], 32) == first  # there was room for a second row
    second = used(["a", "b", "c"], 32)  # now the copy is replaced
    assert forgotten == [first]
    third = used(["d"], 64)  # and this one takes another one's room
    assert forgotten == [first, second]
    assert used(["e"], 16) == 4
    assert used(["d"], 64) == third
    assert forgotten == [first, second]
    assert used(["f", "g", "h", "i"], 64) is None
    assert used(["x"], 256) is None
    assert make_cache(0).dense_copies is None


class _InterruptedArray(np.ndarray):
    """Raises behind its n-th assignment from outside."""

    left = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        type(self).left -= 1
        if type(self).left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("nth", range(1, 5))
def test_an_interruption_loses_nothing(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind each assignment of the bookkeeping; the next step finds what is stored."""
    torch.manual_seed(0)
    cache = make_cache(10_000)
    copies = cache.dense_copies
    assert copies is not None
    monkeypatch.setattr(_InterruptedArray, "left", 0)
    tables = {"a": np.arange(9), "b": np.arange(40, 51)}

    def step(owners: list[str], written: np.ndarray) -> DensePlan:
        copies.begin(written)
        copy, order = copies.arrange(owners, 32) or pytest.fail("no room")
        key_slots = np.full((len(owners), 12), cache.null_slot)
        for row, place in enumerate(order):
            table = tables[owners[place]]
            key_slots[row, : len(table)] = table
        return copies.plan(copy, key_slots)

    stamped = copies._stamps._stamps
    first = step(["a"], tables["a"])
    stored = write(cache, tables["a"])
    assert holds_all(cache, first, torch.float32, stored)
    for array in ("slots", "stamps"):
        setattr(first.of, array, getattr(first.of, array).view(_InterruptedArray))
    copies._stamps._stamps = stamped.view(_InterruptedArray)
    tables["a"] = np.arange(20, 31)  # the row gets other slots
    _InterruptedArray.left = nth
    with suppress(KeyboardInterrupt):
        step(["a"], tables["a"])
    _InterruptedArray.left = 0
    write(cache, tables["a"])
    nothing = np.array([], dtype=np.int64)
    for owners in (["a"], ["b"], ["a", "b"]):
        plan = step(owners, nothing)
        assert holds_all(cache, plan, torch.float32, write(cache, nothing))
        cache.move([20, 21], [3, 5])


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window"),
    [(64, torch.float32, None), (4, torch.bfloat16, None), (16, torch.float32, 20)],
)
def test_attention_over_copies_has_the_same_bits(
    head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    """Growing texts in a batch, with rows for drafts that are taken back, joined and left."""
    torch.manual_seed(1)
    chance = random.Random(5)
    rules = AttentionRules.choose(
        CPU,
        dtype,
        torch.float32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        row_invariant=True,
    )
    kind = LayerKV(2, head_dim, head_dim)
    cache = KVCache([kind], 128, 16, dtype, CPU, max_dense_bytes=1 << 26)
    free = list(range(128))
    chance.shuffle(free)
    tables: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    num_dense = 0
    for step in range(60):
        if chance.random() < 0.25 and len(tables) < 5:
            tables[f"r{step}"], lengths[f"r{step}"] = [], 0
        if chance.random() < 0.1 and tables:
            gone = next(iter(tables))
            free += tables.pop(gone)
            del lengths[gone]
        owners = list(tables)
        if not owners:
            continue
        positions, slots = [], []
        for owner in owners:
            start = lengths[owner]
            end = start + (chance.randrange(1, 10) if start else chance.randrange(40, 120))
            while len(tables[owner]) * 16 < end:
                tables[owner].append(free.pop())
            table = np.array(tables[owner])
            at = np.arange(end)
            slots.append(table[at // 16] * 16 + at % 16)
            positions.append(np.arange(start, end))
            lengths[owner] = start + chance.randrange(1, end - start + 1)
        mapping = np.concatenate([s[p] for s, p in zip(slots, positions, strict=True)])
        query, key, value = (
            torch.randn(len(mapping), heads, head_dim).to(dtype) for heads in (4, 2, 2)
        )
        results = []
        for dense in (None, cache.dense_copies):
            metadata = AttentionMetadata.build(
                positions, slots, mapping, cache.null_slot, rules, CPU,
                owners=owners, dense_copies=dense,
            )  # fmt: skip
            num_dense += sum(group.dense is not None for group in metadata.groups)
            results.append(paged_attention(query, key, value, cache.layers[0], metadata, scale=0.5))
        assert torch.equal(*results)
    assert num_dense > 40
