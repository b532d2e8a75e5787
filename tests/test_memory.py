"""The KV pool's size, worked out by hand, and the memory it may take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

from foresay.core.errors import ConfigError
from foresay.core.worker import memory
from foresay.core.worker.kv_cache import LayerKV
from foresay.core.worker.memory import PoolSize, free_memory, size_pool
from foresay.core.worker.target import load_target

CPU = torch.device("cpu")
# Two layers, keys and values of 2 heads of 8 numbers, 4 bytes each: 256 bytes a token.
LAYOUT = [LayerKV(2, 8, 8)] * 2
BLOCK = 16 * 256  # bytes


def size(**changes: Any) -> PoolSize:
    settings = {
        "layout": LAYOUT,
        "dtype": torch.float32,
        "block_size": 16,
        "max_num_seqs": 4,
        "budget": 10**9,
        "model_limit": 100,
        "max_model_len": None,
        "num_blocks": None,
    }
    return size_pool(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "num_blocks", "max_model_len"),
    [
        # 100 tokens are 7 blocks.
        pytest.param({}, 28, 100, id="all that 4 requests need"),
        pytest.param({"max_num_seqs": 1}, 7, 100, id="one request"),
        pytest.param({"max_model_len": 32}, 8, 32, id="shorter requests"),
        pytest.param({"max_model_len": 33}, 12, 33, id="one token more than 2 blocks"),
        pytest.param({"block_size": 1}, 400, 100, id="blocks of one token"),
        pytest.param({"block_size": 128}, 4, 100, id="blocks longer than a request"),
        pytest.param({"model_limit": None}, 1024, 4096, id="a model without a limit"),
        pytest.param({"model_limit": None, "max_model_len": 8000}, 2000, 8000, id="beyond 4096"),
        pytest.param({"num_blocks": 500}, 500, 100, id="more blocks than needed"),
        pytest.param({"num_blocks": 500, "budget": 0}, 500, 100, id="blocks whatever fits"),
        pytest.param({"num_blocks": 7}, 7, 100, id="blocks for one request"),
        pytest.param({"num_blocks": 6}, 6, 96, id="too few blocks for the model's limit"),
        pytest.param({"num_blocks": 1, "block_size": 2}, 1, 2, id="the shortest request"),
        pytest.param({"budget": 20 * BLOCK}, 20, 100, id="what fits"),
        pytest.param({"budget": 20 * BLOCK - 1}, 19, 100, id="what fits, rounded down"),
        pytest.param({"budget": 3 * BLOCK}, 3, 48, id="less than one request of the model's limit"),
        pytest.param(
            {"budget": 6 * BLOCK, "dtype": torch.bfloat16}, 12, 100, id="half the bytes a number"
        ),
        pytest.param({"budget": 2 * BLOCK, "max_model_len": 32}, 2, 32, id="just what was asked"),
    ],
)
def test_the_pool_holds_what_is_asked_for_and_fits(
    changes: dict[str, Any], num_blocks: int, max_model_len: int
) -> None:
    assert size(**changes) == PoolSize(num_blocks, max_model_len)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"max_model_len": 101},
            "max_model_len=101 exceeds the 100 positions that the model was made for",
            id="beyond the model",
        ),
        pytest.param(
            {"max_model_len": 80, "num_blocks": 4},
            "max_model_len=80 needs 5 KV blocks of 16 tokens, and there is room for 4: lower "
            "max_model_len, or raise num_blocks if memory allows",
            id="too few blocks",
        ),
        pytest.param(
            {"max_model_len": 80, "budget": 5 * BLOCK - 1},
            "max_model_len=80 needs 5 KV blocks of 16 tokens, and there is room for 4: lower "
            "max_model_len, or raise num_blocks if memory allows",
            id="too little memory",
        ),
        pytest.param(
            {"budget": BLOCK - 1},
            "the KV cache has room for 0 blocks of 16 tokens, too few for even the shortest "
            "request: raise num_blocks, or free memory",
            id="no memory",
        ),
        pytest.param(
            {"num_blocks": 1, "block_size": 1},
            "the KV cache has room for 1 blocks of 1 tokens, too few for even the shortest "
            "request: raise num_blocks, or free memory",
            id="one token",
        ),
    ],
)
def test_what_cannot_be_held_is_an_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        size(**changes)
    assert str(error.value) == words


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine: 1000 KiB can be had, 400 KiB of them free; no container."""
    (tmp_path / "meminfo").write_text(
        "MemTotal:       4000 kB\nMemFree:         400 kB\nMemAvailable:   1000 kB\n"
    )
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def confine(machine: Path, limit: str, used: int, stat: str = "") -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(stat)


def test_free_memory_is_what_the_kernel_calls_available(machine: Path) -> None:
    assert free_memory(CPU) == 1000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        pytest.param("max", 10**6, "", 1000 * 1024, id="no limit"),
        pytest.param("5000000", 10**6, "", 1000 * 1024, id="a limit above the machine's"),
        pytest.param("700000", 400000, "anon 400000\n", 300000, id="a limit"),
        pytest.param(
            "700000",
            690000,
            "anon 90000\nfile 600000\ninactive_file 200000\nactive_file 400000\n",
            610000,
            id="a limit that cached files fill",
        ),
        pytest.param("700000", 800000, "anon 800000\n", 0, id="a limit that is exceeded"),
        pytest.param("nonsense", 1, "", 1000 * 1024, id="unreadable limit"),
        pytest.param("700000", 1, "a line\nof three words\n", 1000 * 1024, id="unreadable use"),
    ],
)
def test_a_containers_limit_counts(
    machine: Path, limit: str, used: int, stat: str, free: int
) -> None:
    confine(machine, limit, used, stat)
    assert free_memory(CPU) == free


def test_free_memory_without_proc_is_half_of_what_is_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1001}.get)
    assert free_memory(CPU) == 2050048


def test_free_memory_of_this_machine_is_less_than_it_has() -> None:
    import os

    assert 0 < free_memory(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_free_memory_of_a_gpu_is_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 123, 456

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert free_memory(torch.device("cuda", 1)) == 123
    assert asked == [torch.device("cuda", 1)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_dummy_step_runs_as_many_rows_as_a_full_one(family: str) -> None:
    target = load_target(tiny_models.BUILDERS[family]())
    rows: list[tuple[int, int, int]] = []

    @dataclass(frozen=True)
    class Watched:
        decoder: Any

        def forward(
            self, input_ids: Any, output_rows: Any, cache: Any, metadata: Any, capture: Any
        ) -> Any:
            logits = self.decoder.forward(input_ids, output_rows, cache, metadata, capture)
            rows.append((len(input_ids), int(metadata.positions.max()) + 1, len(logits)))
            assert logits.isfinite().all()
            return logits

    watched = replace(target, decoder=Watched(target.decoder))
    memory.dummy_step(watched, 300, 24)
    memory.dummy_step(watched, 5, 24)
    assert rows == [(300, tiny_models.MAX_POSITIONS, 24), (5, 5, 5)]
