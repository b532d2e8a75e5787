"""A pass of a Llama on a GPU against what reading its weights takes; eager, and as a CUDA graph.

usage: python tests/bench_gpu.py [--rows 1,8] [--batch-sizes 1,16] [--context 1024] [--layers 32]
           [--hidden 4096] [--intermediate 14336] [--heads 32,8,128] [--vocab 128256]
           [--repeats 50] [--tokens 128]

The model has the shape of Llama 3 8B unless told otherwise, and random weights made on the device:
no checkpoint is needed. `floor` is the time in which a device copy of 1 GiB in the same run moves
as many bytes, read and written, as the matrices of the model have: the weights are read once a
pass. The keys and values that attention reads are not in it (`bench_attention` has those).

A pass has B requests with a context of the given length and `rows` rows each. `eager` and `graph`
are whole passes by the clock, from the lists of a step to logits that are there, the batch made and
sent anew each time; `replay` is the graph alone. `over floor` is `graph` over the floor: at B = 1
with 1 and 8 rows 1.35 is wanted. `differ` is the largest difference of the logits, of the largest
logit. Last, what a step of the engine takes, plain decoding of one text.

Where there is no GPU it can be tried with TRITON_INTERPRET=1 in the environment and --device cpu
--dtype float32 --layers 2 --hidden 64 --intermediate 96 --heads 4,2,16 --vocab 160 --context 20
--batch-sizes 1 --repeats 1 --tokens 4; its figures mean nothing then.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from bench_attention import copy_bandwidth
from static_passes import Captured, eager, kernels_on_cpu

from foresay.core.config import SamplingParams
from foresay.core.llm import LLM
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel, load_target
from foresay.core.worker.triton_graphs import Extent, Graphs, capture_graphs

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Pass:
    """What a pass took, in seconds."""

    batch: int
    rows: int
    eager: float
    graph: float
    replay: float
    difference: float  # of the logits


@dataclass(frozen=True)
class Figures:
    """All that is measured; times in seconds."""

    bandwidth: float  # bytes per second
    weights: int  # bytes
    passes: list[Pass]
    steps: dict[str, float]  # of the engine, with and without graphs

    @property
    def floor(self) -> float:
        return self.weights / self.bandwidth


def build_model(options: argparse.Namespace) -> Any:
    """A random model on the device."""
    num_heads, num_kv_heads, head_dim = options.heads
    config = transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max(8192, 2 * options.context),
        eos_token_id=None,
    )
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype)
        )
    return model.eval()


def read_bytes(model: Any) -> int:
    """Bytes of the matrices that a pass reads in full: all but the embeddings."""
    embeddings = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embeddings and p.ndim == 2)


def random_batch(vocab_size: int, batch: int, context: int, rows: int) -> dict[str, Any]:
    """Arguments of `Graphs.run`: requests whose blocks lie anywhere."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(batch * -(-context // BLOCK_SIZE)).reshape(batch, -1, 1)
    slots = (blocks * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(batch, -1)[:, :context]
    return {
        "input_ids": rng.integers(0, vocab_size, batch * rows).tolist(),
        "positions": [np.arange(context - rows, context)] * batch,
        "slots": list(slots),
        "slot_mapping": list(slots[:, context - rows :]),
        "trees": [None] * batch,
    }


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median time by the clock until the device is done."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for number in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        if number:  # the first compiles
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_pass(
    target: TargetModel, options: argparse.Namespace, cache: KVCache, graphs: Graphs, batch: int,
    rows: int,
) -> Pass:  # fmt: skip
    made = random_batch(options.vocab, batch, options.context, rows)
    by_graph = graphs.run(**made, capture=None)
    assert by_graph is not None, "no graph takes it"
    by_graph = by_graph.clone()
    expected = eager(target, cache, made, None)
    difference = (by_graph - expected).abs().max() / expected.abs().max()
    forward = next(each for each in graphs.forwards if each.num_rows >= batch * rows)
    return Pass(
        batch=batch,
        rows=rows,
        eager=seconds(lambda: eager(target, cache, made, None), target.device, options.repeats),
        graph=seconds(lambda: graphs.run(**made, capture=None), target.device, options.repeats),
        replay=seconds(forward.launch, target.device, options.repeats),
        difference=float(difference),
    )


def step_seconds(model: Any, num_tokens: int, *, enforce_eager: bool) -> float:
    """What a step of the engine takes, while it decodes one text plainly."""
    with LLM(model, None, max_num_seqs=1, max_model_len=num_tokens + 16,
             enforce_eager=enforce_eager) as llm:  # fmt: skip
        times = []
        for _ in range(3):
            start = time.perf_counter()
            llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=num_tokens))
            times.append((time.perf_counter() - start) / num_tokens)
        return min(times)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> Figures:
    device = torch.device(options.device)
    with ExitStack() as stack:
        capturing = None
        if device.type == "cpu":
            stack.enter_context(kernels_on_cpu())
            capturing = Captured()
        model = build_model(options)
        target = load_target(model, row_invariant=False)
        largest = max(options.batch_sizes)
        num_blocks = largest * -(-options.context // BLOCK_SIZE)
        cache = KVCache(target.kv_layout, num_blocks, BLOCK_SIZE, target.dtype, device)
        for layer in cache.layers:
            layer.slots[: cache.null_slot].normal_()
        target.reserve(options.context)
        extent = Extent(largest, largest * max(options.rows), options.context)
        graphs = capture_graphs(target, cache, extent, capturing=capturing)
        assert graphs is not None, "nothing could be captured"
        passes = [
            measure_pass(target, options, cache, graphs, batch, rows)
            for batch in options.batch_sizes
            for rows in options.rows
        ]
        del graphs, cache, target
        return Figures(
            bandwidth=copy_bandwidth(device, options.repeats),
            weights=read_bytes(model),
            passes=passes,
            steps={
                how: step_seconds(model, options.tokens, enforce_eager=how == "eager")
                for how in (("eager", "graphs") if device.type == "cuda" else ("eager",))
            },
        )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=numbers, default=[1, 8])
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 16])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=numbers, default=[32, 8, 128], help="query, key, dimension")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    figures = measure(parse(arguments))
    print(
        f"copy {figures.bandwidth / 1e9:.0f} GB/s; weights {figures.weights / 1e9:.2f} GB; "
        f"floor {figures.floor * 1e3:.3f} ms"
    )
    print("     B  rows  eager ms  graph ms  replay ms  over floor   differ")
    for each in figures.passes:
        print(
            f"{each.batch:6} {each.rows:5} {each.eager * 1e3:9.3f} {each.graph * 1e3:9.3f} "
            f"{each.replay * 1e3:10.3f} {each.graph / figures.floor:11.2f} {each.difference:8.1e}"
        )
    for how, took in figures.steps.items():
        print(f"a step of the engine, {how}: {took * 1e3:.3f} ms, {took / figures.floor:.2f}")


if __name__ == "__main__":
    main()
