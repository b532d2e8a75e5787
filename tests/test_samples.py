"""`n` > 1: several outputs of one prompt, on a scripted worker and on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tiny_models
import torch
from fake_engine import ALPHABET, EOS, FAILING, FakeLLM, fake_llm, ids, observer, params

from foresay import LLM, SamplingParams
from foresay.core.errors import RequestError, WorkerDiedError
from foresay.core.messages import SamplingData, SchedulerOutput
from foresay.core.outputs import RequestOutput
from foresay.core.proposer import Draft, DraftInput, DraftRequest, ProposerConfig
from foresay.core.stats import StepStats

# -- what comes out ------------------------------------------------------------------------------


def by_sample(*answers: str) -> FakeLLM:
    return fake_llm(lambda prompt, sampling: answers[sampling.sample_index], k=2)


def test_each_sample_has_its_own_text_and_end() -> None:
    llm = by_sample("abc", "abcdefgh", "azbcdefg")
    (output,) = llm.generate("x", params(5, n=3, stop="zb"))
    assert [
        (each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason)
        for each in output.outputs
    ] == [
        (0, "abc", [*ids("abc"), EOS], "stop", EOS),
        (1, "abcde", ids("abcde"), "length", None),
        (2, "a", ids("azb"), "stop", "zb"),
    ]
    llm.check_empty()


def test_prompts_may_want_different_numbers_of_samples() -> None:
    llm = fake_llm(lambda prompt, sampling: f"{prompt}{sampling.sample_index}")
    outputs = llm.generate(["a", "b", "c"], [params(n=n) for n in (2, 1, 3)])
    assert [[each.text for each in output.outputs] for output in outputs] == [
        ["a0", "a1"], ["b0"], ["c0", "c1", "c2"],
    ]  # fmt: skip
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert [output.prompt_token_ids[1:] for output in outputs] == [ids("a"), ids("b"), ids("c")]


@pytest.mark.parametrize("caching", [True, False])
def test_more_samples_than_the_engine_runs_at_once_take_turns(caching: bool) -> None:
    llm = fake_llm(
        lambda prompt, sampling: "abcdefg"[: 1 + sampling.sample_index],
        max_num_seqs=2,
        enable_prefix_caching=caching,
    )
    (output,) = llm.generate("longer than a block", params(n=7))
    assert [each.text for each in output.outputs] == ["abcdefg"[:length] for length in range(1, 8)]
    llm.check_empty()


def test_a_stream_is_of_one_output() -> None:
    llm = fake_llm()
    with pytest.raises(RequestError, match=r"stream\(\) gives one output as it comes, not n=2"):
        llm.stream("x", params(n=2))
    assert llm.stats.num_requests == 0


# -- seeds ---------------------------------------------------------------------------------------


def samplings(llm: FakeLLM) -> dict[str, list[SamplingData]]:
    """By prompt, in the order of the samples."""
    found: dict[str, list[SamplingData]] = {}
    for request in sorted(llm.runner.received, key=lambda request: request.req_id):
        found.setdefault(chr(request.token_ids[1]), []).append(request.sampling)
    return found


def test_samples_share_a_seed_and_differ_in_their_index() -> None:
    llm = fake_llm()
    llm.generate(["x", "y"], [params(n=3, seed=7), params(n=2)])
    found = samplings(llm)
    assert [(each.seed, each.sample_index) for each in found["x"]] == [(7, 0), (7, 1), (7, 2)]
    assert [each.sample_index for each in found["y"]] == [0, 1]
    assert found["y"][0].seed == found["y"][1].seed != 7


def test_the_seed_of_a_prompt_does_not_depend_on_how_many_samples_are_asked_for() -> None:
    one, three = fake_llm(), fake_llm()
    one.generate(["x", "y"], params())
    three.generate(["x", "y"], params(n=3))
    for prompt in "xy":
        assert samplings(three)[prompt][0] == samplings(one)[prompt][0]


# -- who computes the prompt ---------------------------------------------------------------------


def watched(**settings: object) -> tuple[FakeLLM, list[dict[str, int]]]:
    """An LLM, and how many tokens of whom each of its steps computes."""
    steps: list[dict[str, int]] = []

    def watch(step: SchedulerOutput) -> None:
        if step.num_scheduled_tokens:
            steps.append(dict(step.num_scheduled_tokens))

    llm = fake_llm("a", **settings)  # type: ignore[arg-type]
    llm.runner.before_execute = watch
    return llm, steps


def test_later_samples_wait_for_the_first_ones_prompt_and_share_its_full_blocks() -> None:
    llm, steps = watched(chunked_prefill_size=4)
    llm.generate("ninechars", params(n=3))  # with BOS ten tokens: two full blocks of four, and two
    assert steps == [
        {"0.0": 4},
        {"0.0": 4},
        {"0.0": 2},  # a
        {"0.0": 1, "0.1": 2, "0.2": 2},  # EOS, a, a
        {"0.1": 1, "0.2": 1},  # EOS, EOS
    ]
    first, *others = llm.runner.received
    assert first.num_computed_tokens == 0
    tables = [other.block_ids for other in others]
    assert [other.num_computed_tokens for other in others] == [8, 8]
    assert [table[:2] for table in tables] == [first.block_ids[:2]] * 2
    assert len({first.block_ids[2], tables[0][2], tables[1][2]}) == 3  # the rest is each one's own
    assert llm.stats.num_cached_tokens == 16
    llm.check_empty()


@pytest.mark.parametrize(
    ("prompt", "settings", "num_tokens"),
    [("ninechars", {"enable_prefix_caching": False}, 10), ("abc", {}, 4)],
    ids=["no-prefix-cache", "no-full-block-to-share"],
)
def test_samples_that_can_share_nothing_start_together(
    prompt: str, settings: dict[str, bool], num_tokens: int
) -> None:
    llm, steps = watched(**settings)
    llm.generate(prompt, params(n=3))
    assert steps[0] == {"0.0": num_tokens, "0.1": num_tokens, "0.2": num_tokens}
    assert llm.stats.num_cached_tokens == 0


@pytest.mark.parametrize("max_tokens", [1, 9])
def test_samples_come_before_later_prompts(max_tokens: int) -> None:
    """So they find the first one's blocks, which later prompts might need."""
    llm, _ = watched(max_num_seqs=1)
    llm.generate(["the first prompt", "a second one"], params(max_tokens, n=2))
    assert [request.req_id for request in llm.runner.received] == ["0.0", "0.1", "1.0", "1.1"]
    assert llm.stats.num_cached_tokens == 16 + 12  # of 17 and 13 tokens


