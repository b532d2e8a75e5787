"""Texts that trees were verified for follow the target's law, whatever the trees were made of.

Chi-square of the joint law of four tokens, over several steps, against enumeration; and the wrong
ways that it must see. With other seeds than these a right sampler fails each check once in 10 000
times (`laws.ODDS`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import Text, chi_square, filtered, make_sampling
from tree_laws import TreeCase, drawn_for_what_comes, play, target_s_own, tree_cases

from foresay.core.worker.draft_sampler import DrawRequest, StepSampler
from foresay.core.worker.noise import Stream
from foresay.core.worker.race import Race, draw
from foresay.core.worker.rejection_sampler import _Progress
from foresay.core.worker.sampling import Row, RowError, survivors

CASES = tree_cases()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_texts_follow_the_target_s_law(case: TreeCase) -> None:
    games = case.play()
    found = case.check(games)
    assert found.holds, found
    assert not games.faults
    assert sum(games.num_accepted) > 0.2 * len(games.num_accepted)


def test_a_text_of_one_seed_is_the_same_whatever_tree_there_is() -> None:
    sampling = make_sampling(seed=5)
    texts = []
    for name, case in CASES.items():
        if "chains" not in name:  # they have rules of their own
            games = play(case.planter, sampling, num_games=25, num_tokens=6)
            texts.append([text[:6] for text in games.texts])
    plain: list[Text] = [(0,)] * 25
    for position in range(1, 7):
        plain = [
            (*text, target_s_own(text[-1], replace(sampling, seed=5 + i), position))
            for i, text in enumerate(plain)
        ]
    assert all(each == [text[1:] for text in plain] for each in texts)


# --- wrong ways -----------------------------------------------------------------------------------


def depth_forgotten(patch: pytest.MonkeyPatch) -> None:
    """All rows of a step have the noise of its first position."""
    patch.setattr(Row, "position", property(lambda row: len(row.context.token_ids)))


def noise_by_the_node(patch: pytest.MonkeyPatch) -> None:
    """A row's noise is that of its number instead of its depth, so a later step has it again."""
    patch.setattr(Row, "position", property(lambda row: len(row.context.token_ids) + row.index))


def a_child_anyhow(patch: pytest.MonkeyPatch) -> None:
    """Where no child is right, the first one is taken."""
    right = _Progress.take

    def take(self: Any, outcome: int | RowError) -> bool:
        below = [token_id for (row, token_id) in self._children or () if row == self.index]
        return right(self, below[0] if below and outcome not in below else outcome)

    patch.setattr(_Progress, "take", take)


def a_second_chance(patch: pytest.MonkeyPatch) -> None:
    """Where no child is right, another token is drawn, in case that it is."""
    right, row_of = _Progress.take, _Progress.row

    def row(self: Any, logits: torch.Tensor, index: int) -> Row:
        self.last = found = row_of(self, logits, index)
        return found

    def take(self: Any, outcome: int | RowError) -> bool:
        if (self._children or {}).keys().isdisjoint({(self.index, outcome)}):
            key = replace(self.key(Stream.RECOVER, 0), position=self.last.position)
            (again,) = draw([Race(key, *survivors(self.last))])
            outcome = again if (self.index, again) in (self._children or {}) else outcome
        return right(self, outcome)

    patch.setattr(_Progress, "row", row)
    patch.setattr(_Progress, "take", take)


WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    f"{mutate.__name__}: {case}": (mutate, case)
    for mutate, case in [
        (depth_forgotten, "maximal"),
        (depth_forgotten, "children, coupled"),
        (noise_by_the_node, "twins"),
        (a_child_anyhow, "random"),
        (a_child_anyhow, "spiteful"),
        (a_second_chance, "all siblings alike but one"),
        (a_second_chance, "random"),
    ]
}


@pytest.mark.parametrize(("mutate", "case"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_way_fails_the_chi_square_that_the_right_one_passes(
    mutate: Callable[[pytest.MonkeyPatch], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    found = CASES[case].check(CASES[case].play())
    assert not found.holds, found


def test_what_a_tree_may_know_a_drawn_draft_may_not() -> None:
    """The end of a drawn draft, chosen by the noise of its bonus token, distorts the law."""
    case = TreeCase(drawn_for_what_comes, make_sampling(seed=77, verification="block"))
    assert not case.check(case.play()).holds


# --- what children are ----------------------------------------------------------------------------


def test_children_are_drawn_without_replacement() -> None:
    """Two of four, by the drafter's law: p(a) p(b) / (1 - p(a)); by their seeds alone."""
    logits = torch.tensor([1.2, 0.3, -0.4, 0.9])
    sampling = make_sampling(temperature=0.8)
    num_requests = 1500
    requests = [DrawRequest(str(i), replace(sampling, seed=i), 5, 2) for i in range(num_requests)]
    sampler = StepSampler(requests, 4)
    rows = logits.expand(num_requests, 4)
    found = sampler.children(rows, [1] * num_requests, range(num_requests), 2)
    p = filtered(logits, sampling).tolist()
    law = {(a, b): p[a] * p[b] / (1 - p[a]) for a in range(4) for b in range(4) if a != b}
    assert sum(law.values()) == pytest.approx(1)
    assert chi_square(Counter(map(tuple, found.token_ids.tolist())), law).holds
