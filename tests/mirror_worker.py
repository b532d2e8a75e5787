"""A worker that knows nothing but the messages, and a model that notices every wrong slot.

`MirrorWorker` rebuilds block tables and computed tokens from pickled messages and keeps a "KV
memory": what it writes for a position is a function of everything before it, read back from that
memory, so a wrong block table, a wrong prefix hit or an overwritten slot makes it read something
other than the chain of the tokens, and that fails at once. Of a draft tree every node reads what
its parent wrote, and what was accepted is moved to where it belongs. Its next token is a function
of the chain, so `Case.plain` can say what plain decoding gives without scheduler, blocks or drafts.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from foresay.core.messages import (
    DraftTokenIds,
    ModelRunnerOutput,
    NewRequest,
    SamplingData,
    SchedulerOutput,
)
from foresay.core.scheduling.scheduler import SchedulerConfig

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
    token_id = ((chain >> 5) + sampling.sample_index) % vocab_size
    if num_output < sampling.min_tokens:
        while token_id in sampling.stop_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


def logprobs_of(chain: int, token_id: int) -> dict[int, float]:
    """Of a token that was sampled after `chain`; no two places have the same."""
    return {token_id: -float(chain % 2**20)}


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
    prediction_ids: list[int]
    after: int | None  # the case whose prompt this is another sample of

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

    def logprobs(self, output: Sequence[int]) -> list[dict[int, float]]:
        chains = chain_of([*self.prompt, *output])[len(self.prompt) - 1 : -1]
        return [logprobs_of(*pair) for pair in zip(chains, output, strict=True)]


# -- The worker


@dataclass
class Held:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingData
    prediction_ids: list[int]
    may_draft: bool
    num_stored: int  # positions that the drafter's own memory holds
    parents: list[int] | None = None  # of the draft that is to be verified, if it is a tree
    drafted_at: int = -1  # and for how many tokens it was made

    def parents_of(self, drafts: Sequence[int]) -> list[int]:
        """For each draft the place of the one above it; -1: none."""
        if self.parents is not None and self.drafted_at == len(self.token_ids):
            return self.parents[: len(drafts)]
        return list(range(-1, len(drafts) - 1))


class MirrorWorker:
    def __init__(self, config: SchedulerConfig, vocab_size: int, rng: random.Random) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.rng = rng
        self.memory = [NEVER_WRITTEN] * (config.num_blocks * config.block_size)
        # A drafter's KV in the same blocks: of a position's token and those behind it.
        self.drafter_memory = list(self.memory)
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
            new.prediction_ids,
            new.may_draft,
            new.num_computed_tokens,
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
        logprobs: dict[str, list[dict[int, float]]] = {}
        accepted: dict[str, list[int]] = {}
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
            sampled[req_id], nodes = self._verify(held, drafts)
            if held.parents is not None and drafts:
                accepted[req_id] = nodes
                self.counts["siblings accepted"] += nodes != list(range(len(nodes)))
            first = len(held.token_ids)
            moved = [self.memory[self.slot(held, first + node)] for node in nodes]
            for place, chain in enumerate(moved):
                self.memory[self.slot(held, first + place)] = chain
            held.parents = None
            if held.sampling.logprobs is not None:
                chains = chain_of(held.token_ids + sampled[req_id])[len(held.token_ids) - 1 :]
                logprobs[req_id] = [
                    logprobs_of(*pair) for pair in zip(chains, sampled[req_id], strict=False)
                ]
            num_rejected = len(drafts) + 1 - len(sampled[req_id])
            held.num_computed_tokens -= num_rejected
            held.token_ids = held.token_ids + sampled[req_id]
            assert held.num_computed_tokens == len(held.token_ids) - 1
            self.counts["verified"] += len(drafts)
            self.counts["rejected"] += num_rejected
            self.counts["partly accepted"] += 0 < num_rejected < len(drafts)
        self.counts["failed"] += len(failed)
        return pickle.dumps(
            ModelRunnerOutput(
                scheduled.step_id, sampled, failed, logprobs, accepted_drafts=accepted
            )
        )

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
        num_committed = end - len(drafts)
        parents = held.parents_of(drafts)
        for position in range(start, end):
            before = position - 1
            if position >= num_committed:
                before = num_committed + parents[position - num_committed]
            chain = self.memory[self.slot(held, before)] if position else EMPTY_CHAIN
            self.memory[self.slot(held, position)] = link(chain, rows[position])
        return rows[:num_committed]

    def _read(self, held: Held, rows: list[int]) -> None:
        seen = [self.memory[self.slot(held, position)] for position in range(len(rows))]
        assert seen == chain_of(rows)

    def _verify(self, held: Held, drafts: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens that come out, and the places of the drafts accepted."""
        first = len(held.token_ids)
        parents = held.parents_of(drafts)
        sampled: list[int] = []
        nodes: list[int] = []
        node = -1
        while True:
            token_id = next_token(
                self.memory[self.slot(held, first + node)],
                first + len(sampled) - held.num_prompt_tokens,
                held.sampling,
                self.vocab_size,
            )
            sampled.append(token_id)
            found = [
                place
                for place, above in enumerate(parents)
                if above == node and drafts[place] == token_id
            ]
            if not found:
                return sampled, nodes
            (node,) = found
            nodes.append(node)

    def draft(self, k_of: dict[str, int]) -> DraftTokenIds:
        """Mostly right guesses, some wrong, some too long, too short, missing or out of date."""
        drafts: dict[str, list[int]] = {}
        lengths: dict[str, int] = {}
        trees: dict[str, list[int]] = {}
        stored = {}
        if self.config.has_proposer_kv:
            stored = {
                r: self._store(h, k_of.get(r, 0)) for r, h in self.held.items() if h.may_draft
            }
        for req_id, k in k_of.items():
            held = self.held[req_id]
            token_ids = list(held.token_ids)
            if self.rng.random() < 0.05:
                continue
            most = k if self.config.has_proposer_kv else k + 3  # k may be what there is room for
            lengths[req_id] = len(held.token_ids) - (self.rng.random() < 0.03)
            if self.config.has_draft_trees and self.rng.random() < 0.7:
                drafts[req_id], trees[req_id] = self._tree(held, self.rng.choice([k, k, most, 0]))
                held.parents, held.drafted_at = trees[req_id], lengths[req_id]
                continue
            for _ in range(self.rng.choice([k, k, k, most, k // 2, 0])):
                token_id = next_token(
                    chain_of(token_ids)[-1],
                    len(token_ids) - held.num_prompt_tokens,
                    held.sampling,
                    self.vocab_size,
                )
                if self.rng.random() < self.p_wrong:
                    token_id = self.rng.randrange(self.vocab_size)
                token_ids.append(token_id)
            drafts[req_id] = token_ids[len(held.token_ids) :]
        return DraftTokenIds(drafts, lengths, num_stored_tokens=stored, parents=trees)

    def _tree(self, held: Held, num_nodes: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of a tree; the right ones stand among wrong siblings."""
        token_ids: list[int] = []
        parents: list[int] = []
        ways = {-1: list(held.token_ids)}
        for place in range(num_nodes):
            parent = self.rng.choice([place - 1, place - 1, self.rng.randrange(-1, place)])
            beside = {t for t, above in zip(token_ids, parents, strict=True) if above == parent}
            token_id = next_token(
                chain_of(ways[parent])[-1],
                len(ways[parent]) - held.num_prompt_tokens,
                held.sampling,
                self.vocab_size,
            )
            if token_id in beside or self.rng.random() < self.p_wrong:
                left = [t for t in range(self.vocab_size) if t not in beside]
                if not left:
                    break
                token_id = self.rng.choice(left)
            token_ids.append(token_id)
            parents.append(parent)
            ways[place] = [*ways[parent], token_id]
        return token_ids, parents

    def _store(self, held: Held, k: int) -> int:
        """Do as a drafter with KV layers does; return how many leading positions it holds."""
        ids = held.token_ids
        reach = self.config.kv_reach
        last = min(len(ids) - 1, held.num_computed_tokens)  # an unfinished prompt's chunk ends it
        known = max(held.num_stored, last - (reach - 1))  # what is behind later ones is guessed
        for position in range(held.num_stored, last):
            chain = self.drafter_memory[self.slot(held, position - 1)] if position else 1
            for token_id in ids[position : position + 1 + reach]:
                chain = link(chain, token_id)
            self.drafter_memory[self.slot(held, position)] = chain if position < known else NAN
        held.num_stored = known
        chain = 1
        for position in range(held.num_stored):
            for token_id in ids[position : position + 1 + reach]:
                chain = link(chain, token_id)
            assert self.drafter_memory[self.slot(held, position)] == chain, "another text's KV"
        for position in range(len(ids) - 1, len(ids) - 1 + max(k - 1, 0) + self.config.draft_slots):
            if k:  # what it guesses; there must be room
                self.drafter_memory[self.slot(held, position)] = NAN
        self.counts["stored hits"] += held.num_stored > 0 and held.num_computed_tokens > 0
        return held.num_stored
