"""Has a proposer draft for nobody (`dummy_run`), to learn which passes its drafts are made of.

Knows what a proposer needs, and that its later passes are alike; neither how they are captured, nor
what the drafter computes. Nothing is stored where requests have their keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from foresay.core.messages import SamplingData
from foresay.core.proposer import DraftInput, DraftRequest
from foresay.core.worker.chain import Member
from foresay.core.worker.draft_sampler import DrawRequest, StepSampler
from foresay.core.worker.drafter_kv import StepKV, StepRows
from foresay.core.worker.drafting import DrafterModel
from foresay.core.worker.kv_cache import KVCache, LayerCache

_REQ_ID = "dummy_run"
_TOKEN_IDS = (0, 0)  # its features are those of one position
_GREEDY = SamplingData(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, min_tokens=0, stop_token_ids=()
)


@dataclass(frozen=True, slots=True)
class LaterPass:
    """What a drafter runs behind the first pass of a draft: from this `step` on, always."""

    model: DrafterModel
    step: int
    hidden: torch.Tensor | None  # [1, ...] like what a row takes; None: it takes none


class _Finder:
    """Sees the first of the later passes; runs none: the drafter does."""

    def __init__(self) -> None:
        self.found: LaterPass | None = None

    def run(
        self,
        model: DrafterModel,
        token_ids: torch.Tensor,  # noqa: ARG002
        hidden: torch.Tensor | None,
        rows: StepRows,  # noqa: ARG002
        step: int,
    ) -> None:
        if self.found is None:
            self.found = LaterPass(model, step, None if hidden is None else hidden[:1].clone())


def find_later_pass(
    member: Member,
    layers: Sequence[LayerCache],
    cache: KVCache,
    *,
    vocab_size: int,
    hidden_size: int,
) -> LaterPass | None:
    """Return what the member's drafts run behind their first pass; None: nothing, or not known.

    `layers` are its own in `cache`. `vocab_size` and `hidden_size` are the target's. Raises what
    the proposer raises.
    """
    if member.dummy_run is None or not layers:
        return None
    needs, k = member.needs, member.num_speculative_tokens
    request = DraftRequest(_REQ_ID, _TOKEN_IDS, num_new_tokens=1, k=k, num_prompt_tokens=1)
    like = cache.layers[0].slots
    finder = _Finder()

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(1, *shape, dtype=like.dtype, device=like.device)

    def slots(_req_id: str, num_positions: int) -> np.ndarray:
        return np.full(num_positions, cache.scratch_slot)

    sampler = None
    if needs.sampled:
        drawn = DrawRequest(_REQ_ID, _GREEDY, num_tokens=len(_TOKEN_IDS), k=k)
        sampler = StepSampler([drawn], vocab_size, may_branch=needs.tree)
    batch = DraftInput(
        (request,),
        sampler,
        hidden_states=ones(hidden_size) if needs.hidden_state else None,
        aux_hidden_states=ones(len(needs.aux_layers), hidden_size) if needs.aux_layers else None,
        positions=torch.zeros(1, dtype=torch.int64, device=like.device),
        row_starts=[0, 1],
        kv=StepKV(
            layers,
            cache.null_slot,
            (request,),
            slots,
            draft_slots=needs.draft_slots,
            device=like.device,
            passes=finder,
        ),
    )
    try:
        member.dummy_run(batch)
    finally:
        member.proposer.release(_REQ_ID)
    return finder.found
