"""The scheduler's rules, one by one, on schedules small enough to be worked out by hand."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from foresay.core.errors import ConfigError, EngineError, RequestError
from foresay.core.messages import (
    BlockTableUpdate,
    DraftTokenIds,
    ModelRunnerOutput,
    SamplingData,
    SchedulerOutput,
)
from foresay.core.scheduling.request import Request, RequestStatus
from foresay.core.scheduling.scheduler import (
    LOOK_AHEAD,
    PASSED_OVER_LIMIT,
    RequestUpdate,
    Scheduler,
    SchedulerConfig,
)

EOS = 2
GREEDY = SamplingData(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, stop_token_ids=(EOS,)
)


def make_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "chunked_prefill_size": None,
        "max_model_len": 100,
        "enable_prefix_caching": False,
        "num_speculative_tokens": 3,
    }
    return SchedulerConfig(**(values | changes))


class Engine:
    """A scheduler and a loop around it; the "model" says what the test tells it to say."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler = Scheduler(make_config(**changes))
        self.scheduled = SchedulerOutput(0, {}, {}, {}, {})

    def add(self, req_id: str, prompt: int | Sequence[int], **options: Any) -> Request:
        """Add a request; a number is a prompt of that many tokens, like no other's."""
        if isinstance(prompt, int):
            first = 1000 * (1 + len(self.scheduler.requests))
            prompt = range(first, first + prompt)
        options = {"sampling": GREEDY, "max_tokens": 50} | options
        request = Request(req_id, prompt, **options)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        self.scheduled = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return self.scheduled

    def update(
        self,
        sampled: dict[str, list[int]] | None = None,
        failed: dict[str, str] | None = None,
    ) -> dict[str, RequestUpdate]:
        """Commit the step; who is not in `sampled` has its drafts rejected and token 7 sampled."""
        failed = failed or {}
        all_sampled = {
            req_id: [7]
            for req_id, num_rows in self.scheduled.num_output_rows.items()
            if num_rows and req_id not in failed
        }
        output = ModelRunnerOutput(self.scheduled.step_id, all_sampled | (sampled or {}), failed)
        updates = self.scheduler.update_from_output(self.scheduled, output)
        self.scheduler.check_integrity()
        return {update.request.req_id: update for update in updates}

    def step(
        self,
        sampled: dict[str, list[int]] | None = None,
        failed: dict[str, str] | None = None,
    ) -> SchedulerOutput:
        self.schedule()
        self.update(sampled, failed)
        return self.scheduled

    def draft(self, drafts: dict[str, list[int]]) -> None:
        lengths = {req_id: self.scheduler.requests[req_id].num_tokens for req_id in drafts}
        self.scheduler.update_draft_token_ids(DraftTokenIds(drafts, lengths))
        self.scheduler.check_integrity()


