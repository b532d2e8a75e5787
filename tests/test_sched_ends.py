"""Stops, ends of every kind, interrupted steps, and what must never happen."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from sched_engine import EOS, GREEDY, Engine

from foresay.core.errors import EngineError
from foresay.core.messages import ModelRunnerOutput
from foresay.core.scheduling.request import Request, RequestStatus

# -- Stops


def test_what_follows_a_stop_is_discarded_and_not_counted() -> None:
    engine = Engine(num_speculative_tokens=3)
    request = engine.add("r", 5)
    engine.step()
    engine.draft({"r": [20, EOS, 22]})
    engine.schedule()
    update = engine.update({"r": [20, EOS, 22, 30]})["r"]
    assert update.new_token_ids == [20, EOS]
    assert (update.num_draft_tokens, update.num_accepted_tokens) == (3, 2)
    assert update.finished
    assert request.output_token_ids == [7, 20, EOS]
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, EOS)


def test_only_what_is_left_after_a_stop_is_cached() -> None:
    engine = Engine(block_size=4, enable_prefix_caching=True)
    engine.add("r", [1, 3, 4, 5, 6])
    engine.step()
    engine.draft({"r": [EOS, 21, 22]})
    engine.step({"r": [EOS, 21, 22, 30]})  # 1 3 4 5 | 6 7 EOS: the second block is not full
    assert not engine.scheduler.has_unfinished_requests()
    engine.add("next", [1, 3, 4, 5, 6, 7, EOS, 21, 22])
    assert engine.schedule().new_requests[0].num_computed_tokens == 4


def test_max_tokens_cuts_accepted_tokens() -> None:
    engine = Engine(num_speculative_tokens=3)
    request = engine.add("r", 5, max_tokens=3)
    engine.step()
    engine.draft({"r": [20, 21, 22]})
    assert request.spec_token_ids == [20]
    engine.schedule()
    update = engine.update({"r": [20, 30]})["r"]
    assert (update.new_token_ids, update.finished) == ([20, 30], True)
    assert request.status.finish_reason == "length"


# -- Ends: finished, failed, aborted, interrupted


def test_a_finished_request_frees_its_blocks_and_is_told_with_the_next_step() -> None:
    engine = Engine()
    engine.add("r", 5, max_tokens=1)
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.blocks.num_free_blocks == 64
    assert not scheduler.has_unfinished_requests()
    assert scheduler.has_pending_messages()
    scheduled = engine.schedule()
    assert scheduled.finished_req_ids == ["r"]
    assert scheduled.num_scheduled_tokens == {}
    assert engine.update() == {}
    assert not scheduler.has_pending_messages()
    assert engine.schedule().finished_req_ids == []


def test_a_failed_request_ends_with_its_error_and_the_others_go_on() -> None:
    engine = Engine()
    bad, good = engine.add("bad", 5), engine.add("good", 5)
    block_ids = None
    engine.schedule()
    block_ids = set(bad.block_ids)
    updates = engine.update(failed={"bad": "row 0 is not finite"})
    assert updates["bad"].finished
    assert updates["bad"].new_token_ids == []
    assert (bad.status, bad.stop_reason) == (RequestStatus.FINISHED_ERROR, "row 0 is not finite")
    assert bad.status.finish_reason == "error"
    assert updates["good"].new_token_ids == [7]
    scheduled = engine.step()
    assert set(scheduled.block_ids_to_zero) == block_ids
    assert scheduled.finished_req_ids == ["bad"]
    assert list(scheduled.num_scheduled_tokens) == ["good"]
    assert good.num_output_tokens == 2
    assert engine.step().block_ids_to_zero == []


def test_blocks_of_a_failed_request_leave_the_prefix_cache() -> None:
    engine = Engine(enable_prefix_caching=True)
    engine.add("bad", range(9))
    engine.step()
    engine.step(failed={"bad": "row 0 is not finite"})
    assert engine.scheduler.has_pending_messages()
    engine.add("next", range(9))
    scheduled = engine.schedule()
    assert scheduled.new_requests[0].num_computed_tokens == 0
    assert len(scheduled.block_ids_to_zero) == 3


def test_a_shared_block_of_a_failed_request_is_not_zeroed_under_those_who_read_it() -> None:
    engine = Engine(enable_prefix_caching=True)
    bad = engine.add("bad", range(6))
    engine.step()
    good = engine.add("good", range(6), max_tokens=2)
    engine.schedule()
    shared, own = bad.block_ids
    assert good.block_ids[0] == shared
    engine.update(failed={"bad": "row 0 is not finite"})
    assert engine.step().block_ids_to_zero == [own]  # good ends with this step
    assert engine.schedule().block_ids_to_zero == [shared]


def test_a_failed_prompt_chunk_ends_the_request() -> None:
    engine = Engine(chunked_prefill_size=4)
    request = engine.add("r", 10)
    engine.schedule()
    assert engine.update(failed={"r": "no"})["r"].finished
    assert request.status is RequestStatus.FINISHED_ERROR


def test_aborts_of_waiting_running_and_preempted_requests() -> None:
    engine = Engine(block_size=1, num_blocks=12, max_model_len=12, num_speculative_tokens=0)
    old, new = engine.add("old", 5), engine.add("new", 6)
    engine.step()
    engine.step()
    waiting = engine.add("waiting", 8)
    assert new.status is RequestStatus.PREEMPTED
    for request in (waiting, new, old):
        assert engine.scheduler.abort_request(request.req_id) is request
        engine.scheduler.check_integrity()
        assert request.status is RequestStatus.FINISHED_ABORTED
        assert request.status.finish_reason == "abort"
    assert engine.scheduler.blocks.num_free_blocks == 12
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.schedule().finished_req_ids == ["waiting", "new", "old"]
    assert old.output_token_ids == [7, 7]


@pytest.mark.parametrize("req_id", ["nobody", "done"])
def test_aborting_what_is_not_there_returns_none(req_id: str) -> None:
    engine = Engine()
    engine.add("done", 5, max_tokens=1)
    engine.step()
    assert engine.scheduler.abort_request(req_id) is None


def test_an_abort_during_a_step_frees_blocks_after_it_and_discards_its_tokens() -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.add("other", 5)
    engine.schedule()
    assert engine.scheduler.abort_request("r") is request
    assert engine.scheduler.abort_request("r") is None
    assert engine.scheduler.blocks.num_free_blocks == 60
    assert list(engine.update()) == ["other"]
    assert engine.scheduler.blocks.num_free_blocks == 62
    assert request.output_token_ids == []
    assert engine.step().finished_req_ids == ["r"]


def test_a_request_that_fails_while_it_is_aborted_still_has_its_blocks_zeroed() -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.schedule()
    block_ids = set(request.block_ids)
    engine.scheduler.abort_request("r")
    assert engine.update(failed={"r": "row 0 is not finite"}) == {}
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert set(engine.schedule().block_ids_to_zero) == block_ids


def test_an_abandoned_step_is_done_again_from_the_start() -> None:
    engine = Engine()
    engine.add("bad", 40)
    first = engine.add("first", 5)
    engine.step(failed={"bad": "row 0 is not finite"})
    second = engine.add("second", 6)
    aborted = engine.add("aborted", 6)
    lost = engine.schedule()
    first_block_ids = list(first.block_ids)
    engine.scheduler.abort_request("aborted")
    engine.scheduler.abandon_step()
    engine.scheduler.check_integrity()
    assert aborted.req_id not in engine.scheduler.requests
    again = engine.schedule()
    assert again.finished_req_ids == ["bad", "aborted"]
    assert again.preempted_req_ids == ["first", "second"]
    # The worker may have zeroed none, and written anything into the blocks of the lost step.
    assert len(lost.block_ids_to_zero) == 10
    written = {block_id for new in lost.new_requests for block_id in new.block_ids}
    assert set(again.block_ids_to_zero) == {
        *lost.block_ids_to_zero,
        *written,
        *first_block_ids,
    }
    assert [new.req_id for new in again.new_requests] == ["first", "second"]
    assert again.num_scheduled_tokens == {"first": 6, "second": 6}
    engine.update()
    assert (first.output_token_ids, second.output_token_ids) == ([7, 7], [7])


class RaisingSink:
    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        raise RuntimeError("no text today")


def test_a_commit_that_is_cut_short_can_be_abandoned() -> None:
    engine = Engine(enable_prefix_caching=True)
    done = engine.add("done", 5, max_tokens=1)
    broken = engine.add("broken", 5, text=RaisingSink())
    later = engine.add("later", 5)
    engine.schedule()
    with pytest.raises(RuntimeError):
        engine.update()
    engine.scheduler.abandon_step()
    engine.scheduler.check_integrity()
    assert done.status is RequestStatus.FINISHED_LENGTH
    assert broken.status is later.status is RequestStatus.PREEMPTED
    assert engine.scheduler.abort_request("broken") is broken
    again = engine.step()
    assert again.finished_req_ids == ["done", "broken"]
    assert again.num_scheduled_tokens == {"later": 5}
    assert later.output_token_ids == [7]


def test_abandoning_no_step_changes_nothing() -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.step()
    engine.scheduler.abandon_step()
    assert request.status is RequestStatus.RUNNING


# -- What must never happen


def test_a_step_that_schedules_nothing_while_requests_exist_raises() -> None:
    engine = Engine(num_blocks=25)
    outsider = Request("outsider", range(99), sampling=GREEDY, max_tokens=1)
    engine.scheduler.blocks.allocate(outsider, 100)
    engine.add("r", 5)
    with pytest.raises(EngineError, match="0 of 25 blocks free"):
        engine.scheduler.schedule()


def test_scheduling_over_a_step_in_flight_raises() -> None:
    engine = Engine()
    engine.add("r", 5)
    engine.schedule()
    with pytest.raises(EngineError, match="step 1 is in flight"):
        engine.scheduler.schedule()


def test_the_outcome_of_another_step_raises() -> None:
    engine = Engine()
    engine.add("r", 5)
    first = engine.step()
    engine.schedule()
    with pytest.raises(EngineError, match="step 1 was given for step 2"):
        engine.scheduler.update_from_output(engine.scheduled, ModelRunnerOutput(1, {"r": [7]}))
    with pytest.raises(EngineError, match="in flight is 2"):
        engine.scheduler.update_from_output(first, ModelRunnerOutput(1, {"r": [7]}))
    engine.update()
    with pytest.raises(EngineError, match="in flight is None"):
        engine.update()


@pytest.mark.parametrize(
    "sampled",
    [[], [20, 21, 30, 31], [21, 30], [20, 30, 31]],
    ids=["none", "too many", "not the draft", "not the second draft"],
)
def test_sampled_ids_that_do_not_fit_the_drafts_raise(sampled: list[int]) -> None:
    engine = Engine()
    engine.add("r", 5)
    engine.step()
    engine.draft({"r": [20, 21]})
    engine.schedule()
    with pytest.raises(EngineError, match="the worker sampled"):
        engine.update({"r": sampled})


def test_messages_are_plain_and_share_nothing_with_the_scheduler() -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.step()
    engine.draft({"r": [20, 21]})
    scheduled = engine.schedule()
    assert pickle.loads(pickle.dumps(scheduled)) == scheduled  # noqa: S301
    seen = dataclasses.asdict(scheduled)
    engine.update({"r": [20, 21, 30]})
    engine.draft({"r": [40]})
    engine.step()
    assert dataclasses.asdict(scheduled) == seen
    new = engine.add("new", 5)
    (sent,) = engine.schedule().new_requests
    assert sent.token_ids is not new.token_ids
    assert sent.block_ids is not new.block_ids
    assert request.block_ids
