"""Plays games with draft trees, and compares the texts with the enumerated law; see `laws`.

A *planter* makes a round's trees, one a game; a tree may depend on anything, the noise to come
included. `tree_law_table.py` prints the chi-square of every case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from laws import (
    ChiSquare,
    Drawn,
    Games,
    Text,
    chi_square,
    filtered,
    filters_worked_out_once,
    joint_law,
    like,
    make_sampling,
    random_table,
)
from trees import SHAPES, Tree, in_a_tree

from foresay.core.messages import SamplingData
from foresay.core.worker.draft_sampler import DraftProbs, DrawRequest, StepSampler
from foresay.core.worker.draft_tree import DraftTree
from foresay.core.worker.noise import NoiseKey, exponential, vocabulary_words
from foresay.core.worker.rejection_sampler import VerifyRequest, verify

Drafted = tuple[list[int], list[int] | None, DraftProbs | None]  # tokens, parents, probs
Planter = Callable[[Sequence[Text], Sequence[SamplingData]], list[Drafted]]


def each_by_itself(plant: Callable[[Text, SamplingData], Tree]) -> Planter:
    def planter(texts: Sequence[Text], sampling: Sequence[SamplingData]) -> list[Drafted]:
        return [(*plant(*each), None) for each in zip(texts, sampling, strict=True)]

    return planter


# --- planters -------------------------------------------------------------------------------------


def grown(table: torch.Tensor, widths: Sequence[int], ids: torch.Tensor | None = None) -> Planter:
    """Trees of the sampler's children, which share the target's noise; `widths` by level."""

    def planter(texts: Sequence[Text], sampling: Sequence[SamplingData]) -> list[Drafted]:
        requests = [
            DrawRequest(str(i), data, len(text), 99)
            for i, (text, data) in enumerate(zip(texts, sampling, strict=True))
        ]
        sampler = StepSampler(requests, PLAIN.shape[1])
        trees = [DraftTree() for _ in texts]
        leaves = [(i, -1, text[-1]) for i, text in enumerate(texts)]
        for depth, width in enumerate(widths):
            rows = [i for i, _, _ in leaves]
            logits = table[torch.tensor([last for *_, last in leaves]) % len(table)]
            found = sampler.children(logits, [depth] * len(rows), rows, width, ids)
            pairs = [
                (*leaf, *pair)
                for leaf, *both in zip(
                    leaves, found.token_ids.tolist(), found.log_probs.tolist(), strict=True
                )
                for pair in zip(*both, strict=True)
            ]
            leaves = [
                (i, trees[i].add(parent, token_id, log_prob), token_id)
                for i, parent, _, token_id, log_prob in pairs
                if log_prob > -torch.inf
            ]
        # The best nodes, so what is left out depends on the noise as well.
        return [(*tree.draft(tree.best(sum(widths) + 1)), None) for tree in trees]

    return planter


def by_shape(shape: str, size: int, num_nodes: int) -> Planter:
    """Trees that have nothing to do with the target: another one for each text."""
    return each_by_itself(lambda text, _: SHAPES[shape](random.Random(str(text)), size, num_nodes))


@each_by_itself
def twins(text: Text, _: SamplingData) -> Tree:
    """Every sibling twice, and below the second one everything that the first one lacks."""
    token_ids, parents = [0, 0, 1, 1, 2], [-1, -1, -1, -1, -1]
    for parent, below in ((0, [0]), (1, [0, 1, 2]), (2, [1, 1]), (3, [0, 2]), (4, [2])):
        token_ids += below
        parents += [parent] * len(below)
    return token_ids, parents


@cache
def target_s_own(last: int, sampling: SamplingData, position: int) -> int:
    """The token that plain decoding will draw there after `last`: it can be known beforehand."""
    probs = filtered(PLAIN[last % len(PLAIN)], sampling).tolist()
    key = NoiseKey(sampling.seed, position, sample=sampling.sample_index)
    words = vocabulary_words(key, len(probs), PLAIN.device).tolist()
    times = {
        i: exponential(w) / p for i, (w, p) in enumerate(zip(words, probs, strict=True)) if p > 0
    }
    return min(times, key=times.__getitem__)


def future(text: Text, sampling: SamplingData, length: int) -> list[int]:
    own = list(text)
    for _ in range(length):
        own.append(target_s_own(own[-1], sampling, len(own)))
    return own[len(text) :]


@each_by_itself
def clairvoyant(text: Text, sampling: SamplingData) -> Tree:
    """Knows what comes; tells all of it if it begins with a 0, else one token, among wrong ones."""
    own = future(text, sampling, 3)
    if own[0] == 0:
        return own, [-1, 0, 1]
    return [(own[0] + 1) % 3, own[0], own[1]], [-1, -1, 0]


@each_by_itself
def spiteful(text: Text, sampling: SamplingData) -> Tree:
    """Knows what comes, and offers all else; the truth only where two equal tokens would follow."""
    own = future(text, sampling, 2)
    token_ids = [i for i in range(3) if i != own[0] or own[1] == own[0]]
    parents = [-1] * len(token_ids)
    for parent, token_id in enumerate(tuple(token_ids)):
        below = [i for i in range(3) if i != own[1] or token_id == 2]
        token_ids += below
        parents += [parent] * len(below)
    return token_ids, parents


def in_turns(planter: Planter, drafter: Drawn) -> Planter:
    """Trees after texts of odd length, else chains that are drawn and have their probs."""

    def taking_turns(texts: Sequence[Text], sampling: Sequence[SamplingData]) -> list[Drafted]:
        size = PLAIN.shape[1]
        chains = drafter(texts, sampling, size)
        trees = planter(texts, sampling)
        return [
            tree if len(text) % 2 else (chain[0], None, chain[1])
            for text, tree, chain in zip(texts, trees, chains, strict=True)
        ]

    return taking_turns


def drawn_for_what_comes(texts: Sequence[Text], sampling: Sequence[SamplingData]) -> list[Drafted]:
    """Wrong: chains that are drawn, and end where their bonus token will be a 0."""
    chains = Drawn(OTHER, 2)(texts, sampling, PLAIN.shape[1])
    drafts: list[Drafted] = []
    for text, data, (token_ids, probs) in zip(texts, sampling, chains, strict=True):
        assert probs is not None
        is_0 = target_s_own(token_ids[0], data, len(text) + 1) == 0
        end = 1 if is_0 else 2
        drafts.append((token_ids[:end], None, probs.cut(end)))
    return drafts


# --- games ----------------------------------------------------------------------------------------


@filters_worked_out_once()
def play(planter: Planter, sampling: SamplingData, num_games: int, num_tokens: int) -> Games:
    """Play games of `num_tokens` tokens or a few more, each with its seed."""
    games = Games()
    texts: list[Text] = [(0,)] * num_games
    settings = [replace(sampling, seed=sampling.seed + i) for i in range(num_games)]
    while going := [i for i, text in enumerate(texts) if len(text) <= num_tokens]:
        drafted = planter([texts[i] for i in going], [settings[i] for i in going])
        requests, states = [], []
        for i, (token_ids, parents, probs) in zip(going, drafted, strict=True):
            request = VerifyRequest(str(i), token_ids, texts[i], 1, settings[i], probs)
            if parents is not None:
                request = in_a_tree(request, (token_ids, parents))
            requests.append(request)
            states += [texts[i][-1], *token_ids]
        rows = PLAIN[torch.tensor(states) % len(PLAIN)]
        for i, result in zip(going, verify(rows, requests), strict=True):
            assert result.error is None, result.error
            texts[i] += tuple(result.token_ids)
            games.faults.update(result.faults)
            games.num_accepted.append(len(result.accepted))
    games.texts = [text[1:] for text in texts]
    return games


@dataclass(frozen=True)
class TreeCase:
    planter: Planter
    sampling: SamplingData
    num_games: int = 600
    num_tokens: int = 4

    def play(self) -> Games:
        return play(self.planter, self.sampling, self.num_games, self.num_tokens)

    def check(self, games: Games) -> ChiSquare:
        """The joint law of all tokens, which several steps have emitted."""
        law = joint_law(PLAIN, self.sampling, 0, self.num_tokens)
        return chi_square(games.firsts(self.num_tokens), law)


PLAIN = random_table(3, 3, seed=1)
OTHER = like(PLAIN, 2)
# Two draft ids of the target's 1; none of its 2, and one that it lacks.
REDUCED_IDS = torch.tensor([1, 0, 1, 7])
REDUCED = torch.cat((OTHER, OTHER[:, :1]), dim=1)
FILTERS = {"temperature": 1.5, "top_k": 2}


def tree_cases() -> dict[str, TreeCase]:
    planters: dict[str, tuple[Planter, dict[str, Any]]] = {
        "children, coupled": (grown(OTHER, (2, 2, 1)), {}),
        "children, no seed": (grown(OTHER, (2, 2, 1)), {"verification": "block"}),
        "children, temperature .6": (grown(OTHER, (2, 1)), {"temperature": 0.6}),
        "children, top_k 2": (grown(OTHER, (3, 2)), FILTERS),
        "children, reduced": (grown(REDUCED, (2, 2), REDUCED_IDS), {}),
        "children, of the target's own": (grown(PLAIN, (1, 1, 1)), {}),
        "random": (by_shape("random_tree", 3, 8), {}),
        "random, no seed": (by_shape("random_tree", 3, 8), {"verification": "block"}),
        "all siblings alike but one": (by_shape("alike_but_one", 3, 9), {}),
        "deepest first": (by_shape("deepest_first", 3, 8), {"min_p": 0.2}),
        "maximal": (by_shape("maximal", 3, 12), {"verification": "rejection"}),
        "twins": (twins, {}),
        "clairvoyant": (clairvoyant, {}),
        "spiteful": (spiteful, {}),
        "spiteful, no seed, top_k 2": (spiteful, {"verification": "block", **FILTERS}),
        "trees and drawn chains in turns": (
            in_turns(grown(OTHER, (2, 2)), Drawn(OTHER, 2)),
            {"verification": "block"},
        ),
    }
    return {
        name: TreeCase(planter, make_sampling(seed=2 * 10**6 + 10_000 * i, **changes))
        for i, (name, (planter, changes)) in enumerate(planters.items())
    }
