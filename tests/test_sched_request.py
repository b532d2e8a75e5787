"""When a request stops, and in which order the reasons count."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from foresay.core.messages import SamplingData
from foresay.core.scheduling.request import Request, RequestStatus

EOS = 2


@dataclass
class ScriptedSink:
    """Says that a stop string was completed by the tokens given, if it may stop."""

    completes_stop: tuple[int, ...] = ()
    seen: list[tuple[int, bool]] = field(default_factory=list)

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        self.seen.append((token_id, may_stop))
        return "END" if may_stop and token_id in self.completes_stop else None


def make_request(
    max_tokens: int = 100,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (EOS,),
    text: ScriptedSink | None = None,
) -> Request:
    sampling = SamplingData(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
    )
    return Request("r", [10, 11, 12], sampling=sampling, max_tokens=max_tokens, text=text)


def append_all(request: Request, token_ids: list[int], max_model_len: int = 1000) -> int:
    """Append until one finishes; return how many were appended."""
    for count, token_id in enumerate(token_ids, start=1):
        if request.append_output_token(token_id, max_model_len):
            return count
    return len(token_ids)


def test_a_new_request_waits_with_nothing_computed() -> None:
    request = make_request()
    assert request.status is RequestStatus.WAITING
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.block_ids, request.spec_token_ids) == (0, [], [])


def test_drafts_are_counted_with_spec_only() -> None:
    request = make_request()
    request.append_output_token(7, 1000)
    request.spec_token_ids = [8, 9]
    assert (request.num_tokens, request.num_output_tokens) == (4, 1)
    assert request.num_tokens_with_spec == 6
    assert request.output_token_ids == [7]


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2]
    request = Request("r", prompt, sampling=make_request().sampling, max_tokens=5)
    request.append_output_token(3, 1000)
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("status", "finish_reason"),
    [
        (RequestStatus.WAITING, None),
        (RequestStatus.RUNNING, None),
        (RequestStatus.PREEMPTED, None),
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_LENGTH, "length"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_ERROR, "error"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_statuses_and_their_public_names(status: RequestStatus, finish_reason: str | None) -> None:
    assert status.finish_reason == finish_reason
    assert status.is_finished == (finish_reason is not None)


def test_a_stop_id_ends_the_ids_and_never_reaches_the_text() -> None:
    sink = ScriptedSink()
    request = make_request(text=sink, stop_token_ids=(EOS, 40))
    assert append_all(request, [7, 40, 8]) == 2
    assert request.output_token_ids == [7, 40]
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == 40
    assert sink.seen == [(7, True)]


def test_a_stop_string_ends_the_ids_with_the_token_that_completed_it() -> None:
    sink = ScriptedSink(completes_stop=(9,))
    request = make_request(text=sink)
    assert append_all(request, [7, 9, 8]) == 2
    assert request.output_token_ids == [7, 9]
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == "END"


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "num_output"),
    [(3, 1000, 3), (1, 1000, 1), (100, 5, 2), (100, 4, 1), (2, 5, 2)],
)
def test_length_caps(max_tokens: int, max_model_len: int, num_output: int) -> None:
    request = make_request(max_tokens=max_tokens)
    assert append_all(request, [7] * 10, max_model_len) == num_output
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert request.stop_reason is None


@pytest.mark.parametrize(
    ("token_id", "status", "stop_reason"),
    [
        (EOS, RequestStatus.FINISHED_STOPPED, EOS),
        (9, RequestStatus.FINISHED_STOPPED, "END"),
        (7, RequestStatus.FINISHED_LENGTH, None),
    ],
    ids=["stop id first", "then stop string", "then length"],
)
def test_the_order_of_reasons_at_one_token(
    token_id: int, status: RequestStatus, stop_reason: str | int | None
) -> None:
    """Every reason that the token can meet holds at the same time; the first one wins."""
    request = make_request(max_tokens=1, text=ScriptedSink(completes_stop=(EOS, 9)))
    assert request.append_output_token(token_id, 4)
    assert (request.status, request.stop_reason) == (status, stop_reason)


def test_nothing_stops_before_min_tokens_stand_in_front_of_it() -> None:
    sink = ScriptedSink(completes_stop=(9,))
    request = make_request(min_tokens=2, text=sink)
    assert append_all(request, [EOS, 9, 9, 8]) == 3
    assert request.stop_reason == "END"
    assert sink.seen == [(EOS, False), (9, False), (9, True)]


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (1, 2), (3, 4)])
def test_the_first_place_for_eos_is_after_min_tokens(min_tokens: int, count: int) -> None:
    assert append_all(make_request(min_tokens=min_tokens), [EOS] * 9) == count


def test_without_stop_ids_only_length_ends_it() -> None:
    request = make_request(max_tokens=4, stop_token_ids=())
    assert append_all(request, [EOS] * 9) == 4
    assert request.status.finish_reason == "length"
