"""The worker, driven by messages written by hand, against transformers' generate."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch

from foresay.core.errors import EngineError
from foresay.core.messages import (
    BlockTableUpdate,
    DraftTokenIds,
    ModelRunnerOutput,
    NewRequest,
    SamplingData,
    SchedulerOutput,
)
from foresay.core.proposer import Draft, DraftInput, Needs
from foresay.core.worker.chain import Member, ProposerChain
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.model_runner import ModelRunner
from foresay.core.worker.proposing import GuardedProposer
from foresay.core.worker.request_state import TokenView
from foresay.core.worker.target import load_target

GREEDY = SamplingData(0.0, 0, 1.0, 0.0, 0, 0, ())
NO_NEEDS = Needs()
BLOCK_SIZE = 4
NAN_ID = 150  # in `broken`, a token whose embedding is no number
PROMPT = [5, 17, 99, 3, 42, 64, 8, 120, 33]
OTHER = [77, 1, 30, 30, 12]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.llama(eos_token_id=None)


@pytest.fixture(scope="module")
def broken() -> Any:
    model = tiny_models.llama(eos_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_ID] = torch.nan
    return model


def generate(model: Any, prompt: Sequence[int], num_tokens: int = 16) -> list[int]:
    """What transformers continues the prompt with, greedily."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    assert len(set(found)) >= num_tokens // 2  # not one token over and over
    return found


def new(
    req_id: str,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    *,
    num_computed: int = 0,
    num_prompt: int | None = None,
    sampling: SamplingData = GREEDY,
) -> NewRequest:
    return NewRequest(
        req_id,
        list(token_ids),
        len(token_ids) if num_prompt is None else num_prompt,
        num_computed,
        list(block_ids),
        sampling,
    )


def copied(message: Any) -> Any:
    """What arrives at the other end of a pipe."""
    return pickle.loads(pickle.dumps(message))  # noqa: S301  # our own


class Recorder:
    """Drafts `ids` for every request, and keeps what it was asked and told."""

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)
        self.asked: list[list[tuple[str, list[int], int, int]]] = []
        self.views: dict[str, Sequence[int]] = {}
        self.released: list[str] = []

    def propose(self, batch: DraftInput) -> Draft:
        self.asked.append(
            [(r.req_id, list(r.token_ids), r.num_new_tokens, r.k) for r in batch.requests]
        )
        self.views |= {r.req_id: r.token_ids for r in batch.requests}
        return Draft([self.ids[: r.k] for r in batch.requests])

    def release(self, req_id: str) -> None:
        self.released.append(req_id)


