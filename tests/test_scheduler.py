"""Admission, token counts and k, on schedules small enough to be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sched_engine import GREEDY, Engine, make_config

from foresay.core.errors import ConfigError, RequestError
from foresay.core.messages import DraftTokenIds
from foresay.core.scheduling.request import RequestStatus

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
