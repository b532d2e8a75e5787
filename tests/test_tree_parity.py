"""Trees that hold the right continuation somewhere, in any engine: the text is plain decoding's.

The drafter here knows the text and hides it among wrong tokens, in trees of every shape, so that
deep paths of any kind are accepted and their KV is moved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import tiny_models
import torch

from foresay import LLM, SamplingParams
from foresay.core.proposer import Draft, DraftInput, DraftRequest, Needs, ProposerConfig
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.kv_cache import KVCache

VOCAB = 50
NUM_TOKENS = 40
Shape = Callable[[random.Random, int], list[int]]


def any_tree(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(-1, place) for place in range(n)]


def mostly_deep(rng: random.Random, n: int) -> list[int]:
    return [rng.choice([place - 1, place - 1, rng.randrange(-1, place)]) for place in range(n)]


def side_branch(rng: random.Random, n: int) -> list[int]:
    """A chain of wrong tokens first, then another that may be right."""
    return [-1 if place == n // 2 else place - 1 for place in range(n)]


def bush(rng: random.Random, n: int) -> list[int]:
    return [-1] * n


def comb(rng: random.Random, n: int) -> list[int]:
    """A path with a leaf beside each of its nodes, the leaf first."""
    return [-1 if place < 2 else (place // 2) * 2 - 1 for place in range(n)]


SHAPES: dict[str, Shape] = {
    shape.__name__: shape for shape in (any_tree, mostly_deep, side_branch, bush, comb)
}


class Oracle:
    """Drafts the text that it was told, hidden in trees."""

    needs = Needs(tree=True)
    texts: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}
    shape: ClassVar[Shape] = any_tree
    p_wrong: ClassVar[float] = 0.15

    def __init__(self, config: ProposerConfig) -> None:
        self.rng = random.Random(1)

    def propose(self, batch: DraftInput) -> Draft:
        trees = [self.tree(request) for request in batch.requests]
        return Draft([ids for ids, _ in trees], [parents for _, parents in trees])

    def tree(self, request: DraftRequest) -> tuple[list[int], list[int]]:
        rng, ids = self.rng, list(request.token_ids)
        text = [
            *ids[: request.num_prompt_tokens],
            *self.texts[tuple(ids[: request.num_prompt_tokens])],
        ]
        if request.k == 0:
            return [], []
        parents = type(self).shape(rng, request.k)
        right: dict[int, bool] = {-1: True}
        depth: dict[int, int] = {-1: 0}
        has_right: set[int] = set()
        tokens: list[int] = []
        beside: dict[int, set[int]] = {}
        last_child = {parent: place for place, parent in enumerate(parents)}
        for place, parent in enumerate(parents):
            depth[place] = depth[parent] + 1
            at = len(ids) + depth[parent]
            taken = beside.setdefault(parent, set())
            wanted = text[at] if right[parent] and at < len(text) else None
            # The right one comes somewhere among its siblings, often as the last of them.
            is_right = wanted is not None and parent not in has_right and (
                place == last_child[parent] or rng.random() < 0.3
            ) and rng.random() > self.p_wrong  # fmt: skip
            choices = [t for t in range(VOCAB) if t not in taken and t != wanted]
            token = wanted if is_right else rng.choice(choices)
            assert token is not None
            right[place] = is_right
            if is_right:
                has_right.add(parent)
            taken.add(token)
            tokens.append(token)
        kept = [place for place in range(len(tokens)) if depth[place] <= request.max_depth]
        places = {-1: -1} | {place: number for number, place in enumerate(kept)}
        return [tokens[p] for p in kept], [places[parents[p]] for p in kept]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {
        "llama": tiny_models.llama(vocab_size=VOCAB),
        "gemma2": tiny_models.gemma2(vocab_size=VOCAB),  # sliding windows, soft caps
        "gpt2": tiny_models.gpt2(vocab_size=VOCAB),  # transformers' own modules
    }


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    Oracle.texts = {}
    Oracle.shape = any_tree


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (3, 21, 9, 17, 30)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=8, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(
            temperature=0.9, seed=9, repetition_penalty=1.3, frequency_penalty=0.5,
            max_tokens=NUM_TOKENS, ignore_eos=True,
        ),
    ]  # fmt: skip
    return prompts, params


def outputs(llm: LLM) -> tuple[list[list[int]], list[Any]]:
    prompts, params = asked()
    found = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [one.token_ids for one in found], [one.logprobs for one in found]


SETTINGS: list[dict[str, Any]] = [
    {"block_size": 4},
    {"block_size": 16, "chunked_prefill_size": 5, "num_blocks": 9},
    {"block_size": 1, "adaptive": True},
]
CASES = [("llama", shape, number) for shape in SHAPES for number in range(3)]
CASES += [(model, shape, 1) for model in ("gemma2", "gpt2") for shape in ("mostly_deep", "comb")]


@pytest.fixture(scope="module")
def plain(models: dict[str, Any]) -> dict[str, tuple[list[list[int]], list[Any]]]:
    found = {}
    for name, model in models.items():
        with LLM(model=model, proposer=None, max_model_len=128) as llm:
            found[name] = outputs(llm)
    return found


@pytest.mark.parametrize(("model", "shape", "number"), CASES)
def test_the_text_is_plain_decodings(
    models: dict[str, Any],
    plain: dict[str, tuple[list[list[int]], list[Any]]],
    model: str,
    shape: str,
    number: int,
) -> None:
    expected, logprobs = plain[model]
    prompts, _ = asked()
    Oracle.texts = {tuple(p): ids for p, ids in zip(prompts, expected, strict=True)}
    Oracle.shape = SHAPES[shape]
    settings: dict[str, Any] = {"adaptive": False, **SETTINGS[number]}
    with LLM(
        model=models[model],
        proposer=Oracle,
        num_speculative_tokens=14,
        max_model_len=128,
        strict=True,
        **settings,
    ) as llm:
        ids, found = outputs(llm)
        stats = llm.stats
    assert ids == expected
    assert [one is None for one in found] == [one is None for one in logprobs]
    for ours, theirs in zip(found, logprobs, strict=True):
        for our, their in zip(ours or [], theirs or [], strict=True):
            assert list(our) == list(their)
            assert list(our.values()) == pytest.approx(list(their.values()), abs=1e-4)
    assert stats.num_accepted_tokens > 20
    assert not stats.faults
    assert stats.mean_draft_depth is not None
    assert stats.nodes_per_step is not None
    if not settings["adaptive"]:
        assert stats.nodes_per_step > stats.mean_draft_depth


@pytest.mark.parametrize("model", ["llama", "gemma2", "gpt2"])
def test_kv_after_accepted_trees_is_that_of_a_fresh_prefill(
    models: dict[str, Any], model: str
) -> None:
    """Bit for bit, where rows are invariant."""
    prompt = list(range(11))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings: dict[str, Any] = {
        "model": models[model],
        "max_model_len": 128,
        "block_size": 4,
        "enable_prefix_caching": False,
    }
    with LLM(proposer=None, **settings) as plain:
        text = plain.generate([prompt], params)[0].outputs[0].token_ids
    Oracle.texts = {tuple(prompt): text}
    Oracle.shape = mostly_deep
    with LLM(
        proposer=Oracle, num_speculative_tokens=12, strict=True, adaptive=False, **settings
    ) as llm:
        runner: Any = llm._engine._runner
        chunks = []
        for chunk in llm.stream(prompt, params):
            chunks += chunk.token_ids
            if len(chunks) > 25:
                break_state = next(iter(runner._states.values()))
                num_computed = break_state.num_computed_tokens
                slots = break_state.blocks.slots(num_computed).copy()
                tokens = list(break_state.token_ids)[:num_computed]
                found = [layer.slots[slots].clone() for layer in runner.cache.layers]
                break
        assert llm.stats.num_accepted_tokens > 5
        invariant = llm.stats.row_invariant
        target = runner.target
    assert tokens == [*prompt, *text][:num_computed]
    cache = KVCache(target.kv_layout, 40, 4, target.dtype, target.device)
    positions = np.arange(num_computed)
    metadata = AttentionMetadata.build(
        [positions], [positions], positions, cache.null_slot, target.attention_rules, target.device
    )
    with torch.inference_mode():
        target.forward(torch.tensor(tokens), torch.tensor([num_computed - 1]), cache, metadata)
    for ours, layer in zip(found, cache.layers, strict=True):
        if invariant:
            assert torch.equal(ours, layer.slots[:num_computed])
        else:
            torch.testing.assert_close(ours, layer.slots[:num_computed], atol=1e-4, rtol=1e-4)
