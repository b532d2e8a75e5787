"""What is emitted follows the target's law, whatever drafted it; and how much gets accepted.

Chi-square of many games against enumeration. Seeds are fixed; with others, a right sampler would
fail each check once in 10 000 times (`laws.ODDS`). `test_verification_mutations` shows that the
same checks see what may go wrong. `python tests/laws.py` prints all figures.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from laws import (
    PAIR_DRAFT,
    PAIR_TARGET,
    Case,
    Drawn,
    Fixed,
    chi_square,
    joint_cases,
    joint_law,
    like,
    make_sampling,
    play,
    random_table,
    single_cases,
)

CASES = joint_cases() | single_cases()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_texts_follow_the_target_s_law(case: Case) -> None:
    games = case.play()
    found = case.checks(games)
    assert all(check.holds for check in found.values()), found
    assert not games.faults
    assert games.num_accepted


def test_the_same_games_are_far_from_the_law_of_another_temperature() -> None:
    case = CASES["block; 8 ids; temperature 1"]
    texts = case.play().firsts(2)
    assert chi_square(texts, joint_law(case.table, case.sampling, 0, 2)).holds
    hotter = make_sampling(temperature=1.5)
    assert not chi_square(texts, joint_law(case.table, hotter, 0, 2)).holds


def test_a_text_of_one_seed_is_the_same_whatever_drafts_for_the_coupled_rule() -> None:
    table = random_table(8, 8, seed=11)
    drafters = [
        Fixed(lambda text: []),
        Drawn(table, 3),
        Drawn(like(table, 12), 1),
        Drawn(random_table(8, 5, seed=13), 4, torch.tensor([6, 1, 6, 4, 0])),
        Fixed(lambda text: [text[-1], 99, -1]),
    ]
    sampling = make_sampling(temperature=1.2, top_p=0.95)
    texts = []
    for drafter in drafters:
        games = play(table, drafter, sampling, num_games=60, num_tokens=9)
        texts.append([text[:9] for text in games.texts])
    assert all(text == texts[0] for text in texts)
    assert len(set(texts[0])) > 50


def test_a_drafter_with_the_target_s_own_logits_is_always_accepted() -> None:
    table = random_table(8, 8, seed=14)
    for rule in ("coupled", "rejection", "block"):
        sampling = make_sampling(verification=rule, temperature=0.8, top_k=5, min_p=0.05)
        games = play(table, Drawn(table, 4), sampling, num_games=50, num_tokens=10)
        assert set(games.num_accepted) == {4}


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_the_positions_of_one_text_are_as_independent_as_the_seeds_of_many(rule: str) -> None:
    pair = torch.tensor([PAIR_TARGET]).log(), torch.tensor([PAIR_DRAFT]).log()
    sampling = make_sampling(verification=rule)
    games = play(pair[0], Drawn(pair[1], 3), sampling, 5, 400, first_seed=2**40)
    pairs = Counter(text[place : place + 2] for text in games.texts for place in range(0, 400, 2))
    assert chi_square(pairs, joint_law(pair[0], sampling, 0, 2)).holds


# --- acceptance -----------------------------------------------------------------------------------


def accepted_law(
    target: Sequence[float], draft: Sequence[float], k: int, rule: str
) -> dict[int, float]:
    """The law of the number of accepted tokens, where all rows are alike: the papers' formulas."""
    law = dict.fromkeys(range(k + 1), 0.0)
    for path in itertools.product(range(len(draft)), repeat=k):
        reach = math.prod(draft[x] for x in path)
        if rule == "rejection":
            passes = [min(1.0, target[x] / draft[x]) for x in path]
            for n in range(k + 1):
                fails = 1 - passes[n] if n < k else 1.0
                law[n] += reach * math.prod(passes[:n]) * fails
            continue
        scales = [1.0]
        for x in path:
            scales.append(min(1.0, scales[-1] * target[x] / draft[x]))
        for n in range(k, -1, -1):
            scale = scales[n]
            excess = sum(max(scale * t - d, 0) for t, d in zip(target, draft, strict=True))
            passes_here = 1.0 if n == 0 else scale if n == k else excess / (excess + 1 - scale)
            law[n] += reach * passes_here
            reach *= 1 - passes_here
    return law


def overlap(target: Sequence[float], draft: Sequence[float]) -> float:
    """1 - the total variation distance."""
    return sum(map(min, target, draft))


def race_overlap(target: Sequence[float], draft: Sequence[float]) -> float:
    """How often two exponential races with one noise have one winner.

    x wins both iff its E_x is less than every E_y times min(t_x/t_y, d_x/d_y).
    """
    ids = range(len(target))
    return sum(
        1 / sum(max(target[y] / target[x], draft[y] / draft[x]) for y in ids)
        for x in ids
        if target[x] and draft[x]
    )


def mean(law: dict[int, float]) -> float:
    return sum(n * p for n, p in law.items())


def random_pair(seed: int, size: int = 4) -> tuple[list[float], list[float]]:
    probs = random_table(2, size, seed=seed, scale=1.5).double().softmax(dim=-1)
    return probs[0].tolist(), probs[1].tolist()


PAIRS = {
    "the issue's": (PAIR_TARGET, PAIR_DRAFT),
    "a coin": ([0.5, 0.5], [0.9, 0.1]),
    "random": random_pair(1, 5),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("target", "draft"), PAIRS.values(), ids=PAIRS.keys())
def test_as_many_tokens_are_accepted_as_the_papers_say(
    target: list[float], draft: list[float], rule: str
) -> None:
    table, drafter = torch.tensor([target]).log(), Drawn(torch.tensor([draft]).log(), 3)
    games = play(table, drafter, make_sampling(verification=rule), 1000, 1, first_seed=77_000)
    law = accepted_law(target, draft, 3, rule)
    assert chi_square(Counter(games.num_accepted), law).holds
    other = accepted_law(target, draft, 3, "block" if rule == "rejection" else "rejection")
    assert mean(law) != pytest.approx(mean(other), rel=0.01)


@pytest.mark.parametrize(("target", "draft"), PAIRS.values(), ids=PAIRS.keys())
def test_rejection_accepts_a_token_as_often_as_the_distributions_overlap(
    target: list[float], draft: list[float]
) -> None:
    first_rejected = accepted_law(target, draft, 1, "rejection")[0]
    assert 1 - first_rejected == pytest.approx(overlap(target, draft))
    table, drafter = torch.tensor([target]).log(), Drawn(torch.tensor([draft]).log(), 1)
    for rule, share in {
        "rejection": overlap(target, draft),
        "block": overlap(target, draft),  # with one token, the same
        "coupled": race_overlap(target, draft),
    }.items():
        games = play(table, drafter, make_sampling(verification=rule), 1000, 1)
        law = {0: 1 - share, 1: share}
        assert chi_square(Counter(games.num_accepted), law).holds, rule


def test_block_accepts_at_least_as_many_in_expectation() -> None:
    gains = []
    for seed in range(60):
        target, draft = random_pair(seed, size=2 + seed % 3)
        k = 1 + seed % 4
        block, rejection = (
            mean(accepted_law(target, draft, k, rule)) for rule in ("block", "rejection")
        )
        assert block >= rejection - 1e-12
        gains.append(block - rejection if k > 1 else 0.0)
    assert max(gains) > 0.1
