"""Runs the steps the scheduler decides: builds the batch, runs the target, verifies, asks to draft.

It keeps a copy of each request's tokens and block table, made from the messages alone, so it may
live in another process. It decides nothing: who runs, how many rows, when a text stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from foresay.core.messages import (
    DraftTokenIds,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from foresay.core.proposer import DraftRequest, draft_depths
from foresay.core.worker.attention import AttentionMetadata, TreeLayout
from foresay.core.worker.capture import Capture
from foresay.core.worker.chain import Drafted, ProposerChain
from foresay.core.worker.draft_tree import subtree
from foresay.core.worker.hidden_states import hidden_states
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult, verify
from foresay.core.worker.request_state import BlockTable, DraftParents, RequestState, TokenView
from foresay.core.worker.target import TargetModel
from foresay.core.worker.tree_columns import within_members

if TYPE_CHECKING:
    from foresay.core.worker.triton_graphs import Graphs


@dataclass(frozen=True, slots=True)
class _Pass:
    """Where a pass of the target left a request's hidden states."""

    capture: Capture | None
    first_row: int


# Members of an attention batch that a tree may become. Each reads all keys once more, which at the
# end of a block of columns (see `tree_columns`) is more than the nodes it brings are worth.
_MOST_MEMBERS = 2


