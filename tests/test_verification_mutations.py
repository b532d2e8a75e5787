"""Ways to get verification wrong, each of which the chi-square of `laws` must see.

The cases are those of test_distribution, where the right way passes; the line is the same, too: a
right sampler falls below `ODDS` once in 10 000 checks. A mutation that stops failing here means
that the tests have gone blind, not that the mutation is harmless. `python
tests/test_verification_mutations.py` prints all figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import ChiSquare, Drafted, Meddle, Text, as_drafted, joint_cases

from foresay.core.worker.draft_sampler import DraftProbs, StepSampler
from foresay.core.worker.drawn_drafts import DrawnDraft
from foresay.core.worker.noise import NoiseKey
from foresay.core.worker.sampling import Survivors

CASES = joint_cases()
Mutate = Callable[[pytest.MonkeyPatch], None]


# --- in the code ----------------------------------------------------------------------------------


def all_streams_equal(patch: pytest.MonkeyPatch) -> None:
    tail = property(lambda key: (key.position, key.offset << 8, key.sample))
    patch.setattr(NoiseKey, "counter_tail", tail)


def accept_with_the_draft_s_noise(patch: pytest.MonkeyPatch) -> None:
    def tail(key: NoiseKey) -> tuple[int, int, int]:
        stream = 1 if key.stream == 2 else int(key.stream)
        return key.position, stream | key.offset << 8, key.sample

    patch.setattr(NoiseKey, "counter_tail", property(tail))


def recover_with_the_draft_s_noise(patch: pytest.MonkeyPatch) -> None:
    def tail(key: NoiseKey) -> tuple[int, int, int]:
        stream = 1 if key.stream == 3 else int(key.stream)
        return key.position, stream | key.offset << 8, key.sample

    patch.setattr(NoiseKey, "counter_tail", property(tail))


def noise_keyed_by_position_alone(patch: pytest.MonkeyPatch) -> None:
    tail = property(lambda key: (key.position, int(key.stream), key.sample))
    patch.setattr(NoiseKey, "counter_tail", tail)


def probs_handed_over_before_filtering(patch: pytest.MonkeyPatch) -> None:
    right = StepSampler.draft_probs
    rows: dict[int, list[torch.Tensor]] = {}
    draw = StepSampler.draw

    def noting(self: Any, logits: torch.Tensor, step: int, indices: Any, ids: Any = None) -> Any:
        for index, row in zip(indices, logits, strict=True):
            rows.setdefault(index, [])[step:] = [row.softmax(dim=-1)]
        return draw(self, logits, step, indices, ids)

    def unfiltered(self: Any, row: int) -> DraftProbs | None:
        kept = right(self, row)
        return None if kept is None else replace(kept, probs=torch.stack(rows[row]))

    patch.setattr(StepSampler, "draw", noting)
    patch.setattr(StepSampler, "draft_probs", unfiltered)


def recovered_from_the_target(patch: pytest.MonkeyPatch) -> None:
    def residual(self: Any, j: int, scale: float) -> Survivors:
        token_ids, probs = self._target(j)
        return Survivors(token_ids, probs * scale)

    patch.setattr(DrawnDraft, "residual", residual)


def recovered_from_the_difference_s_size(patch: pytest.MonkeyPatch) -> None:
    def residual(self: Any, j: int, scale: float) -> Survivors:
        token_ids, probs = self._target(j)
        return Survivors(token_ids, (probs * scale - self._draft(j)[token_ids]).abs())

    patch.setattr(DrawnDraft, "residual", residual)


def a_residual_without_its_scale(patch: pytest.MonkeyPatch) -> None:
    right = DrawnDraft.residual
    patch.setattr(DrawnDraft, "residual", lambda self, j, scale: right(self, j, 1.0))


# --- in what is done with a draft that was drawn --------------------------------------------------


def cut_at_a_bad_id(_text: Text, drafts: list[int], probs: DraftProbs | None) -> Drafted:
    num_good = next((j for j, token_id in enumerate(drafts) if token_id >= 3), len(drafts))
    return cut(drafts, probs, num_good)


def dropped_for_its_own_probability(
    _text: Text, drafts: list[int], probs: DraftProbs | None
) -> Drafted:
    own = own_probs(drafts, probs)
    return cut(drafts, probs, next((j for j, p in enumerate(own) if p < 0.3), len(drafts)))


def best_prefix_by_a_stepped_cost(
    _text: Text, drafts: list[int], probs: DraftProbs | None
) -> Drafted:
    cost = [1.0, 1.4, 1.4, 2.0]  # of a step that verifies so many drafts
    value, reach = [1.0], 1.0
    for p in own_probs(drafts, probs):
        reach *= p
        value.append(value[-1] + reach)
    return cut(drafts, probs, max(range(len(value)), key=lambda n: value[n] / cost[n]))


def own_probs(drafts: list[int], probs: DraftProbs | None) -> list[float]:
    assert probs is not None
    return [probs.probs[j, token_id].item() for j, token_id in enumerate(drafts)]


def cut(drafts: list[int], probs: DraftProbs | None, num_drafts: int) -> Drafted:
    assert probs is not None
    return drafts[:num_drafts], probs.cut(num_drafts)


MUTATIONS: dict[str, tuple[str, Mutate | None, Meddle]] = {
    f"{mutate.__name__}: {case}": (case, mutate, as_drafted)
    for mutate, cases in {
        all_streams_equal: ["rejection; the issue's pair", "block; the issue's pair"],
        accept_with_the_draft_s_noise: ["rejection; the issue's pair"],
        recover_with_the_draft_s_noise: ["rejection; the issue's pair"],
        noise_keyed_by_position_alone: ["block; a coin"],
        probs_handed_over_before_filtering: ["rejection; top_k 2", "block; top_k 2"],
        recovered_from_the_target: ["rejection; the issue's pair", "block; the issue's pair"],
        recovered_from_the_difference_s_size: ["rejection", "block"],
        a_residual_without_its_scale: ["block; a coin"],
    }.items()
    for case in cases
} | {
    f"{meddle.__name__}: {case}": (case, None, meddle)
    for meddle, cases in {
        cut_at_a_bad_id: ["rejection; a bad id", "block; a bad id"],
        dropped_for_its_own_probability: ["rejection", "block; the issue's pair"],
        best_prefix_by_a_stepped_cost: ["rejection; the issue's pair", "block; the issue's pair"],
    }.items()
    for case in cases
}


def play_wrongly(
    case: str, mutate: Mutate | None, meddle: Meddle, patch: pytest.MonkeyPatch
) -> ChiSquare:
    if mutate is not None:
        mutate(patch)
    fewer = replace(CASES[case], num_games=800)
    (found,) = fewer.checks(fewer.play(meddle)).values()
    return found


@pytest.mark.parametrize(("case", "mutate", "meddle"), MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_way_fails_the_chi_square_that_the_right_one_passes(
    case: str, mutate: Mutate | None, meddle: Meddle, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = play_wrongly(case, mutate, meddle, monkeypatch)
    assert not found.holds, found


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'mutation: case':66} {'chi2':>7} {'df':>4} {'odds':>9}")
    for name, mutation in MUTATIONS.items():
        with pytest.MonkeyPatch.context() as patch:
            found = play_wrongly(*mutation, patch)
        print(f"{name:66} {found.statistic:7.0f} {found.degrees:4} {found.odds:9.1g}")


if __name__ == "__main__":
    main()