class Worker:
    """A model runner behind a pipe; all its steps are numbered, and said in full."""

    def __init__(
        self, model: Any, proposer: Any = None, num_blocks: int = 16, needs: Needs = NO_NEEDS
    ) -> None:
        target = load_target(model)
        self.cache = KVCache(target.kv_layout, num_blocks, BLOCK_SIZE, target.dtype, target.device)
        chain = None
        if proposer is not None:
            guarded = GuardedProposer(
                proposer, name="fake", owner="tests", vocab_size=target.vocab_size, strict=False
            )
            chain = ProposerChain([Member(guarded, needs, 4)], target.vocab_size)
        self.runner = ModelRunner(
            target,
            self.cache,
            chain,
            max_model_len=64,
            row_invariant=True,
            summary="",
        )
        self._num_steps = 0

    def step(
        self,
        rows: Mapping[str, int],
        *,
        drafts: Mapping[str, list[int]] | None = None,
        unfinished: Iterable[str] = (),
        k: Mapping[str, int] | None = None,
        new: Sequence[NewRequest] = (),
        updates: Mapping[str, BlockTableUpdate] | None = None,
        zero: Sequence[int] = (),
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> ModelRunnerOutput:
        """Run `rows` of each request; `unfinished`: those whose prompt goes on after them."""
        drafts = drafts or {}
        message = SchedulerOutput(
            step_id=self._num_steps,
            num_scheduled_tokens=dict(rows),
            scheduled_spec_decode_tokens=dict(drafts),
            num_output_rows={
                req_id: 0 if req_id in unfinished else 1 + len(drafts.get(req_id, []))
                for req_id in rows
            },
            num_draft_tokens=dict(k or {}),
            new_requests=list(new),
            block_table_updates=dict(updates or {}),
            block_ids_to_zero=list(zero),
            finished_req_ids=list(finished),
            preempted_req_ids=list(preempted),
        )
        output: ModelRunnerOutput = copied(self.runner.execute(copied(message)))
        assert output.step_id == self._num_steps
        self._num_steps += 1
        return output

    def sampled(self, req_id: str, rows: int, draft: Sequence[int] = (), **more: Any) -> list[int]:
        """Run one request's rows, the draft among them; the tokens it gives."""
        drafts = {req_id: list(draft)} if draft else {}
        output = self.step({req_id: rows}, drafts=drafts, **more)
        assert not output.failed
        return output.sampled_token_ids[req_id]

    def draft(self, *finished: str) -> DraftTokenIds | None:
        found: DraftTokenIds | None = copied(self.runner.draft(finished))
        return found


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_sliding", "gpt2"])
def test_one_row_a_step_gives_what_generate_gives(family: str) -> None:
    model = tiny_models.BUILDERS[family](eos_token_id=None)
    expected = generate(model, PROMPT)
    worker = Worker(model)
    found = worker.sampled("r", 9, new=[new("r", PROMPT, [7, 2, 9, 0, 15, 4, 1])])
    while len(found) < 16:
        found += worker.sampled("r", 1)
    assert found == expected


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 4, 1], [8, 1], [2, 7]], ids=str)
def test_a_prompt_in_chunks_gives_tokens_after_the_last_one_only(
    model: Any, chunks: list[int]
) -> None:
    worker = Worker(model)
    first: list[NewRequest] = [new("r", PROMPT, [3, 8, 1])]
    for size in chunks[:-1]:
        output = worker.step({"r": size}, new=first, unfinished=["r"])
        assert (output.sampled_token_ids, output.failed) == ({}, {})
        first = []
    found = worker.sampled("r", chunks[-1]) + worker.sampled("r", 1)
    assert found == generate(model, PROMPT)[:2]


def test_drafts_are_accepted_up_to_the_first_wrong_one(model: Any) -> None:
    expected = generate(model, PROMPT, 20)

    def draft(*right: bool) -> list[int]:
        """The next tokens; where not right, the one after the right one."""
        following = expected[len(found) : len(found) + len(right)]
        return [t if ok else (t + 1) % 160 for t, ok in zip(following, right, strict=True)]

    worker = Worker(model)
    found = worker.sampled("r", 9, new=[new("r", PROMPT, [3, 8, 1, 12, 0, 6, 10, 11])])
    counts = []
    for right in [
        (True, True, True),
        (False, True, True),
        (True, True, False),
        (),
        (False,),
        (True,),
        (True, False, True, True),
    ]:
        tokens = worker.sampled("r", 1 + len(right), draft(*right))
        counts.append(len(tokens))
        found += tokens
        assert found == expected[: len(found)]
    assert counts == [4, 1, 3, 1, 1, 2, 2]


