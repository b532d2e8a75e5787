"""Runs the steps the scheduler decides: builds the batch, runs the target, verifies, asks to draft.

It keeps a copy of each request's tokens and block table, made from the messages alone, so it may
live in another process. It decides nothing: who runs, how many rows, when a text stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch

from foresay.core.errors import EngineError
from foresay.core.messages import (
    DraftTokenIds,
    ModelRunnerOutput,
    NewRequest,
    SamplingData,
    SchedulerOutput,
)
from foresay.core.proposer import DraftRequest
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.proposing import GuardedProposer
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify
from foresay.core.worker.target import TargetModel


class TokenView(Sequence[int]):
    """A read-only view of a request's committed tokens, as proposers see them."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


class _BlockTable:
    """A request's blocks, and the slots of its positions 0, 1, ... in one growing array."""

    def __init__(self, block_ids: Sequence[int], block_size: int) -> None:
        self._block_size = block_size
        self._num_blocks = 0
        self._slots = np.empty(0, dtype=np.int64)
        self.append(block_ids)

    def append(self, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        start, size = self._num_blocks * self._block_size, len(block_ids) * self._block_size
        if start + size > len(self._slots):
            grown = np.empty(max(2 * len(self._slots), start + size), dtype=np.int64)
            grown[:start] = self._slots[:start]
            self._slots = grown
        first = np.asarray(block_ids, dtype=np.int64)[:, None] * self._block_size
        self._slots[start : start + size] = (first + np.arange(self._block_size)).ravel()
        self._num_blocks += len(block_ids)

    def cut(self, num_kept: int) -> None:
        if num_kept > self._num_blocks:
            raise EngineError(f"{num_kept} blocks to keep of the request's {self._num_blocks}")
        self._num_blocks = num_kept

    def slots(self, num_positions: int) -> np.ndarray:
        """Return the slots of the first positions; [num_positions]."""
        if num_positions > self._num_blocks * self._block_size:
            raise EngineError(
                f"{num_positions} positions do not fit the request's {self._num_blocks} blocks"
            )
        return self._slots[:num_positions]


@dataclass(slots=True)
class _State:
    """What the worker knows of one request."""

    token_ids: list[int]  # committed
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: _BlockTable
    sampling: SamplingData
    num_new_tokens: int = 0  # committed by the last step


class ModelRunner:
    """The worker: one target model, its KV cache, and at most one proposer."""

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        proposer: GuardedProposer | None,
        *,
        max_model_len: int,
        num_speculative_tokens: int,
        max_context: int | None,
        row_invariant: bool,
        summary: str,
    ) -> None:
        """The facts are for the engine: limits, what was found out, one line that says so."""
        self.target = target
        self.cache = cache
        self.proposer = proposer
        self.proposer_name = proposer.name if proposer is not None else None
        self.tokenizer = target.tokenizer
        self.eos_token_ids = target.eos_token_ids
        self.vocab_size = target.vocab_size
        self.num_blocks = cache.num_blocks
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.max_context = max_context
        self.row_invariant = row_invariant
        self.summary = summary
        self._states: dict[str, _State] = {}
        self._step: SchedulerOutput | None = None  # the step executed last, not yet drafted for

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: forward, verification, commit to the worker's own copies."""
        self._receive(step)
        self._step = step
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput(step.step_id, {})
        results = self._verified(step)
        spoiled = {
            req_id: len(drafts)
            for req_id, drafts in step.scheduled_spec_decode_tokens.items()
            if req_id in results and results[req_id].error is not None
        }
        if spoiled:
            # A draft's row that is no number may have spoilt, through attention, those before it.
            # Without its drafts a request gets what plain decoding gives, be it an error.
            results |= self._verified(
                replace(
                    step,
                    num_scheduled_tokens={
                        req_id: step.num_scheduled_tokens[req_id] - num_drafts
                        for req_id, num_drafts in spoiled.items()
                    },
                    scheduled_spec_decode_tokens={},
                    num_output_rows=dict.fromkeys(spoiled, 1),
                )
            )
        sampled = {r: result.token_ids for r, result in results.items() if result.error is None}
        failed = {r: result.error for r, result in results.items() if result.error is not None}
        self._commit(step, sampled)
        return ModelRunnerOutput(step.step_id, sampled, failed)

    def _verified(self, step: SchedulerOutput) -> dict[str, VerifyResult]:
        """Run the step's forward and verify the drafts; by request with output rows."""
        logits = self._forward(step)  # [num_output_rows in all, vocab_size]
        requests = [
            VerifyRequest(
                req_id=req_id,
                draft_token_ids=step.scheduled_spec_decode_tokens.get(req_id, []),
                num_committed=len(self._states[req_id].token_ids),
                num_output_tokens=len(self._states[req_id].token_ids)
                - self._states[req_id].num_prompt_tokens,
                sampling=self._states[req_id].sampling,
            )
            for req_id in step.num_scheduled_tokens
            if step.num_output_rows[req_id] > 0
        ]
        results = verify(logits, requests)
        return {r.req_id: result for r, result in zip(requests, results, strict=True)}

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        """Ask the proposer for the drafts that the step executed last wants.

        Requests in `finished_req_ids` ended with that step's tokens: they are forgotten, not
        drafted for. Returns None if there is nothing to draft.
        """
        for req_id in finished_req_ids:
            self._forget(req_id)
        step, self._step = self._step, None
        if self.proposer is None:
            return None
        num_wanted = step.num_draft_tokens if step is not None else {}
        requests = [] if self.proposer.dropped else self._draft_requests(num_wanted)
        drafts = self.proposer.propose(requests) if requests else []
        faults = self.proposer.take_faults()  # releasing may have failed, too
        if not requests and not faults:
            return None
        drafted = {r.req_id: ids for r, ids in zip(requests, drafts, strict=True) if ids}
        return DraftTokenIds(
            draft_token_ids=drafted,
            num_tokens={req_id: len(self._states[req_id].token_ids) for req_id in drafted},
            faults=faults,
        )

    def _draft_requests(self, num_draft_tokens: Mapping[str, int]) -> list[DraftRequest]:
        """Return what to ask the proposer for: nothing for prompts that are not complete."""
        return [
            DraftRequest(
                req_id=req_id,
                token_ids=TokenView(self._states[req_id].token_ids),
                num_new_tokens=self._states[req_id].num_new_tokens,
                k=k,
            )
            for req_id, k in num_draft_tokens.items()
            if req_id in self._states and self._states[req_id].num_new_tokens > 0
        ]

    def _receive(self, step: SchedulerOutput) -> None:
        """Bring the worker's copies up to date with what the scheduler decided."""
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._forget(req_id)
        self.cache.zero_blocks(step.block_ids_to_zero)
        for request in step.new_requests:
            self._states[request.req_id] = self._new_state(request)
        for req_id, update in step.block_table_updates.items():
            blocks = self._states[req_id].blocks
            blocks.cut(update.num_kept)
            blocks.append(update.block_ids)

    def _new_state(self, request: NewRequest) -> _State:
        return _State(
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            blocks=_BlockTable(request.block_ids, self.cache.block_size),
            sampling=request.sampling,
        )

    def _forget(self, req_id: str) -> None:
        if self._states.pop(req_id, None) is not None and self.proposer is not None:
            self.proposer.release(req_id)

    def _forward(self, step: SchedulerOutput) -> torch.Tensor:
        """Run the target on the step's rows; returns the logits of its output rows."""
        input_ids: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        slot_mapping: list[np.ndarray] = []
        output_rows: list[np.ndarray] = []
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            state = self._states[req_id]
            start = state.num_computed_tokens
            end = start + num_scheduled
            drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
            input_ids += state.token_ids[start : end - len(drafts)]
            input_ids += drafts
            positions.append(np.arange(start, end))
            slots.append(state.blocks.slots(end))
            slot_mapping.append(slots[-1][start:])
            num_output = step.num_output_rows[req_id]
            output_rows.append(np.arange(len(input_ids) - num_output, len(input_ids)))
        num_padding = self.target.min_rows - len(input_ids)
        if num_padding > 0:
            # Repeat the last row of the last request; its key and value go where nobody reads.
            input_ids += input_ids[-1:] * num_padding
            positions[-1] = np.append(positions[-1], [positions[-1][-1]] * num_padding)
            slot_mapping.append(np.full(num_padding, self.cache.scratch_slot))
        device = self.target.device
        metadata = AttentionMetadata.build(
            positions,
            slots,
            np.concatenate(slot_mapping),
            self.cache.null_slot,
            self.target.attention_rules,
            device,
        )
        return self.target.forward(
            torch.tensor(input_ids, device=device),
            torch.from_numpy(np.concatenate(output_rows)).to(device),
            self.cache,
            metadata,
        )

    def _commit(self, step: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Advance as the scheduler does: what was scheduled, less the rejected drafts."""
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            state = self._states[req_id]
            state.num_computed_tokens += num_scheduled
            tokens = sampled.get(req_id, [])
            state.num_new_tokens = len(tokens)
            if tokens:
                num_drafts = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
                state.num_computed_tokens -= num_drafts - (len(tokens) - 1)
                state.token_ids += tokens
