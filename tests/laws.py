"""Plays drafting and verification on tiny Markov models, and compares with the enumerated law.

A model is a table of logits [num_states, vocab_size]; what follows a token depends on its id modulo
num_states. A *game* is one request: draft, verify, commit, until it has its tokens. All games of a
case share the calls, so thousands are quick.

`python tests/laws.py` prints the chi-square of every case. Seeds are fixed; with other seeds, a
right sampler would fall below `ODDS` once in 10 000 checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from scipy import stats

from foresay.core.messages import SamplingData
from foresay.core.worker import draft_sampler, drawn_drafts, rejection_sampler
from foresay.core.worker import sampling as sampling_module
from foresay.core.worker.draft_sampler import DraftProbs, DrawRequest, StepSampler
from foresay.core.worker.processors import Context
from foresay.core.worker.rejection_sampler import VerifyRequest, verify
from foresay.core.worker.sampling import Row, Survivors, survivors, target_probs

ODDS = 1e-4
Text = tuple[int, ...]
Drafted = tuple[list[int], DraftProbs | None]

# The pair of the issue, which exposes noise that is used twice.
PAIR_TARGET = [0.719, 0.054, 0.046, 0.181]
PAIR_DRAFT = [0.541, 0.249, 0.2, 0.01]


def make_sampling(**changes: Any) -> SamplingData:
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "min_tokens": 0,
        "stop_token_ids": (),
    }
    return SamplingData(**(values | changes))


def random_table(num_states: int, vocab_size: int, seed: int, scale: float = 1.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_states, vocab_size, generator=generator) * scale


def filtered(logits: torch.Tensor, sampling: SamplingData) -> torch.Tensor:
    """The distribution of a row, float64 [vocab_size]: the definition, not what verifies."""
    probs = target_probs(Row(logits, Context(sampling, (), 0))).double()
    return probs / probs.sum()


# --- what is compared with what -------------------------------------------------------------------


@dataclass(frozen=True)
class ChiSquare:
    """How far counts are from a law."""

    num_draws: int
    statistic: float
    degrees: int
    odds: float  # of a statistic as large or larger, if the law holds

    @property
    def holds(self) -> bool:
        return self.odds > ODDS


def chi_square(
    observed: Mapping[Any, int], expected: Mapping[Any, float], least: float = 5
) -> ChiSquare:
    """Counts against probabilities. Rare outcomes are pooled until `least` of them are expected.

    An outcome that the law excludes has odds 0.
    """
    num_draws = sum(observed.values())
    if any(expected.get(outcome, 0) <= 0 for outcome, count in observed.items() if count):
        return ChiSquare(num_draws, float("inf"), 0, 0.0)
    bins: list[tuple[float, float]] = []
    rest_observed, rest_expected = 0.0, 0.0
    for outcome, probability in sorted(expected.items(), key=lambda item: item[1]):
        rest_observed += observed.get(outcome, 0)
        rest_expected += probability * num_draws
        if rest_expected >= least:
            bins.append((rest_observed, rest_expected))
            rest_observed, rest_expected = 0.0, 0.0
    last_observed, last_expected = bins.pop()
    bins.append((last_observed + rest_observed, last_expected + rest_expected))
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    degrees = len(bins) - 1
    odds = float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    return ChiSquare(num_draws, statistic, degrees, odds)


def joint_law(
    table: torch.Tensor, sampling: SamplingData, start: int, length: int
) -> dict[Text, float]:
    """The probability of each text of `length` tokens that follows `start`."""
    probs = [filtered(row, sampling).tolist() for row in table]
    law: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        law = {
            (*text, token): mass * p
            for text, mass in law.items()
            for token, p in enumerate(probs[(text[-1] if text else start) % len(table)])
            if p > 0
        }
    return law


def law_at(table: torch.Tensor, sampling: SamplingData, start: int, place: int) -> dict[int, float]:
    """The probability of each token at a place (from 0) of the text that follows `start`."""
    num_states, vocab_size = table.shape
    probs = torch.stack([filtered(row, sampling) for row in table])  # [num_states, vocab_size]
    state_of = torch.arange(vocab_size) % num_states
    law = probs[start % num_states]
    for _ in range(place):
        states = torch.zeros(num_states, dtype=torch.float64).index_add_(0, state_of, law)
        law = states @ probs
    return {token: p for token, p in enumerate(law.tolist()) if p > 0}


# --- drafters -------------------------------------------------------------------------------------


class Drafter(Protocol):
    """Drafts for all games of a round: each game's draft, and what it was drawn from."""

    def __call__(
        self, texts: Sequence[Text], sampling: Sequence[SamplingData], vocab_size: int
    ) -> list[Drafted]: ...


