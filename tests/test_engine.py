"""The engine and `LLM` on a scripted worker: what a caller sees, whatever happens in between."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from fake_engine import ALPHABET, BOS, EOS, FAILING, fake_llm, ids, logprobs_at, observer, params
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay.core.errors import ConfigError, EngineError, RequestError
from foresay.core.outputs import RequestOutput, StreamChunk
from foresay.core.scheduling.draft_control import DraftControl
from foresay.core.stats import StepStats

# -- what comes out ------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    llm = fake_llm(lambda prompt: prompt * int(prompt[-1]), max_num_seqs=2)
    outputs = llm.generate(["a3", "b1", "c2"], params())
    assert [output.outputs[0].text for output in outputs] == ["a3a3a3", "b1", "c2c2"]
    assert [output.prompt_token_ids for output in outputs] == (
        [[BOS, *ids("a3")], [BOS, *ids("b1")], [BOS, *ids("c2")]]
    )
    assert len({output.request_id for output in outputs}) == 3
    llm.check_empty()


@pytest.mark.parametrize(
    ("values", "text", "token_ids", "finish_reason", "stop_reason"),
    [
        ({}, "abcdefgh", [*ids("abcdefgh"), EOS], "stop", EOS),
        ({"max_tokens": 3}, "abc", ids("abc"), "length", None),
        ({"max_tokens": 11, "ignore_eos": True}, "abcdefgh", [*ids("abcdefgh"), 0, 0, 0],
         "length", None),
        ({"stop": "de"}, "abc", ids("abcde"), "stop", "de"),
        ({"stop": ["zz", "d", "cd"]}, "ab", ids("abcd"), "stop", "cd"),
        ({"stop_token_ids": [ord("c")]}, "ab", ids("abc"), "stop", ord("c")),
        ({"stop": "c", "stop_token_ids": [ord("c")]}, "ab", ids("abc"), "stop", ord("c")),
        ({"stop": "b", "min_tokens": 2}, "abcdefgh", [*ids("abcdefgh"), EOS], "stop", EOS),
        ({"stop": "hx"}, "abcdefgh", [*ids("abcdefgh"), EOS], "stop", EOS),
    ],
    ids=["eos", "length", "ignore-eos", "stop-string", "longer-stop-string", "stop-id",
         "id-before-string", "min-tokens", "held-back-then-flushed"],
)  # fmt: skip
@pytest.mark.parametrize("k", [0, 1, 7])
def test_an_output_ends_where_it_should(
    values: dict[str, Any],
    text: str,
    token_ids: list[int],
    finish_reason: str,
    stop_reason: str | int | None,
    k: int,
) -> None:
    llm = fake_llm(k=k)
    (output,) = llm.generate("x", params(**values))
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == (text, token_ids)
    assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
    assert (completion.index, completion.logprobs) == (0, None)
    llm.check_empty()


def test_more_tokens_than_the_model_can_hold_is_a_length_cap_not_an_error() -> None:
    llm = fake_llm(ALPHABET, max_model_len=10, num_blocks=4, k=3)
    (output,) = llm.generate("xyz", params(max_tokens=1000))
    assert output.outputs[0].text == "abcdef"  # BOS, three prompt tokens, six output tokens
    assert output.outputs[0].finish_reason == "length"


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    llm = fake_llm(has_tokenizer=False)
    (output,) = llm.generate([5, 6], params(3))
    assert output.prompt_token_ids == [5, 6]
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", ids("abc"))
    assert llm.tokenizer is None


def test_a_failed_request_ends_with_its_error_and_others_go_on() -> None:
    llm = fake_llm()
    outputs = llm.generate(["one", FAILING, "two"], params())
    failed = outputs[1].outputs[0]
    assert (failed.finish_reason, failed.stop_reason) == ("error", "a row is not finite")
    assert (failed.text, failed.token_ids) == ("abc", ids("abc"))
    assert [outputs[i].outputs[0].text for i in (0, 2)] == ["abcdefgh"] * 2
    llm.check_empty()


# -- speculation ---------------------------------------------------------------------------------


def test_figures_of_a_speculative_request() -> None:
    # k = 3; output positions 4 and 6 are drafted wrongly. Answer: a b c d e f g h EOS.
    llm = fake_llm(k=3, wrong=lambda position: position in (4, 6))
    (output,) = llm.generate("x", params())
    assert output.outputs[0].text == "abcdefgh"
    stats = output.stats
    # prompt: a | drafts b c d, all right, then e | drafts f ? h: f, then g | drafts h EOS ?: stop
    assert stats.num_steps == 4
    assert stats.num_verify_steps == 3
    assert stats.num_draft_tokens == 9
    assert stats.num_accepted_tokens == 3 + 1 + 2
    assert stats.num_output_tokens == 9
    assert stats.mean_acceptance_length == pytest.approx(8 / 3)  # 4 + 2 + 2 tokens
    assert stats.tokens_per_step == pytest.approx(9 / 4)
    assert stats.acceptance_per_position == pytest.approx([1.0, 2 / 3, 1 / 3])
    # The last draft was cut at EOS: its third position was never reached.
    assert stats.conditional_acceptance_per_position == pytest.approx([1.0, 2 / 3, 1.0])
    assert stats.by_proposer["script"].num_draft_tokens == 9
    assert stats.time_to_first_token is not None
    assert stats.time_to_first_token > 0


def test_a_stop_within_the_first_two_of_eight_accepted_tokens_cuts_everything_there() -> None:
    llm = fake_llm("xabcdefghij", k=8)
    (output,) = llm.generate("x", params(stop="ab"))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("x", ids("xab"))
    assert (output.stats.num_draft_tokens, output.stats.num_accepted_tokens) == (8, 2)
    assert output.stats.num_output_tokens == 3
    llm.check_empty()


def test_nothing_after_an_accepted_eos_appears_anywhere() -> None:
    llm = fake_llm("xy", k=8)
    chunks = list(llm.stream("x", params()))
    assert [token for chunk in chunks for token in chunk.token_ids] == [*ids("xy"), EOS]
    assert chunks[-1].output is not None
    assert chunks[-1].output.outputs[0].text == "xy"


def test_a_request_may_lower_k_or_switch_drafting_off() -> None:
    llm = fake_llm(ALPHABET, k=4)
    outputs = llm.generate(["a", "b", "c"], [params(num_speculative_tokens=k) for k in (0, 2, 9)])
    positions = [len(output.stats.acceptance_per_position) for output in outputs]
    assert positions == [0, 2, 4]
    assert outputs[0].stats.tokens_per_step == 1.0
    assert outputs[0].stats.by_proposer == {}


def test_a_verify_step_counts_for_the_member_of_a_chain_that_drafted() -> None:
    # As above: drafts b c d at position 1, then f ? h at 5 and h EOS ? at 7.
    llm = fake_llm(k=3, wrong=lambda position: position in (4, 6))
    llm.runner.proposer_name = "first,second"
    llm.engine.control = DraftControl([("first", 3), ("second", 3)], {1: 3})
    llm.runner.proposer_at = lambda position: "second" if position == 5 else "first"
    (output,) = llm.generate("x", params())
    for stats in (output.stats, llm.stats):
        by = {name: (own.num_verify_steps, own.num_draft_tokens, own.num_accepted_tokens)
              for name, own in stats.by_proposer.items()}  # fmt: skip
        assert by == {"first": (2, 6, 5), "second": (1, 3, 1)}
    llm.check_empty()


def test_faults_of_verification_and_of_drafting_are_counted_together() -> None:
    steps: list[StepStats] = []
    llm = fake_llm("ab", observer(steps.append), k=1)
    llm.runner.faults = {"bad_id": 1, "zero_residual": 1}
    llm.runner.verification_faults = {"zero_residual": 2}
    llm.generate("x", params())
    # a, and b is drafted; b, EOS.
    assert [step.faults for step in steps] == [
        {"bad_id": 1, "zero_residual": 3},
        {"zero_residual": 2},
    ]
    assert llm.stats.faults == {"bad_id": 1, "zero_residual": 5}


def test_the_run_adds_up_its_requests() -> None:
    llm = fake_llm(k=3)
    llm.runner.faults = {"bad_id": 1}
    outputs = llm.generate(["x", "yy", "z"], params())
    stats = llm.stats
    assert stats.num_output_tokens == sum(len(o.outputs[0].token_ids) for o in outputs) == 27
    assert stats.num_draft_tokens == sum(output.stats.num_draft_tokens for output in outputs)
    assert stats.by_proposer["script"].num_accepted_tokens == stats.num_accepted_tokens
    assert (stats.num_requests, stats.num_finished_requests) == (3, 3)
    assert stats.num_prompt_tokens == 2 + 3 + 2
    assert stats.num_engine_steps == 3
    assert stats.faults == {"bad_id": 2}  # one each time drafts were made
    assert stats.row_invariant is True
    stats.num_steps = 0
    assert llm.stats.num_steps > 0  # what a caller holds is a copy


# -- streams -------------------------------------------------------------------------------------


def test_a_stream_gives_what_generate_gives() -> None:
    llm = fake_llm(ALPHABET, k=3, wrong=lambda position: position % 5 == 0)
    (expected,) = llm.generate("x", params(stop="stu"))
    chunks = list(llm.stream("x", params(stop="stu")))
    assert "".join(chunk.text for chunk in chunks) == expected.outputs[0].text == ALPHABET[:18]
    assert [t for chunk in chunks for t in chunk.token_ids] == expected.outputs[0].token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [chunk.output for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].output is not None
    assert chunks[-1].output.outputs == expected.outputs
    assert all(chunk.token_ids for chunk in chunks)
    llm.check_empty()


def test_text_that_could_begin_a_stop_string_is_held_back() -> None:
    chunks = list(fake_llm("abcabd").stream("x", params(stop="abd")))
    assert [chunk.text for chunk in chunks] == ["", "", "abc", "", "", ""]


def test_the_first_token_reaches_the_user_before_anything_is_drafted() -> None:
    llm = fake_llm(k=3, chunked_prefill_size=2)
    stream = llm.stream("xyz", params())
    assert llm.runner.log == []
    assert next(stream).token_ids == ids("a")
    assert llm.runner.log == ["execute", "draft", "execute"]  # two chunks of the prompt
    next(stream)
    assert llm.runner.log[3:] == ["draft", "execute"]
    stream.close()


def test_a_wrong_stream_is_refused_at_once() -> None:
    llm = fake_llm()
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        llm.stream([[]], params())
    with pytest.raises(RequestError, match=r"stream\(\) takes one prompt, not 2"):
        llm.stream(["a", "b"], params())  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, 3], ids=["plain", "speculative"])
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_closing_a_stream_aborts_its_request_and_frees_everything(num_chunks: int, k: int) -> None:
    outputs: list[RequestOutput] = []
    llm = fake_llm(ALPHABET, observer(on_request=outputs.append), k=k)
    stream = llm.stream("x", params())
    for _ in range(num_chunks):
        next(stream)
    stream.close()
    llm.check_empty()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * (num_chunks > 0)


def test_leaving_the_loop_of_a_stream_is_enough() -> None:
    llm = fake_llm(ALPHABET, k=2)
    for _ in llm.stream("x", params()):
        break
    gc.collect()
    llm.check_empty()


def test_streams_and_generate_share_the_engine() -> None:
    llm = fake_llm(lambda prompt: prompt * 4, k=2, wrong=lambda position: position % 3 == 0)
    first, second = llm.stream("abc", params()), llm.stream("xyz", params())
    pieces = [next(first), next(second)]
    (output,) = llm.generate("hello", params())
    assert output.outputs[0].text == "hello" * 4
    # Both went on meanwhile, and give what gathered in one chunk.
    text = pieces[0].text + "".join(chunk.text for chunk in first)
    assert text == "abc" * 4
    rest = list(second)
    assert pieces[1].text + "".join(chunk.text for chunk in rest) == "xyz" * 4
    assert len(rest) == 1
    llm.check_empty()


def test_a_pool_too_small_for_one_request_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="num_blocks=5"):
        fake_llm(num_blocks=5, max_model_len=200)


def test_a_closed_llm_says_so_and_keeps_its_figures() -> None:
    with fake_llm(ALPHABET) as llm:
        stream = llm.stream("x", params())
        next(stream)
        unstarted = llm.stream("y", params())
    assert [chunk.finish_reason for chunk in stream] == ["abort"]
    with pytest.raises(EngineError, match="closed"):
        next(unstarted)
    for call in (llm.generate, llm.stream):
        with pytest.raises(EngineError, match="closed"):
            call("x", params())
    llm.close()
    assert llm.abort("0") is False
    assert llm.stats.num_output_tokens == 1
    assert llm.runner.closed


@pytest.mark.parametrize("at", ["step", "request"])
def test_an_observer_may_close_the_llm(at: str) -> None:
    """The worker (which fails if it is called after that) is closed when the step is over."""
    llm = fake_llm(
        ALPHABET,
        observer(
            on_step=lambda stats: llm.close() if at == "step" else None,
            on_request=lambda output: llm.close() if at == "request" else None,
        ),
        k=2,
    )
    first, second = llm.generate(["x", "y"], [params(1), params()])
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("length", "abort")
    assert second.outputs[0].text == "a"
    assert llm.runner.closed


def test_an_error_at_the_end_does_not_keep_the_worker_open() -> None:
    def fail(step: object) -> None:
        raise RuntimeError("the worker is gone")

    llm = fake_llm(ALPHABET)
    stream = llm.stream("x", params())
    next(stream)
    llm.runner.before_execute = fail
    with pytest.raises(RuntimeError, match="gone"):
        llm.close()
    assert llm.runner.closed


# -- everything at once --------------------------------------------------------------------------


def expected_output(
    answer: str, max_tokens: int, stop: str, min_tokens: int
) -> tuple[list[int], str, str]:
    """Walk the answer token by token: the rules of stops, without an engine."""
    token_ids: list[int] = []
    text = ""
    for token_id in [*ids(answer), EOS]:
        may_stop = len(token_ids) >= min_tokens
        token_ids.append(token_id)
        if token_id == EOS:
            return token_ids, text, "stop"
        text += chr(token_id)
        if may_stop and text.endswith(stop):
            return token_ids, text.removesuffix(stop), "stop"
        if len(token_ids) == max_tokens:
            break
    return token_ids, text, "length"


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_mix_of_requests_gives_what_each_alone_should_give(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    answers = data.draw(
        st.lists(st.text("ab", max_size=20), min_size=count, max_size=count), label="answers"
    )
    requests = [
        (f"{index}" + "p" * data.draw(st.integers(0, 9)), data.draw(st.integers(4, 25)),
         data.draw(st.sampled_from(["ab", "bb", "aab", "zz"])), data.draw(st.integers(0, 4)))
        for index in range(count)
    ]  # fmt: skip
    nums = [1] + [data.draw(st.integers(1, 3), label="n") for _ in range(count - 1)]
    wrong = data.draw(st.sets(st.integers(0, 25)), label="wrong drafts")

    def check(stats: StepStats) -> None:
        llm.engine._scheduler.check_integrity()

    k = data.draw(st.integers(0, 5), label="k")
    max_num_seqs = data.draw(st.integers(1, 4), label="max_num_seqs")
    llm = fake_llm(
        lambda prompt, sampling: answers[(int(prompt[0]) + sampling.sample_index) % count],
        observer(check),
        k=k,
        wrong=lambda position: position in wrong,
        max_model_len=48,
        num_blocks=data.draw(st.integers(12, 30), label="num_blocks"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * (1 + k) + 3,
        chunked_prefill_size=data.draw(st.sampled_from([None, 1, 3]), label="chunk"),
        enable_prefix_caching=data.draw(st.booleans(), label="prefix cache"),
        adaptive=data.draw(st.booleans(), label="adaptive"),
    )
    each = [
        params(max_tokens, stop=stop, min_tokens=min_tokens, n=n, logprobs=n)
        for n, (_, max_tokens, stop, min_tokens) in zip(nums, requests, strict=True)
    ]
    streamed = data.draw(st.booleans(), label="first one streamed")
    chunks: list[StreamChunk] = []
    stream = llm.stream(requests[0][0], each[0])
    if streamed:
        chunks.append(next(stream))
    outputs = llm.generate([prompt for prompt, *_ in requests], each)
    if streamed:
        chunks += stream
        assert "".join(chunk.text for chunk in chunks) == outputs[0].outputs[0].text
        assert [t for c in chunks for t in c.token_ids] == outputs[0].outputs[0].token_ids
    # `min_tokens` masks EOS in a real worker; the scripted one emits it, and goes on with EOS.
    total = sum(len(chunk.token_ids) for chunk in chunks)
    for index, (output, (_, max_tokens, stop, min_tokens)) in enumerate(
        zip(outputs, requests, strict=True)
    ):
        assert [completion.index for completion in output.outputs] == list(range(nums[index]))
        for completion in output.outputs:
            answer = answers[(index + completion.index) % count]
            if len(answer) >= min_tokens:
                got = (completion.token_ids, completion.text, completion.finish_reason)
                assert got == expected_output(answer, max_tokens, stop, min_tokens)
            assert completion.logprobs == [
                logprobs_at(position, token_id, nums[index])
                for position, token_id in enumerate(completion.token_ids)
            ]
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        assert output.stats.num_output_tokens == num_tokens
        total += num_tokens
    assert llm.stats.num_output_tokens == total
    llm.check_empty()
