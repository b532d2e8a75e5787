"""Blocks, preemption, resumption and fairness, worked out by hand."""

from __future__ import annotations

import pytest
from sched_engine import Engine

from foresay.core.messages import BlockTableUpdate
from foresay.core.scheduling.request import RequestStatus
from foresay.core.scheduling.scheduler import LOOK_AHEAD, PASSED_OVER_LIMIT


def test_a_running_request_gets_blocks_as_updates() -> None:
    engine = Engine(block_size=4)
    request = engine.add("r", 4)
    engine.step()
    scheduled = engine.schedule()
    assert scheduled.block_table_updates == {
        "r": BlockTableUpdate(num_kept=1, block_ids=request.block_ids[1:])
    }
    assert len(request.block_ids) == 2
    engine.update()
    assert engine.step().block_table_updates == {}


def test_slots_of_rejected_drafts_stay() -> None:
    engine = Engine(block_size=1, num_blocks=100)
    request = engine.add("r", 4)
    engine.step()
    engine.draft({"r": [20, 21, 22]})
    engine.step()  # all rejected: 6 tokens, slots for 5 + 3
    assert len(request.block_ids) == 8
    engine.draft({"r": [20, 21]})
    assert engine.step().block_table_updates == {}


def test_the_newest_is_preempted_keeps_its_output_and_loses_its_drafts() -> None:
    engine = Engine(block_size=1, num_blocks=16, max_model_len=16, num_speculative_tokens=1)
    old, mid, new = engine.add("old", 4), engine.add("mid", 4), engine.add("new", 4)
    engine.step()
    engine.step({"new": [8]})  # 15 of 16 slots, 6 tokens each: the next step needs three more
    engine.draft({"new": [20], "old": [20]})
    scheduled = engine.schedule()
    assert scheduled.preempted_req_ids == ["new"]
    assert list(scheduled.num_scheduled_tokens) == ["old", "mid"]
    assert new.status is RequestStatus.PREEMPTED
    assert new.output_token_ids == [7, 8]
    assert (new.num_computed_tokens, new.block_ids, new.spec_token_ids) == (0, [], [])
    assert old.status is mid.status is RequestStatus.RUNNING
    assert engine.scheduler.num_waiting == 1


def test_the_newest_may_have_to_preempt_itself() -> None:
    engine = Engine(block_size=4, num_blocks=5, max_model_len=20)
    old, new = engine.add("old", 9), engine.add("new", 8)
    engine.step()  # old: 3 blocks, room for 12 tokens; new: 2 blocks, full
    scheduled = engine.step()
    assert scheduled.preempted_req_ids == ["new"]
    assert scheduled.num_scheduled_tokens == {"old": 1}
    assert (old.num_tokens, new.num_tokens) == (11, 9)


def test_newest_is_by_arrival_also_if_it_was_started_first() -> None:
    """b does not fit beside a, so c passes it; when b runs, c is the newer one all the same."""
    engine = Engine(block_size=1, num_blocks=20, max_model_len=20, num_speculative_tokens=0)
    engine.add("a", 10, max_tokens=2)
    engine.add("b", 12)
    engine.add("c", 3)
    assert list(engine.step().num_scheduled_tokens) == ["a", "c"]
    engine.step()
    assert list(engine.step().num_scheduled_tokens) == ["c", "b"]
    preempted: list[str] = []
    while not preempted:
        preempted = engine.step().preempted_req_ids
    assert preempted == ["c"]


def test_a_resumed_request_is_sent_in_full_with_its_output() -> None:
    engine = Engine(block_size=1, num_blocks=10, max_model_len=10, num_speculative_tokens=0)
    engine.add("old", 4, max_tokens=3)
    new = engine.add("new", [5, 6, 7, 8])
    engine.step()
    engine.step({"new": [9]})
    assert engine.step().preempted_req_ids == ["new"]  # old is finished by this step
    scheduled = engine.schedule()
    (sent,) = scheduled.new_requests
    assert (sent.token_ids, sent.num_prompt_tokens) == ([5, 6, 7, 8, 7, 9], 4)
    assert scheduled.num_scheduled_tokens == {"new": 6}
    assert scheduled.num_output_rows == {"new": 1}
    assert engine.update()["new"].new_token_ids == [7]
    assert new.num_computed_tokens == new.num_tokens - 1


def test_a_resumed_request_hits_what_is_left_of_its_own_blocks() -> None:
    engine = Engine(
        block_size=2,
        num_blocks=6,
        max_model_len=12,
        num_speculative_tokens=0,
        enable_prefix_caching=True,
    )
    engine.add("old", 4, max_tokens=4)
    new = engine.add("new", 4)
    for _ in range(3):
        engine.step()
    first_blocks = new.block_ids[:2]
    assert [len(request.block_ids) for request in engine.scheduler.requests.values()] == [3, 3]
    # Seven tokens each: old needs a fourth block, takes new's last one, and ends.
    assert engine.step().preempted_req_ids == ["new"]
    scheduled = engine.schedule()
    assert scheduled.new_requests[0].num_computed_tokens == 4
    assert scheduled.num_scheduled_tokens == {"new": 3}
    assert new.block_ids[:2] == first_blocks