def test_requests_in_every_state_share_a_step(model: Any) -> None:
    """A verifying one, a decoding one, one whose prompt ends and one whose prompt goes on."""
    long = [*OTHER, *PROMPT]
    verifying, decoding = generate(model, PROMPT), generate(model, OTHER)
    worker = Worker(model, num_blocks=24)
    output = worker.step(
        {"b": 5, "a": 9, "c": 6, "d": 3},
        new=[
            new("a", PROMPT, [20, 3, 9, 8]),
            new("b", OTHER, [0, 1]),
            new("c", long, [5, 23, 2, 11]),
            new("d", long, [12, 6, 7, 22]),
        ],
        unfinished=["c", "d"],
    )
    assert output.sampled_token_ids == {"b": decoding[:1], "a": verifying[:1]}
    assert list(output.sampled_token_ids) == ["b", "a"]
    output = worker.step(
        {"a": 4, "c": 8, "b": 1, "d": 4},
        drafts={"a": [verifying[1], verifying[2], 0]},
        unfinished=["d"],
    )
    assert output.sampled_token_ids == {
        "a": verifying[1:4],
        "c": generate(model, long)[:1],
        "b": decoding[1:2],
    }
    output = worker.step({"b": 1, "a": 1})
    assert output.sampled_token_ids == {"a": verifying[4:5], "b": decoding[2:3]}
    output = worker.step({"d": 7, "c": 1})
    assert output.sampled_token_ids == {
        "d": generate(model, long)[:1],
        "c": generate(model, long)[1:2],
    }


def test_a_seeded_texts_noise_is_that_of_its_positions_whatever_is_drafted(model: Any) -> None:
    sampling = replace(GREEDY, temperature=1.5, seed=7)

    def text(drafts: Sequence[Sequence[int]]) -> list[int]:
        worker = Worker(model)
        first = new("r", PROMPT, [3, 8, 1, 12, 0, 6], sampling=sampling)
        found = worker.sampled("r", 9, new=[first])
        for draft in drafts:
            found += worker.sampled("r", 1 + len(draft), draft)
        return found

    plain = text([()] * 9)
    assert plain != generate(model, PROMPT, 10)
    wrong = [(token + 1) % 160 for token in plain]
    assert text([plain[1:4], [wrong[5]], [plain[6], wrong[7]], plain[8:10]])[:10] == plain


def test_min_tokens_counts_output_tokens_after_a_resumption_too(model: Any) -> None:
    expected = generate(model, PROMPT)
    # The fourth output token may be a stop id once three exist, but not a token sooner.
    for min_tokens, is_allowed in ((3, True), (4, False)):
        sampling = replace(GREEDY, min_tokens=min_tokens, stop_token_ids=(expected[3],))
        resumed = new("r", [*PROMPT, *expected[:3]], [3, 8, 1, 0], num_prompt=9, sampling=sampling)
        tokens = Worker(model).sampled("r", 12, new=[resumed])
        assert (tokens == expected[3:4]) is is_allowed


# -- blocks --------------------------------------------------------------------------------------


def test_a_block_table_is_cut_and_extended(model: Any) -> None:
    """Blocks that were cut off are another request's at once, and it writes over them."""
    expected, other = generate(model, PROMPT), generate(model, OTHER)
    worker = Worker(model)
    found = worker.sampled("r", 9, new=[new("r", PROMPT, [3, 8, 1, 5, 6])])
    found += worker.sampled("r", 3, [(expected[1] + 1) % 160, 7])  # fills block 1, all rejected
    output = worker.step(
        {"r": 1, "s": 5},
        new=[new("s", OTHER, [6, 5])],
        updates={"r": BlockTableUpdate(num_kept=3, block_ids=[])},
    )
    found += output.sampled_token_ids["r"]
    texts = {"r": found, "s": output.sampled_token_ids["s"]}
    changes = [
        {"r": BlockTableUpdate(num_kept=3, block_ids=[10])},
        {"s": BlockTableUpdate(num_kept=2, block_ids=[0])},
        {},
        {"r": BlockTableUpdate(num_kept=3, block_ids=[10, 4]), "s": BlockTableUpdate(3, [])},
        {},
        {},
    ]
    for updates in changes:
        output = worker.step({"s": 1, "r": 1}, updates=updates)
        for req_id, text in texts.items():
            text += output.sampled_token_ids[req_id]
    assert texts == {"r": expected[:9], "s": other[:7]}


