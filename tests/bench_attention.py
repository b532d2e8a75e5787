"""What attention reads per second: the Triton kernels against the torch path, on a GPU.

usage: python tests/bench_attention.py [--batch-sizes 1,16,64] [--contexts 1024,8192]
           [--rows 1,8,33] [--heads 32,8,128] [--tilings 32x64x512,...] [--shared] [--repeats 50]

Where there is no GPU it can be tried with TRITON_INTERPRET=1 in the environment and --device cpu
--dtype float32 --batch-sizes 2 --contexts 70 --rows 5 --heads 4,2,16 --repeats 1; its figures mean
nothing then.

A step of one layer: B requests with a context of the given length, each with `rows` query rows: 1
decodes, 8 verify a chain; `tree` says how long the same number of rows takes as the root and nodes
of a random tree. Bytes are those the step must move: all keys and values of all requests once,
queries and results. The kernels are timed as a CUDA graph, by events over replays, with a layer's
cache of its own for each of several in turn, so that no cache of the device holds them; `torch` is
timed without a graph, on the same inputs. `copy` is a device copy of 1 GiB in the same run, its
bytes read and written. `of copy` is the kernels' share of it: 70 % is wanted at a context of 8192,
B >= 16. `host` is the host's part for 4 layers: the plan, made once a step, and the launches.

Last, one prompt of 2048 rows, in floating-point operations per second. `--tilings` tries others:
rows of a tile x keys of a block x keys of a split [x warps x stages]. `--shared`: with the work
items of the CUDA graphs, whose number does not follow the contexts (`worker.triton_graphs`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from foresay.core.worker.attention import (
    AttentionMetadata,
    AttentionRules,
    TreeLayout,
    paged_attention,
)
from foresay.core.worker.kv_cache import LayerCache, LayerKV
from foresay.core.worker.triton_attention import Tiling, TritonMetadata, attend, programs_of

NUM_LAYERS = 4  # caches in turn
PROMPT = 2048


class Step:
    """B requests with `rows` query rows each at the end of `context` keys."""

    def __init__(self, options: argparse.Namespace, size: tuple[int, int, int], tree: bool) -> None:
        batch, context, rows = size
        num_heads, num_kv_heads, head_dim = options.heads
        rng = np.random.default_rng(0)
        self.device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        blocks = rng.permutation(batch * -(-context // 16)).reshape(batch, -1, 1)
        self.slots = list((blocks * 16 + np.arange(16)).reshape(batch, -1)[:, :context] + 1)
        first = context - rows + 1
        self.trees: list[TreeLayout | None] = [None] * batch
        self.positions = [np.arange(context - rows, context)] * batch
        if tree:
            parents = np.array([rng.integers(-1, node) for node in range(rows - 1)], dtype=np.int64)
            depths: list[int] = [0]
            depths += [0] * len(parents)
            for node, parent in enumerate(parents):
                depths[node + 1] = depths[parent + 1] + 1
            self.trees = [TreeLayout(first, parents, np.arange(-1, rows - 1))] * batch
            self.positions = [first - 1 + np.array(depths)] * batch
        layer = LayerKV(num_kv_heads, head_dim, head_dim)
        num_slots = blocks.size * 16 + 1
        self.caches = [
            LayerCache(layer, torch.randn(num_slots, layer.width, device=self.device).to(dtype))
            for _ in range(NUM_LAYERS)
        ]
        query = torch.randn(batch * rows, num_heads, head_dim, device=self.device)
        self.query, self.scale = query.to(dtype), head_dim**-0.5
        self.max_items = None
        if options.shared:
            num_programs = -(-programs_of(self.device) // num_kv_heads)
            self.max_items = batch * rows + 2 * num_programs
        self.bytes = (batch * context * layer.width + 2 * query.numel()) * dtype.itemsize

    def metadata(self) -> TritonMetadata:
        made = TritonMetadata.build(self.positions, self.slots, self.trees, self.device)
        made.max_items = self.max_items
        return made

    def kernels(self, metadata: TritonMetadata, tiling: Tiling | None) -> None:
        for cache in self.caches:
            attend(self.query, cache, metadata, scale=self.scale, tiling=tiling)

    def torch_path(self) -> Callable[[], None]:
        rows = len(self.positions[0])
        mapping = np.concatenate([slots[-rows:] for slots in self.slots])
        metadata = AttentionMetadata.build(
            self.positions, self.slots, mapping, 0, AttentionRules(), self.device, self.trees
        )
        metadata.triton = None
        cache = self.caches[0]
        key, value = cache.key[mapping].clone(), cache.value[mapping].clone()

        def run() -> None:
            for cache in self.caches:
                paged_attention(self.query, key, value, cache, metadata, scale=self.scale)

        return run


def seconds(work: Callable[[], None], device: torch.device, repeats: int, *, graph: bool) -> float:
    """The median time of a layer, from `work` on all of them."""
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    times = []
    if device.type != "cuda":
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times) / NUM_LAYERS
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        work = captured.replay
        work()
    for _ in range(repeats):
        start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        work()
        end_event.record()
        torch.cuda.synchronize()
        times.append(start_event.elapsed_time(end_event) / 1000)
    return statistics.median(times) / NUM_LAYERS


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    source = torch.ones(2**28 if device.type == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(NUM_LAYERS):
            target.copy_(source)

    return 2 * source.nbytes / seconds(copy, device, repeats, graph=False)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def tilings(text: str) -> list[Tiling | None]:
    return [
        Tiling(*(int(n) for n in each.split("x"))) if each else None for each in text.split(",")
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 33])
    parser.add_argument("--heads", type=numbers, default=[32, 8, 128], help="query, key, dimension")
    parser.add_argument("--tilings", type=tilings, default=[None])
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    copy = copy_bandwidth(device, options.repeats)
    print(f"copy {copy / 1e9:.0f} GB/s")
    print(
        "     B  context  rows  tiling                 us     GB/s  of copy  tree us torch us host"
    )
    sizes = [(b, c, r) for b in options.batch_sizes for c in options.contexts for r in options.rows]
    for size in sizes:
        step, tree = Step(options, size, tree=False), Step(options, size, tree=True)
        step.kernels(step.metadata(), options.tilings[0])  # compiles
        in_torch = seconds(step.torch_path(), device, max(options.repeats // 5, 1), graph=False)
        start = time.perf_counter()
        step.kernels(step.metadata(), options.tilings[0])
        host = time.perf_counter() - start
        for tiling in options.tilings:
            times = []
            for each in (step, tree):
                made = each.metadata()
                work = lambda each=each, made=made, tiling=tiling: each.kernels(made, tiling)  # noqa: E731
                times.append(seconds(work, device, options.repeats, graph=True))
            rate = step.bytes / times[0]
            batch, context, rows = size
            print(
                f"{batch:6} {context:8} {rows:5}  {_shown(tiling):16} {times[0] * 1e6:8.1f} "
                f"{rate / 1e9:8.0f} {rate / copy:8.0%} {times[1] * 1e6:8.1f} {in_torch * 1e6:9.1f} "
                f"{host * 1e6:7.0f}",
                flush=True,
            )
    prompt = Step(options, (1, PROMPT, PROMPT) if device.type == "cuda" else (1, 70, 70), False)
    rows, operations = len(prompt.positions[0]), 4 * prompt.query.shape[1] * prompt.query.shape[2]
    for tiling in options.tilings:
        made = prompt.metadata()
        took = seconds(
            lambda made=made, tiling=tiling: prompt.kernels(made, tiling),  # type: ignore[misc]
            device, options.repeats, graph=True,
        )  # fmt: skip
        rate = operations * rows * (rows + 1) / 2 / took
        print(f"a prompt of {rows} rows, {_shown(tiling)}: {took * 1e6:.1f} us, "
              f"{rate / 1e12:.1f} TFLOP/s")  # fmt: skip


def _shown(tiling: Tiling | None) -> str:
    if tiling is None:
        return "default"
    parts = (tiling.block_m, tiling.block_n, tiling.split_len, tiling.num_warps, tiling.num_stages)
    return "x".join(map(str, parts))


if __name__ == "__main__":
    main()
