"""Drafts through static buffers beside eager ones, both with the kernels in Triton's interpreter.

The drafter is a layer of attention with random weights, the texts grow as if drafts were accepted
now and then, and what CUDA would capture runs as it is (`static_passes.Captured`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import tiny_models
import torch
from static_passes import Captured, kernels_on_cpu

from foresay.core.config import SamplingParams
from foresay.core.llm import LLM
from foresay.core.messages import SamplingData
from foresay.core.proposer import (
    Draft,
    DraftInput,
    DraftRequest,
    KVLayer,
    KVRows,
    Needs,
)
from foresay.core.worker.capture import Capture
from foresay.core.worker.chain import Member, ProposerChain
from foresay.core.worker.drafting import draft
from foresay.core.worker.kv_cache import KVCache, LayerKV
from foresay.core.worker.proposing import GuardedProposer
from foresay.core.worker.target import TargetModel, load_target
from foresay.core.worker.tree_drafting import TreeDrafter

VOCAB_SIZE = tiny_models.VOCAB_SIZE
BLOCK_SIZE, NUM_BLOCKS = 4, 80
ROOM = 80  # positions of a request, at most 4 requests
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
WIDTH = HEADS * HEAD_DIM


class Layer:
    """A drafter of one layer. `hidden` goes in and out normed, so that drafts stay apart."""

    def __init__(self, hidden_size: int, *, takes_hidden: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * shape[-2] ** -0.5

        self.embeddings = torch.randn(VOCAB_SIZE, hidden_size, generator=generator)
        self.query, self.out = random(hidden_size, WIDTH), random(WIDTH, hidden_size)
        self.key, self.value = (random(hidden_size, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.places = torch.randn(ROOM, hidden_size, generator=generator)
        self.head = random(hidden_size, VOCAB_SIZE) * 4
        self.takes_hidden = takes_hidden
        self.num_calls = 0

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: KVRows, step: int
    ) -> torch.Tensor:
        assert step >= 0
        assert (hidden is not None) == self.takes_hidden
        self.num_calls += 1
        x = self.embeddings[token_ids] + self.places[rows.positions]
        if hidden is not None:
            x = x + hidden
        parts = [
            (x @ matrix).view(len(x), -1, HEAD_DIM) for matrix in (self.query, self.key, self.value)
        ]
        attended = rows.attend(0, parts[0], parts[1], parts[2], scale=HEAD_DIM**-0.5)
        return torch.nn.functional.layer_norm(x + attended.flatten(1) @ self.out, x.shape[1:])

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        assert step >= 0
        return hidden @ self.head


class Proposer:
    """Drafts with a `Layer`: chains, trees, or chains that take tokens only."""

    def __init__(self, kind: str, hidden_size: int, *, sample: bool = False) -> None:
        self.layer = Layer(hidden_size, takes_hidden=kind != "tokens")
        self.kind, self.sample = kind, sample
        self.trees = TreeDrafter(4, sample=sample)

    def needs(self) -> Needs:
        return Needs(
            hidden_state=self.kind != "tokens",
            kv_layers=(KVLayer(KV_HEADS, HEAD_DIM),),
            sampled=self.sample,
            tree=self.kind == "tree",
            draft_slots=int(self.kind == "tokens"),
        )

    def propose(self, batch: DraftInput) -> Draft:
        hidden = batch.hidden_states
        if self.kind == "tree":
            assert hidden is not None
            return self.trees.draft(batch, self.layer, hidden=hidden)
        shifted = self.kind != "tokens"
        return draft(batch, self.layer, hidden=hidden, shifted=shifted, sample=self.sample)

    def dummy_run(self, batch: DraftInput) -> None:
        self.propose(batch)

    def release(self, req_id: str) -> None:
        self.trees.release(req_id)


@dataclass
class Engine:
    """A proposer over a cache of its own, handed what the core hands over."""

    target: TargetModel
    proposer: Proposer
    k: int
    cache: KVCache = field(init=False)
    member: Member = field(init=False)
    chain: ProposerChain = field(init=False)
    handed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layer = LayerKV(KV_HEADS, HEAD_DIM, HEAD_DIM)
        self.cache = KVCache(
            self.target.kv_layout, NUM_BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"),
            [layer],
        )  # fmt: skip
        needs = self.proposer.needs()
        guarded = GuardedProposer(
            self.proposer, name="toy", owner="tests", vocab_size=VOCAB_SIZE, strict=True,
            may_branch=needs.tree,
        )  # fmt: skip
        self.member = Member(guarded, needs, self.k, self.proposer.dummy_run)
        self.chain = ProposerChain(
            [self.member], VOCAB_SIZE, hidden_size=self.target.hidden_size, cache=self.cache
        )

    def step(
        self, texts: dict[str, list[int]], ks: dict[str, int], temperature: float
    ) -> dict[str, tuple[list[int], list[int] | None]]:
        requests, sampling = [], {}
        for number, (name, k) in enumerate(ks.items()):
            ids = texts[name]
            start = self.handed.get(name, 0)
            num_rows = len(ids) - 1 - start
            capture = Capture(hidden_state=True, layers=())
            capture.put_hidden(
                torch.stack([features(ids[: p + 1]) for p in range(start, len(ids) - 1)])
            )
            self.chain.add_features(name, start, capture, range(num_rows))
            self.handed[name] = len(ids) - 1
            requests.append(DraftRequest(name, tuple(ids), 1, k, num_prompt_tokens=1))
            sampling[name] = SamplingData(
                temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=number, min_tokens=0,
                stop_token_ids=(),
            )  # fmt: skip
        found = self.chain.propose(requests, sampling, self.slots)
        return {name: (each.token_ids, each.parents) for name, each in found.items()}

    def slots(self, req_id: str, num_positions: int) -> np.ndarray:
        """Of a request: every 4th block from its own on."""
        blocks = "abcd".index(req_id) + 4 * np.arange(ROOM // BLOCK_SIZE)
        return (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:num_positions]


def features(token_ids: Sequence[int]) -> torch.Tensor:
    """What the target leaves at a position: it depends on the tokens up to it."""
    generator = torch.Generator().manual_seed(hash(tuple(token_ids)))
    return torch.nn.functional.layer_norm(torch.randn(48, generator=generator), [48])


@dataclass(frozen=True)
class Compared:
    """A step: the drafts of both, which buckets were replayed, and how many passes ran eagerly."""

    eager: dict[str, tuple[list[int], list[int] | None]]
    static: dict[str, tuple[list[int], list[int] | None]]
    buckets: list[int]
    num_eager_passes: int  # of the one with static buffers
    num_passes: int  # of the other one
    same_kv: bool  # whether the caches are equal but for the block that takes padding


@torch.inference_mode()
def compare_drafts(
    kind: str,
    steps: Sequence[dict[str, int]],
    k: int = 5,
    temperature: float | None = None,
    extent: dict[str, int] | None = None,
) -> list[Compared]:
    """Draft for the requests of `steps`, by name their k, over texts that grow from step to step.

    temperature: None: the likeliest, without a sampler. extent: None: what an engine would take,
    for 3 requests of 40 positions.
    """
    module: Any = import_module("foresay.core.worker.triton_draft_graphs")
    target = load_target(tiny_models.llama(num_hidden_layers=1))
    sample = temperature is not None
    engines = [
        Engine(target, Proposer(kind, target.hidden_size, sample=sample), k) for _ in range(2)
    ]
    eager, static = engines
    texts = {name: [7 * i + 3 for i in range(2 + 3 * n)] for n, name in enumerate("abcd")}
    compared = []
    with kernels_on_cpu():
        captured = Captured()
        sizes = module.Extent(**extent) if extent else module.extent_of(static.member, 3, 40)
        static.member.passes = module.capture_draft_graphs(
            target, static.member, static.member.layers, static.cache, sizes, capturing=captured
        )
        assert static.member.passes is not None
        for static_pass in static.member.passes.passes:
            launch = static_pass.launch
            assert static_pass.is_right()
            static_pass.launch = lambda: None
            assert not static_pass.is_right()
            static_pass.launch = launch
        buckets = sizes.buckets[::-1]
        for number, ks in enumerate(steps):
            captured.num_replays[:] = [0] * len(buckets)
            before = [engine.proposer.layer.num_calls for engine in engines]
            first, second = (
                engine.step(texts, ks, 0.0 if temperature is None else temperature)
                for engine in engines
            )
            calls = [
                engine.proposer.layer.num_calls - num
                for engine, num in zip(engines, before, strict=True)
            ]
            replays = captured.num_replays
            compared.append(
                Compared(
                    first,
                    second,
                    [size for size, n in zip(buckets, replays, strict=True) for _ in range(n)],
                    calls[1] - sum(replays),
                    calls[0],
                    _same_kv(eager.cache, static.cache),
                )
            )
            for place, name in enumerate(ks):
                accepted = first.get(name, ([], None))[0][: (number + place) % 3]
                texts[name] += [*accepted, (31 * number + place) % VOCAB_SIZE]
    return compared


def _same_kv(one: KVCache, other: KVCache) -> bool:
    [a], [b] = one.proposer_layers, other.proposer_layers
    end = one.null_slot
    return torch.allclose(a.slots[:end], b.slots[:end], rtol=1e-5, atol=1e-5)


def cannot_capture(device: torch.device) -> Any:
    raise RuntimeError(f"no graphs on {device}")


def engine_drafts(
    model: str | int,
    proposer: str,
    settings: dict[str, Any],
    prompts: Sequence[list[int]],
    num_tokens: int,
    fails: bool = False,
) -> tuple[list[list[int]], list[dict[str, list[int]]], int]:
    """Generate with an engine that takes the CPU for a GPU; the target's passes are not captured.

    model: a folder, or how many layers a tiny Llama has. fails: nothing can be captured. Returns
    the texts, the drafts of all steps, and how many passes were replayed.
    """
    module: Any = import_module("foresay.core.worker.triton_capture")
    of_target: Any = import_module("foresay.core.worker.triton_graphs")
    captured, in_cuda, propose = Captured(), module.in_cuda, ProposerChain.propose
    memory, of_target.memory_of_graphs = of_target.memory_of_graphs, lambda *arguments: None
    module.in_cuda = cannot_capture if fails else lambda device: captured
    drafts: list[dict[str, list[int]]] = []

    def noting(self: ProposerChain, *arguments: Any) -> Any:
        found = propose(self, *arguments)
        drafts.append({name: each.token_ids for name, each in found.items()})
        return found

    ProposerChain.propose = noting  # type: ignore[method-assign]
    try:
        with (
            kernels_on_cpu(),
            LLM(
                tiny_models.llama(num_hidden_layers=model) if isinstance(model, int) else model,
                proposer, max_num_seqs=2, max_model_len=64,
                num_blocks=16, strict=True, adaptive=False, row_invariant=False, **settings,
            ) as llm,
        ):  # fmt: skip
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            results = llm.generate(list(prompts), params)
            texts = [list(result.outputs[0].token_ids) for result in results]
    finally:
        ProposerChain.propose = propose  # type: ignore[method-assign]
        module.in_cuda, of_target.memory_of_graphs = in_cuda, memory
    return texts, drafts, sum(captured.num_replays)