def test_a_prompt_that_was_passed_over_still_comes_before_later_ones_samples() -> None:
    # Twelve blocks of four. The second prompt (ten) does not fit beside the first (four), which
    # ends with the first step, as does the third one's first sample.
    llm, _ = watched(max_model_len=44, num_blocks=12)
    prompts = ["p" * 15, "q" * 39, "r" * 7]
    llm.generate(prompts, [params(1), params(1), params(1, n=2)])
    assert [request.req_id for request in llm.runner.received] == ["0", "2.0", "1", "2.1"]
    llm.check_empty()


def test_when_the_first_sample_fails_the_others_go_on() -> None:
    llm = fake_llm("abcdefgh")
    llm.runner.fails = lambda sampling, position: sampling.sample_index == 0
    prompt = [1] * 9 + ids(FAILING)
    (output,) = llm.generate([prompt], params(n=3))
    assert [each.finish_reason for each in output.outputs] == ["error", "stop", "stop"]
    assert [each.text for each in output.outputs] == ["", "abcdefgh", "abcdefgh"]
    llm.check_empty()


# -- figures, observers, aborts ------------------------------------------------------------------


def test_the_figures_of_all_samples_are_one_requests() -> None:
    llm = fake_llm("abcdef", k=2)
    (output,) = llm.generate("x", params(n=2))
    # Each: a | drafts b c, then d | drafts e f, then EOS.
    stats = output.stats
    assert (stats.num_steps, stats.num_verify_steps, stats.num_output_tokens) == (6, 4, 14)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (8, 8)
    assert stats.tokens_per_step == pytest.approx(14 / 6)
    assert stats.by_proposer["script"].num_draft_tokens == 8
    run = llm.stats
    assert (run.num_requests, run.num_finished_requests, run.num_prompt_tokens) == (1, 1, 2)
    assert (run.num_first_tokens, run.num_output_tokens) == (1, 14)
    assert run.time_to_first_token == stats.time_to_first_token


def test_observers_see_a_request_once_with_all_its_outputs() -> None:
    steps: list[StepStats] = []
    outputs: list[RequestOutput] = []
    llm = fake_llm(
        lambda prompt, sampling: "abc"[: sampling.sample_index],
        observer(steps.append, outputs.append),
    )
    results = llm.generate(["x", "y"], [params(n=3), params()])
    assert outputs == [results[1], results[0]]
    assert [each.text for each in outputs[1].outputs] == ["", "a", "ab"]
    # Three samples and one; two; one.
    assert [step.req_ids for step in steps] == [("0", "1"), ("0",), ("0",)]
    assert [step.num_emitted_tokens for step in steps] == [4, 2, 1]


