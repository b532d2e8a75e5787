"""`logprobs`: one entry for each output token, whatever drafts, stops, preemptions do to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import tiny_models
import torch
from fake_engine import ALPHABET, FakeLLM, fake_llm, ids, logprobs_at, params
from sched_engine import GREEDY
from sched_engine import Engine as SchedulerLoop

from foresay import LLM, SamplingParams
from foresay.core.errors import EngineError
from foresay.core.messages import ModelRunnerOutput, SchedulerOutput
from foresay.core.proposer import Draft, DraftInput, ProposerConfig

# -- cut where the tokens are --------------------------------------------------------------------


def expected(token_ids: list[int], num_likeliest: int) -> list[dict[int, float]]:
    return [
        logprobs_at(position, token_id, num_likeliest)
        for position, token_id in enumerate(token_ids)
    ]


@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize(
    ("values", "token_ids"),
    [
        ({}, [*ids("abcdefgh"), 0]),
        ({"max_tokens": 3}, ids("abc")),
        ({"stop": "de"}, ids("abcde")),
        ({"stop_token_ids": [ord("c")]}, ids("abc")),
    ],
    ids=["eos", "length", "stop-string", "stop-id"],
)
def test_there_are_as_many_as_tokens(values: dict[str, Any], token_ids: list[int], k: int) -> None:
    llm = fake_llm(k=k, wrong=lambda position: position == 6)
    (output,) = llm.generate("x", params(**values, logprobs=2))
    assert output.outputs[0].token_ids == token_ids
    assert output.outputs[0].logprobs == expected(token_ids, 2)
    # By hand: the token first, then the two likeliest.
    assert list((output.outputs[0].logprobs or [])[2].items()) == [
        (ord("c"), -0.03), (200, -1.0), (201, -2.0),
    ]  # fmt: skip


def test_only_who_asks_gets_them() -> None:
    llm = fake_llm(k=3)
    outputs = llm.generate(["a", "b", "c"], [params(), params(logprobs=0), params(logprobs=5)])
    assert outputs[0].outputs[0].logprobs is None
    sizes = [[len(each) for each in output.outputs[0].logprobs or []] for output in outputs[1:]]
    assert sizes == [[1] * 9, [6] * 9]


def test_chunks_of_a_stream_bring_those_of_their_tokens() -> None:
    llm = fake_llm(ALPHABET, k=3)
    chunks = list(llm.stream("x", params(10, logprobs=1)))
    assert [len(chunk.logprobs or []) for chunk in chunks] == [1, 4, 4, 1]
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 4, 1]
    gathered = [each for chunk in chunks for each in chunk.logprobs or []]
    assert gathered == expected(ids(ALPHABET[:10]), 1)
    assert chunks[-1].output is not None
    assert chunks[-1].output.outputs[0].logprobs == gathered
    assert [chunk.logprobs for chunk in llm.stream("x", params(2))] == [None, None]


def test_an_aborted_stream_has_those_of_the_tokens_it_has() -> None:
    llm = fake_llm(ALPHABET, k=3)
    stream = llm.stream("x", params(logprobs=0))
    next(stream)
    chunk = next(stream)
    llm.abort(chunk.request_id)
    (last,) = list(stream)
    assert (last.token_ids, last.logprobs) == ([], [])
    assert last.output is not None
    assert last.output.outputs[0].logprobs == expected(ids("abcde"), 0)


# -- computed anew -------------------------------------------------------------------------------


def test_a_request_that_was_preempted_has_one_per_token() -> None:
    llm = fake_llm(ALPHABET, k=2, max_model_len=40, num_blocks=12, enable_prefix_caching=False)
    outputs = llm.generate(["x", "y", "z"], params(logprobs=1))
    assert llm.stats.num_preemptions > 0
    for output in outputs:
        assert output.outputs[0].logprobs == expected([*ids(ALPHABET), 0], 1)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_step_that_was_lost_is_not_counted_twice(after: int) -> None:
    llm = fake_llm(ALPHABET, k=2)
    stream = llm.stream("x", params(logprobs=1))
    found = list(next(stream).logprobs or [])
    interrupt(llm, after)
    with pytest.raises(ZeroDivisionError):
        llm.generate("y", params())
    found += [each for chunk in stream for each in chunk.logprobs or []]
    assert found == expected([*ids(ALPHABET), 0], 1)


def interrupt(llm: FakeLLM, after: int) -> None:
    """Let the step with that number from now fail in the worker."""
    calls = 0

    def fail(step: SchedulerOutput) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise ZeroDivisionError

    llm.runner.before_execute = fail


@pytest.mark.parametrize(
    "logprobs",
    [None, [], [{8: -0.5}], [{7: -0.5}, {7: -0.5}]],
    ids=["none", "too-few", "of-another-token", "too-many"],
)
def test_a_worker_that_gives_others_than_it_should_is_found_out(logprobs: Any) -> None:
    loop = SchedulerLoop()
    request = loop.add("a", 3, sampling=replace(GREEDY, logprobs=0))
    loop.schedule()
    given = {} if logprobs is None else {"a": logprobs}
    output = ModelRunnerOutput(loop.scheduled.step_id, {"a": [7]}, logprobs=given)
    with pytest.raises(EngineError, match=r"sampled \[7\] and gave the logprobs of"):
        loop.scheduler.update_from_output(loop.scheduled, output)
    assert request.num_output_tokens == 0


# -- on a model ----------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42]]


class Often:
    """Drafts the true continuation, but for every third token."""

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, config: ProposerConfig) -> None:
        pass

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.draft(list(r.token_ids))[: r.k] for r in batch.requests])

    def draft(self, token_ids: list[int]) -> list[int]:
        for prompt, answer in self.answers.items():
            if tuple(token_ids[: len(prompt)]) == prompt:
                start = len(token_ids) - len(prompt)
                return [3 if i % 3 == 2 else t for i, t in enumerate(answer)][start:]
        return []


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"temperature": 1.5, "top_k": 5, "seed": 3}],
    ids=["greedy", "sampled"],
)
def test_with_drafts_they_are_those_of_plain_decoding_and_of_the_raw_rows(
    values: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    model = tiny_models.llama()
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3, **values)
    settings = {"max_model_len": 64, "num_blocks": 64}
    with LLM(model=model, proposer=None, **settings) as llm:
        plain = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    Often.answers = {
        tuple(prompt): each.token_ids for prompt, each in zip(PROMPTS, plain, strict=True)
    }
    with LLM(model=model, proposer=Often, **settings, adaptive=False) as llm:
        drafted = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
        assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens
    for prompt, one, other in zip(PROMPTS, plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        # The reference: transformers' own forward, log-softmax of the raw row.
        with torch.no_grad():
            logits = model(torch.tensor([prompt + one.token_ids])).logits[0].double()
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]  # [num_output_tokens, vocab_size]
        assert len(one.logprobs) == len(other.logprobs) == len(rows) == 12
        for row, token_id, ours, theirs in zip(
            rows, one.token_ids, one.logprobs, other.logprobs, strict=True
        ):
            likeliest = row.topk(3).indices.tolist()
            assert list(ours) == list(theirs) == list(dict.fromkeys([token_id, *likeliest]))
            reference = [row[each].item() for each in ours]
            assert list(ours.values()) == pytest.approx(reference, abs=1e-4)
            assert list(theirs.values()) == pytest.approx(list(ours.values()), abs=1e-5)
