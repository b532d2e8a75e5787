"""Random schedules against a worker that knows nothing but the messages.

`MirrorWorker` rebuilds block tables and computed tokens from pickled messages and keeps a "KV
memory": what it writes for a position is a function of everything before it, read back from that
memory, so a wrong block table, a wrong prefix hit or an overwritten slot makes it read something
other than the chain of the tokens, and that fails at once. Its next token is a function of the
chain, so every finished output must equal the one that plain decoding gives, worked out here
without scheduler, blocks or drafts.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foresay.core.messages import (
    DraftTokenIds,
    ModelRunnerOutput,
    NewRequest,
    SamplingData,
    SchedulerOutput,
)
from foresay.core.scheduling.request import Request
from foresay.core.scheduling.scheduler import Scheduler, SchedulerConfig

NEVER_WRITTEN = 0
NAN = -1
EMPTY_CHAIN = 1


# -- The model


def link(chain: int, token_id: int) -> int:
    """The KV of a token: depends on it and on everything before it; never 0 or negative."""
    return ((chain * 6364136223846793005 + token_id * 1442695040888963407 + 97) >> 7) % 2**61 + 1


def chain_of(token_ids: Sequence[int]) -> list[int]:
    chain = [EMPTY_CHAIN]
    for token_id in token_ids:
        chain.append(link(chain[-1], token_id))
    return chain[1:]


def next_token(chain: int, num_output: int, sampling: SamplingData, vocab_size: int) -> int:
    token_id = (chain >> 5) % vocab_size
    if num_output < sampling.min_tokens:
        while token_id in sampling.stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


@dataclass
class PairSink:
    """Stands in for text: the "stop string" is a pair of token ids in a row."""

    pair: tuple[int, int]
    last: int | None = None

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        matched = (self.last, token_id) == self.pair
        self.last = token_id
        return repr(self.pair) if matched and may_stop else None


@dataclass
class Case:
    """What a request asks for, and what plain decoding answers."""

    prompt: list[int]
    sampling: SamplingData
    max_tokens: int
    pair: tuple[int, int] | None
    k: int | None

    def plain(self, vocab_size: int, max_model_len: int) -> tuple[list[int], str]:
        chain = chain_of(self.prompt)[-1]
        output: list[int] = []
        while True:
            token_id = next_token(chain, len(output), self.sampling, vocab_size)
            chain = link(chain, token_id)
            output.append(token_id)
            if len(output) > self.sampling.min_tokens:
                if token_id in self.sampling.stop_token_ids:
                    return output, "stop"
                if self.pair is not None and tuple(output[-2:]) == self.pair:
                    return output, "stop"
            if len(output) == self.max_tokens or len(self.prompt) + len(output) == max_model_len:
                return output, "length"


# -- The worker


@dataclass
class Held:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingData


class MirrorWorker:
    def __init__(self, config: SchedulerConfig, vocab_size: int, rng: random.Random) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.rng = rng
        self.memory = [NEVER_WRITTEN] * (config.num_blocks * config.block_size)
        self.held: dict[str, Held] = {}
        self.p_wrong = rng.choice([0.0, 0.2, 0.6])
        self.counts: Counter[str] = Counter()

    def slot(self, held: Held, position: int) -> int:
        block_size = self.config.block_size
        return held.block_ids[position // block_size] * block_size + position % block_size

    def receive(self, scheduled: SchedulerOutput) -> None:
        block_size = self.config.block_size
        for req_id in (*scheduled.finished_req_ids, *scheduled.preempted_req_ids):
            self.held.pop(req_id, None)
        for block_id in scheduled.block_ids_to_zero:
            start = block_id * block_size
            self.memory[start : start + block_size] = [NEVER_WRITTEN] * block_size
        for new in scheduled.new_requests:
            self._take(new)
        for req_id, update in scheduled.block_table_updates.items():
            table = self.held[req_id].block_ids
            assert update.num_kept <= len(table)
            table[update.num_kept :] = update.block_ids
        self.counts["preempted"] += len(scheduled.preempted_req_ids)
        self.counts["zeroed"] += len(scheduled.block_ids_to_zero)

    def _take(self, new: NewRequest) -> None:
        assert new.req_id not in self.held
        assert new.num_computed_tokens < len(new.token_ids)
        assert new.num_computed_tokens % self.config.block_size == 0
        self.held[new.req_id] = Held(
            new.token_ids,
            new.num_prompt_tokens,
            new.num_computed_tokens,
            new.block_ids,
            new.sampling,
        )
        self.counts["resumed"] += len(new.token_ids) > new.num_prompt_tokens
        self.counts["prefix hits"] += new.num_computed_tokens > 0

    def execute(self, message: bytes, p_fail: float) -> bytes:
        scheduled: SchedulerOutput = pickle.loads(message)  # noqa: S301
        self.receive(scheduled)
        self._check_limits(scheduled)
        rows = {}
        for req_id in scheduled.num_scheduled_tokens:
            rows[req_id] = self._write(req_id, scheduled)
        sampled: dict[str, list[int]] = {}
        failed: dict[str, str] = {}
        for req_id, num_new in scheduled.num_scheduled_tokens.items():
            held = self.held[req_id]
            self._read(held, rows[req_id])
            num_rows = scheduled.num_output_rows[req_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
            start = held.num_computed_tokens
            held.num_computed_tokens += num_new
            if num_rows == 0:
                assert held.num_computed_tokens < len(held.token_ids)
                self.counts["unfinished prompts"] += 1
                continue
            assert num_rows == 1 + len(drafts)
            assert held.num_computed_tokens == len(held.token_ids) + len(drafts)
            if self.rng.random() < p_fail:
                failed[req_id] = "a row that is not finite"
                for position in range(start, start + num_new):
                    self.memory[self.slot(held, position)] = NAN
                continue
            sampled[req_id] = self._verify(held, drafts)
            num_rejected = len(drafts) + 1 - len(sampled[req_id])
            held.num_computed_tokens -= num_rejected
            held.token_ids = held.token_ids + sampled[req_id]
            assert held.num_computed_tokens == len(held.token_ids) - 1
            self.counts["verified"] += len(drafts)
            self.counts["rejected"] += num_rejected
            self.counts["partly accepted"] += 0 < num_rejected < len(drafts)
        self.counts["failed"] += len(failed)
        return pickle.dumps(ModelRunnerOutput(scheduled.step_id, sampled, failed))

    def _check_limits(self, scheduled: SchedulerOutput) -> None:
        config = self.config
        num_tokens = scheduled.num_scheduled_tokens
        assert sum(num_tokens.values()) <= config.max_num_batched_tokens
        assert len(num_tokens) <= config.max_num_seqs
        assert num_tokens.keys() == scheduled.num_output_rows.keys()
        assert all(num_tokens.values())
        for req_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            num_committed = len(self.held[req_id].token_ids)
            assert 1 <= len(drafts) <= config.num_speculative_tokens
            assert num_committed + len(drafts) + 1 <= config.max_model_len
            if config.max_context is not None:
                assert num_committed + len(drafts) <= config.max_context
        for req_id, k in scheduled.num_draft_tokens.items():
            assert scheduled.num_output_rows[req_id] >= 1
            assert 1 <= k <= config.num_speculative_tokens
        for req_id in num_tokens:
            table = self.held[req_id].block_ids
            assert len(set(table)) == len(table)
            block_size = config.block_size
            for block_id in table:
                block = self.memory[block_id * block_size : (block_id + 1) * block_size]
                assert NAN not in block, "a masked slot would poison attention"

    def _write(self, req_id: str, scheduled: SchedulerOutput) -> list[int]:
        held = self.held[req_id]
        drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
        start = held.num_computed_tokens
        end = start + scheduled.num_scheduled_tokens[req_id]
        rows = (held.token_ids + drafts)[:end]
        assert len(rows) == end
        chain = self.memory[self.slot(held, start - 1)] if start else EMPTY_CHAIN
        for position in range(start, end):
            chain = link(chain, rows[position])
            self.memory[self.slot(held, position)] = chain
        return rows

    def _read(self, held: Held, rows: list[int]) -> None:
        seen = [self.memory[self.slot(held, position)] for position in range(len(rows))]
        assert seen == chain_of(rows)

    def _verify(self, held: Held, drafts: list[int]) -> list[int]:
        first = len(held.token_ids) - 1
        sampled: list[int] = []
        for row in range(len(drafts) + 1):
            token_id = next_token(
                self.memory[self.slot(held, first + row)],
                first + 1 + row - held.num_prompt_tokens,
                held.sampling,
                self.vocab_size,
            )
            sampled.append(token_id)
            if row == len(drafts) or drafts[row] != token_id:
                break
        return sampled

    def draft(self, k_of: dict[str, int]) -> DraftTokenIds:
        """Mostly right guesses, some wrong, some too long, too short, missing or out of date."""
        drafts: dict[str, list[int]] = {}
        lengths: dict[str, int] = {}
        for req_id, k in k_of.items():
            held = self.held[req_id]
            token_ids = list(held.token_ids)
            if self.rng.random() < 0.05:
                continue
            for _ in range(self.rng.choice([k, k, k, k + 3, k // 2, 0])):
                token_id = next_token(
                    chain_of(token_ids)[-1],
                    len(token_ids) - held.num_prompt_tokens,
                    held.sampling,
                    self.vocab_size,
                )
                if self.rng.random() < self.p_wrong:
                    token_id = self.rng.randrange(self.vocab_size)
                token_ids.append(token_id)
            lengths[req_id] = len(held.token_ids) - (self.rng.random() < 0.03)
            drafts[req_id] = token_ids[len(held.token_ids) :]
        return DraftTokenIds(drafts, lengths)


# -- The engine's loop, with everything that can happen to it


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
        )
        self.scheduler.add_request(self.requests[req_id])
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
        if k_of:
            scheduler.update_draft_token_ids(worker.draft(k_of))
            scheduler.check_integrity()
            for req_id, k in k_of.items():
                assert len(scheduler.requests[req_id].spec_token_ids) <= k

    def compare_tables(self) -> None:
        for req_id, request in self.scheduler.requests.items():
            if request.block_ids:
                assert self.worker.held[req_id].block_ids == request.block_ids

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
    return SchedulerConfig(
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 12)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * (1 + k) + draw(st.integers(0, 30)),
        chunked_prefill_size=draw(st.none() | st.integers(1, 12)),
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.booleans()),
        num_speculative_tokens=k,
        max_context=draw(st.none() | st.integers(1, 40)),
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
        )
        pair = (rng.randrange(vocab), rng.randrange(vocab)) if rng.random() < 0.3 else None
        cases.append(Case(prompt, sampling, max_tokens, pair, rng.choice([None, None, 0, 1, 3])))
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
        "unfinished prompts",
        "verified",
        "rejected",
        "partly accepted",
        "aborted",
        "failed",
        "zeroed",
        "interrupted",
        "stop",
        "length",
    )
    assert [name for name in expected if not counts[name]] == []