@dataclass(frozen=True)
class Fixed:
    """Deterministic drafts: a function of the text."""

    choose: Callable[[Text], list[int]]

    def __call__(
        self, texts: Sequence[Text], sampling: Sequence[SamplingData], vocab_size: int
    ) -> list[Drafted]:
        return [(self.choose(text), None) for text in texts]


@dataclass(frozen=True)
class Drawn:
    """Drafts drawn through the sampler from a table of the drafter's own, [num_states, V_draft]."""

    table: torch.Tensor
    k: int = 2
    draft_to_target: torch.Tensor | None = None
    num_target_ids: int | None = None  # what the sampler is told; None: the truth

    def __call__(
        self, texts: Sequence[Text], sampling: Sequence[SamplingData], vocab_size: int
    ) -> list[Drafted]:
        requests = [
            DrawRequest(str(i), data, len(text), self.k)
            for i, (text, data) in enumerate(zip(texts, sampling, strict=True))
        ]
        sampler = StepSampler(requests, self.num_target_ids or vocab_size)
        last = torch.tensor([text[-1] for text in texts])
        rows = list(range(len(texts)))
        for step in range(self.k):
            logits = self.table[last % len(self.table)]
            last = sampler.draw(logits, step, rows, self.draft_to_target)
        return [(sampler.drawn(row) or [], sampler.draft_probs(row)) for row in rows]


def likeliest_path(table: torch.Tensor, k: int) -> Fixed:
    best = table.argmax(dim=-1).tolist()

    def choose(text: Text) -> list[int]:
        path = [best[text[-1] % len(best)]]
        while len(path) < k:
            path.append(best[path[-1] % len(best)])
        return path

    return Fixed(choose)


def scattered(vocab_size: int, k: int) -> Fixed:
    """Ragged drafts that have nothing to do with the target, some empty."""
    return Fixed(lambda text: [hash((text, j)) % vocab_size for j in range(hash(text) % (k + 1))])


# --- games ----------------------------------------------------------------------------------------

Meddle = Callable[[Text, list[int], DraftProbs | None], Drafted]


def as_drafted(_text: Text, drafts: list[int], draft_probs: DraftProbs | None) -> Drafted:
    return drafts, draft_probs


@dataclass
class Games:
    """The texts of all games, without their start, and what verification told on the way."""

    texts: list[Text] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)  # one entry a verified draft
    faults: Counter[str] = field(default_factory=Counter)

    def firsts(self, num_tokens: int) -> Counter[Text]:
        return Counter(text[:num_tokens] for text in self.texts)

    def at(self, place: int) -> Counter[int]:
        return Counter(text[place] for text in self.texts)


@contextmanager
def filters_worked_out_once() -> Iterator[None]:
    """Keep what the filters leave of a row: thousands of games meet the same few rows."""
    known: dict[Hashable, Survivors] = {}

    def remembered(row: Row) -> Survivors:
        data = row.sampling
        key = row.logits.numpy().tobytes(), data.temperature, data.top_k, data.top_p, data.min_p
        if key not in known:
            known[key] = survivors(row)
        return known[key]

    with ExitStack() as stack:
        for module in (sampling_module, draft_sampler, drawn_drafts, rejection_sampler):
            stack.enter_context(patch.object(module, "survivors", remembered))
        yield


