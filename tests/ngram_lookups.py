"""The ngram plugin's Triton lookup for tests: what it does in the interpreter, and its compilation.

Run by pytest by its name, in the interpreter, it has the rules that foresay has for proposers:
`check_conformance`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.testing import ProposerConformance, tiny_llama
from foresay_ngram import NgramConfig
from foresay_ngram.proposer import NgramProposer


class TestConformanceInTriton(ProposerConformance):
    """All rules, drafting chains by the kernels; with one model, for the interpreter is slow."""

    proposer_name = "ngram"
    settings: ClassVar = {"tree": False, "lookup": "triton"}
    num_output_tokens = 10

    def models(self) -> Mapping[str, Callable[[], Any]]:
        return {"llama": tiny_llama}


def check_conformance() -> int:
    """Try the rules in this process, which has the interpreter; pytest's exit code."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    # Half of the time. Other tests keep these checks.
    builder.options = replace(builder.options, sanitize_overflow=False)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, __file__]))


@dataclass(frozen=True)
class Ask:
    """One request of a step."""

    req_id: str
    token_ids: Sequence[int]
    k: int
    prediction: Sequence[int] = ()

    def request(self) -> DraftRequest:
        return DraftRequest(self.req_id, self.token_ids, 1, self.k, self.prediction, 1)


@dataclass(frozen=True)
class Step:
    """Requests that end or are preempted, then those that are drafted for."""

    released: Sequence[str]
    asks: Sequence[Ask]


def random_steps(seed: int, num_steps: int, most_requests: int = 9) -> list[Step]:
    """Requests come, grow, miss steps, change rows, are preempted and end; ids are used again."""
    rng = random.Random(seed)
    texts: dict[str, list[int]] = {}
    preempted: dict[str, list[int]] = {}
    steps = []
    for _ in range(num_steps):
        released = [req_id for req_id in texts if rng.random() < 0.1]
        for req_id in released:
            text = texts.pop(req_id)
            if rng.random() < 0.5:
                preempted[req_id] = text
        for req_id in [req_id for req_id in preempted if rng.random() < 0.4]:
            texts[req_id] = preempted.pop(req_id)
        for req_id in map(str, range(most_requests)):
            if req_id not in texts and req_id not in preempted and rng.random() < 0.3:
                texts[req_id] = [rng.randrange(4) for _ in range(rng.choice((1, 3, 20, 90)))]
        for text in texts.values():
            grown = rng.choice((1, 1, 2, 6))
            start = rng.randrange(len(text))
            copied = text[start : start + grown] if rng.random() < 0.7 else []
            text += copied or [rng.randrange(4) for _ in range(grown)]
        present = [req_id for req_id in texts if rng.random() < 0.8]
        rng.shuffle(present)
        asks = [
            Ask(r, list(texts[r]), rng.choice((0, 1, 5, 40)), [1, 2, 0, 1] if r == "0" else ())
            for r in present
        ]
        steps.append(Step(released, asks))
    return steps


def replay(
    steps: Sequence[Step], settings: dict[str, Any], device: str = "cpu"
) -> list[list[list[int]]]:
    """What a proposer drafts in each of the steps."""
    proposer = NgramProposer(NgramConfig(tree=False, **settings))
    proposer.load(SimpleNamespace(device=torch.device(device)))  # type: ignore[arg-type]
    drafts = []
    for step in steps:
        for req_id in step.released:
            proposer.release(req_id)
        batch = DraftInput([ask.request() for ask in step.asks])
        drafts.append(proposer.propose(batch).token_ids)
    return drafts


def search(
    texts: Sequence[Sequence[int]],
    k: int,
    bounds: tuple[int, int],
    block: int,
    device: str = "cpu",
) -> list[list[int]]:
    """What the kernels draft for texts that arrive in two parts, blocks being so short."""
    lookup: Any = import_module("foresay_ngram.triton_lookup")
    histories = lookup.HistoryLookup(torch.device(device), *bounds, block=block)
    drafts: list[list[int]] = []
    for part in (0.5, 1.0):
        known = [text[: max(int(part * len(text)), 1)] for text in texts]
        drafts = histories.drafts([Ask(str(i), ids, k).request() for i, ids in enumerate(known)])
    return drafts


