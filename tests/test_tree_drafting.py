"""The loop that drafts trees: each node against the drafter run along the node's own path."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from foresay.core.messages import SamplingData
from foresay.core.proposer import Draft, DraftInput, DraftRequest, KVLayer, KVRows, draft_depths
from foresay.core.worker.calibration import Calibration
from foresay.core.worker.draft_sampler import DrawRequest, StepSampler
from foresay.core.worker.draft_tree import DraftTree
from foresay.core.worker.drafter_kv import PrivateKV, StepKV
from foresay.core.worker.drafting import draft
from foresay.core.worker.tree_drafting import TreeDrafter

VOCAB_SIZE, HIDDEN_SIZE = 30, 8


class Drafter:
    """One layer of attention over tokens, states and positions, with random weights."""

    def __init__(self, *, sharpness: float = 2.0, vocab_size: int = VOCAB_SIZE) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.embeddings = random(VOCAB_SIZE, HIDDEN_SIZE)
        self.features = random(VOCAB_SIZE, HIDDEN_SIZE)
        self.places = random(64, HIDDEN_SIZE)
        self.query, self.key, self.value = (random(HIDDEN_SIZE, HIDDEN_SIZE) for _ in range(3))
        self.head = random(HIDDEN_SIZE, vocab_size) * sharpness
        self.num_rows: list[int] = []  # of each pass

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: KVRows, step: int
    ) -> torch.Tensor:
        assert hidden is not None
        assert step == len(self.num_rows)
        self.num_rows.append(len(token_ids))
        x = self.enter(token_ids, hidden, rows.positions)
        parts = (x @ matrix for matrix in (self.query, self.key, self.value))
        query, key, value = (part[:, None] for part in parts)
        return torch.tanh(x + rows.attend(0, query, key, value, scale=0.5)[:, 0])

    def enter(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        return torch.tanh(self.embeddings[token_ids] + hidden + self.places[positions])

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        assert step < len(self.num_rows)
        return hidden @ self.head

    def reference(self, token_ids: Sequence[int], path: Sequence[int]) -> torch.Tensor:
        """Logits after `path` behind committed tokens: the whole sequence anew, without a cache."""
        tokens = [*token_ids[1:], *path]
        hidden = self.features[torch.tensor(token_ids[:-1])]
        for end in range(len(token_ids) - 1, len(tokens) + 1):
            x = self.enter(torch.tensor(tokens[:end]), hidden[:end], torch.arange(end))
            scores = (x @ self.query) @ (x @ self.key).T * 0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            state = torch.tanh(x + scores.softmax(-1) @ (x @ self.value))
            hidden = torch.cat([hidden, state[-1:]])
        return state[-1] @ self.head


@dataclass
class Engine:
    """Hands the rows of several requests to the loop, as the core does; each starts at once."""

    drafter: Drafter = field(default_factory=Drafter)
    trees: TreeDrafter = field(default_factory=lambda: TreeDrafter(4, sample=False))
    handed: dict[str, int] = field(default_factory=dict)
    kv: PrivateKV = field(
        default_factory=lambda: PrivateKV(
            [KVLayer(1, HIDDEN_SIZE)], 4000, torch.float32, torch.device("cpu")
        )
    )

    def step(
        self, *requests: DraftRequest, sampler: StepSampler | None = None, **settings: Any
    ) -> Draft:
        self.drafter.num_rows.clear()
        batch = self.batch(requests, sampler)
        positions, starts = batch.positions, batch.row_starts
        assert positions is not None
        assert starts is not None
        tokens = [
            request.token_ids[position]
            for i, request in enumerate(requests)
            for position in positions[starts[i] : starts[i + 1]].tolist()
        ]
        hidden = self.drafter.features[torch.tensor(tokens, dtype=torch.int64)]
        return self.trees.draft(batch, self.drafter, hidden=hidden, **settings)

    def batch(
        self, requests: Sequence[DraftRequest], sampler: StepSampler | None = None
    ) -> DraftInput:
        starts, positions = [0], list[int]()
        for request in requests:
            assert self.kv.hold(request.req_id, 60)
            first, end = self.handed.get(request.req_id, 0), len(request.token_ids) - 1
            positions += range(first, end)
            starts.append(len(positions))
            self.handed[request.req_id] = end
        view = StepKV(
            self.kv._cache.layers, self.kv._cache.null_slot, requests, self.kv._slots,
            draft_slots=0, device=torch.device("cpu"),
        )  # fmt: skip
        return DraftInput(
            requests,
            positions=torch.tensor(positions, dtype=torch.int64),
            row_starts=starts,
            kv=view,
            sampler=sampler,
        )

    def grown(self, name: str) -> Any:
        """What was made of a request: all its candidates, drafted or not."""
        return self.trees._last[name]


def asks(name: str, token_ids: Sequence[int], k: int, **settings: Any) -> DraftRequest:
    return DraftRequest(name, tuple(token_ids), num_new_tokens=1, k=k, **settings)


def path(tree: DraftTree, number: int) -> list[int]:
    found: list[int] = []
    while number >= 0:
        found.insert(0, tree.token_ids[number])
        number = tree.parents[number]
    return found


def check(
    engine: Engine, request: DraftRequest, token_ids: list[int], parents: list[int] | None
) -> int:
    """Compare every candidate of a request with the reference; return how many there were."""
    growth = engine.grown(request.req_id)
    tree: DraftTree = growth.tree
    for number, log_prob in enumerate(growth.drafter_log_probs):
        *above, token_id = path(tree, number)
        logits = engine.drafter.reference(request.token_ids, above)
        assert log_prob == pytest.approx(float(logits.log_softmax(-1)[token_id]), abs=1e-4)
    # What is drafted is the best of them, and no more than was asked for.
    best = tree.best(request.k)
    assert len(token_ids) == len(best) <= request.k
    assert parents is not None
    assert (token_ids, parents) == tree.draft(best)
    assert not token_ids or max(draft_depths(parents)) <= min(4, request.max_depth)
    assert len(growth.row_parents) <= max(request.k - 1, 0)
    return len(growth.drafter_log_probs)


HISTORIES = {"a": [4, 9, 1], "b": [8, 8, 8, 2, 20, 11], "c": [1, 2], "d": [6, 3, 3, 29, 3]}


@pytest.mark.parametrize("sharpness", [0.3, 1.5, 6.0])
def test_candidates_have_the_probabilities_of_their_paths(
    sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several steps, of requests with their own k and depth, accepted in part and not."""
    monkeypatch.setattr(Calibration, "see", lambda *_: None)
    engine = Engine(Drafter(sharpness=sharpness))
    histories = {name: list(ids) for name, ids in HISTORIES.items()}
    ks = itertools.cycle((16, 5, 0, 2, 32, 1, 7, 3))
    num_compared, shapes = 0, set()
    for i in range(6):
        requests = [
            asks(name, ids, k, max_depth=max(1, 3 - i) if name == "d" else 99)
            for (name, ids), k in zip(histories.items(), ks, strict=False)
        ]
        found = engine.step(*requests)
        assert found.parents is not None
        for request, ids, parents in zip(requests, found.token_ids, found.parents, strict=True):
            if request.k:
                num_compared += check(engine, request, ids, parents)
                shapes.add(tuple(parents or ()))
                histories[request.req_id] += ids[:1] if i % 2 else [i, 28]
            else:
                assert (ids, parents) == ([], None)
                histories[request.req_id].append(13)
    assert num_compared > 150
    assert len(shapes) > 5