def test_preempted_requests_resume_before_those_never_started_and_hold_them_back() -> None:
    engine = Engine(block_size=1, num_blocks=12, max_model_len=12, num_speculative_tokens=0)
    engine.add("old", 5, max_tokens=4)
    engine.add("new", 5)
    engine.step()
    engine.step()
    engine.add("small", 1)
    # 12 slots are taken, and old needs one more.
    scheduled = engine.step()
    assert scheduled.preempted_req_ids == ["new"]
    assert list(scheduled.num_scheduled_tokens) == ["old"]
    # Four slots are left beside old's 8. new needs 7 with its output: nobody is let past it.
    scheduled = engine.step()
    assert list(scheduled.num_scheduled_tokens) == ["old"]
    assert engine.scheduler.blocks.num_free_blocks == 12
    assert list(engine.step().num_scheduled_tokens) == ["new", "small"]


def test_a_preempted_request_waits_for_blocks_of_all_its_output_too() -> None:
    engine = Engine(block_size=1, num_blocks=10, max_model_len=10, num_speculative_tokens=0)
    engine.add("old", 3)
    new = engine.add("new", 3)
    for _ in range(3):
        engine.step()  # 5 slots and 6 tokens each
    assert engine.step().preempted_req_ids == ["new"]
    for num_free in (3, 2):  # its prompt alone would find room
        assert list(engine.step().num_scheduled_tokens) == ["old"]
        assert engine.scheduler.blocks.num_free_blocks == num_free
    assert new.status is RequestStatus.PREEMPTED


def test_room_made_by_a_preemption_is_not_for_newcomers_of_the_same_step() -> None:
    engine = Engine(block_size=1, num_blocks=12, max_model_len=12, num_speculative_tokens=0)
    engine.add("old", 5)
    engine.add("new", 6)
    engine.step()
    engine.add("small", 1)
    scheduled = engine.schedule()
    assert scheduled.preempted_req_ids == ["new"]
    assert list(scheduled.num_scheduled_tokens) == ["old"]
    assert scheduled.new_requests == []


def test_spare_blocks_are_reclaimed_before_anyone_is_preempted() -> None:
    engine = Engine(block_size=1, num_blocks=12, max_model_len=12, num_speculative_tokens=3)
    old, new = engine.add("old", 2), engine.add("new", 4)
    engine.step()
    engine.draft({"old": [20, 21, 22]})
    engine.step()  # rejected: old has 4 tokens and 6 slots, new 6 tokens and 5 slots
    engine.draft({"new": [20]})
    assert (len(old.block_ids), len(new.block_ids)) == (6, 5)
    engine.step()  # the last free slot goes to new's token, its draft finds none
    assert (len(old.block_ids), len(new.block_ids)) == (6, 6)
    kept = old.block_ids[:5]
    scheduled = engine.schedule()
    assert scheduled.preempted_req_ids == []
    assert scheduled.num_scheduled_tokens == {"old": 1, "new": 1}
    assert scheduled.block_table_updates["old"] == BlockTableUpdate(num_kept=5, block_ids=[])
    assert old.block_ids == kept
    assert scheduled.block_table_updates["new"].num_kept == 6
    assert len(new.block_ids) == 7


def test_a_request_that_gave_spare_blocks_and_is_preempted_all_the_same_has_no_table() -> None:
    engine = Engine(block_size=1, num_blocks=15, max_model_len=15, num_speculative_tokens=2)
    engine.add("old", 4)
    engine.add("mid", 4)
    new = engine.add("new", 2)
    engine.step()
    engine.draft({"new": [20, 21]})
    engine.step()  # rejected: old and mid hold 5 slots, new 5 for its 4 tokens; all are taken
    assert (len(new.block_ids), new.num_tokens) == (5, 4)
    scheduled = engine.step()
    assert scheduled.preempted_req_ids == ["new"]
    assert list(scheduled.num_scheduled_tokens) == ["old", "mid"]
    assert list(scheduled.block_table_updates) == ["old", "mid"]


def test_drafts_never_cause_a_preemption() -> None:
    """One slot beyond the committed tokens is free; old's drafts would like three."""
    engine = Engine(block_size=1, num_blocks=12, max_model_len=12, num_speculative_tokens=3)
    engine.add("old", 4)
    engine.add("new", 5)
    engine.step()
    engine.draft({"old": [20, 21, 22], "new": [20, 21, 22]})
    scheduled = engine.schedule()
    assert scheduled.preempted_req_ids == []
    assert scheduled.num_scheduled_tokens == {"old": 2, "new": 1}
    assert scheduled.scheduled_spec_decode_tokens == {"old": [20]}
    assert scheduled.num_output_rows == {"old": 2, "new": 1}