# -- Settings and admission


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"max_context": 0}, "max_context=0"),
        ({"num_blocks": 24}, "25 blocks"),
        ({"max_num_batched_tokens": 15}, "= 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(**changes)


def test_the_tightest_settings_that_work_are_accepted() -> None:
    make_config(num_blocks=25, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (0, {}, "no tokens"),
        (100, {}, "100 tokens"),
        (101, {}, "101 tokens"),
        (5, {"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_requests_that_can_never_run_are_refused(
    prompt: int, options: dict[str, Any], words: str
) -> None:
    engine = Engine()
    with pytest.raises(RequestError, match=words):
        engine.add("r", prompt, **options)
    assert not engine.scheduler.has_unfinished_requests()


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = Engine()
    request = engine.add("r", 5, max_tokens=1)
    with pytest.raises(RequestError, match="'r'"):
        engine.add("r", 5)
    engine.step()
    with pytest.raises(RequestError, match="added before"):
        engine.scheduler.add_request(request)
    engine.add("r", 5)
    scheduled = engine.schedule()
    assert scheduled.finished_req_ids == ["r"]
    assert [new.req_id for new in scheduled.new_requests] == ["r"]


def test_a_request_is_sent_in_full_when_it_starts() -> None:
    engine = Engine()
    request = engine.add("r", [5, 6, 7, 8, 9])
    (new,) = engine.schedule().new_requests
    assert (new.req_id, new.token_ids, new.num_prompt_tokens) == ("r", [5, 6, 7, 8, 9], 5)
    assert (new.num_computed_tokens, new.sampling) == (0, GREEDY)
    assert new.block_ids == request.block_ids
    assert len(new.block_ids) == 2
    assert engine.scheduler.num_running == 1


def test_no_more_than_max_num_seqs_run() -> None:
    engine = Engine(max_num_seqs=2)
    for req_id in "abc":
        engine.add(req_id, 3, max_tokens=2)
    assert list(engine.step().num_scheduled_tokens) == ["a", "b"]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.step()
    assert list(engine.step().num_scheduled_tokens) == ["c"]


# -- Counting tokens


@pytest.mark.parametrize(
    ("chunk", "budget", "expected"),
    [
        (None, 64, [(20, 1)]),
        (8, 64, [(8, 0), (8, 0), (4, 1)]),
        (8, 16, [(8, 0), (8, 0), (4, 1)]),
        (None, 16, [(16, 0), (4, 1)]),
        (10, 16, [(10, 0), (10, 1)]),
        (20, 64, [(20, 1)]),
    ],
)
def test_a_prompt_is_computed_in_chunks(
    chunk: int | None, budget: int, expected: list[tuple[int, int]]
) -> None:
    engine = Engine(chunked_prefill_size=chunk, max_num_batched_tokens=budget)
    engine.add("r", 20)
    seen = []
    for _ in expected:
        scheduled = engine.step()
        seen.append((scheduled.num_scheduled_tokens["r"], scheduled.num_output_rows["r"]))
    assert seen == expected
    assert engine.scheduler.requests["r"].num_output_tokens == 1


def test_an_unfinished_prompt_has_no_update_and_never_drafts() -> None:
    engine = Engine(chunked_prefill_size=8)
    request = engine.add("r", 20)
    for _ in range(2):
        assert engine.schedule().num_draft_tokens == {}
        assert engine.update() == {}
        engine.draft({"r": [1, 2, 3]})
        assert request.spec_token_ids == []
    assert engine.schedule().num_draft_tokens == {"r": 3}
    assert engine.update()["r"].new_token_ids == [7]


def test_a_prompt_tail_of_k_plus_one_tokens_is_not_taken_for_a_verification() -> None:
    engine = Engine(chunked_prefill_size=8)
    engine.add("r", 12)
    engine.step()
    scheduled = engine.schedule()
    assert scheduled.num_scheduled_tokens == {"r": 4}
    assert scheduled.num_output_rows == {"r": 1}
    assert scheduled.scheduled_spec_decode_tokens == {}


def test_drafts_are_scheduled_behind_the_committed_token() -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.step()
    engine.draft({"r": [20, 21, 22]})
    assert request.num_tokens_with_spec == 9
    scheduled = engine.schedule()
    assert scheduled.num_scheduled_tokens == {"r": 4}
    assert scheduled.num_output_rows == {"r": 4}
    assert scheduled.scheduled_spec_decode_tokens == {"r": [20, 21, 22]}
    assert request.spec_token_ids == []


def test_a_step_without_drafts_is_a_plain_step() -> None:
    engine = Engine()
    engine.add("r", 5)
    engine.step()
    scheduled = engine.step()
    assert scheduled.num_scheduled_tokens == {"r": 1}
    assert scheduled.num_output_rows == {"r": 1}
    assert scheduled.scheduled_spec_decode_tokens == {}


def test_a_chunk_limit_cuts_prompts_and_no_drafts() -> None:
    engine = Engine(chunked_prefill_size=2)
    engine.add("r", 2)
    engine.step()
    engine.draft({"r": [20, 21, 22]})
    assert engine.schedule().num_scheduled_tokens == {"r": 4}


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_rejected_tokens_are_given_back(num_accepted: int) -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.step()
    engine.draft({"r": [20, 21, 22]})
    engine.schedule()
    assert request.num_computed_tokens == 9  # optimistic: 5 of the prompt, 1 and 3 drafts
    accepted = [20, 21, 22][:num_accepted]
    update = engine.update({"r": [*accepted, 30]})["r"]
    assert request.output_token_ids == [7, *accepted, 30]
    assert request.num_computed_tokens == 6 + num_accepted == request.num_tokens - 1
    assert update.new_token_ids == [*accepted, 30]
    assert (update.num_draft_tokens, update.num_accepted_tokens) == (3, num_accepted)
    assert not update.finished


def test_who_lacks_one_token_is_budgeted_before_an_older_longer_one() -> None:
    engine = Engine(
        max_num_seqs=2, max_num_batched_tokens=8, chunked_prefill_size=7, num_speculative_tokens=3
    )
    engine.add("long", 30)
    engine.add("short", 1)
    assert engine.step().num_scheduled_tokens == {"long": 7, "short": 1}
    engine.draft({"short": [20, 21, 22]})
    scheduled = engine.step()
    assert list(scheduled.num_scheduled_tokens.items()) == [("short", 4), ("long", 4)]
    # It is an order, not a state: once the long one lacks one token, it is first again.
    for _ in range(3):
        engine.step()
    assert list(engine.step().num_scheduled_tokens.items()) == [("long", 1), ("short", 1)]


def test_running_requests_are_served_before_waiting_ones() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("first", 20)
    engine.add("second", 1)
    assert engine.step().num_scheduled_tokens == {"first": 16}
    assert list(engine.step().num_scheduled_tokens.items()) == [("first", 4), ("second", 1)]


def test_output_goes_up_to_max_model_len_and_drafts_never_beyond() -> None:
    engine = Engine(max_model_len=10, num_speculative_tokens=3)
    request = engine.add("r", 6)
    engine.step()  # 7 tokens
    engine.draft({"r": [20, 21, 22]})
    assert request.spec_token_ids == [20, 21]  # with the bonus token: 10
    engine.schedule()
    update = engine.update({"r": [20, 21, 30]})["r"]
    assert update.finished
    assert request.status.finish_reason == "length"
    assert request.num_tokens == 10


def test_nothing_is_scheduled_for_the_last_position_of_max_model_len() -> None:
    """k keeps drafts out of there; the clamp holds whatever k says."""
    engine = Engine(max_model_len=10)
    request = engine.add("r", 6)
    engine.step()
    request.spec_token_ids = [20, 21, 22]
    scheduled = engine.scheduler.schedule()
    assert scheduled.num_scheduled_tokens == {"r": 3}  # positions 6, 7 and 8
    assert scheduled.scheduled_spec_decode_tokens == {"r": [20, 21]}


# -- k


@pytest.mark.parametrize(
    ("changes", "options", "k"),
    [
        ({}, {}, 3),
        ({"num_speculative_tokens": 0}, {}, 0),
        ({}, {"num_speculative_tokens": 2}, 2),
        ({}, {"num_speculative_tokens": 0}, 0),
        ({}, {"num_speculative_tokens": 9}, 3),
        # After the step: 11 tokens, one of them output.
        ({}, {"max_tokens": 4}, 2),
        ({}, {"max_tokens": 2}, 0),
        ({}, {"max_tokens": 1}, 0),
        ({"max_model_len": 14}, {}, 2),
        ({"max_model_len": 12}, {}, 0),
        ({"max_context": 14}, {}, 3),
        ({"max_context": 13}, {}, 2),
        ({"max_context": 11}, {}, 0),
        ({"max_context": 5}, {}, 0),
    ],
)
def test_k_is_the_least_of_all_limits(
    changes: dict[str, Any], options: dict[str, Any], k: int
) -> None:
    engine = Engine(**changes)
    request = engine.add("r", 10, **options)
    assert engine.schedule().num_draft_tokens == ({"r": k} if k else {})
    if not engine.update()["r"].finished:
        engine.draft({"r": [20, 21, 22, 23, 24]})
    assert request.spec_token_ids == [20, 21, 22, 23, 24][:k]


def test_one_request_beyond_the_drafters_limit_leaves_the_others_theirs() -> None:
    engine = Engine(max_context=32)
    engine.add("long", 40)
    engine.add("short", 4)
    assert engine.step().num_draft_tokens == {"short": 3}


def test_num_draft_tokens_is_an_upper_bound_that_is_cut_after_the_commit() -> None:
    engine = Engine()
    request = engine.add("r", 5, max_tokens=8)
    engine.step()
    engine.draft({"r": [20, 21, 22]})
    # One output token; at least a second comes: at most 8 - 2 - 1 = 5 drafts, by the setting 3.
    assert engine.schedule().num_draft_tokens == {"r": 3}
    engine.update({"r": [20, 21, 22, 30]})
    # Five output tokens: 8 - 5 - 1 = 2.
    engine.draft({"r": [20, 21, 22]})
    assert request.spec_token_ids == [20, 21]


@pytest.mark.parametrize("off_by", [-1, 1], ids=["older", "newer"])
def test_a_draft_for_another_committed_length_is_dropped(off_by: int) -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.step()
    drafts = DraftTokenIds({"r": [20]}, {"r": request.num_tokens + off_by})
    engine.scheduler.update_draft_token_ids(drafts)
    assert request.spec_token_ids == []


def test_drafts_for_finished_unknown_and_preempted_requests_are_dropped() -> None:
    engine = Engine(block_size=1, num_blocks=10, max_model_len=10, num_speculative_tokens=1)
    old, new = engine.add("old", 5), engine.add("new", 4)
    done = engine.add("done", 1, max_tokens=1)
    engine.step()
    assert done.status.is_finished
    engine.step()
    assert new.status is RequestStatus.PREEMPTED
    for request in (old, new, done):
        lengths = {request.req_id: request.num_tokens, "nobody": 3}
        drafts = DraftTokenIds({request.req_id: [20], "nobody": [20]}, lengths)
        engine.scheduler.update_draft_token_ids(drafts)
    assert (old.spec_token_ids, new.spec_token_ids, done.spec_token_ids) == ([20], [], [])


def test_a_draft_for_a_request_that_waits_is_dropped() -> None:
    engine = Engine()
    request = engine.add("r", 1)  # lacks one token, and so would one that decodes
    engine.draft({"r": [20]})
    assert request.spec_token_ids == []


def test_spec_token_ids_are_rebound_and_never_mutated() -> None:
    engine = Engine()
    request = engine.add("r", 5)
    engine.step()
    given = [20, 21, 22]
    engine.draft({"r": given})
    before = request.spec_token_ids
    engine.step()
    assert given == [20, 21, 22]
    assert before == [20, 21, 22]
    assert before is not given


# -- Blocks, preemption, resumption


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
