"""When all requests will have ended, against sums done by hand."""

from __future__ import annotations

import pytest
from control_world import greedy_request

from foresay.core.scheduling.acceptance import Rates
from foresay.core.scheduling.draft_choice import Chooser, Menu
from foresay.core.scheduling.drain import Lengths, look_ahead, other_plans
from foresay.core.scheduling.step_cost import StepCost

ROW = 1.0  # seconds; a step takes 10 more


def chooser() -> Chooser:
    cost = StepCost()
    for _ in range(3):
        for rows in (1, 65):
            cost.add_step(rows, 1, 10 + ROW * rows, 0.0)
        for tokens in (0, 8):
            cost.add_drafting("p", 1, tokens, 0.5 * tokens)
    return Chooser(["p"], cost)


def menu(rate: float, k: int = 4) -> Menu:
    return Menu.of([Rates([1.0] * k, [rate, *[1.0] * (k - 1)])], [k])


def test_requests_end_one_after_another_and_steps_become_cheaper() -> None:
    plain = menu(0.5).choice((0,))
    until = look_ahead(chooser(), [plain, plain], [10.0, 30.0])
    assert until.last == pytest.approx(10 * 12 + 20 * 11)
    assert until.average == pytest.approx((10 * 12 + until.last) / 2)


def test_who_drafts_needs_fewer_steps_and_makes_them_dearer() -> None:
    # One token each, always accepted: 2 of its rows, and half a second of drafting.
    choices = [menu(1.0).choice((1,)), menu(1.0).choice((0,))]
    until = look_ahead(chooser(), choices, [20.0, 20.0])
    assert until.last == pytest.approx(10 * 13.5 + 10 * 11)
    # A third one, of which there is no choice, runs on as it is.
    assert look_ahead(chooser(), choices, [20.0, 20.0, 25.0]).last == pytest.approx(
        10 * 14.5 + 10 * 12 + 5 * 11
    )


def test_ends_close_together_are_one() -> None:
    plain = menu(0.5).choice((0,))
    left = [100.0 + 0.01 * number for number in range(64)]
    assert look_ahead(chooser(), [plain] * 64, left).last == pytest.approx(100 * 74, rel=0.01)


def test_a_plan_lets_the_longest_end_sooner_and_asks_no_more_of_others() -> None:
    own, menus, left = chooser(), [menu(0.9), menu(0.9)], [10.0, 100.0]
    found = own.best(menus, 2)
    assert found is not None
    plans = other_plans(own, menus, left, found)
    assert any(
        choices[0].num_draft_tokens == (0,) and choices[1].num_draft_tokens == (4,)
        for choices in plans
    )


def test_lengths_are_the_tokens_over_the_stops() -> None:
    lengths = Lengths()
    request = greedy_request("r", 64)
    assert lengths.left(request) == 64
    for _ in range(20):
        lengths.add(64, stopped=False)
    assert lengths.left(request) == 64
    for _ in range(600):
        lengths.add(30, stopped=False)
        lengths.add(10, stopped=True)
    stop = 1 / 40
    assert lengths.left(request) == pytest.approx((1 - (1 - stop) ** 64) / stop, rel=0.02)
    request.token_ids += [0] * 60
    assert lengths.left(request) == pytest.approx(4, rel=0.05)
    assert lengths.left(greedy_request("endless")) == pytest.approx(40, rel=0.02)