@filters_worked_out_once()
def play(
    table: torch.Tensor,
    drafter: Drafter,
    sampling: SamplingData,
    num_games: int,
    num_tokens: int,
    *,
    start: int = 0,
    first_seed: int = 0,
    meddle: Meddle = as_drafted,
) -> Games:
    """Play games of at least `num_tokens` tokens; game i has the seed `first_seed + i`.

    `meddle` may change a draft between drafting and verification, as a wrong engine would.
    """
    games = Games()
    texts: list[Text] = [(start,)] * num_games
    settings = [replace(sampling, seed=first_seed + i) for i in range(num_games)]
    while going := [i for i, text in enumerate(texts) if len(text) <= num_tokens]:
        drafted = drafter([texts[i] for i in going], [settings[i] for i in going], table.shape[1])
        requests, states = [], []
        for i, (drafts, draft_probs) in zip(going, drafted, strict=True):
            drafts, draft_probs = meddle(texts[i], drafts, draft_probs)
            requests.append(VerifyRequest(str(i), drafts, texts[i], 1, settings[i], draft_probs))
            states += [texts[i][-1], *drafts]
        rows = table[torch.tensor(states) % len(table)]
        for i, request, result in zip(going, requests, verify(rows, requests), strict=True):
            assert result.error is None, result.error
            texts[i] += tuple(result.token_ids)
            games.faults.update(result.faults)
            if request.draft_token_ids:
                games.num_accepted.append(len(result.token_ids) - 1)
    games.texts = [text[1:] for text in texts]
    return games


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A game, how often it is played, and what of its texts is compared with the law."""

    table: torch.Tensor
    drafter: Drafter
    sampling: SamplingData
    num_games: int
    num_tokens: int
    joint: bool  # the joint law of all tokens; else the law of each place, and of the first two
    first_seed: int = 0

    def play(self, meddle: Meddle = as_drafted) -> Games:
        return play(
            self.table,
            self.drafter,
            self.sampling,
            self.num_games,
            self.num_tokens,
            first_seed=self.first_seed,
            meddle=meddle,
        )

    def checks(self, games: Games) -> dict[str, ChiSquare]:
        joint = partial(joint_law, self.table, self.sampling, 0)
        if self.joint:
            name = f"{self.num_tokens} tokens jointly"
            return {name: chi_square(games.firsts(self.num_tokens), joint(self.num_tokens))}
        checks = {
            f"token {place + 1}": chi_square(
                games.at(place), law_at(self.table, self.sampling, 0, place)
            )
            for place in range(self.num_tokens)
        }
        if self.table.shape[1] <= 8:
            checks["tokens 1 and 2"] = chi_square(games.firsts(2), joint(2))
        return checks


def like(
    table: torch.Tensor, seed: int, draft_to_target: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits of a drafter that resembles the target, over its own vocabulary."""
    if draft_to_target is not None:
        table = table[:, draft_to_target.clamp(max=table.shape[1] - 1)]
    noise = random_table(*table.shape, seed=seed, scale=1.0)
    return table * 0.6 + noise