def test_a_prefix_of_another_requests_blocks_is_read_and_not_written(model: Any) -> None:
    tail = [2, 2, 71]
    worker = Worker(model)
    worker.step({"r": 9}, new=[new("r", PROMPT, [3, 8, 1])])
    shared = [layer.key[[*range(12, 16), *range(32, 36)]].clone() for layer in worker.cache.layers]
    prompt = [*PROMPT[:8], *tail]
    found = worker.sampled("s", 3, new=[new("s", prompt, [3, 8, 11], num_computed=8)])
    assert found + worker.sampled("s", 1) == generate(model, prompt)[:2]
    for layer, before in zip(worker.cache.layers, shared, strict=True):
        assert torch.equal(layer.key[[*range(12, 16), *range(32, 36)]], before)
    assert worker.sampled("r", 1) == generate(model, PROMPT)[1:2]


def test_a_preempted_request_resumes_elsewhere_with_what_it_has(model: Any) -> None:
    expected = generate(model, PROMPT)
    recorder = Recorder()
    worker = Worker(model, recorder)
    found = worker.sampled("r", 9, new=[new("r", PROMPT, [3, 8, 1, 0])])
    found += worker.sampled("r", 3, expected[1:3])
    assert recorder.released == []
    worker.step({"s": 5}, new=[new("s", OTHER, [8, 3])], preempted=["r"])
    assert recorder.released == ["r"]
    resumed = new("r", [*PROMPT, *found], [9, 2, 14, 15], num_prompt=9)
    output = worker.step({"r": 6, "s": 1}, new=[resumed], unfinished=["r"])
    assert output.sampled_token_ids == {"s": generate(model, OTHER)[1:2]}
    found += worker.sampled("r", 7)
    found += worker.sampled("r", 1)
    assert found == expected[:6]
    assert recorder.released == ["r"]


def test_a_request_may_be_preempted_and_resumed_in_one_message(model: Any) -> None:
    expected = generate(model, PROMPT)
    recorder = Recorder()
    worker = Worker(model, recorder)
    found = worker.sampled("r", 9, new=[new("r", PROMPT, [3, 8, 1])])
    resumed = new("r", [*PROMPT, *found], [3, 8, 0], num_prompt=9, num_computed=8)
    found += worker.sampled("r", 2, new=[resumed], preempted=["r"])
    assert found == expected[:2]
    assert recorder.released == ["r"]


def test_blocks_are_zeroed_before_anything_is_written(model: Any) -> None:
    worker = Worker(model)
    for layer in worker.cache.layers:
        layer.key.fill_(3.0)
        layer.value.fill_(torch.nan)
        layer.key[worker.cache.null_slot :] = 0
        layer.value[worker.cache.null_slot :] = 0
    tokens = worker.sampled("r", 9, new=[new("r", PROMPT, [3, 8, 1])], zero=[1, 3, 8, 5])
    assert tokens == generate(model, PROMPT)[:1]
    for layer in worker.cache.layers:
        for tensor, before in ((layer.key, 3.0), (layer.value, torch.nan)):
            assert tensor[20:24].eq(0).all()  # block 5
            assert tensor[5:8].eq(0).all()  # of block 1 one slot is in use
            assert tensor[4].ne(0).any()
            assert torch.equal(tensor[:4].nan_to_num(9.0), torch.full_like(tensor[:4], before)
                               .nan_to_num(9.0))  # fmt: skip
    output = worker.step({}, zero=[3])  # a step may hold nothing else
    assert output.sampled_token_ids == {}
    assert all(layer.value[12:16].eq(0).all() for layer in worker.cache.layers)


