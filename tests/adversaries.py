"""Proposers that do what they should not, and the plain ones tests need. None may change a text."""

from __future__ import annotations

import random

import torch

from foresay.core.proposer import Draft, DraftInput, Needs, ProposerConfig, TargetView


class _Adversary:
    """Drafts one list per request by `ids`; subclasses say which."""

    def __init__(self, config: ProposerConfig) -> None:
        self.random = random.Random(0)
        self.vocab_size = 0
        self.eos = 0

    def load(self, target: TargetView) -> None:
        self.vocab_size = target.vocab_size
        eos = target.config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else (eos or 0)

    def ids(self, k: int) -> list[int]:
        raise NotImplementedError

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.ids(request.k) for request in batch.requests])


class Random(_Adversary):
    """Uniform tokens, as many as it likes up to k."""

    def ids(self, k: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(self.random.randint(0, k))]


class Constant(_Adversary):
    """One frequent token, always."""

    def ids(self, k: int) -> list[int]:
        return [28 % self.vocab_size] * k


class AllEos(_Adversary):
    """Wants every text to end."""

    def ids(self, k: int) -> list[int]:
        return [self.eos] * k


class TokenZero(_Adversary):
    """What an engine that pads with zeros would draft."""

    def ids(self, k: int) -> list[int]:
        return [0] * k


class TooLong(_Adversary):
    """Three times as many as wanted."""

    def ids(self, k: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(3 * k)]


class OutOfRange(_Adversary):
    """Ids that are no tokens, behind one that is."""

    def ids(self, k: int) -> list[int]:
        return [5, self.vocab_size, -1][:k]


class Empty(_Adversary):
    """Never offers anything."""

    def ids(self, k: int) -> list[int]:
        return []


class Raising(_Adversary):
    """Fails every second call."""

    calls = 0

    def propose(self, batch: DraftInput) -> Draft:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("no draft today")
        return Draft([[7] for _ in batch.requests])


class Drawing(_Adversary):
    """Draws its drafts from distributions of its own making, some of them over few tokens."""

    needs = Needs(sampled=True)

    def propose(self, batch: DraftInput) -> Draft:
        assert batch.sampler is not None
        drafts: list[list[int]] = [[] for _ in batch.requests]
        generator = torch.Generator().manual_seed(self.random.randrange(2**32))
        for step in range(max((request.k for request in batch.requests), default=0)):
            rows = [row for row, request in enumerate(batch.requests) if request.k > step]
            logits = torch.randn(len(rows), self.vocab_size, generator=generator)
            ids = batch.sampler.draw(self.random.choice((0.1, 3.0)) * logits, step, rows)
            for row, token_id in zip(rows, ids.tolist(), strict=True):
                drafts[row].append(token_id)
        return Draft(drafts)


class RandomTrees(_Adversary):
    """Trees of any shape, of tokens that the request has had."""

    needs = Needs(tree=True)

    def propose(self, batch: DraftInput) -> Draft:
        ids, parents = [], []
        for request in batch.requests:
            tree = [self.random.randrange(-1, place) for place in range(request.k)]
            parents.append(self.shaped(tree))
            ids.append([self.random.choice(request.token_ids) for _ in tree])
        return Draft(ids, parents)

    def shaped(self, parents: list[int]) -> list[int]:
        return parents


class Bushes(RandomTrees):
    """Nothing but siblings, many of them alike."""

    def shaped(self, parents: list[int]) -> list[int]:
        return [-1] * len(parents)


class BrokenTrees(RandomTrees):
    """Parents that come later, are no nodes, or are no numbers."""

    def shaped(self, parents: list[int]) -> list[int]:
        return [self.random.choice([parent, parent + 3, -2, 99]) for parent in parents]


ADVERSARIES: dict[str, type[_Adversary]] = {
    "random": Random,
    "constant": Constant,
    "all-eos": AllEos,
    "token-zero": TokenZero,
    "too-long": TooLong,
    "out-of-range": OutOfRange,
    "empty": Empty,
    "raising": Raising,
    "drawing": Drawing,
    "random-trees": RandomTrees,
    "bushes": Bushes,
    "broken-trees": BrokenTrees,
}