def test_drafts_that_fell_off_are_not_verified_later() -> None:
    engine = Engine(block_size=1, num_blocks=12, max_model_len=12, num_speculative_tokens=3)
    old, new = engine.add("old", 4), engine.add("new", 5)
    engine.step()
    engine.draft({"old": [20, 21, 22], "new": [20, 21, 22]})
    engine.schedule()
    assert (old.spec_token_ids, new.spec_token_ids) == ([], [])
    update = engine.update({"old": [20, 9]})["old"]
    assert (update.num_draft_tokens, update.num_accepted_tokens) == (1, 1)


def test_a_waiting_request_starts_only_when_all_its_tokens_find_blocks() -> None:
    engine = Engine(
        block_size=1,
        num_blocks=20,
        max_model_len=20,
        chunked_prefill_size=4,
        num_speculative_tokens=0,
    )
    engine.add("first", 10, max_tokens=2)
    engine.add("second", 12)
    assert list(engine.step().num_scheduled_tokens) == ["first"]
    for _ in range(3):
        assert list(engine.step().num_scheduled_tokens) == ["first"]
    assert engine.step().num_scheduled_tokens == {"second": 4}
    assert len(engine.scheduler.requests["second"].block_ids) == 12


def test_a_request_passed_over_a_hundred_times_stops_admission_behind_it() -> None:
    engine = Engine(
        block_size=1,
        num_blocks=200,
        max_model_len=200,
        max_num_batched_tokens=200,
        num_speculative_tokens=0,
    )
    engine.add("old", 100, max_tokens=100)
    big = engine.add("big", 150)
    for count in range(PASSED_OVER_LIMIT):
        engine.add(f"small{count}", 1, max_tokens=1)
    started: list[str] = []
    for _ in range(60):
        scheduled = engine.step()
        started += [new.req_id for new in scheduled.new_requests]
        if big.num_times_passed_over == PASSED_OVER_LIMIT:
            break
    assert started == ["old", *(f"small{count}" for count in range(PASSED_OVER_LIMIT))]
    engine.add("late", 1, max_tokens=1)
    assert list(engine.step().num_scheduled_tokens) == ["old"]
    engine.scheduler.abort_request("old")
    assert list(engine.step().num_scheduled_tokens) == ["big", "late"]


@pytest.mark.parametrize(("num_big", "started"), [(LOOK_AHEAD, ["small"]), (LOOK_AHEAD + 1, [])])
def test_a_step_looks_past_a_few_requests_only(num_big: int, started: list[str]) -> None:
    engine = Engine(
        block_size=1,
        num_blocks=20,
        max_model_len=20,
        max_num_seqs=16,
        num_speculative_tokens=0,
    )
    engine.add("old", 10)
    engine.step()
    for count in range(num_big):
        engine.add(f"big{count}", 15)
    engine.add("small", 1)
    assert [new.req_id for new in engine.step().new_requests] == started


def test_a_prefix_hit_is_not_computed_again() -> None:
    engine = Engine(block_size=4, enable_prefix_caching=True)
    first = engine.add("first", range(10))
    engine.step()
    second = engine.add("second", [*range(9), 50, 51])
    scheduled = engine.schedule()
    (new,) = scheduled.new_requests
    assert new.num_computed_tokens == 8
    assert scheduled.num_scheduled_tokens["second"] == 3
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]


def test_blocks_are_cached_only_once_their_step_is_done() -> None:
    engine = Engine(block_size=4, enable_prefix_caching=True)
    engine.add("first", range(10))
    engine.add("second", range(10))
    scheduled = engine.schedule()
    assert [new.num_computed_tokens for new in scheduled.new_requests] == [0, 0]


def test_rejected_drafts_are_never_cached() -> None:
    engine = Engine(block_size=4, enable_prefix_caching=True)
    engine.add("first", [1, 3, 4, 5, 6])
    engine.step()  # 6 tokens
    engine.draft({"first": [20, 21, 22]})
    engine.step({"first": [20, 9]})  # computed: 1 3 4 5 | 6 7 20 (21 22)
    for req_id, tail in (("rejected", [20, 21]), ("not computed", [20, 9])):
        engine.add(req_id, [1, 3, 4, 5, 6, 7, *tail, 30], max_tokens=1)
    assert [new.num_computed_tokens for new in engine.schedule().new_requests] == [4, 4]
    engine.update()  # computed the 9: the second block is full
    engine.add("last", [1, 3, 4, 5, 6, 7, 20, 9, 30], max_tokens=1)
    assert engine.schedule().new_requests[0].num_computed_tokens == 8