LAWS: dict[str, dict[str, Any]] = {
    "temperature .5": {"temperature": 0.5},
    "temperature 1": {},
    "temperature 2": {"temperature": 2.0},
    "temperature 1, top_k 4": {"top_k": 4},
    "temperature .5, top_p .9": {"temperature": 0.5, "top_p": 0.9},
    "temperature 1, min_p .1": {"min_p": 0.1},
    "temperature 2, all filters": {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
}
LARGE_LAWS: dict[str, dict[str, Any]] = {
    "temperature .5, top_p .95": {"temperature": 0.5, "top_p": 0.95},
    "temperature 1": {},
    "temperature 2, all filters": {"temperature": 2.0, "top_k": 900, "top_p": 0.9, "min_p": 0.01},
}
# Two draft ids each of 0, 1 and 2; 4 and 6 have none; the target of 8 ids has no 9.
SMALL_MAP = torch.tensor([7, 0, 1, 2, 3, 5, 0, 1, 2, 9])
LARGE_MAP = torch.arange(1500) % 1100 * 3  # 400 target ids have two draft ids


def single_cases() -> dict[str, Case]:
    """First and later places: every rule, with and without filters, small and large vocabulary."""
    small, large = random_table(8, 8, seed=1), random_table(4, 4096, seed=2, scale=2.0)
    sizes = [
        (small, LAWS, SMALL_MAP, 400, 3),
        (large, LARGE_LAWS, LARGE_MAP, 300, 2),
    ]
    cases: dict[str, Case] = {}
    for table, laws, ids, num_games, num_tokens in sizes:
        full, reduced = like(table, 3), like(table, 4, ids)
        for i, (name, law) in enumerate(laws.items()):
            # Full and reduced draft vocabulary take turns: each meets every rule.
            drawn = [Drawn(full), Drawn(reduced, draft_to_target=ids)]
            size = table.shape[1]
            drafters: dict[str, tuple[str, Drafter]] = {
                "deterministic": ("coupled", likeliest_path(table, 2)),
                "deterministic, scattered": ("block", scattered(size, 3)),
                "coupled" + ", reduced" * (i % 2): ("coupled", drawn[i % 2]),
                "rejection" + ", reduced" * (i % 2): ("rejection", drawn[i % 2]),
                "block" + ", reduced" * (1 - i % 2): ("block", drawn[1 - i % 2]),
            }
            del drafters[("deterministic", "deterministic, scattered")[i % 2]]
            for kind, (rule, drafter) in drafters.items():
                sampling = make_sampling(verification=rule, **law)
                seed = 10_000 * len(cases)
                cases[f"{kind}; {size} ids; {name}"] = Case(
                    table, drafter, sampling, num_games, num_tokens, False, seed
                )
    return cases


def joint_cases() -> dict[str, Case]:
    """The joint law of four tokens, which take several steps."""
    table, other = random_table(3, 3, seed=1), random_table(3, 3, seed=2)
    pair = torch.tensor([PAIR_TARGET]).log(), torch.tensor([PAIR_DRAFT]).log()
    coin = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    third = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[0.35, 0.4, 0.25]]).log()
    shared = torch.tensor([2, 0, 1, 0, 1])
    wide = torch.cat((other, torch.full((3, 1), 1.5)), dim=1)  # one id that the target lacks
    hot = {"temperature": 2.0}
    games: dict[str, tuple[torch.Tensor, Drafter, dict[str, Any]]] = {
        "deterministic; likeliest": (table, likeliest_path(table, 3), {}),
        "deterministic; scattered": (table, scattered(3, 3), {"verification": "block"}),
        "coupled": (table, Drawn(other, 3), hot),
        "coupled; reduced": (table, Drawn(like(table, 4, shared), 3, shared), {}),
    }
    for rule in ("rejection", "block"):
        law = {"verification": rule}
        games |= {
            f"{rule}": (table, Drawn(other, 3), law | hot),
            f"{rule}; the issue's pair": (pair[0], Drawn(pair[1], 3), law),
            f"{rule}; a coin": (coin[0], Drawn(coin[1], 2), law),
            f"{rule}; top_k 2": (third[0], Drawn(third[1], 2), law | {"top_k": 2}),
            f"{rule}; reduced": (table, Drawn(like(table, 4, shared), 3, shared), law),
            f"{rule}; a bad id": (table, Drawn(wide, 2, num_target_ids=4), law),
        }
    return {
        name: Case(logits, drafter, make_sampling(**law), 1000, 4, True, 10**6 + 10_000 * i)
        for i, (name, (logits, drafter, law)) in enumerate(games.items())
    }


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'case':60} {'compared':18} {'draws':>6} {'chi2':>8} {'df':>4} {'odds':>9}")
    for name, case in (joint_cases() | single_cases()).items():
        for what, found in case.checks(case.play()).items():
            verdict = "" if found.holds else "  FAILS"
            print(
                f"{name:60} {what:18} {found.num_draws:6} {found.statistic:8.1f} "
                f"{found.degrees:4} {found.odds:9.2g}{verdict}"
            )


if __name__ == "__main__":
    main()