@pytest.mark.parametrize(
    ("prompt", "at_step", "texts"),
    [
        ("x", 2, ["ab", "ab", "ab"]),
        ("longer than a block", 2, ["ab", "a", "a"]),
        ("longer than a block", 1, ["", "", ""]),  # after half of the prompt
    ],
    ids=["running", "later-ones-started", "waiting"],
)
def test_an_abort_ends_all_samples(prompt: str, at_step: int, texts: list[str]) -> None:
    aborted: list[bool] = []

    def on_step(stats: StepStats) -> None:
        if stats.step_id == at_step:
            aborted.extend([llm.abort("0"), llm.abort("0")])

    chunk = 10 if at_step == 1 else None
    llm = fake_llm(ALPHABET, observer(on_step), chunked_prefill_size=chunk)
    (output,) = llm.generate(prompt, params(n=3))
    assert aborted == [True, False]
    assert [each.text for each in output.outputs] == texts
    assert [each.finish_reason for each in output.outputs] == ["abort"] * 3
    assert [len(each.token_ids) for each in output.outputs] == [len(text) for text in texts]
    llm.check_empty()


def test_an_abort_leaves_the_samples_that_have_ended_as_they_are() -> None:
    def on_step(stats: StepStats) -> None:
        if stats.step_id == 3:
            llm.abort("0")

    llm = fake_llm(
        lambda prompt, sampling: ("a", ALPHABET)[sampling.sample_index], observer(on_step)
    )
    (output,) = llm.generate("x", params(n=2))
    assert [(each.text, each.finish_reason) for each in output.outputs] == [
        ("a", "stop"),
        ("abc", "abort"),
    ]
    llm.check_empty()


def test_a_worker_that_dies_ends_all_samples_with_an_error() -> None:
    """Those of a request that an observer aborts meanwhile with an abort."""

    def on_request(output: RequestOutput) -> None:
        if output.request_id == "0":
            assert llm.abort("1")

    def die(step: SchedulerOutput) -> None:
        if step.step_id == 2:
            raise WorkerDiedError("the worker is gone")

    llm = fake_llm(ALPHABET, observer(on_request=on_request), chunked_prefill_size=4)
    llm.runner.before_execute = die
    outputs = llm.generate(["longer than a block", "x", "y"], params(n=2))
    found = [[(each.text, each.finish_reason) for each in output.outputs] for output in outputs]
    assert found == [[("", "error")] * 2, [("a", "abort")] * 2, [("a", "error")] * 2]
    assert outputs[0].outputs[1].stop_reason == "the worker is gone"


# -- on a model ----------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [40, 41, 42]]


class LastAgain:
    """Drafts the last tokens again: sometimes right, and differently so for each sample."""

    def __init__(self, config: ProposerConfig) -> None:
        pass

    def propose(self, batch: DraftInput) -> Draft:
        return Draft([self.draft(request) for request in batch.requests])

    def draft(self, request: DraftRequest) -> list[int]:
        return (list(request.token_ids[-3:]) * 2)[: request.k]


@pytest.fixture(scope="module")
def model() -> object:
    return tiny_models.llama()


def texts(
    model: object,
    params: SamplingParams | Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **settings: object,
) -> list[list[list[int]]]:
    settings = {"max_model_len": 64, "num_blocks": 64, "proposer": None, **settings}
    with LLM(model=model, **settings, adaptive=False) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
        llm._running_engine()._scheduler.check_integrity()
    return [[each.token_ids for each in output.outputs] for output in outputs]


def sampled(n: int, **values: object) -> SamplingParams:
    settings = {"temperature": 0.5, "max_tokens": 12, "seed": 7, "ignore_eos": True, "n": n}
    return SamplingParams(**{**settings, **values})


def test_seeded_samples_are_the_same_whatever_runs_beside_them(model: object) -> None:
    torch.set_num_threads(1)
    expected = texts(model, sampled(3))
    assert len({tuple(ids) for ids in expected[0]}) == 3
    assert texts(model, sampled(3), proposer=LastAgain) == expected
    assert texts(model, sampled(3), max_num_seqs=2, enable_prefix_caching=False) == expected
    alone = [texts(model, sampled(3), [prompt], proposer=LastAgain)[0] for prompt in PROMPTS]
    assert alone == expected
    assert texts(model, sampled(1), proposer=LastAgain) == [each[:1] for each in expected]


def test_unseeded_samples_differ_and_the_first_is_that_of_a_single_one(model: object) -> None:
    three, one = texts(model, sampled(3, seed=None)), texts(model, sampled(1, seed=None))
    assert len({tuple(ids) for each in three for ids in each}) == 6
    assert [each[:1] for each in three] == one


def test_greedy_samples_are_equal_though_their_drafts_fare_differently(model: object) -> None:
    """A draft is accepted to a different length for each, as `OneMore` says."""

    class OneMore(LastAgain):
        def draft(self, request: DraftRequest) -> list[int]:
            return super().draft(request)[: int(request.req_id[-1])]

    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (expected,) = texts(model, greedy, PROMPTS[:1])
    several = greedy.model_copy(update={"n": 4})
    assert texts(model, several, PROMPTS[:1], proposer=OneMore) == [expected * 4]
