"""How many KV blocks, and how long a request may be: sizes the pool to what is asked for and fits.

It reads free memory, on a GPU after a full step's worth of it was used once; it keeps nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from foresay.core.errors import ConfigError
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.capture import Capture
from foresay.core.worker.kv_cache import KVCache, LayerKV, block_bytes
from foresay.core.worker.target import TargetModel

CPU_SHARE = 0.25  # of the memory that is free once the weights are loaded
DENSE_SHARE = 0.125  # of it, at most, for dense copies of what is running (`dense_kv`)
GPU_SHARE = 0.90
DEFAULT_MAX_MODEL_LEN = 4096  # for a model that states no limit

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool's size and the longest request it is sized for."""

    num_blocks: int
    max_model_len: int


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _cgroup_room())
    # Elsewhere half of what is built in is a safe guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_room() -> int:
    """Return what a container's limit (cgroup v2) leaves; a huge number without one.

    Files in the page cache, the weights' among them, count as used but give way when need be.
    """
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # "max": none
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        sizes = {key: int(size) for key, size in map(str.split, lines)}
    except (OSError, ValueError):
        return _UNLIMITED
    cached = sizes.get("active_file", 0) + sizes.get("inactive_file", 0)
    return max(0, limit - used + cached)


@torch.inference_mode()
def dummy_step(
    target: TargetModel, num_rows: int, num_output_rows: int, capture: Capture | None = None
) -> None:
    """Run one step of `num_rows` rows, `num_output_rows` of them with logits, that leaves no trace.

    A GPU's allocator keeps what such a step needs, so that the pool does not take that memory.
    """
    cache = KVCache(target.kv_layout, 1, 1, target.dtype, target.device)
    longest = min(target.max_model_len or num_rows, num_rows)
    lengths = [min(longest, num_rows - start) for start in range(0, num_rows, longest)]
    metadata = AttentionMetadata.build(
        [np.arange(length) for length in lengths],
        [np.full(length, cache.null_slot) for length in lengths],
        np.full(num_rows, cache.scratch_slot),
        cache.null_slot,
        target.attention_rules,
        target.device,
    )
    input_ids = torch.zeros(num_rows, dtype=torch.int64, device=target.device)
    output_rows = torch.arange(min(num_output_rows, num_rows), device=target.device)
    target.forward(input_ids, output_rows, cache, metadata, capture)


def size_pool(
    *,
    layout: list[LayerKV],
    dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    model_limit: int | None,
    max_model_len: int | None,
    num_blocks: int | None,
) -> PoolSize:
    """Settle the number of blocks and the longest request, both given or left open.

    budget: bytes the pool may take if `num_blocks` is left open. `max_model_len` left open is the
    model's own limit, lowered to what one request can get; given, it must be held. Raises
    `ConfigError` where that is impossible.
    """
    if max_model_len is not None and model_limit is not None and max_model_len > model_limit:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {model_limit} positions that the model "
            "was made for"
        )
    wanted = max_model_len or model_limit or DEFAULT_MAX_MODEL_LEN
    per_request = -(-wanted // block_size)
    if num_blocks is None:
        fitting = budget // block_bytes(layout, block_size, dtype)
        num_blocks = min(max_num_seqs * per_request, fitting)
    if num_blocks < per_request:
        if max_model_len is not None:
            raise ConfigError(
                f"max_model_len={max_model_len} needs {per_request} KV blocks of {block_size} "
                f"tokens, and there is room for {num_blocks}: lower max_model_len, or raise "
                "num_blocks if memory allows"
            )
        wanted = num_blocks * block_size
    if wanted < 2:
        raise ConfigError(
            f"the KV cache has room for {num_blocks} blocks of {block_size} tokens, too few for "
            "even the shortest request: raise num_blocks, or free memory"
        )
    return PoolSize(num_blocks, wanted)