class ModelRunner:
    """The worker: one target model, its KV cache, and its proposers, if any."""

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        proposers: ProposerChain | None,
        *,
        max_model_len: int,
        row_invariant: bool,
        summary: str,
        graphs: Graphs | None = None,
    ) -> None:
        """The facts are for the engine: limits, what was found out, one line that says so.

        graphs: passes over `cache` that were captured, for the steps that they take.
        """
        self.target = target
        self.cache = cache
        self.proposers = proposers
        self.proposer_name = proposers.name if proposers is not None else None
        self.proposer_members = proposers.limits if proposers is not None else ()
        self.tree_members = proposers.tree_members if proposers is not None else ()
        self.max_contexts = proposers.max_contexts if proposers is not None else {}
        self.num_speculative_tokens = proposers.num_speculative_tokens if proposers else 0
        self.max_context = proposers.max_context if proposers is not None else None
        self.takes_prediction = proposers is not None and proposers.takes_prediction
        self.draft_slots = proposers.draft_slots if proposers is not None else 0
        self.has_proposer_kv = proposers is not None and proposers.has_kv
        self.kv_reach = proposers.kv_reach if proposers is not None else 1
        self.tokenizer = target.tokenizer
        self.eos_token_ids = target.eos_token_ids
        self.vocab_size = target.vocab_size
        self.num_blocks = cache.num_blocks
        self.max_model_len = max_model_len
        self.row_invariant = row_invariant
        self.summary = summary
        self.graphs = graphs
        self._states: dict[str, RequestState] = {}
        self._step: SchedulerOutput | None = None  # the step executed last, not yet drafted for

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: forward, verification, commit to the worker's own copies."""
        self._receive(step)
        self._step = step
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput(step.step_id, {})
        results, passes = self._verified(step)
        faults = _faults(results)
        spoiled = {
            req_id: len(drafts)
            for req_id, drafts in step.scheduled_spec_decode_tokens.items()
            if req_id in results and results[req_id].error is not None
        }
        if spoiled:
            # A draft's row that is no number may have spoilt, through attention, those before it.
            # Without its drafts a request gets what plain decoding gives, be it an error.
            again, passes_again = self._verified(
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
            results |= again
            passes |= passes_again
            faults += _faults(again)
        sampled = {r: result.token_ids for r, result in results.items() if result.error is None}
        accepted = self._accepted_of_trees(step, results)
        self._compact(step, accepted)
        self._commit(step, sampled, accepted, passes)
        return ModelRunnerOutput(
            step.step_id,
            sampled,
            failed={r: result.error for r, result in results.items() if result.error is not None},
            logprobs={
                r: result.logprobs
                for r, result in results.items()
                if result.error is None and result.logprobs is not None
            },
            faults=dict(faults),
            accepted_drafts=accepted,
        )

    def _verified(self, step: SchedulerOutput) -> tuple[dict[str, VerifyResult], dict[str, _Pass]]:
        """Run the step's forward and verify the drafts.

        Returns the results of requests with output rows, and what the pass left for proposers.
        """
        capture = self.proposers.capture() if self.proposers is not None else None
        logits = self._forward(step, capture)  # [num_output_rows in all, vocab_size]
        passes = {}
        first_row = 0
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            passes[req_id] = _Pass(capture, first_row)
            first_row += num_scheduled
        requests = []
        for req_id in step.num_scheduled_tokens:
            if step.num_output_rows[req_id] == 0:
                continue
            state = self._states[req_id]
            drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
            requests.append(
                VerifyRequest(
                    req_id=req_id,
                    draft_token_ids=drafts,
                    token_ids=state.token_ids,
                    num_prompt_tokens=state.num_prompt_tokens,
                    sampling=state.sampling,
                    draft_probs=state.probs_of(drafts),
                    parents=state.parents_of(drafts),
                )
            )
        results = verify(logits, requests)
        by_request = {r.req_id: result for r, result in zip(requests, results, strict=True)}
        return by_request, passes

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        """Ask the proposer for the drafts that the step executed last wants.

        Requests in `finished_req_ids` ended with that step's tokens: they are forgotten, not
        drafted for. Returns None if there is nothing to draft.
        """
        for req_id in finished_req_ids:
            self._forget(req_id)
        step, self._step = self._step, None
        if self.proposers is None:
            return None
        requests = self._draft_requests(step) if step and not self.proposers.dropped else []
        sampling = {request.req_id: self._states[request.req_id].sampling for request in requests}
        drafted: dict[str, Drafted] = {}
        if step is not None and requests:
            drafted = self.proposers.propose(requests, sampling, self._slots, step.draft_plans)
        faults = self.proposers.take_faults()  # releasing may have failed, too
        num_stored = self.proposers.num_stored(list(sampling))
        if not any(request.k for request in requests) and not faults and not num_stored:
            return None
        drafted = {req_id: self._affordable(req_id, draft) for req_id, draft in drafted.items()}
        for req_id, draft in drafted.items():
            state = self._states[req_id]
            state.draft_probs = draft.probs
            if draft.parents is not None:
                state.draft_parents = DraftParents(len(state.token_ids), draft.parents)
        return DraftTokenIds(
            draft_token_ids={req_id: draft.token_ids for req_id, draft in drafted.items()},
            num_tokens={req_id: len(self._states[req_id].token_ids) for req_id in drafted},
            faults=faults,
            proposers={req_id: draft.proposer for req_id, draft in drafted.items()},
            num_stored_tokens=num_stored,
            seconds=self.proposers.take_seconds(),
            parents={r: draft.parents for r, draft in drafted.items() if draft.parents is not None},
        )

    def hidden_states(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], max_tokens: int
    ) -> list[torch.Tensor]:
        """Run the target on whole texts, apart from all requests: see `worker.hidden_states`."""
        return hidden_states(self.target, texts, layers, max_tokens)

    def close(self) -> None:
        """Forget every request. The model goes when nobody holds the runner any more."""
        for req_id in list(self._states):
            self._forget(req_id)

    def _draft_requests(self, step: SchedulerOutput) -> list[DraftRequest]:
        """Return the step's requests; k is 0 where nothing is to be drafted."""
        requests = []
        for req_id in step.num_scheduled_tokens:
            state = self._states.get(req_id)
            if state is None or not state.may_draft:
                continue
            # Nothing for prompts that are not complete.
            k = step.num_draft_tokens.get(req_id, 0) if state.num_new_tokens else 0
            max_depth = state.max_num_tokens - len(state.token_ids) - 1
            requests.append(
                DraftRequest(
                    req_id=req_id,
                    token_ids=TokenView(state.token_ids),
                    num_new_tokens=state.num_new_tokens,
                    k=k if max_depth > 0 else 0,
                    max_depth=max(max_depth, 0),
                    prediction_ids=state.prediction_ids,
                    num_prompt_tokens=state.num_prompt_tokens,
                )
            )
        return requests

    def _affordable(self, req_id: str, draft: Drafted) -> Drafted:
        """Cut nodes off a tree that would take the attention too long; any tree is exact."""
        if draft.parents is None:
            return draft
        first = len(self._states[req_id].token_ids)
        rules = self.target.attention_rules
        places = within_members(first, draft.parents, _MOST_MEMBERS, rules)
        if len(places) == len(draft.parents):
            return draft
        return replace(
            draft,
            token_ids=[draft.token_ids[place] for place in places],
            parents=subtree(draft.parents, places),
        )

    def _slots(self, req_id: str, num_positions: int) -> np.ndarray:
        return self._states[req_id].blocks.slots(num_positions)

    def _receive(self, step: SchedulerOutput) -> None:
        """Bring the worker's copies up to date with what the scheduler decided."""
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._forget(req_id)
        self.cache.zero_blocks(step.block_ids_to_zero)
        for request in step.new_requests:
            self._states[request.req_id] = self._new_state(request)
            if self.proposers is not None and request.may_draft:
                self.proposers.admit(request.req_id, request.num_computed_tokens)
        for req_id, update in step.block_table_updates.items():
            blocks = self._states[req_id].blocks
            blocks.cut(update.num_kept)
            blocks.append(update.block_ids)

    def _new_state(self, request: NewRequest) -> RequestState:
        return RequestState(
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            blocks=BlockTable(request.block_ids, self.cache.block_size),
            sampling=request.sampling,
            prediction_ids=TokenView(request.prediction_ids) if request.prediction_ids else (),
            may_draft=request.may_draft,
            max_num_tokens=request.max_num_tokens,
        )

    def _forget(self, req_id: str) -> None:
        if self._states.pop(req_id, None) is not None and self.proposers is not None:
            self.proposers.release(req_id)

    def _forward(self, step: SchedulerOutput, capture: Capture | None) -> torch.Tensor:
        """Run the target on the step's rows; returns the logits of its output rows."""
        input_ids: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        slot_mapping: list[np.ndarray] = []
        output_rows: list[np.ndarray] = []
        trees: list[TreeLayout | None] = []
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            state = self._states[req_id]
            start = state.num_computed_tokens
            end = start + num_scheduled
            drafts = step.scheduled_spec_decode_tokens.get(req_id, [])
            input_ids += state.token_ids[start : end - len(drafts)]
            input_ids += drafts
            positions.append(np.arange(start, end))
            trees.append(None)
            parents = state.parents_of(drafts)
            if parents is not None:
                first = end - len(drafts)
                positions[-1][first - start :] = first - 1 + np.asarray(draft_depths(parents))
                nodes = np.arange(start - first, len(drafts)).clip(min=-1)
                trees[-1] = TreeLayout(first, np.asarray(parents), nodes)
            slots.append(state.blocks.slots(end))
            slot_mapping.append(slots[-1][start:])
            num_output = step.num_output_rows[req_id]
            output_rows.append(np.arange(len(input_ids) - num_output, len(input_ids)))
        if self.graphs is not None and sum(map(len, output_rows)) == len(input_ids):
            logits = self.graphs.run(input_ids, positions, slots, slot_mapping, trees, capture)
            if logits is not None:
                return logits
        num_padding = self.target.min_rows - len(input_ids)
        if num_padding > 0:
            # Repeat the last row of the last request; its key and value go where nobody reads.
            input_ids += input_ids[-1:] * num_padding
            positions[-1] = np.append(positions[-1], [positions[-1][-1]] * num_padding)
            slot_mapping.append(np.full(num_padding, self.cache.scratch_slot))
            last = trees[-1]
            if last is not None:
                nodes = np.append(last.nodes, [last.nodes[-1]] * num_padding)
                trees[-1] = replace(last, nodes=nodes)
        device = self.target.device
        metadata = AttentionMetadata.build(
            positions,
            slots,
            np.concatenate(slot_mapping),
            self.cache.null_slot,
            self.target.attention_rules,
            device,
            trees if any(tree is not None for tree in trees) else None,
            owners=list(step.num_scheduled_tokens),
            dense_copies=self.cache.dense_copies,
        )
        return self.target.forward(
            torch.tensor(input_ids, device=device),
            torch.from_numpy(np.concatenate(output_rows)).to(device),
            self.cache,
            metadata,
            capture,
        )

    def _accepted_of_trees(
        self, step: SchedulerOutput, results: Mapping[str, VerifyResult]
    ) -> dict[str, list[int]]:
        """Return which drafts were accepted, of the requests whose draft is a tree."""
        return {
            req_id: results[req_id].accepted
            for req_id, drafts in step.scheduled_spec_decode_tokens.items()
            if req_id in results
            and results[req_id].error is None
            and self._states[req_id].parents_of(drafts) is not None
        }

    def _compact(self, step: SchedulerOutput, accepted: Mapping[str, Sequence[int]]) -> None:
        """Bring the KV of the accepted nodes of trees to where their positions have it.

        The target's layers only. The proposers' own hold guesses there, until the features of these
        positions are handed over, which overwrite them.
        """
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        for req_id, nodes in accepted.items():
            state = self._states[req_id]
            num_drafts = len(step.scheduled_spec_decode_tokens[req_id])
            end = state.num_computed_tokens + step.num_scheduled_tokens[req_id]
            slots = state.blocks.slots(end)[end - num_drafts :]
            moved = [place for place, node in enumerate(nodes) if node != place]
            if moved:
                source.append(slots[[nodes[place] for place in moved]])
                target.append(slots[moved])
        if source:
            self.cache.move(np.concatenate(source), np.concatenate(target))

    def _commit(
        self,
        step: SchedulerOutput,
        sampled: Mapping[str, list[int]],
        accepted: Mapping[str, Sequence[int]],
        passes: Mapping[str, _Pass],
    ) -> None:
        """Advance as the scheduler does: what was scheduled, less the rejected drafts.

        `accepted`: which drafts were, of the requests whose draft is a tree.
        """
        for req_id, num_scheduled in step.num_scheduled_tokens.items():
            state = self._states[req_id]
            start = state.num_computed_tokens
            state.num_computed_tokens += num_scheduled
            state.draft_probs = state.draft_parents = None
            tokens = sampled.get(req_id, [])
            state.num_new_tokens = len(tokens)
            num_drafts = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
            if tokens:
                state.num_computed_tokens -= num_drafts - (len(tokens) - 1)
                state.token_ids += tokens
            if self.proposers is not None and state.may_draft:
                first = passes[req_id].first_row
                kept: Sequence[int] = range(first, first + state.num_computed_tokens - start)
                if req_id in accepted:
                    first_draft = first + num_scheduled - num_drafts
                    kept = [
                        *range(first, first_draft),
                        *(first_draft + node for node in accepted[req_id]),
                    ]
                self.proposers.add_features(req_id, start, passes[req_id].capture, kept)


def _faults(results: Mapping[str, VerifyResult]) -> Counter[str]:
    faults: Counter[str] = Counter()
    for result in results.values():
        faults.update(result.faults)
    return faults
