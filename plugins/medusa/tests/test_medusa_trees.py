"""Medusa's trees: which nodes are chosen, what the heads are worth, and whole engines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_heads import as_authors, as_reduced, random_heads, view

from foresay import LLM, SamplingParams
from foresay.core.errors import ModelError
from foresay.core.proposer import Draft, DraftChildren, DraftInput, DraftRequest
from foresay_medusa import MedusaConfig
from foresay_medusa.accuracies import FILE, NUM_RANKS, Accuracies
from foresay_medusa.measuring import Measuring
from foresay_medusa.proposer import MedusaProposer
from foresay_medusa.tree import best_tree

# -- which nodes ---------------------------------------------------------------------------------


def value_of(values: Sequence[Sequence[float]], ranks: Sequence[int]) -> float:
    product = 1.0
    for own, rank in zip(values, ranks, strict=False):
        product *= own[rank]
    return product


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), min_size=1, max_size=3),
    k=st.integers(1, 30),
    least=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_the_first_n_nodes_are_the_best_n_of_all(
    values: list[list[float]], k: int, least: float
) -> None:
    nodes = best_tree(values, k, least)
    ways: list[tuple[int, ...]] = []
    for parent, depth, rank in nodes:
        way = (*(() if parent < 0 else ways[parent]), rank)
        assert len(way) == depth + 1
        ways.append(way)
    assert len(set(ways)) == len(ways)
    every = [
        value_of(values, way)
        for depth in range(1, len(values) + 1)
        for way in itertools.product(*(range(len(own)) for own in values[:depth]))
    ]
    allowed = [value for value in every if value >= least]
    best = sorted(allowed, reverse=True)[:k]
    assert [value_of(values, way) for way in ways] == pytest.approx(best)


def test_a_tree_by_hand() -> None:
    # 0.6; 0.6 x 0.5; 0.2 at the root; 0.6 x 0.3; 0.2 x 0.5.
    assert best_tree([[0.6, 0.2], [0.5, 0.3]], 5) == [
        (-1, 0, 0),
        (0, 1, 0),
        (-1, 0, 1),
        (0, 1, 1),
        (2, 1, 0),
    ]
    assert best_tree([[0.2, 0.6]], 1) == [(-1, 0, 1)], "ranks need not be in the values' order"
    assert best_tree([[0.5, 0.0]], 5) == [(-1, 0, 0)], "what is worth nothing is no node"


# -- what heads are worth ------------------------------------------------------------------------


def test_probabilities_are_believed_until_more_is_known() -> None:
    accuracies = Accuracies.guess(2)
    assert accuracies.values(1, [0.5, 0.25, *[0.01] * 10]) == pytest.approx(
        [0.5, 0.25, *[0.01] * 10]
    )


def test_what_came_true_corrects_them_after_some_hundred_tokens() -> None:
    accuracies = Accuracies.guess(1)
    probabilities = [0.8, *[0.1] * 8]
    for number in range(255):
        accuracies.see(0, probabilities, 1 if number % 2 else None)
        assert accuracies.values(0, [0.8])[0] == 0.8
    accuracies.see(0, probabilities, None)
    first, second = accuracies.values(0, [0.8, 0.1])
    # 300 tokens before: 0.35 promised and right; 256 since: 0.8 promised, none right.
    assert first == pytest.approx(0.8 * 105 / (105 + 0.8 * 256))
    assert second == pytest.approx(0.1 * (30 + 127) / (30 + 25.6))
    assert accuracies.values(0, [1.0] * 12)[1] == 1.0, "no more than certain"


def test_measured_accuracies_are_kept_and_read(tmp_path: Path) -> None:
    measuring = Measuring(3)
    logits = torch.full((4, 40), -5.0)
    logits[:, 7], logits[:, 9] = 5.0, 3.0
    ids = torch.arange(40) + 100  # target ids
    labels = torch.tensor([107, 107, 109, 139])
    counts = torch.tensor([True, True, True, True])
    counts = measuring.add(0, logits, labels, counts, ids)
    assert counts.tolist() == [True, True, True, False], "a rank beyond the candidates ends it"
    counts = measuring.add(1, logits, labels, counts & torch.tensor([False, True, True, True]), ids)
    assert counts.tolist() == [False, True, True, False]
    measuring.save(tmp_path)
    fields = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert fields["tokens"] == [4, 2]  # nothing reached the third
    assert fields["heads"][0][:3] == [0.5, 0.25, 0.125]
    assert fields["heads"][1][:3] == [0.5, 0.5, 0.25]
    top = torch.softmax(logits[0], dim=0)
    assert fields["promised"][0][:2] == pytest.approx([float(top[7]), 0.125], abs=1e-4)

    accuracies = Accuracies.read(str(tmp_path), 3)
    found = accuracies.values(0, [float(top[7]), 0.125])
    assert found == pytest.approx([0.5, 0.25], rel=1e-3)
    assert accuracies.values(2, [0.3])[0] == pytest.approx(0.3), "one that is not there is guessed"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"heads": [[0.1]], "promised": [[0.1]], "tokens": [5]}', '{"heads": []}'],
)
def test_a_file_of_another_form_is_an_error_that_says_what_to_do(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"accuracies\.json' cannot be read: .*; delete it"):
        Accuracies.read(str(tmp_path), 2)


# -- the proposer --------------------------------------------------------------------------------


def loaded(folder: Path, **config: Any) -> MedusaProposer:
    proposer = MedusaProposer(MedusaConfig(drafter=str(folder), **config))
    proposer.load(view())
    return proposer


def drafted(
    proposer: MedusaProposer, hidden: torch.Tensor, sampler: Any = None, **asked: Any
) -> Draft:
    """Draft for one request, whose newest position has the state `hidden` [1, hidden_size]."""
    history = asked.pop("history", range(40))
    request = DraftRequest("a", history, num_new_tokens=1, **asked)
    return proposer.propose(DraftInput([request], sampler, hidden_states=hidden, row_starts=[0, 1]))


def test_nodes_are_the_best_products_of_the_heads_probabilities(tmp_path: Path) -> None:
    folder = as_reduced(random_heads(3, num_rows=40, shared=True)).save(tmp_path)
    proposer = loaded(folder, sample=False)
    assert proposer._heads is not None
    ids = proposer._heads.draft_to_target
    assert ids is not None
    hidden = torch.randn(1, 48, generator=torch.Generator().manual_seed(1))
    probs = [part[0].softmax(dim=0) for part in proposer._heads.logits(hidden, [None] * 3)]
    draft = drafted(proposer, hidden, k=12)
    assert draft.parents is not None
    [token_ids], [parents] = draft.token_ids, draft.parents
    assert parents is not None
    column = {int(target): number for number, target in enumerate(ids)}
    ways: list[tuple[int, ...]] = []
    values = []
    for token_id, parent in zip(token_ids, parents, strict=True):
        ways.append((*(() if parent < 0 else ways[parent]), column[token_id]))
        values.append(
            float(torch.stack([p[c] for p, c in zip(probs, ways[-1], strict=False)]).prod())
        )
    every = sorted(
        (
            float(torch.stack([p[c] for p, c in zip(probs, way, strict=False)]).prod())
            for depth in (1, 2, 3)
            for way in itertools.product(*(p.topk(13).indices.tolist() for p in probs[:depth]))
        ),
        reverse=True,
    )
    assert len(set(ways)) == 12
    assert values == pytest.approx(every[:12], rel=1e-4)

    shallow = drafted(proposer, hidden, k=12, max_depth=1)
    assert shallow.parents == [[-1] * 12]
    least = (values[4] + values[5]) / 2
    assert drafted(proposer, hidden, k=12, min_confidence=least).token_ids == [token_ids[:5]]
    assert drafted(proposer, hidden, k=5).token_ids == [token_ids[:5]]
    assert drafted(proposer, hidden, k=0).token_ids == [[]]


class FakeSampler:
    """Gives every head the same children, and notes what it was asked."""

    def __init__(self, ids: list[int], probs: list[float]) -> None:
        self.children_of = DraftChildren(torch.tensor([ids]), torch.tensor([probs]).log())
        self.asked: list[tuple[list[int], list[int]]] = []

    def children(
        self,
        logits: torch.Tensor,
        depths: Sequence[int],
        rows: Sequence[int],
        width: int,
        draft_to_target: torch.Tensor | None = None,
    ) -> DraftChildren:
        assert len(logits) == len(depths) == len(rows)
        assert width >= 4
        assert draft_to_target is None
        self.asked.append((list(depths), list(rows)))
        found = self.children_of
        return DraftChildren(
            found.token_ids.expand(len(rows), -1), found.log_probs.expand(len(rows), -1)
        )


def test_where_tokens_are_sampled_the_sampler_says_what_the_candidates_are(tmp_path: Path) -> None:
    proposer = loaded(as_authors(random_heads(2)).save(tmp_path))
    sampler = FakeSampler([5, 9, 0], [0.6, 0.3, 0.0])
    draft = drafted(proposer, torch.randn(1, 48), sampler, k=5)
    assert draft.token_ids == [[5, 5, 9, 9, 5]]  # 0.6; 0.36; 0.3; 0.18 below 5; 0.18 below 9
    assert draft.parents == [[-1, 0, -1, 0, 2]]
    assert sampler.asked == [([0, 1], [0, 0])]


def test_what_was_committed_since_is_learnt_from(tmp_path: Path) -> None:
    proposer = loaded(as_authors(random_heads(2)).save(tmp_path))
    hidden = torch.randn(1, 48)
    sampler = FakeSampler([5, 9, 7], [0.6, 0.3, 0.05])
    seen: list[tuple[int, int | None]] = []
    assert proposer._trees is not None
    proposer._trees._accuracies.see = (  # type: ignore[method-assign]
        lambda head, _probabilities, rank: seen.append((head, rank))
    )
    history = list(range(100, 140))

    def step(*new: int) -> list[tuple[int, int | None]]:
        seen.clear()
        history.extend(new)
        drafted(proposer, hidden, sampler, k=4, history=list(history))
        return list(seen)

    assert step() == []
    assert step(9) == [(0, 1)]
    assert step(5, 7) == [(0, 0), (1, 2)]
    assert step(5, 9, 44) == [(0, 0), (1, 1)], "there are two heads"
    assert step(44, 5) == [(0, None)], "what comes after another token was not foretold"
    proposer.release("a")
    assert step(5) == []


# -- in whole engines ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
@pytest.mark.parametrize("sample", [False, True])
def test_trees_change_no_text(temperature: float, sample: bool, tmp_path: Path) -> None:
    model = tiny_models.llama(eos_token_id=None)
    folder = as_authors(random_heads(3)).save(tmp_path)
    asked = [[5, 6, 7], [9] * 11, list(range(20, 40))]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=14) for i in range(len(asked))
    ]

    def texts(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(asked, params)]

    with LLM(model, None) as llm:
        plain = texts(llm)
    with LLM(
        model,
        "medusa",
        drafter=str(folder),
        proposer_settings={"sample": sample},
        strict=True,
        adaptive=False,
    ) as llm:
        assert texts(llm) == plain
        assert llm.stats.num_draft_tokens > 10 * llm.stats.num_steps, "some 16 nodes a request"


def test_there_are_as_many_ranks_as_the_shipped_file_has() -> None:
    shipped = pytest.importorskip("foresay_smollm2")
    folder = Path(shipped.__file__).parent / "drafters" / "smollm2-medusa"
    fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
    assert [len(row) for row in fields["heads"]] == [NUM_RANKS] * 4
    assert all(row[0] == max(row) for row in fields["heads"])
    Accuracies.read(str(folder), 4)
