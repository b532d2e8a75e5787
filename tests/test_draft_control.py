"""The draft-length control against the best that could be done, in worlds where that is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from control_world import Drafter, World, greedy_request

from foresay.core.scheduling.draft_control import DraftControl
from foresay.core.scheduling.step_cost import Curve, StepCost


def flat(rate: float) -> Callable[[str, int], float]:
    return lambda request, place: rate


def cpu(rows: int) -> float:
    """A step on a CPU: rows are cheap, not free."""
    return 10 + 0.5 * rows


def head(requests: int, tokens: int) -> float:
    """A drafter that runs once for each token."""
    return tokens * (0.5 + 0.02 * requests)


def fixed_rates(make: Callable[[], World], num_requests: int, k: int) -> list[float]:
    """Tokens per second of each fixed number of draft tokens from 0 on."""
    rates = []
    for fixed in range(k + 1):
        world = make()
        requests = [greedy_request(str(i)) for i in range(num_requests)]
        steps = 1000 // num_requests + 100
        rates.append(world.run(DraftControl(world.members, {1: fixed}), requests, steps))
    return rates


WORLDS = {
    "good": (cpu, Drafter("p", 5, flat(0.8), head)),
    "middling": (cpu, Drafter("p", 5, flat(0.45), head)),
    "poor": (cpu, Drafter("p", 5, flat(0.02), head)),
    "useless rows": (lambda rows: 4.0 * rows, Drafter("p", 5, flat(0.7), head)),
    "first place only": (cpu, Drafter("p", 5, lambda r, j: 0.8 if j == 0 else 0.05, head)),
    "seldom, and good": (cpu, Drafter("p", 8, flat(0.9), has_draft=0.1)),
    "seldom, and poor": (cpu, Drafter("p", 8, flat(0.05), has_draft=0.3)),
}


@pytest.mark.parametrize("num_requests", [1, 8, 32])
@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_close_to_the_best_fixed_length(name: str, num_requests: int) -> None:
    step_seconds, drafter = WORLDS[name]

    def make() -> World:
        return World(step_seconds, [drafter], noise=0.1)

    world = make()
    requests = [greedy_request(str(i)) for i in range(num_requests)]
    rate = world.run(DraftControl(world.members), requests, 2000 // num_requests + 400)
    rates = fixed_rates(make, num_requests, drafter.k)
    # Several together draft only where that promises a good deal more.
    assert rate >= max(rates) * (0.88 if num_requests == 1 else 0.75)
    assert rate >= 0.96 * rates[0]


def test_a_poor_drafter_costs_little_over_a_few_prompts() -> None:
    drafter = Drafter("p", 5, flat(0.0), head)
    world, plain = World(cpu, [drafter], noise=0.1), World(cpu, [drafter], noise=0.1)
    control = DraftControl(world.members)
    for prompt in range(24):
        world.run(control, [greedy_request(str(prompt))], 64)
        control.forget(str(prompt))
    rate = plain.run(DraftControl(plain.members, {1: 0}), [greedy_request("r")], 24 * 64)
    assert world.num_tokens / world.seconds > 0.97 * rate
    assert world.num_plain_steps < world.num_steps  # it does try


def test_it_learns_when_a_request_becomes_predictable() -> None:
    rate = 0.0
    world = World(cpu, [Drafter("p", 5, lambda r, j: rate, head)], noise=0.05)
    control, requests = DraftControl(world.members), [greedy_request("r")]
    world.run(control, requests, 600)
    before = world.num_plain_steps / world.num_steps
    rate = 0.95
    assert world.run(control, requests, 600) > 2 * 1 / cpu(1)
    rate = 0.0
    assert world.run(control, requests, 600) > 0.93 / cpu(1)
    assert before > 0.8


def test_each_request_of_a_batch_has_a_length_of_its_own() -> None:
    # Rows are dear: only the drafts of the predictable requests are worth theirs.
    world = World(
        lambda rows: 5 + 0.3 * rows, [Drafter("p", 4, lambda r, j: 0.95 if r < "2" else 0.1)]
    )
    control, requests = DraftControl(world.members), [greedy_request(str(i)) for i in range(4)]
    world.run(control, requests, 400)
    control.decide(requests)
    plans = [r.draft_plan.num_draft_tokens[0] for r in requests if r.draft_plan is not None]
    assert plans[:2] == [4, 4]
    assert plans[2:] == [0, 0]


@pytest.mark.parametrize(("lookup", "wins"), [(0.9, "lookup"), (0.1, "head")])
def test_a_chain_asks_who_is_worth_it(lookup: float, wins: str) -> None:
    drafters = [
        Drafter("lookup", 5, flat(lookup), has_draft=0.8),
        Drafter("head", 5, flat(0.7), head),
    ]
    world = World(cpu, drafters, noise=0.05)
    control, requests = DraftControl(world.members), [greedy_request("r")]
    world.run(control, requests, 200)
    world.asked.clear()
    rate = world.run(control, requests, 1000)
    alone = {
        d.name: World(cpu, [d], noise=0.05).run(
            DraftControl([(d.name, d.k)]), [greedy_request("r")], 1000
        )
        for d in drafters
    }
    assert rate >= 0.95 * max(alone.values())
    if wins == "lookup":  # and the head where there is none
        assert world.asked["lookup"] > 800
        assert rate > alone["lookup"]
    else:
        assert world.asked.get("lookup", 0) < 200


def test_a_request_lowers_its_own_length() -> None:
    world = World(cpu, [Drafter("p", 5, flat(0.95), head)])
    control = DraftControl(world.members)
    requests = [greedy_request("a"), greedy_request("b", num_speculative_tokens=2)]
    requests.append(greedy_request("c", num_speculative_tokens=0))
    world.run(control, requests, 300)
    control.decide(requests)
    assert [r.draft_plan and r.draft_plan.num_draft_tokens for r in requests] == [(5,), (2,), None]


def test_a_table_by_batch_size() -> None:
    table = DraftControl([("p", 5), ("q", 2)], {1: 5, 4: 1, 8: 0})
    found = []
    for number in (1, 3, 4, 7, 8, 20):
        requests = [greedy_request(str(i)) for i in range(number)]
        table.decide(requests)
        (plan,) = {r.draft_plan for r in requests}
        assert plan is not None
        found.append(plan.num_draft_tokens)
    assert found == [(5, 2), (5, 2), (1, 1), (1, 1), (0, 0), (0, 0)]


def test_a_control_forgets_requests_and_keeps_their_history() -> None:
    world = World(cpu, [Drafter("p", 5, flat(0.0), head)])
    control = DraftControl(world.members)
    world.run(control, [greedy_request("a")], 100)
    control.forget("a")
    assert not control._known
    newcomer = greedy_request("b")
    control.decide([newcomer])
    assert newcomer.draft_plan is not None
    assert newcomer.draft_plan.num_draft_tokens[0] <= 1  # a bit of hope, and no more
    assert control._known.keys() == {"b"}


def test_only_greedy_requests_stop_by_confidence() -> None:
    world = World(cpu, [Drafter("p", 5, flat(0.9), head)])
    control, requests = DraftControl(world.members), [greedy_request("r")]
    world.run(control, requests, 100)
    plan = requests[0].draft_plan
    assert plan is not None
    assert 0 < plan.min_confidence < 0.5


def test_a_curve_rises_and_is_straight_between_its_points() -> None:
    curve = Curve()
    assert curve.at(3) is None
    for x, seconds in [(1, 10.0), (3, 14.0), (5, 12.0), (9, 20.0)]:
        for _ in range(3):
            curve.add(x, seconds)
    assert curve.at(0) == curve.at(1) == 10
    assert curve.at(3) == curve.at(4) == curve.at(5) == 13  # pooled
    assert curve.at(2) == 11.5
    assert curve.at(7) == 16.5
    assert curve.at(17) == 20 + 8 * 10 / 8


def test_a_curve_goes_by_the_median_of_the_last_times() -> None:
    curve = Curve()
    for seconds in (1.0, 50.0, 1.0, 1.2, 1.1):
        curve.add(4, seconds)
    assert curve.at(4) == 1.1
    for _ in range(8):
        curve.add(4, 3.0)
    assert curve.at(4) == 3.0


def test_drafting_costs_are_those_of_the_nearest_batch() -> None:
    cost = StepCost()
    assert cost.drafting("p", 1, 3) == 0
    for _ in range(3):
        cost.add_drafting("p", 2, 1, 1.0)
        cost.add_drafting("p", 2, 5, 3.0)
        cost.add_drafting("p", 30, 5, 9.0)
    assert cost.drafting("p", 1, 3) == 2
    assert cost.drafting("p", 40, 3) == 9
    assert cost.knows_lengths("p", 2)
    assert not cost.knows_lengths("p", 30)