@pytest.mark.parametrize("k", [1, 3, 8])
def test_of_depth_two_it_finds_the_best_of_all_trees(k: int) -> None:
    for seed in range(6):
        engine = Engine(Drafter(sharpness=1.0 + seed / 2))
        history = [seed, 2 * seed, 7]
        found = engine.step(asks("a", history, k, max_depth=2))

        whole = DraftTree()
        first = engine.drafter.reference(history, []).log_softmax(-1).tolist()
        for token_id, log_prob in enumerate(first):
            parent = whole.add(-1, token_id, log_prob)
            behind = engine.drafter.reference(history, [token_id]).log_softmax(-1).tolist()
            for other, more in enumerate(behind):
                whole.add(parent, other, more)
        best = {tuple(path(whole, number)) for number in whole.best(k)}
        tree = engine.grown("a").tree
        assert {tuple(path(tree, number)) for number in tree.best(k)} == best
        assert len(found.token_ids[0]) == k


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_drafter_that_is_sure_drafts_a_chain(k: int) -> None:
    engine = Engine(Drafter(sharpness=60.0))
    requests = [asks(name, ids, k) for name, ids in HISTORIES.items()]
    found = engine.step(*requests)
    chains = Engine(Drafter(sharpness=60.0))
    batch = chains.batch(requests)
    tokens = torch.tensor([i for ids in HISTORIES.values() for i in ids[:-1]])
    expected = draft(
        batch, chains.drafter, hidden=chains.drafter.features[tokens], shifted=True, sample=False
    )
    assert found == Draft(expected.token_ids, [list(range(-1, k - 1))] * 4)
    # As many passes as a chain has, and not a row more.
    assert engine.drafter.num_rows == chains.drafter.num_rows == [12] + [4] * (k - 1)


