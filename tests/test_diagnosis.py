"""What `foresay doctor` computes and concludes, from costs and rates that are made up.

Break-even rates are compared with closed forms, and every verdict is reached from findings that
have its cause by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from control_world import greedy_request

from foresay.core.commands.diagnosis import (
    Economy,
    Pair,
    Speed,
    Timed,
    by_task,
    lengths,
    rate_ratio,
    speed,
)
from foresay.core.commands.reasons import Findings, judge, percent
from foresay.core.messages import DraftTokenIds, SchedulerOutput
from foresay.core.scheduling.acceptance import Rates
from foresay.core.scheduling.draft_control import DraftControl
from foresay.core.scheduling.step_cost import StepCost

PLAIN = 10.0  # seconds of a plain step of one request


def economy(
    accepted: Sequence[float],
    *,
    there: float = 1.0,
    row: float = 0.0,
    drafting: Callable[[int], float] = lambda tokens: 0.0,
    num_requests: int = 1,
) -> Economy:
    """One proposer; a row more takes `row` seconds; acceptance is of the tokens that there are."""
    k = len(accepted)
    rates = Rates(
        [there, *[1.0] * (k - 1)],
        [there * accepted[0], *accepted[1:]],
    )
    return Economy([("p", rates)], costs({"p": drafting}, k, row, num_requests), num_requests)


def costs(
    drafting: dict[str, Callable[[int], float]], k: int, row: float, num_requests: int
) -> StepCost:
    cost = StepCost()
    for _ in range(3):
        for rows in range(num_requests, num_requests * (1 + k) + 1, num_requests):
            cost.add_step(rows, num_requests, PLAIN - 1 + (rows - num_requests) * row, 1.0)
        for name, seconds in drafting.items():
            for tokens in range(k + 1):
                cost.add_drafting(name, num_requests, tokens, seconds(tokens))
    return cost


# -- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [1.0, 0.25])
@pytest.mark.parametrize(("row", "each"), [(0.5, 2.0), (0.0, 1.0), (3.0, 0.0)])
def test_break_even_is_the_closed_form(there: float, row: float, each: float) -> None:
    found = economy([0.6, 0.6], there=there, row=row, drafting=lambda n: n * each)
    # One token: it pays if what is accepted is worth its row and its drafting.
    price = (row + each) / PLAIN
    assert found.break_even([1]) == pytest.approx(price, abs=1e-6)
    # Two: a + a**2 = twice the price.
    two = (-1 + math.sqrt(1 + 8 * price)) / 2
    assert found.break_even([2]) == pytest.approx(two, abs=1e-6)
    assert found.found([1]) == pytest.approx(0.6, abs=1e-6)
    assert found.found([2]) == pytest.approx(0.6, abs=1e-6)


def test_at_break_even_a_step_is_as_fast_as_a_plain_one() -> None:
    def drafting(tokens: int) -> float:
        return 0.8 + 0.4 * tokens

    rate = economy([0.5] * 4, row=0.3, drafting=drafting).break_even([4])
    assert rate is not None
    at = economy([rate] * 4, row=0.3, drafting=drafting)
    assert at.speedup(at.expect(4)) == pytest.approx(1.0, abs=1e-6)


def test_where_not_even_all_tokens_would_pay_there_is_no_break_even() -> None:
    found = economy([1.0], row=0.0, drafting=lambda n: 12.0 * n)
    assert found.break_even([1]) is None
    assert found.found([1]) == 1.0


def test_without_drafts_there_is_neither_rate() -> None:
    found = economy([0.0, 0.0], there=0.0)
    assert found.break_even([2]) is None
    assert found.found([2]) is None
    assert found.speedup(found.expect(2)) == pytest.approx(1.0)


def test_the_rate_found_is_between_those_of_the_places() -> None:
    found = economy([0.9, 0.3])
    rate = found.found([2])
    assert rate is not None
    assert rate + rate**2 == pytest.approx(0.9 + 0.9 * 0.3)


def test_expected_tokens_and_seconds_of_a_batch() -> None:
    found = economy([0.5, 0.4], row=0.25, drafting=lambda n: 0.5 * n, num_requests=4)
    step = found.expect(2)
    assert step.tokens == pytest.approx(1 + 0.5 + 0.2)
    assert step.rows == 12
    assert step.step_seconds == pytest.approx(PLAIN + 8 * 0.25)
    assert step.drafting_seconds == pytest.approx(1.0)
    assert found.speedup(step) == pytest.approx(1.7 * PLAIN / 13)
    # Two rows more of each request add eight to the step.
    assert found.row_share(step) == pytest.approx(4 * 0.25 / PLAIN)


@pytest.mark.parametrize(
    ("accepted", "row", "each"),
    [([0.9, 0.8, 0.7, 0.2, 0.1], 0.5, 1.0), ([0.3] * 5, 0.5, 1.0), ([0.95] * 5, 0.1, 0.1)],
    ids=["falling", "poor", "good"],
)
def test_the_best_length_is_the_best_of_all(accepted: list[float], row: float, each: float) -> None:
    found = economy(accepted, row=row, drafting=lambda n: n * each)
    speedups = [
        (1 + sum(math.prod(accepted[: n + 1]) for n in range(k))) / (1 + k * (row + each) / PLAIN)
        for k in range(1, 6)
    ]
    best = found.best()
    assert found.speedup(best) == pytest.approx(max(speedups))
    assert best.k == speedups.index(max(speedups)) + 1


def test_the_members_of_a_chain_may_have_different_best_lengths() -> None:
    cost = costs({"lookup": lambda n: 0.0, "head": lambda n: 2.0 * n}, 4, 0.1, 1)
    members = [("lookup", Rates([0.5, 1, 1, 1], [0.45, 0.9, 0.9, 0.9])),
               ("head", Rates([1.0] * 4, [0.7, 0.1, 0.1, 0.1]))]  # fmt: skip
    found = Economy(members, cost, 1)
    best = found.best()
    assert best.ks == (4, 1)
    # The head is asked where the lookup has nothing: 1 + 0.45 + ... + 0.5 * 0.7 tokens.
    assert best.tokens == pytest.approx(1 + 0.45 * (1 + 0.9 + 0.81 + 0.729) + 0.5 * 0.7)
    assert best.drafting_seconds == pytest.approx(0.5 * 2.0)
    assert found.first(best.ks) == pytest.approx((1.0, 0.45 + 0.5 * 0.7))
    assert found.first([4, 0]) == pytest.approx((0.5, 0.9))


def test_what_would_be_if_one_thing_were_otherwise() -> None:
    found = economy([0.5], there=0.2, row=1.0, drafting=lambda n: 2.0)
    # 1.1 tokens in 10 + 0.2 + 2 seconds.
    assert found.best_if() == pytest.approx(11 / 12.2)
    assert found.best_if(free_drafting=True) == pytest.approx(11 / 10.2)
    assert found.best_if(free_rows=True) == pytest.approx(11 / 12)
    assert found.best_if(always=True) == pytest.approx(15 / 13)


def test_speeds_are_pooled_in_each_repeat_and_the_middle_one_counts() -> None:
    def pair(repeat: int, task: str, own: float, plain: float) -> Pair:
        return Pair(repeat, task, Timed(10, own), Timed(10, plain), 4 if task == "a" else 6)

    pairs = [
        *(pair(0, "a", 1.0, 2.0), pair(0, "b", 3.0, 4.0)),  # 6/4
        *(pair(1, "a", 2.0, 3.0), pair(1, "b", 2.0, 1.0)),  # 4/4
        *(pair(2, "a", 1.0, 4.0), pair(2, "b", 1.0, 4.0)),  # 8/2
        pair(3, "b", 1.0, 100.0),  # interrupted
    ]
    assert speed(pairs) == Speed(1.5, 1.0, 4.0, 20 / 10)
    assert by_task(pairs)["a"] == Speed(2.0, 1.5, 4.0, 10 / 4)
    assert speed([]) is None
    assert by_task([pair(0, "", 1.0, 2.0)]) == {}
    assert speed(pairs[-1:]) == Speed(100.0, 100.0, 100.0, 10 / 6)


def test_rates_of_runs_are_pooled() -> None:
    own, plain = [Timed(10, 1.0), Timed(30, 3.0)], [Timed(10, 4.0)]
    assert rate_ratio(own, plain) == 4.0
    assert rate_ratio(own, []) is None


@pytest.mark.parametrize(
    ("most", "tried"),
    [
        (1, [0, 1]),
        (3, [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 4, 5]),
        (6, [0, 1, 2, 3, 5, 6]),
        (8, [0, 1, 2, 3, 5, 8]),
        (16, [0, 1, 2, 3, 5, 8, 13, 16]),
    ],
)
def test_the_numbers_of_draft_tokens_that_are_tried(most: int, tried: list[int]) -> None:
    assert lengths(most) == tried


# -- trees ---------------------------------------------------------------------------------------


def tree(there: float = 1.0, row: float = 0.3) -> Economy:
    """Nodes of which the best is right in every third step, the others less and less."""
    rates = Rates([there] * 16, [there / (3 + rank) for rank in range(16)], is_tree=True)
    return Economy([("t", rates)], costs({"t": lambda n: 0.1 * n}, 16, row, 1), 1)


def test_of_a_tree_nodes_count_each_for_itself() -> None:
    found = tree()
    step = found.expect(4)
    assert step.tokens == pytest.approx(1 + 1 / 3 + 1 / 4 + 1 / 5 + 1 / 6)
    assert step.rows == 5
    assert found.found([4]) == pytest.approx((step.tokens - 1) / 4)
    # Each node costs 0.4 of 10 seconds.
    assert found.break_even([4]) == pytest.approx(0.04)
    assert found.first([4]) == pytest.approx((1.0, 1 / 3))
    assert tree(0.5).first([4]) == pytest.approx((0.5, 1 / 3))
    assert tree(0.5).best_if(always=True) == pytest.approx(found.speedup(found.best()))


def test_the_best_tree_is_smaller_where_rows_are_dear() -> None:
    sizes = [tree(row=row).best().k for row in (0.0, 0.6, 1.5)]
    assert sizes[0] == 16
    assert sizes[0] > sizes[1] > sizes[2]


def test_of_trees_nodes_are_told() -> None:
    verdict = judge(findings(tree(), 1.6))
    assert "33% of the best nodes are accepted" in verdict.text
    assert f"drafting up to {tree().best().k} nodes" in verdict.text
    rates = Rates([1.0] * 4, [0.02] * 4, is_tree=True)
    poor = Economy([("t", rates)], costs({"t": lambda n: 0.1 * n}, 4, 0.3, 1), 1)
    assert "2% of nodes are accepted, and 4% would be needed" in judge(findings(poor, 0.9)).text


# -- what the control keeps for it ---------------------------------------------------------------


def drafted(control: DraftControl, accepted: Sequence[bool], seconds: Sequence[float]) -> None:
    """Tell it of steps of one request, a draft of one token after each."""
    request = greedy_request("r")
    for number, (holds, took) in enumerate(zip(accepted, seconds, strict=True)):
        control.decide([request])
        drafts = DraftTokenIds({"r": [1]}, {}, seconds={"p": 0.0})
        step = SchedulerOutput(number, {"r": 2}, {}, {"r": 2}, {"r": 1})
        control.add_engine_step(step, drafts, [0.0, 0.0, took, took])
        control.add_verified("r", 1, [0] if holds else [])


@pytest.mark.parametrize(
    ("table", "rate", "seconds"),
    [
        ({1: 1}, (150 + 1.5) / (300 + 2), 1.0),  # of all, and twice what is assumed at first
        (None, 0.0, 3.0),  # of the last ones
    ],
    ids=["fixed", "adaptive"],
)
def test_with_fixed_lengths_nothing_is_forgotten(
    table: dict[int, int] | None, rate: float, seconds: float
) -> None:
    control = DraftControl([("p", 1)], table)
    # The machine had other work to do for the most part, in the end too.
    drafted(control, [True] * 150 + [False] * 150, [1.0] * 100 + [3.0] * 200)
    assert control.members == [("p", 1)]
    assert control.rates("p").accepted[0] == pytest.approx(rate, abs=0.1)
    assert control.cost.step(2, 1) == seconds


# -- verdicts ------------------------------------------------------------------------------------


def findings(own: Economy, times: float | None = None, **changes: Any) -> Findings:
    fields: dict[str, Any] = {"num_steps": 500, "num_drafts": 400, "was_asked": True}
    if times is not None:
        fields["measured"] = Speed(times, times * 0.98, times * 1.02, 3.0)
    return Findings(own, **{**fields, **changes})


def cheap(accepted: float = 0.6, **changes: Any) -> Economy:
    given = {"row": 0.3, "drafting": lambda n: 0.4 * n, **changes}
    return economy([accepted] * 3, **given)


def test_it_helps_and_the_sentence_says_by_what() -> None:
    verdict = judge(findings(cheap(), 1.6))
    assert (verdict.helps, verdict.cause) == (True, "helps")
    assert verdict.text == (
        "speculation helps here: 1.60x, because 60% of the first draft tokens are accepted, a row "
        "more costs 3% of a step and drafting up to 3 tokens 12%"
    )


def test_what_was_not_measured_is_called_expected() -> None:
    verdict = judge(findings(cheap()))
    assert verdict.text.startswith("speculation helps here: 1.80x expected, because ")


def test_it_helps_with_few_good_drafts() -> None:
    verdict = judge(findings(economy([0.9] * 5, there=0.2, row=0.1), 1.25))
    assert "because 20% of the steps have a draft, 90% of the first draft tokens" in verdict.text
    assert verdict.text.endswith("a row more costs 1% of a step and drafting up to 5 tokens 0%")


def test_it_helps_where_only_some_texts_have_good_drafts() -> None:
    verdict = judge(findings(cheap(0.05), 1.2))
    assert verdict.helps
    assert "because foresay drafts only where that pays" in verdict.text


def test_too_little_is_accepted() -> None:
    own = economy([0.04] * 5, row=0.1, drafting=lambda n: 0.4 + 0.4 * n)
    verdict = judge(findings(own, 0.99))
    assert (verdict.helps, verdict.cause) == (False, "acceptance")
    # One token costs 0.1 + 0.8 seconds of 10.
    assert verdict.text == (
        "speculation does not help here (0.99x), because 4% of draft tokens are accepted, and 9% "
        "would be needed to pay for drafting (8% of a step for 1 token) and rows (a row "
        "more: 1%)"
    )
    assert verdict.notes == (
        "foresay notices and drafts little: always to draft would be 0.95x at best",
    )


def test_hardly_enough_is_accepted() -> None:
    verdict = judge(findings(economy([0.12], row=0.5, drafting=lambda n: 0.5 * n), 1.01))
    assert verdict.cause == "acceptance"
    assert "12% of draft tokens are accepted, hardly more than the 10% that pay" in verdict.text


@pytest.mark.parametrize(
    ("row", "each", "cause", "why"),
    [
        (
            *(4.0, 15.0, "drafting"),
            "drafting takes too long: 1 token 1.5 plain steps, for 0.20 tokens more a step",
        ),
        (
            *(15.0, 4.0, "rows"),
            "rows are what costs: 1 more makes a step 2.50 times as long, for 1.20 times the "
            "tokens",
        ),
    ],
)
def test_where_not_even_all_tokens_would_pay_it_is_the_price(
    row: float, each: float, cause: str, why: str
) -> None:
    verdict = judge(findings(economy([0.2], row=row, drafting=lambda n: each * n), 0.7))
    assert verdict.cause == cause
    assert verdict.text == f"speculation is slower than plain decoding here (0.70x), because {why}"


def test_what_is_needed_is_what_is_needed_at_least() -> None:
    # A call is dear, another token is not: one token never pays, five pay from about a half.
    own = economy([0.1] * 5, drafting=lambda n: 12.0 if n else 0.0)
    easiest = own.easiest()
    assert easiest is not None
    assert easiest.k == 5
    rate = own.break_even(easiest.ks)
    assert rate is not None
    assert sum(rate**n for n in range(1, 6)) == pytest.approx(1.2, abs=1e-5)
    assert "10% of draft tokens are accepted, and 56% would be needed" in judge(findings(own)).text


def test_drafting_takes_too_long() -> None:
    verdict = judge(findings(economy([0.7] * 2, row=0.2, drafting=lambda n: 7.0 * n), 0.98))
    assert verdict.cause == "drafting"
    # Free, two tokens bring 2.19 in a step of 10.4.
    assert verdict.text == (
        "speculation does not help here (0.98x), because drafting takes too long: 1 token 70% of a "
        "plain step, for 0.70 tokens more a step; if it took no time, it would be 2.11x"
    )


def test_rows_are_what_costs() -> None:
    own = economy([0.6, 0.6], row=0.2, drafting=lambda n: 0.1 * n, num_requests=32)
    verdict = judge(findings(own, 1.0))
    assert verdict.cause == "rows"
    assert verdict.text.endswith(
        "because rows are what costs: 1 more for each of 32 requests makes a step 1.64 times as "
        "long, for 1.60 times the tokens"
    )
    assert "try a smaller --batch-size" in verdict.notes[-1]


def test_too_few_steps_have_a_draft() -> None:
    verdict = judge(findings(economy([0.8] * 3, there=0.02, row=0.1), 1.0, num_drafts=30))
    assert verdict.cause == "few_drafts"
    assert verdict.text.endswith(
        "because only 2% of the steps have a draft; of those there are, 80% of the first tokens "
        "are accepted"
    )


def test_few_and_bad_drafts_are_too_bad_before_they_are_too_few() -> None:
    verdict = judge(findings(economy([0.02] * 3, there=0.1, row=0.5), 1.0))
    assert verdict.cause == "acceptance"


@pytest.mark.parametrize(
    ("changes", "cause", "why"),
    [
        (
            {"faults": {"raised": 3, "dropped": 1}},
            "faults",
            "the proposer failed and was turned off (dropped 1x, raised 3x)",
        ),
        (
            {"num_drafts": 0, "faults": {"bad_id": 9}},
            "faults",
            "no draft came of it but faults (bad_id 9x)",
        ),
        ({"num_drafts": 0}, "no_drafts", "the proposer never had a draft, in 500 steps"),
        (
            {"num_drafts": 0, "was_asked": False},
            "not_asked",
            "the prompts leave no room in the longest text that it takes",
        ),
    ],
    ids=["dropped", "faults only", "nothing found", "never asked"],
)
def test_without_drafts_the_reason_is_said_first(
    changes: dict[str, Any], cause: str, why: str
) -> None:
    verdict = judge(findings(cheap(), 1.0, **changes))
    assert (verdict.helps, verdict.cause) == (False, cause)
    assert why in verdict.text


def test_the_prompts_take_the_time() -> None:
    verdict = judge(findings(cheap(), 1.02, prompt_share=0.95))
    assert verdict.cause == "prompts"
    assert "95% of the time goes to the prompts" in verdict.text
    assert "after them 1.80x is expected" in verdict.text


def test_what_cannot_be_explained_is_not() -> None:
    verdict = judge(findings(cheap(), 1.0, prompt_share=0.1))
    assert verdict.cause == "unclear"
    assert "less was measured than costs and acceptance promise (1.80x)" in verdict.text
    assert "1.67x would be expected, prompts included" in verdict.notes[0]


def test_it_helps_for_some_tasks() -> None:
    tasks = {
        "edit": Speed(1.5, 1.4, 1.6, 3.0),
        "copy": Speed(1.2, 1.1, 1.3, 3.0),
        "talk": Speed(0.9, 0.9, 1, 3.0),
    }
    verdict = judge(findings(cheap(0.03), 1.01, tasks=tasks))
    assert (verdict.helps, verdict.cause) == (False, "some_tasks")
    assert verdict.text.startswith(
        "speculation helps here for edit (1.50x) and copy (1.20x), not over all tasks (1.01x), "
        "because 3% of draft tokens are accepted"
    )


def test_a_task_that_is_fast_now_and_then_is_not_helped() -> None:
    verdict = judge(findings(cheap(0.03), 1.01, tasks={"edit": Speed(1.5, 0.9, 2.0, 3.0)}))
    assert verdict.cause == "acceptance"


def test_no_speedup_is_believed_that_saved_no_steps() -> None:
    lucky = Speed(1.3, 1.2, 1.4, 1.01)
    verdict = judge(findings(cheap(0.005), measured=lucky, tasks={"edit": lucky}))
    assert (verdict.helps, verdict.cause) == (False, "acceptance")
    assert any("1.30x was measured, which 1.01 tokens a step" in note for note in verdict.notes)


def test_cheap_drafts_of_which_few_are_accepted() -> None:
    verdict = judge(findings(economy([0.03]), 1.0))
    assert verdict.text.endswith("because 3% of draft tokens are accepted")


def test_where_it_helps_the_tasks_that_it_does_not_help_are_named() -> None:
    tasks = {"edit": Speed(2.0, 1.9, 2.1, 3.0), "talk": Speed(0.92, 0.9, 1.1, 3.0)}
    assert "it is slower for talk (0.92x)" in judge(findings(cheap(), 1.8, tasks=tasks)).notes


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"num_drafts": 7}, "only 7 drafts were verified, too few for a firm answer"),
        ({"measured": Speed(1.8, 1.2, 2.0, 3.0)}, "range from 1.20x to 2.00x: the machine is"),
        ({"faults": {"too_long": 4}}, "faults of the proposer: too_long 4x"),
        ({"first_and_again": (0.2, 0.95)}, "95% of the first draft tokens were accepted, 20%"),
    ],
    ids=["few drafts", "wide spread", "faults", "memory"],
)  # fmt: skip
def test_doubts_are_told(changes: dict[str, Any], note: str) -> None:
    assert judge(findings(cheap(), 1.8)).notes == (
        "the longest drafts did best: try a larger -k than 3",
    )
    assert any(note in text for text in judge(findings(cheap(), 1.8, **changes)).notes)


def test_parts_are_worded() -> None:
    assert [percent(part) for part in (0.0, 0.004, 0.01, 0.256, 1.0)] == [
        *("0%", "under 1%", "1%", "26%", "100%")
    ]
