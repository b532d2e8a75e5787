"""How far drafts get, from counts whose rates are known."""

from __future__ import annotations

import random

import pytest

from foresay.core.scheduling.acceptance import Rates, Spread, of_all, of_proposer, of_request
from foresay.core.scheduling.draft_choice import Menu, Offer


def test_a_chain_counts_by_place_given_the_one_before() -> None:
    acceptance = of_all(3)
    for num_drafted, num_accepted in [(3, 3), (3, 1), (1, 1), (0, 0)] * 100:
        acceptance.add(3, num_drafted, range(num_accepted))
    rates = acceptance.rates()
    # There: 3 of 4, then 2 of 3, then 2 of 2. Accepted: 3 of 4, then 1 of 3, then 1 of 1.
    assert rates.there == pytest.approx([3 / 4, 2 / 3, 1], abs=0.01)
    assert rates.accepted == pytest.approx([3 / 4, 1 / 3, 1], abs=0.02)


def test_a_tree_counts_by_rank_and_each_for_itself() -> None:
    acceptance = of_all(4, is_tree=True)
    for num_drafted, accepted in [(4, [0, 3]), (4, [1]), (2, [0, 1]), (0, [])] * 100:
        acceptance.add(4, num_drafted, accepted)
    rates = acceptance.rates()
    assert rates.there == pytest.approx([3 / 4, 3 / 4, 1 / 2, 1 / 2], abs=0.01)
    assert rates.accepted == pytest.approx([1 / 2, 1 / 2, 0, 1 / 4], abs=0.01)
    offer = Offer.of(rates, 3)
    assert offer.tokens[3] == pytest.approx(1.0, abs=0.01)
    assert offer.rows[3] == pytest.approx(2.0, abs=0.01)
    assert offer.empty == pytest.approx(0.25, abs=0.01)


def test_of_a_rank_that_was_not_allowed_the_one_before_tells() -> None:
    acceptance = of_all(3, is_tree=True)
    assert acceptance.rates().accepted[2] < 0.3
    for _ in range(100):
        acceptance.add(2, 2, [0, 1])
    assert acceptance.rates().accepted[0] > 0.95
    assert 0.6 < acceptance.rates().accepted[2] < 0.8


def test_of_a_rank_that_was_allowed_when_all_went_badly_the_one_before_tells_too() -> None:
    bad, both = of_all(4, is_tree=True), of_all(4, is_tree=True)
    for _ in range(10):
        bad.add(4, 4, ())
        both.add(4, 4, ())
    for _ in range(30):
        both.add(2, 2, [0, 1])
    assert bad.rates().accepted[2] < 0.05
    assert both.rates().accepted[1] == pytest.approx(3 / 4, abs=0.05)
    # It is 0 of 10 drafts by its own count. No node before it was ever accepted in these.
    assert both.rates().accepted[2] > 0.4
    for _ in range(30):
        both.add(4, 4, [0, 1])
    assert both.rates().accepted[2] < 0.1


def test_the_first_guess_of_a_tree_falls_and_is_worth_a_try() -> None:
    rates = of_proposer(32, is_tree=True).rates()
    assert rates.accepted[0] > rates.accepted[1] > rates.accepted[31]
    assert 1 < sum(rates.accepted) < 3


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_first_guess_is_given_up_after_a_few_drafts_without_success(is_tree: bool) -> None:
    tokens = []
    for number in (0, 1, 3, 6):
        acceptance = of_proposer(16, is_tree=is_tree)
        for _ in range(number):
            acceptance.add(4, 4, ())
        tokens.append(Offer.of(acceptance.rates(), 16).tokens[16])  # more than was ever allowed
    assert tokens[0] > 1
    assert tokens[1] < 0.5 * tokens[0]
    assert tokens[2] < 0.2
    assert tokens[3] < 0.07


def test_sizes_of_a_tree_are_a_handful_and_the_largest_is_among_them() -> None:
    sizes = Offer.of(Rates([1.0] * 20, [0.1] * 20, is_tree=True), 20).sizes
    assert list(sizes) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert list(Offer.of(Rates([1.0] * 5, [0.1] * 5), 5).sizes) == [1, 2, 3, 4, 5]
    assert list(Offer.of(Rates([1.0], [0.1], is_tree=True), 0).sizes) == []


def test_new_drafts_count_more_than_old_ones_at_any_length_of_life() -> None:
    acceptance = of_request(1)
    for held in (1, 0):
        for _ in range(5000):  # the weights of new ones grow out of bounds unless they are scaled
            acceptance.add(1, 1, range(held))
        assert acceptance.rates().accepted[0] == pytest.approx(held, abs=0.3)


def test_a_request_that_seldom_gets_far_is_not_taken_to_go_on_like_others() -> None:
    history = Rates([1.0] * 3, [0.5, 0.9, 0.9])
    own = of_request(3)
    for _ in range(30):
        own.add(3, 3, ())
    rates = own.rates(history)
    assert rates.accepted[0] < 0.2
    assert rates.accepted[1] < 0.4  # of which it has seen nothing
    good = of_request(3)
    for _ in range(30):
        good.add(3, 3, range(3))
    assert good.rates(history).accepted[1] >= 0.9


def test_hope_is_for_the_best_nodes_most() -> None:
    raised = Rates([1.0] * 2, [0.3, 0.2], is_tree=True).raised(0.1)
    assert raised.accepted == pytest.approx([0.4, 0.25])
    assert Rates([1.0] * 2, [0.95, 0.2]).raised(0.1).accepted == pytest.approx([0.98, 0.3])


@pytest.mark.parametrize(
    ("rates", "least", "most"), [([0.5], 5, 8), ([0.1, 0.9], 1, 1.5), ([0.3, 0.7], 2, 7)]
)
def test_the_more_requests_differ_the_less_others_say(
    rates: list[float], least: float, most: float
) -> None:
    chance, spread = random.Random(0), Spread()
    assert spread.weight() == 4
    for number in range(200):
        own = of_request(1)
        for _ in range(20):
            own.add(1, 1, range(chance.random() < rates[number % len(rates)]))
        spread.add(own)
    assert least <= spread.weight() <= most


def test_a_choice_of_a_chain_of_members_counts_who_is_reached() -> None:
    lookup = Rates([0.5, 1.0], [0.45, 0.9])
    tree = Rates([1.0] * 4, [0.4, 0.2, 0.1, 0.05], is_tree=True)
    choice = Menu.of([lookup, tree], [2, 4]).choice((2, 3))
    assert choice.tokens == pytest.approx(0.45 + 0.405 + 0.5 * 0.7)
    assert choice.rows == pytest.approx(1.0 + 0.5 * 3)
    assert choice.asked == (1.0, 0.5)
