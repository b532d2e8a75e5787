"""Passes over static buffers beside eager ones, both with the kernels in Triton's interpreter.

What CUDA would capture runs as it is: `Captured` stands for a graph, and sees to it that the work
reads nothing back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import tiny_models
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foresay.core.config import SamplingParams
from foresay.core.llm import LLM
from foresay.core.proposer import Draft, DraftInput, Needs
from foresay.core.worker.attention import AttentionMetadata, TreeLayout
from foresay.core.worker.capture import Capture
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel, load_target

BLOCK_SIZE = 4
NUM_BLOCKS = 64
SMALL = (16, 16, 32)  # rows of a tile, keys of a block, keys of a split


@dataclass(frozen=True)
class Rows:
    """Rows of a request behind `length` keys; with parents the last ones are nodes of a tree."""

    length: int
    num_rows: int
    parents: Sequence[int] = ()


class NoHostReads(TorchDispatchMode):
    """Fails where a number is read from a tensor, as a CUDA graph's capture does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} while a graph is captured")
        return func(*args, **kwargs or {})


class Captured:
    """What is captured, and how often it was replayed."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with NoHostReads():
            work()
        place = len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[place] += 1
            work()

        return replay


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Take the CPU for a device with Triton kernels, which cut rows and keys small."""
    worker = "foresay.core.worker"
    askers: list[Any] = [
        import_module(f"{worker}.{name}") for name in ("attention_layout", "attention", "build")
    ]
    checking: Any = import_module(f"{worker}.triton_check")
    module: Any = import_module(f"{worker}.triton_attention")
    plain = askers[0].triton_backend, checking.are_right, module.Tiling.choose
    for asker in askers:
        asker.triton_backend = lambda device: checking
    checking.are_right = lambda kind: True
    module.Tiling.choose = lambda *arguments: module.Tiling(*SMALL)
    try:
        yield
    finally:
        for asker in askers:
            asker.triton_backend = plain[0]
        checking.are_right, module.Tiling.choose = plain[1:]