def test_a_lone_row_writes_to_its_own_slot_only(model: Any) -> None:
    """In float32 it is computed as two rows; nothing of the second may reach the pool."""
    worker = Worker(model)
    worker.sampled("r", 9, new=[new("r", PROMPT, [3, 8, 1])])
    before = [layer.value.clone() for layer in worker.cache.layers]
    worker.sampled("r", 1)
    for layer, old in zip(worker.cache.layers, before, strict=True):
        changed = (layer.value != old).any(dim=2).any(dim=1).nonzero().flatten().tolist()
        assert changed == [5, worker.cache.scratch_slot]  # block 1, position 9


def test_a_request_without_room_for_its_rows_is_an_error(model: Any) -> None:
    worker = Worker(model)
    with pytest.raises(EngineError, match="9 positions do not fit the request's 2 blocks"):
        worker.step({"r": 9}, new=[new("r", PROMPT, [3, 8])])
    worker = Worker(model)
    worker.step({"r": 9}, new=[new("r", PROMPT, [3, 8, 1])])
    with pytest.raises(EngineError, match="4 blocks to keep of the request's 3"):
        worker.step({"r": 1}, updates={"r": BlockTableUpdate(4, [])})


# -- rows that fail ------------------------------------------------------------------------------


def test_a_row_that_is_no_number_ends_its_request_and_no_other(broken: Any) -> None:
    recorder = Recorder(4)
    worker = Worker(broken, recorder)
    output = worker.step(
        {"a": 9, "bad": 3, "b": 5},
        new=[
            new("a", PROMPT, [3, 8, 1]),
            new("bad", [5, NAN_ID, 6], [0]),
            new("b", OTHER, [2, 9]),
        ],
        k={"a": 2, "bad": 2, "b": 2},
    )
    a, b = generate(broken, PROMPT), generate(broken, OTHER)
    assert output.sampled_token_ids == {"a": a[:1], "b": b[:1]}
    assert output.failed == {"bad": "at position 3, the target model's logits contain NaN"}
    drafts = worker.draft("bad")
    assert drafts is not None
    assert [req_id for req_id, *_ in recorder.asked[0]] == ["a", "b"]
    assert recorder.released == ["bad"]
    output = worker.step({"a": 1, "b": 1}, finished=["bad"], zero=[0])
    assert output.sampled_token_ids == {"a": a[1:2], "b": b[1:2]}
    # Its block, once zeroed, serves another.
    assert worker.sampled("c", 3, new=[new("c", OTHER[:3], [0])]) == generate(broken, OTHER[:3])[:1]


def test_a_draft_whose_row_is_no_number_changes_nothing(broken: Any, kernels: str) -> None:
    """torch's attention would carry it into the rows before it, which are sound without it.

    So the step is run again without drafts. The CPU's own does not: the draft before it counts.
    """
    num_known = 3 if kernels == "torch" else 4  # of a's tokens, before the last step
    a, b = generate(broken, PROMPT), generate(broken, OTHER)
    worker = Worker(broken)
    requests = [new("a", PROMPT, [3, 8, 1, 0]), new("b", OTHER, [2, 9, 4])]
    texts = {"a": list[int](), "b": list[int]()}
    steps: list[tuple[dict[str, int], dict[str, list[int]]]] = [
        ({"a": 9, "b": 5}, {}),
        ({"a": 4, "b": 2}, {"a": [a[1], NAN_ID, 5], "b": [b[1]]}),
        ({"a": 1, "b": 2}, {"b": [NAN_ID]}),
        ({"a": 3, "b": 1}, {"a": a[num_known : num_known + 2]}),
    ]
    for rows, drafts in steps:
        output = worker.step(rows, drafts=drafts, new=requests)
        assert output.failed == {}
        for req_id, text in texts.items():
            text += output.sampled_token_ids[req_id]
        requests = []
    assert texts == {"a": a[: num_known + 3], "b": b[:5]}


def test_a_request_that_drafts_fails_as_it_would_without(broken: Any) -> None:
    worker = Worker(broken)
    worker.step({"r": 2}, new=[new("r", [5, NAN_ID, 6], [0, 1])], unfinished=["r"])
    output = worker.step({"r": 3}, drafts={"r": [7, 8]})
    assert output.sampled_token_ids == {}
    assert output.failed == {"r": "at position 3, the target model's logits contain NaN"}


