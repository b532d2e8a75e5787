"""Random schedules against a worker that sees messages only (`mirror_worker`).

Every finished output must equal the one of plain decoding, every read must find the right KV, and
`check_integrity()` runs after every call.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirror_worker import Case, MirrorWorker, PairSink

from foresay.core.messages import SamplingData
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.scheduler import Scheduler, SchedulerConfig


@dataclass
class Events:
    """How often things happen, per step."""

    p_arrive: float = 0.4
    p_abort: float = 0.0
    p_abort_in_flight: float = 0.0
    p_fail: float = 0.0
    p_interrupt: float = 0.0


@dataclass
class Run:
    """One schedule from the first arrival to an empty engine."""

    config: SchedulerConfig
    cases: list[Case]
    events: Events
    seed: int
    vocab_size: int = 5
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.scheduler = Scheduler(self.config)
        self.worker = MirrorWorker(self.config, self.vocab_size, self.rng)
        self.requests: dict[str, Request] = {}
        self.figures: Counter[str] = Counter()

    def play(self) -> Counter[str]:
        arriving = list(enumerate(self.cases))
        num_steps = 0
        while arriving or self.scheduler.has_unfinished_requests():
            while arriving and (
                self.rng.random() < self.events.p_arrive
                or not self.scheduler.has_unfinished_requests()
            ):
                self.add(*arriving.pop(0))
            if self.rng.random() < self.events.p_abort:
                self.abort_any()
            if self.scheduler.has_unfinished_requests():
                self.step()
            num_steps += 1
            assert num_steps < 5000, "no end in sight"
        self.finish()
        return self.worker.counts + self.counts

    def add(self, index: int, case: Case) -> None:
        req_id = f"r{index}"
        self.requests[req_id] = Request(
            req_id,
            case.prompt,
            sampling=case.sampling,
            max_tokens=case.max_tokens,
            text=None if case.pair is None else PairSink(case.pair),
            num_speculative_tokens=case.k,
            prediction_ids=case.prediction_ids,
        )
        after = None if case.after is None else self.requests[f"r{case.after}"]
        self.scheduler.add_request(self.requests[req_id], after)
        self.scheduler.check_integrity()

    def abort_any(self) -> None:
        alive = [req_id for req_id, r in self.requests.items() if not r.status.is_finished]
        if alive:
            req_id = self.rng.choice(alive)
            assert self.scheduler.abort_request(req_id) is self.requests[req_id]
            assert self.scheduler.abort_request(req_id) is None
            self.scheduler.check_integrity()
            self.counts["aborted"] += 1

    def step(self) -> None:
        scheduler, worker = self.scheduler, self.worker
        scheduled = scheduler.schedule()
        scheduler.check_integrity()
        message = pickle.dumps(scheduled)
        if self.rng.random() < self.events.p_abort_in_flight:
            self.abort_any()
        if self.rng.random() < self.events.p_interrupt:
            if self.rng.random() < 0.5:
                worker.execute(message, 0.5)
            elif self.rng.random() < 0.5:
                worker.receive(pickle.loads(message))  # noqa: S301
            scheduler.abandon_step()
            scheduler.check_integrity()
            self.counts["interrupted"] += 1
            return
        output = pickle.loads(worker.execute(message, self.events.p_fail))  # noqa: S301
        self.compare_tables()
        updates = scheduler.update_from_output(scheduled, output)
        scheduler.check_integrity()
        for update in updates:
            assert update.finished == update.request.status.is_finished
            assert update.num_accepted_tokens <= min(
                update.num_draft_tokens, len(update.new_token_ids)
            )
            self.figures[update.request.req_id] += len(update.new_token_ids)
        for req_id, request in scheduler.requests.items():
            if req_id in worker.held and req_id in scheduled.num_scheduled_tokens:
                assert worker.held[req_id].num_computed_tokens == request.num_computed_tokens
                assert worker.held[req_id].token_ids == request.token_ids
        k_of = {
            req_id: k
            for req_id, k in scheduled.num_draft_tokens.items()
            if req_id in scheduler.requests
        }
        if k_of or self.config.has_proposer_kv:
            scheduler.update_draft_token_ids(worker.draft(k_of))
            scheduler.check_integrity()
            for req_id, k in k_of.items():
                assert len(scheduler.requests[req_id].spec_token_ids) <= k

    def compare_tables(self) -> None:
        for req_id, request in self.scheduler.requests.items():
            if request.block_ids:
                assert self.worker.held[req_id].block_ids == request.block_ids
                assert self.worker.held[req_id].prediction_ids == request.prediction_ids

    def finish(self) -> None:
        if self.scheduler.has_pending_messages():
            self.worker.execute(pickle.dumps(self.scheduler.schedule()), 0.0)
        assert not self.scheduler.has_pending_messages()
        assert self.worker.held == {}
        assert self.scheduler.blocks.num_free_blocks == self.config.num_blocks
        for index, case in enumerate(self.cases):
            request = self.requests[f"r{index}"]
            output, reason = case.plain(self.vocab_size, self.config.max_model_len)
            got = request.output_token_ids
            self.counts[str(request.status.finish_reason)] += 1
            assert self.figures[request.req_id] == len(got)
            wanted = case.sampling.logprobs is not None
            assert request.output_logprobs() == (case.logprobs(got) if wanted else None)
            if request.status.finish_reason in ("abort", "error"):
                assert got == output[: len(got)]
            else:
                assert (got, request.status.finish_reason) == (output, reason)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    block_size = draw(st.integers(1, 32))
    max_model_len = draw(st.integers(2, 48))
    max_num_seqs = draw(st.integers(1, 6))
    k = draw(st.integers(0, 6))
    draft_slots = draw(st.sampled_from((0, 0, 1)))
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 12)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * (1 + k + draft_slots) + draw(st.integers(0, 30)),
        chunked_prefill_size=draw(st.none() | st.integers(1, 12)),
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.booleans()),
        num_speculative_tokens=k,
        max_context=draw(st.none() | st.integers(1, 40)),
        has_proposer_kv=draw(st.booleans()),
        draft_slots=draft_slots,
        kv_reach=draw(st.sampled_from((1, 1, 2, 3))),
        has_draft_trees=draw(st.booleans()),
    )


def make_cases(rng: random.Random, config: SchedulerConfig, count: int, vocab: int) -> list[Case]:
    """Prompts that often begin alike; stops, caps and k of every kind."""
    longest = config.max_model_len - 1
    stems = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(2)]
    cases = []
    for _ in range(count):
        length = rng.randint(1, longest)
        shared = rng.choice([0, length, rng.randint(0, length)])
        prompt = rng.choice(stems)[:shared]
        prompt = prompt + [rng.randrange(vocab) for _ in range(length - shared)]
        max_tokens = rng.randint(1, 30)
        sampling = SamplingData(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            stop_token_ids=tuple(rng.sample(range(vocab), rng.choice([0, 0, 1]))),
            logprobs=rng.choice([None, 0]),
        )
        pair = (rng.randrange(vocab), rng.randrange(vocab)) if rng.random() < 0.3 else None
        k = rng.choice([None, None, 0, 1, 3])
        prediction_ids = [rng.randrange(vocab) for _ in range(rng.choice([0, 0, 5]))]
        case = Case(prompt, sampling, max_tokens, pair, k, prediction_ids, None)
        if cases and rng.random() < 0.3:  # another sample of an earlier prompt, under way or not
            first = rng.randrange(len(cases))
            first = first if cases[first].after is None else cases[first].after
            num_samples = 1 + sum(other.after == first for other in cases)
            case = replace(
                cases[first],
                sampling=replace(cases[first].sampling, sample_index=num_samples),
                after=first,
            )
        cases.append(case)
    return cases


RANDOM = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@RANDOM
@given(config=configs(), seed=st.integers(0, 2**32), num_requests=st.integers(1, 12))
def test_any_schedule_gives_the_plain_outputs(
    config: SchedulerConfig, seed: int, num_requests: int
) -> None:
    cases = make_cases(random.Random(seed), config, num_requests, vocab=5)
    Run(config, cases, Events(), seed).play()


@RANDOM
@given(config=configs(), seed=st.integers(0, 2**32), num_requests=st.integers(1, 12))
def test_aborts_failures_and_interrupts_leave_the_others_right(
    config: SchedulerConfig, seed: int, num_requests: int
) -> None:
    cases = make_cases(random.Random(seed), config, num_requests, vocab=5)
    events = Events(p_abort=0.05, p_abort_in_flight=0.05, p_fail=0.03, p_interrupt=0.03)
    Run(config, cases, events, seed).play()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16, 32])
def test_tiny_pools_meet_every_kind_of_event(block_size: int) -> None:
    """The random tests are worth something only if these things do happen in them."""
    counts: Counter[str] = Counter()
    for seed in range(12):
        rng = random.Random(seed)
        max_model_len = block_size * 4 + 8
        config = SchedulerConfig(
            block_size=block_size,
            num_blocks=-(-max_model_len // block_size) + 2,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            chunked_prefill_size=rng.choice([None, 8]),
            max_model_len=max_model_len,
            num_speculative_tokens=4,
            has_proposer_kv=seed % 2 == 1,
            kv_reach=1 + seed % 3,
            has_draft_trees=seed % 3 > 0,
        )
        cases = make_cases(rng, config, 10, vocab=5)
        events = Events(
            p_arrive=0.8, p_abort=0.02, p_abort_in_flight=0.02, p_fail=0.01, p_interrupt=0.01
        )
        counts += Run(config, cases, events, seed).play()
    expected = (
        "preempted",
        "resumed",
        "prefix hits",
        "stored hits",
        "unfinished prompts",
        "verified",
        "rejected",
        "partly accepted",
        "siblings accepted",
        "aborted",
        "failed",
        "zeroed",
        "interrupted",
        "stop",
        "length",
    )
    assert [name for name in expected if not counts[name]] == []