def make_batch(requests: Sequence[Rows], seed: int) -> dict[str, Any]:
    """Arguments of `Graphs.run`, for requests in blocks of their own."""
    rng = np.random.default_rng(seed)
    blocks = iter(rng.permutation(NUM_BLOCKS).tolist())
    batch: dict[str, Any] = {"input_ids": [], "positions": [], "slots": [], "slot_mapping": []}
    batch["trees"] = []
    for request in requests:
        mine = [next(blocks) for _ in range(-(-request.length // BLOCK_SIZE))]
        slots = (np.array(mine)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
        slots = slots[: request.length]
        start = request.length - request.num_rows
        positions = np.arange(start, request.length)
        tree = None
        if request.parents:
            first = request.length - len(request.parents)
            depths: list[int] = []
            for parent in request.parents:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            positions[first - start :] = first + np.array(depths)
            nodes = np.arange(start - first, len(request.parents)).clip(min=-1)
            tree = TreeLayout(first, np.array(request.parents), nodes)
        batch["input_ids"] += rng.integers(0, tiny_models.VOCAB_SIZE, request.num_rows).tolist()
        batch["positions"].append(positions)
        batch["slots"].append(slots)
        batch["slot_mapping"].append(slots[start:])
        batch["trees"].append(tree)
    return batch


def new_cache(target: TargetModel) -> KVCache:
    """Full of noise: what a request has behind it."""
    cache = KVCache(target.kv_layout, NUM_BLOCKS, BLOCK_SIZE, target.dtype, target.device)
    generator = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        layer.slots[: cache.null_slot].normal_(generator=generator)
    return cache


def eager(
    target: TargetModel, cache: KVCache, batch: dict[str, Any], capture: Capture | None
) -> torch.Tensor:
    metadata = AttentionMetadata.build(
        batch["positions"],
        batch["slots"],
        np.concatenate(batch["slot_mapping"]),
        cache.null_slot,
        target.attention_rules,
        target.device,
        batch["trees"],
    )
    input_ids = torch.tensor(batch["input_ids"])
    return target.forward(input_ids, torch.arange(len(input_ids)), cache, metadata, capture)


@torch.inference_mode()
def rightness() -> list[bool]:
    """Whether a pass finds right what launches it, what does nothing, and what errs a little."""
    module: Any = import_module("foresay.core.worker.triton_graphs")
    target = load_target(tiny_models.llama(num_hidden_layers=1))
    with kernels_on_cpu():
        forward = module.StaticForward(target, new_cache(target), module.Extent(2, 4, 48), 4)
        found = [forward.is_right()]
        forward.launch = lambda: None
        found.append(forward.is_right())

        def errs() -> None:
            forward.work()
            forward.outputs.logits[0, 5] += forward.outputs.logits.abs().max() / 10

        forward.launch = errs
        return [*found, forward.is_right()]


@torch.inference_mode()
def compare(
    family: str,
    model: dict[str, Any],
    batches: Sequence[Sequence[Rows]],
    extent: dict[str, int],
    wanted: tuple[bool, Sequence[int]] | None = None,
) -> tuple[list[int], list[bool]]:
    """Run batches one after another over one cache each, eagerly and over static buffers.

    Returns the rows of the bucket that took each (0: none did), and whether all that came out was
    equal to the bit: logits, hidden states, and the cache but for the block that takes padding.
    """
    module: Any = import_module("foresay.core.worker.triton_graphs")
    target = load_target(tiny_models.BUILDERS[family](**model))
    caches = new_cache(target), new_cache(target)

    def captures() -> list[Capture | None]:
        if wanted is None:
            return [None, None]
        return [Capture(hidden_state=wanted[0], layers=wanted[1]) for _ in range(2)]

    taken_by, are_equal = [], []
    with kernels_on_cpu():
        captured = Captured()
        graphs = module.capture_graphs(
            target, caches[1], module.Extent(**extent), captures()[0], capturing=captured
        )
        sizes = module.Extent(**extent).buckets[::-1]
        same = [_same_caches(*caches)]  # warming up and capturing leave nothing behind
        for seed, requests in enumerate(batches):
            batch = make_batch(requests, seed)
            captured.num_replays[:] = [0] * len(sizes)
            in_eager, in_static = captures()
            logits = graphs.run(**batch, capture=in_static)
            taken_by.append(int(np.dot(captured.num_replays, sizes)))
            if logits is None:
                are_equal.append(True)
                continue
            same = [torch.equal(logits, eager(target, caches[0], batch, in_eager))]
            same.append(_same_caches(*caches))
            if in_eager is not None and in_static is not None:
                if in_eager.hidden_state:
                    same.append(torch.equal(in_eager.hidden, in_static.hidden))
                layers = in_eager.layers
                if layers:
                    same.append(torch.equal(in_eager.streams(layers), in_static.streams(layers)))
            are_equal.append(all(same))
    return taken_by, are_equal


def _same_caches(one: KVCache, other: KVCache) -> bool:
    return all(
        torch.equal(a.slots[: one.scratch_slot], b.slots[: one.scratch_slot])
        for a, b in zip(one.layers, other.layers, strict=True)
    )


class KnowsTheText:
    """Drafts trees from the texts that it was told, beside wrong nodes; wants hidden states."""

    needs = Needs(hidden_state=True, aux_layers=(1,), tree=True)
    texts: ClassVar[list[list[int]]] = []

    def __init__(self, config: Any) -> None:
        pass

    def propose(self, batch: DraftInput) -> Draft:
        assert batch.hidden_states is not None
        assert batch.aux_hidden_states is not None
        self.features.append((batch.hidden_states.clone(), batch.aux_hidden_states.clone()))
        drafts, parents = [], []
        for request in batch.requests:
            tokens = list(request.token_ids)
            [text] = [text for text in self.texts if text[: len(tokens)] == tokens]
            nodes = [*text[len(tokens) :][:1], 0, *text[len(tokens) + 1 :][:1]]
            kept = request.k if len(text) > len(tokens) + 1 and request.max_depth > 1 else 0
            drafts.append(nodes[:kept])
            parents.append([-1, -1, 0][:kept])
        return Draft(drafts, parents)

    features: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []


def engine_texts(
    prompts: Sequence[list[int]],
    num_tokens: int,
    known: Sequence[list[int]] | None,
    settings: dict[str, Any],
) -> tuple[list[list[int]], list[tuple[torch.Tensor, torch.Tensor]], list[int], int]:
    """Generate with an engine that takes the CPU for a GPU, drafting from the texts if any.

    Returns the outputs, the features that the proposer saw, how often each graph was replayed, and
    how many drafts were accepted.
    """
    module: Any = import_module("foresay.core.worker.triton_capture")
    captured, in_cuda = Captured(), module.in_cuda
    module.in_cuda = lambda device: captured
    KnowsTheText.features, KnowsTheText.texts = [], list(known or [])
    if known is not None:
        settings = {"num_speculative_tokens": 3, "adaptive": False, **settings}
    try:
        with (
            kernels_on_cpu(),
            LLM(
                tiny_models.llama(num_hidden_layers=2, eos_token_id=None),
                None if known is None else KnowsTheText,
                max_num_seqs=2,
                max_model_len=64,
                num_blocks=16,
                strict=True,
                row_invariant=False,
                **settings,
            ) as llm,
        ):
            captured.num_replays[:] = [0] * len(captured.num_replays)  # they were tried
            params = SamplingParams(temperature=0, max_tokens=num_tokens)
            results = llm.generate(list(prompts), params)
            outputs = [list(result.outputs[0].token_ids) for result in results]
            accepted = llm.stats.num_accepted_tokens
    finally:
        module.in_cuda = in_cuda
    return outputs, KnowsTheText.features, captured.num_replays, accepted