def test_a_request_without_an_allowed_token_fails(model: Any) -> None:
    everything = replace(GREEDY, min_tokens=5, stop_token_ids=tuple(range(160)))
    output = Worker(model).step(
        {"r": 9, "s": 5},
        new=[new("r", PROMPT, [0, 1, 2], sampling=everything), new("s", OTHER, [3, 4])],
    )
    assert list(output.failed) == ["r"]
    assert "no token is allowed" in output.failed["r"]
    assert output.sampled_token_ids == {"s": generate(model, OTHER)[:1]}


# -- drafting ------------------------------------------------------------------------------------


def test_drafts_are_asked_for_after_the_commit_and_carry_its_length(model: Any) -> None:
    a, b = generate(model, PROMPT), generate(model, OTHER)
    recorder = Recorder(11, 12, 13)
    worker = Worker(model, recorder)
    worker.step(
        {"a": 9, "b": 5},
        new=[new("a", PROMPT, [3, 8, 1, 0]), new("b", OTHER, [2, 9])],
        k={"b": 1, "a": 3},
    )
    assert worker.draft() == DraftTokenIds(
        {"b": [11], "a": [11, 12, 13]}, {"b": 6, "a": 10}, {}, {"b": "fake", "a": "fake"}
    )
    worker.step({"a": 3, "b": 1}, drafts={"a": a[1:3]}, k={"a": 2})
    assert worker.draft() == DraftTokenIds({"a": [11, 12]}, {"a": 13}, {}, {"a": "fake"})
    assert recorder.asked == [
        [("a", [*PROMPT, *a[:1]], 1, 3), ("b", [*OTHER, *b[:1]], 1, 1)],
        [("a", [*PROMPT, *a[:4]], 3, 2)],
    ]


def test_there_is_one_draft_a_step(model: Any) -> None:
    recorder = Recorder(11)
    worker = Worker(model, recorder)
    assert worker.draft() is None
    worker.step({"a": 9}, new=[new("a", PROMPT, [3, 8, 1])], k={"a": 3})
    assert worker.draft() is not None
    assert worker.draft() is None
    assert len(recorder.asked) == 1


@pytest.mark.parametrize(
    ("rows", "unfinished", "k", "finished"),
    [
        pytest.param(8, ["a"], {"a": 3}, [], id="an unfinished prompt"),
        pytest.param(9, [], {}, [], id="a request that wants none"),
        pytest.param(9, [], {"a": 3}, ["a"], id="a request that just ended"),
    ],
)
def test_nothing_is_drafted_for(
    model: Any, rows: int, unfinished: list[str], k: dict[str, int], finished: list[str]
) -> None:
    recorder = Recorder(11)
    worker = Worker(model, recorder)
    worker.step({"a": rows}, new=[new("a", PROMPT, [3, 8, 1])], unfinished=unfinished, k=k)
    assert worker.draft(*finished) is None
    assert recorder.asked == []
    assert recorder.released == finished


def test_a_worker_without_a_proposer_drafts_nothing(model: Any) -> None:
    worker = Worker(model)
    worker.step({"a": 9}, new=[new("a", PROMPT, [3, 8, 1])], k={"a": 3})
    assert worker.draft("a") is None


def test_an_empty_draft_is_left_out_and_faults_are_told(model: Any) -> None:
    worker = Worker(model, Recorder())
    worker.step({"a": 9}, new=[new("a", PROMPT, [3, 8, 1])], k={"a": 3})
    assert worker.draft() == DraftTokenIds({}, {}, {})
    worker = Worker(model, Recorder(160))
    worker.step({"a": 9}, new=[new("a", PROMPT, [3, 8, 1])], k={"a": 3})
    assert worker.draft() == DraftTokenIds({}, {}, {"bad_id": 1})


