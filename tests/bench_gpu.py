"""Passes of a Llama and of a drafter on a GPU against what reading their weights takes.

Eager, and as CUDA graphs.

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
logit. Then passes of a drafter of one such layer and the model's output head, as eagle's and mtp's
heads are: what a token more makes a draft take, for B requests, from picking it to the next one's
logits; `replay` is the graph alone, `over floor` is over reading these matrices, and `same` the
part of the drafted tokens that are the same in both. Last, what a step of the engine takes, plain
decoding of one text.

Where there is no GPU it can be tried with TRITON_INTERPRET=1 in the environment and --device cpu
--dtype float32 --layers 2 --hidden 64 --intermediate 96 --heads 4,2,16 --vocab 160 --context 20
--batch-sizes 1 --repeats 1 --tokens 4; its figures mean nothing then.
"""

from __future__ import annotations

import argparse
import functools
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
from foresay.core.proposer import Draft, DraftInput, DraftRequest, KVLayer, KVRows, Needs
from foresay.core.worker.chain import Member
from foresay.core.worker.decoder import FastDecoder, Linear
from foresay.core.worker.drafter_kv import StepKV
from foresay.core.worker.drafting import draft
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.proposing import GuardedProposer
from foresay.core.worker.target import TargetModel, load_target
from foresay.core.worker.triton_capture import Capturing
from foresay.core.worker.triton_draft_graphs import DraftGraphs, capture_draft_graphs, extent_of
from foresay.core.worker.triton_graphs import Extent, Graphs, capture_graphs

BLOCK_SIZE = 16
NUM_DRAFTS = 5


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
class DrafterPass:
    """What a pass of the drafter took, in seconds."""

    batch: int
    eager: float
    graph: float
    replay: float
    same: float  # part of the drafted tokens


@dataclass(frozen=True)
class Figures:
    """All that is measured; times in seconds."""

    bandwidth: float  # bytes per second
    weights: int  # bytes
    passes: list[Pass]
    drafter_weights: int  # bytes
    drafter_passes: list[DrafterPass]
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


class Drafter:
    """A head like EAGLE's, made of the model's first layer and output head: all is random."""

    def __init__(self, decoder: FastDecoder) -> None:
        size = decoder.hidden_size
        self.decoder = decoder
        weight = torch.randn(size, 2 * size, device=decoder.device).to(decoder.dtype) * size**-0.5
        self.fc = Linear(weight, None, decoder.dtype, pack=True, row_invariant=False)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: KVRows, step: int
    ) -> torch.Tensor:
        assert hidden is not None
        decoder = self.decoder
        embedded = torch.nn.functional.embedding(token_ids, decoder.embeddings)
        cos, sin = decoder.rotary.rows(rows.positions)
        x = self.fc(torch.cat([embedded, hidden], dim=-1))
        return decoder.layers[0](x, cos, sin, functools.partial(rows.attend, 0))

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        return self.decoder.lm_head(self.decoder.norm(hidden))

    def propose(self, batch: DraftInput) -> Draft:
        return draft(batch, self, hidden=batch.hidden_states, shifted=True, sample=False)

    dummy_run = propose


def drafter_bytes(options: argparse.Namespace) -> int:
    """Bytes of the matrices that a pass of the drafter reads."""
    size, (num_heads, num_kv_heads, head_dim) = options.hidden, options.heads
    attention = 2 * (num_heads + num_kv_heads) * head_dim
    rows = 2 * size + attention + 3 * options.intermediate + options.vocab
    return int(size * rows * getattr(torch, options.dtype).itemsize)


def measure_drafter(
    target: TargetModel, options: argparse.Namespace, batch: int, capturing: Capturing | None
) -> DrafterPass:
    """What a token more takes, of a draft for `batch` requests; eager and by graphs."""
    assert isinstance(target.decoder, FastDecoder)
    drafter = Drafter(target.decoder)
    kv = target.kv_layout[0]
    needs = Needs(hidden_state=True, kv_layers=(KVLayer(kv.num_kv_heads, kv.head_dim),))
    guarded = GuardedProposer(
        drafter, name="drafter", owner="bench", vocab_size=options.vocab, strict=True
    )
    member = Member(guarded, needs, NUM_DRAFTS, drafter.dummy_run)
    num_blocks = batch * -(-options.context // BLOCK_SIZE)
    cache = KVCache([kv], num_blocks, BLOCK_SIZE, target.dtype, target.device, [kv])
    cache.proposer_layers[0].slots[: cache.null_slot].normal_()
    slots = random_batch(options.vocab, batch, options.context, 1)["slots"]
    graphs = capture_draft_graphs(
        target,
        member,
        cache.proposer_layers,
        cache,
        extent_of(member, batch, options.context),
        capturing=capturing,
    )
    assert graphs is not None, "nothing could be captured"
    num_tokens = options.context - NUM_DRAFTS
    hidden = torch.randn(batch, options.hidden, device=target.device).to(target.dtype)
    positions = torch.full((batch,), num_tokens - 2, device=target.device)

    def drafts(k: int, passes: DraftGraphs | None) -> list[list[int]]:
        requests = [DraftRequest(f"{i}", range(num_tokens), 1, k) for i in range(batch)]
        view = StepKV(
            cache.proposer_layers,
            cache.null_slot,
            requests,
            lambda req_id, num_positions: slots[int(req_id)][:num_positions],
            draft_slots=0,
            device=target.device,
            passes=passes,
        )
        made = drafter.propose(
            DraftInput(
                requests,
                hidden_states=hidden,
                positions=positions,
                row_starts=range(batch + 1),
                kv=view,
            )
        )
        return made.token_ids

    def pass_seconds(passes: DraftGraphs | None) -> float:
        few, many = (
            seconds(functools.partial(drafts, k, passes), target.device, options.repeats)
            for k in (1, NUM_DRAFTS)
        )
        return (many - few) / (NUM_DRAFTS - 1)

    one, other = (torch.tensor(drafts(NUM_DRAFTS, passes)) for passes in (None, graphs))
    static = next(each for each in graphs.passes if each.num_rows >= batch)
    return DrafterPass(
        batch=batch,
        eager=pass_seconds(None),
        graph=pass_seconds(graphs),
        replay=seconds(static.launch, target.device, options.repeats),
        same=float((one == other).float().mean()),
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
        del graphs, cache
        drafter_passes = [
            measure_drafter(target, options, batch, capturing) for batch in options.batch_sizes
        ]
        del target
        return Figures(
            bandwidth=copy_bandwidth(device, options.repeats),
            weights=read_bytes(model),
            passes=passes,
            drafter_weights=drafter_bytes(options),
            drafter_passes=drafter_passes,
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
    floor = figures.drafter_weights / figures.bandwidth
    print(
        f"a drafter's passes; its weights {figures.drafter_weights / 1e9:.2f} GB; "
        f"floor {floor * 1e3:.3f} ms\n     B  eager ms  graph ms  replay ms  over floor  same"
    )
    for drafted in figures.drafter_passes:
        print(
            f"{drafted.batch:6} {drafted.eager * 1e3:9.3f} {drafted.graph * 1e3:9.3f} "
            f"{drafted.replay * 1e3:10.3f} {drafted.graph / floor:11.2f} {drafted.same:5.2f}"
        )
    for how, took in figures.steps.items():
        print(f"a step of the engine, {how}: {took * 1e3:.3f} ms, {took / figures.floor:.2f}")


if __name__ == "__main__":
    main()
