"""The figures against values worked out by hand."""

from __future__ import annotations

import json

import pytest

from foresay.core.stats import DraftStats, RequestStats, RunStats, StepStats, ratio, show


def test_figures_of_a_hand_made_run() -> None:
    stats = RequestStats()
    # (drafts judged, accepted, emitted): the prompt's step, then three verify steps and a plain one
    for step in [(0, 0, 1), (3, 3, 4), (3, 1, 2), (2, 0, 1), (0, 0, 1)]:
        stats.record_step(*step, "ngram")
    assert stats.num_steps == 5
    assert stats.num_output_tokens == 9
    assert stats.num_verify_steps == 3
    assert stats.num_draft_tokens == 8
    assert stats.num_accepted_tokens == 4
    assert stats.acceptance_rate == pytest.approx(4 / 8)
    assert stats.mean_acceptance_length == pytest.approx(7 / 3)
    assert stats.tokens_per_step == pytest.approx(9 / 5)
    # Position 0: in 3 drafts, accepted in 2. Position 1: in 3, accepted in 1; 2 reached it.
    # Position 2: in 2, accepted in 1; 1 reached it.
    assert stats.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert stats.conditional_acceptance_per_position == pytest.approx([2 / 3, 1 / 2, 1 / 1])


def test_what_a_stop_cut_off_counts_as_drafted_only() -> None:
    stats = DraftStats()
    stats.record_verify_step(num_drafts=8, num_accepted=2, num_emitted=2)  # stopped at the second
    assert stats.num_draft_tokens == 8
    assert stats.num_accepted_tokens == 2
    assert stats.mean_acceptance_length == pytest.approx(2.0)
    assert stats.acceptance_per_position == [1.0, 1.0, 0, 0, 0, 0, 0, 0]
    assert stats.conditional_acceptance_per_position == [1.0, 1.0] + [None] * 6


def test_a_rejection_is_reached_but_a_stop_is_not_a_rejection() -> None:
    rejected, stopped = DraftStats(), DraftStats()
    rejected.record_verify_step(num_drafts=2, num_accepted=1, num_emitted=2)
    stopped.record_verify_step(num_drafts=2, num_accepted=1, num_emitted=1)
    assert rejected.conditional_acceptance_per_position == [1.0, 0.0]
    assert stopped.conditional_acceptance_per_position == [1.0, None]


def test_nothing_over_nothing_is_none_and_prints_na() -> None:
    stats = RunStats()
    figures = [
        stats.acceptance_rate,
        stats.mean_acceptance_length,
        stats.tokens_per_step,
        stats.time_to_first_token,
    ]
    assert figures == [None] * 4
    assert [show(figure) for figure in figures] == ["n/a"] * 4
    assert (stats.acceptance_per_position, stats.conditional_acceptance_per_position) == ([], [])
    assert show(ratio(2, 3)) == "0.67"
    assert show(ratio(2, 3), ".0%") == "67%"


def test_plain_decoding_is_one_token_per_step_and_has_no_acceptance() -> None:
    stats = RequestStats()
    for _ in range(7):
        stats.record_step(0, 0, 1, None)
    assert stats.tokens_per_step == 1.0
    assert stats.mean_acceptance_length is None
    assert stats.by_proposer == {}


def test_each_proposer_has_its_own_figures() -> None:
    stats = RunStats()
    stats.record_step(2, 2, 3, "ngram")
    stats.record_step(2, 0, 1, "eagle")
    stats.record_step(1, 1, 2, "ngram")
    stats.record_step(0, 0, 1, "eagle")
    assert stats.mean_acceptance_length == pytest.approx(6 / 3)
    assert set(stats.by_proposer) == {"ngram", "eagle"}
    assert stats.by_proposer["ngram"].mean_acceptance_length == pytest.approx(5 / 2)
    assert stats.by_proposer["ngram"].acceptance_per_position == [1.0, 1.0]
    assert stats.by_proposer["eagle"].acceptance_rate == 0.0
    assert stats.by_proposer["eagle"].num_verify_steps == 1


def test_time_to_first_token_of_a_run_is_the_mean_over_requests() -> None:
    stats = RunStats()
    stats.record_first_token(1.0)
    stats.record_first_token(2.0)
    assert stats.time_to_first_token == 1.5


def test_engine_steps_add_up() -> None:
    stats = RunStats()
    step = StepStats(
        step_id=1,
        req_ids=("0", "1"),
        num_scheduled_tokens=9,
        num_draft_tokens=3,
        num_accepted_tokens=1,
        num_emitted_tokens=3,
        num_proposed_tokens=4,
        faults={"bad_id": 2},
        schedule_seconds=0.25,
        execute_seconds=4.0,
        commit_seconds=0.5,
        draft_seconds=1.0,
    )
    stats.record_engine_step(step)
    stats.record_engine_step(step)
    assert step.num_requests == 2
    assert stats.num_engine_steps == 2
    assert stats.faults == {"bad_id": 4}
    assert (stats.schedule_seconds, stats.execute_seconds) == (0.5, 8.0)
    assert (stats.commit_seconds, stats.draft_seconds) == (1.0, 2.0)


@pytest.mark.parametrize("kind", [RequestStats, RunStats], ids=["request", "run"])
def test_stats_are_json_with_every_public_figure(kind: type[RequestStats] | type[RunStats]) -> None:
    stats = kind()
    stats.record_step(3, 1, 2, "ngram")
    data = json.loads(json.dumps(stats.as_dict()))
    assert data["num_steps"] == 1
    assert data["num_verify_steps"] == 1
    assert data["num_draft_tokens"] == 3
    assert data["num_accepted_tokens"] == 1
    assert data["mean_acceptance_length"] == 2.0
    assert data["tokens_per_step"] == 2.0
    assert data["acceptance_per_position"] == [1.0, 0.0, 0.0]
    assert data["conditional_acceptance_per_position"] == [1.0, 0.0, None]
    assert data["by_proposer"]["ngram"]["num_draft_tokens"] == 3
    assert data["time_to_first_token"] is None


def test_pooled_figures_are_of_the_counts_and_not_of_the_figures() -> None:
    short, long = RequestStats(time_to_first_token=0.5), RequestStats(time_to_first_token=1.5)
    for step in [(0, 0, 1), (1, 0, 1)]:
        short.record_step(*step, "ngram")
    for step in [(0, 0, 1), (3, 3, 4), (3, 2, 3)]:
        long.record_step(*step, "eagle")
    run = RunStats()
    for stats in (short, long):
        run.record_request(stats)
    assert (run.num_requests, run.num_finished_requests) == (2, 2)
    assert (run.num_steps, run.num_output_tokens) == (5, 10)
    assert run.tokens_per_step == pytest.approx(10 / 5)
    assert run.mean_acceptance_length == pytest.approx((1 + 4 + 3) / 3)
    assert run.acceptance_rate == pytest.approx(5 / 7)
    # Position 0 is in all three drafts, the others in two.
    assert run.acceptance_per_position == pytest.approx([2 / 3, 2 / 2, 1 / 2])
    assert run.time_to_first_token == pytest.approx(1.0)
    assert {name: own.num_draft_tokens for name, own in run.by_proposer.items()} == {
        "ngram": 1,
        "eagle": 6,
    }
    assert (short.num_draft_tokens, long.num_draft_tokens) == (1, 6)