def test_a_proposer_that_keeps_failing_is_asked_three_times(model: Any) -> None:
    class Failing(Recorder):
        def propose(self, batch: DraftInput) -> Draft:
            super().propose(batch)
            raise RuntimeError("no")

    failing = Failing()
    worker = Worker(model, failing)
    worker.step({"a": 9}, new=[new("a", PROMPT, [3, 8, 1, 0])], k={"a": 3})
    found = [worker.draft()]
    for _ in range(4):
        worker.step({"a": 1}, k={"a": 3})
        found.append(worker.draft())
    raised = DraftTokenIds({}, {}, {"raised": 1})
    dropped = DraftTokenIds({}, {}, {"raised": 1, "dropped": 1})
    assert found == [raised, raised, dropped, None, None]
    assert len(failing.asked) == 3


def test_a_release_that_fails_is_told_with_the_next_drafts_or_without_any(model: Any) -> None:
    class Clinging(Recorder):
        def release(self, req_id: str) -> None:
            raise RuntimeError("no")

    worker = Worker(model, Clinging(11))
    new_requests = [new("a", PROMPT, [3, 8, 1]), new("b", OTHER, [0, 2]), new("c", OTHER, [4, 5])]
    worker.step({"a": 9, "b": 5, "c": 5}, new=new_requests, k={"a": 1, "b": 1})
    assert worker.draft("b") == DraftTokenIds({"a": [11]}, {"a": 10}, {"raised": 1}, {"a": "fake"})
    worker.step({"a": 1}, finished=["b", "c"], k={"a": 1})
    assert worker.draft("a") == DraftTokenIds({}, {}, {"raised": 2})


def test_each_ended_request_is_released_once(model: Any) -> None:
    recorder = Recorder(11)
    worker = Worker(model, recorder)
    worker.step(
        {"a": 9, "b": 5},
        new=[new("a", PROMPT, [3, 8, 1]), new("b", OTHER, [2, 9])],
        k={"a": 1, "b": 1},
    )
    worker.draft("a")  # ended with this step's token
    assert recorder.released == ["a"]
    worker.step({"b": 1}, finished=["a"])
    assert recorder.released == ["a"]
    worker.step({}, finished=["b", "never sent"])  # aborted between steps
    assert recorder.released == ["a", "b"]
    assert worker.draft("b") is None
    assert recorder.released == ["a", "b"]


# -- the view of a request's tokens --------------------------------------------------------------


def test_a_proposers_view_sees_later_tokens(model: Any) -> None:
    expected = generate(model, PROMPT)
    recorder = Recorder(11)
    worker = Worker(model, recorder)
    worker.step({"a": 9}, new=[new("a", PROMPT, [3, 8, 1])], k={"a": 1})
    worker.draft()
    view = recorder.views["a"]
    assert list(view) == [*PROMPT, *expected[:1]]
    worker.step({"a": 3}, drafts={"a": expected[1:3]})
    assert list(view) == [*PROMPT, *expected[:4]]
    assert view[-1] == expected[3]


def test_a_view_reads_like_a_list_and_cannot_be_written() -> None:
    tokens = [5, 6, 7, 6]
    view: Any = TokenView(tokens)
    assert (len(view), view[0], view[-1], view[1:3]) == (4, 5, 6, [6, 7])
    assert (list(view), list(reversed(view))) == ([5, 6, 7, 6], [6, 7, 6, 5])
    assert (7 in view, 8 in view, view.index(6), view.count(6)) == (True, False, 1, 2)
    view[1:3].append(9)
    view[:].clear()
    assert tokens == [5, 6, 7, 6]
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(TypeError):
        del view[0]
    with pytest.raises(IndexError):
        view[4]
    for method in ("append", "extend", "clear", "pop", "sort"):
        assert not hasattr(view, method)