@pytest.mark.parametrize(("k", "max_depth"), [(16, 5), (5, 5), (32, 4), (9, 2), (3, 7)])
def test_rows_are_as_many_as_there_are_positions_and_evenly_shared(k: int, max_depth: int) -> None:
    """Near its limit of slots: `StepKV` refuses a node more."""
    engine = Engine(Drafter(sharpness=0.2), TreeDrafter(max_depth, sample=False))
    engine.step(asks("a", HISTORIES["b"], k))
    assert sum(engine.drafter.num_rows[1:]) <= k - 1
    num_passes = min(max_depth, k) - 1
    assert len(engine.drafter.num_rows) - 1 <= num_passes
    assert engine.drafter.num_rows[1] == min((k - 1) // num_passes, 8)


def test_it_stops_where_no_node_can_get_among_the_best() -> None:
    engine = Engine(Drafter(sharpness=0.0))  # all tokens are alike: none deeper is as likely
    found = engine.step(asks("a", [1, 2, 3], 8), asks("b", [5, 6], 0))
    assert found.parents == [[-1] * 8, None]
    assert [len(set(ids)) for ids in found.token_ids] == [8, 0]
    assert engine.drafter.num_rows == [3]


def test_a_tree_ends_where_it_is_not_sure_enough() -> None:
    engine, other = Engine(), Engine()
    request = asks("a", HISTORIES["a"], 16)
    [whole] = other.step(request).token_ids
    sixth = sorted(other.grown("a").tree.log_probs, reverse=True)[5]
    found = engine.step(replace(request, min_confidence=math.exp(sixth - 1e-6)))
    assert found.token_ids[0] == whole[:6]
    assert sum(engine.drafter.num_rows) < sum(other.drafter.num_rows)


def test_rows_that_are_not_finite_have_no_children() -> None:
    class Broken(Drafter):
        def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
            logits = super().logits(hidden, step)
            logits[0] = math.nan if step else math.inf
            logits[1, 5:] = -math.inf
            return logits

    engine = Engine(Broken())
    found = engine.step(*(asks(name, ids, 8) for name, ids in HISTORIES.items()))
    assert found.token_ids[0] == []
    assert set(found.token_ids[1]) <= set(range(VOCAB_SIZE))
    roots = [n for n, p in enumerate(engine.grown("b").tree.parents) if p < 0]
    assert {engine.grown("b").tree.token_ids[n] for n in roots} == set(range(5))
    assert [len(ids) for ids in found.token_ids[1:]] == [8, 8, 8]


def test_draft_ids_are_the_targets_and_two_of_one_are_one_node() -> None:
    engine = Engine(Drafter(vocab_size=12))
    mapping = torch.tensor([3, 5, 3, 9, 11, 5, 21, 22, 23, 24, 25, 26])
    found = engine.step(asks("a", [4, 9, 1], 12), draft_to_target=mapping)
    assert found.parents is not None
    parents = found.parents[0]
    assert parents is not None
    siblings = list(zip(parents, found.token_ids[0], strict=True))
    assert len(set(siblings)) == len(siblings) == 12
    assert set(found.token_ids[0]) <= set(mapping.tolist())
    logits = engine.drafter.reference([4, 9, 1], [])
    assert found.token_ids[0][0] == int(mapping[logits.argmax()])


# -- requests that are sampled -------------------------------------------------------------------


def drawn(name: str, num_tokens: int, k: int, temperature: float) -> DrawRequest:
    sampling = SamplingData(
        temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=5, min_tokens=0,
        stop_token_ids=(),
    )  # fmt: skip
    return DrawRequest(name, sampling, num_tokens, k)


def test_sampled_requests_beside_greedy_ones_get_the_samplers_children() -> None:
    requests = [asks("a", HISTORIES["a"], 9), asks("b", HISTORIES["b"], 16), asks("c", [1, 2], 0)]
    sampler = StepSampler(
        [
            drawn(request.req_id, len(request.token_ids), request.k, temperature)
            for request, temperature in zip(requests, (0.0, 1.0, 1.0), strict=True)
        ],
        VOCAB_SIZE,
    )
    engine = Engine(Drafter(sharpness=0.7), TreeDrafter(4, sample=True))
    found = engine.step(*requests, sampler=sampler)
    greedy = Engine(Drafter(sharpness=0.7)).step(*requests)
    assert found.parents is not None
    assert greedy.parents is not None
    assert (found.token_ids[0], found.parents[0]) == (greedy.token_ids[0], greedy.parents[0])
    assert found.token_ids[1] != greedy.token_ids[1]
    assert sampler.drawn(1) is None
    # The first child of each node that was gone on from is the coupled draw behind its path.
    growth = engine.grown("b")
    for node, children in growth.children.items():
        if not children:
            continue
        above = path(growth.tree, node)
        alone = StepSampler([drawn("b", 6 + len(above), 1, 1.0)], VOCAB_SIZE)
        logits = engine.drafter.reference(HISTORIES["b"], above)
        assert growth.tree.token_ids[children[0]] == int(alone.draw(logits[None], 0, [0]))
    assert len(growth.children) > 3


# -- what is learnt ------------------------------------------------------------------------------


def test_it_learns_from_what_followed_whether_or_not_it_was_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    seen: list[tuple[float, bool]] = []
    monkeypatch.setattr(Calibration, "see", lambda _, p, right: seen.append((p, right)))
    history = HISTORIES["a"]
    engine.step(asks("a", history, 3))
    growth = engine.grown("a")
    roots, first = growth.children[-1], growth.tree.token_ids[0]
    below = growth.children[0]
    second = growth.tree.token_ids[below[-1]]

    engine.step(asks("a", [*history, first, second, 0], 0))
    assert seen == [
        *((growth.drafter_log_probs[n], n == roots[0]) for n in roots),
        *((growth.drafter_log_probs[n], n == below[-1]) for n in below),
    ]
    seen.clear()
    engine.step(asks("a", [*history, first, second, 0, 1], 0))
    assert seen == []  # a tree is learnt from once


def test_it_learns_nothing_of_released_requests_or_before_tokens_followed() -> None:
    engine = Engine()
    engine.step(asks("a", HISTORIES["a"], 3), asks("b", HISTORIES["b"], 3))
    engine.trees.release("a")
    engine.trees.release("never seen")
    engine.step(asks("a", [7, 7, 7, 7], 0), asks("b", HISTORIES["b"], 0))
    assert set(engine.trees._last) == set(engine.trees._calibrations) == {"b"}
    assert engine.trees._calibrations["b"]._seen == [0] * 12


def test_a_drafter_that_is_too_sure_of_itself_is_given_wider_trees() -> None:
    engine = Engine(Drafter(sharpness=4.0))
    request = asks("new", [9, 9, 4], 8)
    [narrow] = engine.step(request).parents or [[]]
    history = [1, 2, 3]
    for _ in range(30):
        if len(history) > 40:  # a new text goes on as the old one did
            engine.handed.pop("a")
            history = history[-3:]
            engine.trees._last.clear()
        engine.step(asks("a", history, 8))
        tree = engine.grown("a").tree
        second = next((n for n in range(1, len(tree)) if tree.parents[n] < 0), None)
        history = [*history, 11 if second is None else tree.token_ids[second]]  # never its best
    engine.handed.pop("a")
    engine.trees._last.clear()
    [wide] = engine.step(replace(request, req_id="a")).parents or [[]]
    assert narrow is not None
    assert wide is not None
    assert narrow.count(-1) < wide.count(-1)
