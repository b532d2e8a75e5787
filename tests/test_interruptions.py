"""Aborts, observers, Ctrl-C and errors in the middle of a step: nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import ALPHABET, FAILING, CharTokenizer, FakeLLM, fake_llm, ids, observer, params

from foresay.core.errors import EngineError, ProposerError
from foresay.core.messages import SchedulerOutput
from foresay.core.outputs import RequestOutput
from foresay.core.stats import StepStats

# -- aborts and accidents ------------------------------------------------------------------------


def test_an_abort_between_chunks_ends_the_stream_with_what_it_has() -> None:
    llm = fake_llm("abcabcabc", k=2)
    stream = llm.stream("x", params(stop="abcx"))
    chunk = next(stream)
    assert (chunk.text, chunk.token_ids) == ("", ids("a"))
    assert llm.abort(chunk.request_id) is True
    assert llm.abort(chunk.request_id) is False
    (last,) = list(stream)
    assert (last.text, last.token_ids, last.finish_reason) == ("a", [], "abort")
    assert last.output is not None
    assert (last.output.outputs[0].text, last.output.outputs[0].token_ids) == ("a", ids("a"))
    llm.check_empty()


def test_aborting_an_unknown_request_is_no_error() -> None:
    assert fake_llm().abort("nobody") is False


@pytest.mark.parametrize("k", [0, 2], ids=["plain", "speculative"])
def test_an_observer_of_steps_may_abort(k: int) -> None:
    def on_step(stats: StepStats) -> None:
        if stats.step_id == 3:
            llm.abort(stats.req_ids[0])

    llm = fake_llm(ALPHABET, observer(on_step), k=k)
    first, second = llm.generate(["x", "y"], params())
    num_tokens = 3 + 2 * k  # the first step gives one token, the others 1 + k
    assert first.outputs[0].finish_reason == "abort"
    assert first.outputs[0].text == ALPHABET[:num_tokens]
    assert first.outputs[0].token_ids == ids(ALPHABET[:num_tokens])
    assert first.stats.num_output_tokens == num_tokens
    assert second.outputs[0].text == ALPHABET
    llm.check_empty()


@pytest.mark.parametrize("other_ends_too", [False, True])
def test_an_observer_of_requests_may_abort_others_of_the_same_step(other_ends_too: bool) -> None:
    ended: list[str] = []

    def on_request(output: RequestOutput) -> None:
        ended.append(output.request_id)
        if len(ended) == 1:
            assert llm.abort("1") is not other_ends_too

    llm = fake_llm(ALPHABET, observer(on_request=on_request), k=2)
    own = params(1 if other_ends_too else 20)
    first, second = llm.generate(["x", "y"], [params(1), own])
    assert first.outputs[0].finish_reason == "length"
    assert second.outputs[0].finish_reason == ("length" if other_ends_too else "abort")
    assert second.outputs[0].text == "a"
    assert second.stats.num_output_tokens == 1
    assert ended == ["0", "1"]
    llm.check_empty()


def test_observers_see_every_step_and_every_request() -> None:
    steps: list[StepStats] = []
    outputs: list[RequestOutput] = []
    llm = fake_llm("abcd", observer(steps.append, outputs.append), k=2)
    results = llm.generate(["x", FAILING], params())
    assert outputs == [results[1], results[0]]  # the failed one ended first
    assert [(s.num_draft_tokens, s.num_accepted_tokens, s.num_emitted_tokens) for s in steps] == [
        (0, 0, 2),  # both prompts: a, a
        (4, 2, 3),  # b c d; the other fails
        (2, 1, 1),  # EOS, and what was drafted after it
    ]
    assert [step.num_proposed_tokens for step in steps] == [4, 2, 0]
    assert [step.num_scheduled_tokens for step in steps] == [2 + 5, 3 + 3, 3]
    assert [step.num_requests for step in steps] == [2, 2, 1]
    assert [step.step_id for step in steps] == [1, 2, 3]


def test_an_observer_cannot_generate_within_a_step() -> None:
    errors: list[str] = []

    def on_step(stats: StepStats) -> None:
        try:
            llm.generate("y", params())
        except EngineError as error:
            errors.append(str(error))

    llm = fake_llm("ab", observer(on_step))
    assert llm.generate("x", params())[0].outputs[0].text == "ab"
    assert errors
    assert "in the middle of a step" in errors[0]
    llm.check_empty()


class Accident(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take personally."""