class Watched(list[int]):
    """A history that notes which of its tokens are read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.read: list[int] = []

    def __getitem__(self, key: Any) -> Any:
        self.read += range(*key.indices(len(self)))
        return super().__getitem__(key)


def tokens_read_by_a_second_step(num_tokens: int) -> list[int]:
    """Which tokens of a history of so many are read when it has grown by two."""
    lookup: Any = import_module("foresay_ngram.triton_lookup")
    histories = lookup.HistoryLookup(torch.device("cpu"), 1, 5)
    history = Watched([i % 50 for i in range(num_tokens)])
    histories.drafts([Ask("a", history, 3).request()])
    history.read.clear()
    history += [0, 1]
    assert histories.drafts([Ask("a", history, 3).request()]) == [[2, 3, 4]]
    return history.read


def sizes_over_time(counts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The histories' shape after steps of so many requests of so many tokens; others are released.

    It is at least (2, 16) here. A request's text is its number, repeated, so that a history in
    another's row would show.
    """
    lookup: Any = import_module("foresay_ngram.triton_lookup")
    least = lookup._FEWEST_ROWS, lookup._SHORTEST_WIDTH
    lookup._FEWEST_ROWS, lookup._SHORTEST_WIDTH = 2, 16
    try:
        return _sizes(lookup.HistoryLookup(torch.device("cpu"), 1, 5), counts)
    finally:
        lookup._FEWEST_ROWS, lookup._SHORTEST_WIDTH = least


def _sizes(histories: Any, counts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    sizes = []
    held = 0
    for num_requests, num_tokens in counts:
        for number in range(num_requests, held):
            histories.release(str(number))
        held = num_requests
        asks = [Ask(str(i), [i] * num_tokens, 2) for i in range(num_requests)]
        drafts = histories.drafts([ask.request() for ask in asks])
        assert drafts == [[i, i] for i in range(num_requests)]
        sizes.append(tuple(histories._store.tokens.shape))
    return sizes


def drafts_around_an_interruption(num_kept: int) -> list[list[int]]:
    """What is drafted when a move was interrupted after so many histories, and asked for again."""
    lookup: Any = import_module("foresay_ngram.triton_lookup")
    histories = lookup.HistoryLookup(torch.device("cpu"), 1, 5)
    few, many = ([Ask(str(i), [i] * 9, 2).request() for i in range(n)] for n in (3, 70))
    histories.drafts(few)
    held, num_made = lookup._Held, 0

    def interrupted(*fields: int) -> Any:
        nonlocal num_made
        num_made += 1
        if num_made > num_kept:
            raise KeyboardInterrupt
        return held(*fields)

    lookup._Held = interrupted
    try:
        histories.drafts(many)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not interrupted")
    finally:
        lookup._Held = held
    drafts: list[list[int]] = histories.drafts(many)
    return drafts


def load_with_wrong_kernels() -> None:
    """Load a proposer while the kernels find something else than the index."""
    module: Any = import_module("foresay_ngram.triton_lookup")
    right = module.HistoryLookup.drafts
    module.HistoryLookup.drafts = lambda self, requests: [[1]] * len(requests)
    module._try.cache_clear()
    try:
        replay([], {"lookup": "triton"})
    finally:
        module.HistoryLookup.drafts = right


def compile_kernels() -> int:
    """Compile the kernels for an H100, which needs no GPU; return how many."""
    module: Any = import_module("foresay_ngram.triton_kernels")
    compiler: Any = import_module("triton.compiler")
    backends: Any = import_module("triton.backends.compiler")
    kernels = (module.append_kernel, module.search_kernel, module.draft_kernel)
    for kernel in kernels:
        types = {"best_ptr": "*i64", "block": "constexpr"}
        names = kernel.arg_names
        signature = {n: types.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names}
        source = compiler.ASTSource(
            fn=kernel, signature=signature, constexprs={(names.index("block"),): 1024}
        )
        compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32))
    return len(kernels)