def once(action: Callable[[], None], after: int) -> Callable[..., None]:
    calls = 0

    def call(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            action()

    return call


def crash() -> None:
    raise Accident


def accident_in(llm: FakeLLM, place: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = once(crash, after)
    if place == "execute":
        llm.runner.before_execute = trigger
    elif place == "draft":
        llm.runner.before_draft = trigger
    else:
        decode = CharTokenizer.decode

        def interrupted(self: CharTokenizer, token_ids: list[int], **options: Any) -> str:
            trigger()
            return decode(self, token_ids, **options)

        monkeypatch.setattr(CharTokenizer, "decode", interrupted)


@pytest.mark.parametrize("place", ["execute", "draft", "commit"])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("n", [1, 3])
def test_an_interrupted_generate_leaves_nothing_behind(
    place: str, after: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[RequestOutput] = []
    llm = fake_llm(ALPHABET, observer(on_request=outputs.append), k=2, num_blocks=60)
    # Each sample's text decodes its prompt's tail twice before anything is committed.
    accident_in(llm, place, after + 6 * n * (place == "commit"), monkeypatch)
    prompts = ["x", "y", "longer than one block"]
    with pytest.raises(Accident):
        llm.generate(prompts, [params(3, n=n, logprobs=0), params(n=n), params(n=n, logprobs=0)])
    assert len(outputs) == 3
    for output in outputs:
        assert [completion.index for completion in output.outputs] == list(range(n))
        for completion in output.outputs:
            assert completion.finish_reason in {"abort", "length"}
            assert completion.token_ids == ids(ALPHABET[: len(completion.token_ids)])
            if output.request_id != "1":
                assert completion.logprobs is not None
                assert len(completion.logprobs) == len(completion.token_ids)
    again = llm.generate(prompts, params(n=n))
    assert [[each.text for each in output.outputs] for output in again] == [[ALPHABET] * n] * 3
    llm.check_empty()


@pytest.mark.parametrize("place", ["execute", "draft"])
def test_an_open_stream_survives_another_calls_interruption(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = fake_llm(ALPHABET, k=2)
    stream = llm.stream("x", params())
    text = next(stream).text
    accident_in(llm, place, 2, monkeypatch)
    with pytest.raises(Accident):
        llm.generate("y", params())
    assert text + "".join(chunk.text for chunk in stream) == ALPHABET
    llm.check_empty()


@pytest.mark.parametrize("after", range(3, 12))
def test_a_stream_whose_commit_was_cut_short_is_aborted_with_what_it_has(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = fake_llm(ALPHABET, k=2)
    stream = llm.stream("x", params())
    text = next(stream).text
    accident_in(llm, "commit", after, monkeypatch)  # the first two decode the new prompt's tail
    with pytest.raises(Accident):
        llm.generate("y", params())
    chunks = list(stream)
    assert chunks[-1].finish_reason == "abort"
    text += "".join(chunk.text for chunk in chunks)
    assert text == ALPHABET[: len(text)]
    llm.check_empty()


def test_a_stream_that_ended_in_a_commit_cut_short_ends_with_its_whole_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = fake_llm(ALPHABET, k=2)
    stream = llm.stream("x", params(4))
    text = next(stream).text  # the step after it brings the other three
    # Two decodes of the new prompt's tail, three of the stream's tokens, then the newcomer's first.
    accident_in(llm, "commit", 6, monkeypatch)
    with pytest.raises(Accident):
        llm.generate("y", params())
    (last,) = list(stream)
    assert (text + last.text, last.finish_reason) == (ALPHABET[:4], "length")
    llm.check_empty()


def test_a_stream_may_be_closed_in_the_middle_of_a_step() -> None:
    """As the garbage collector does."""
    llm = fake_llm(ALPHABET, k=2)
    stream, other = llm.stream("x", params()), llm.stream("y", params())
    text = next(stream).text
    next(other)
    llm.runner.before_execute = once(other.close, 2)
    assert text + "".join(chunk.text for chunk in stream) == ALPHABET
    assert list(other) == []
    llm.check_empty()


def test_everything_may_end_in_the_middle_of_a_step() -> None:
    llm = fake_llm(ALPHABET, k=2, max_num_seqs=1)
    stream = llm.stream("x", params())
    assert next(stream).request_id == "0"

    def end_all() -> None:
        assert llm.abort("1")  # waits: is freed at once
        stream.close()  # in flight: is freed with the step

    llm.runner.before_execute = once(end_all, 1)
    (output,) = llm.generate("y", params())
    assert output.request_id == "1"
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("abort", "")
    llm.check_empty()


def test_news_of_an_interrupted_step_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears of a finished request though the message that said so was lost."""
    llm = fake_llm(ALPHABET, k=2)
    stream = llm.stream("x", params())
    next(stream)
    (short,) = llm.generate("y", params(1))  # ends; the stream goes on, so news waits for a step
    told: list[list[str]] = []

    def lose(step: SchedulerOutput) -> None:
        told.append(list(step.finished_req_ids))
        if len(told) == 1:
            crash()

    llm.runner.before_execute = lose
    with pytest.raises(Accident):
        next(stream)
    next(llm.stream("z", params()))
    assert short.request_id in told[0]
    assert short.request_id in told[1]


def test_a_strict_fault_of_the_proposer_raises_and_the_engine_goes_on() -> None:
    def fault() -> None:
        raise ProposerError("proposer 'script': not again")

    llm = fake_llm(k=2)
    llm.runner.before_draft = once(fault, 2)
    with pytest.raises(ProposerError, match="not again"):
        llm.generate(["x", "y"], params())
    assert llm.generate("x", params())[0].outputs[0].text == "abcdefgh"
    llm.check_empty()
