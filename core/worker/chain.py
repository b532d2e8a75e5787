"""Several proposers, one after the other: each request takes the draft of the first that has one.

It knows proposers, what each needs and how far each goes; not the model. A single proposer is a
chain of one. Who is asked for a request depends on what those before it in the chain drafted from
the past, never on a token that was drawn: a chain is as exact as its members (see
`rejection_sampler` on which drafts may be verified).

A tree of the sampler's `children` has seen the target's own noise at positions to come, and how far
it gets may tell of it. What is emitted there later must then come from that noise. So where a
member makes such trees, all drafts that are drawn are `coupled`, whatever a request asks for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from foresay.core.messages import DraftPlan, SamplingData
from foresay.core.proposer import Draft, DraftInput, DraftRequest, Needs
from foresay.core.worker.capture import Capture
from foresay.core.worker.draft_sampler import DraftProbs, DrawRequest, StepSampler
from foresay.core.worker.drafter_kv import Slots, StepKV
from foresay.core.worker.drafting import DraftPasses
from foresay.core.worker.features import MOST_PENDING, FeatureQueue
from foresay.core.worker.kv_cache import KVCache, LayerCache
from foresay.core.worker.proposing import GuardedProposer
from foresay.core.worker.sampling import is_greedy

_NO_PLANS: Mapping[str, DraftPlan] = MappingProxyType({})


@dataclass(slots=True)
class Member:
    """A proposer of a chain: what it needs, and its own most draft tokens per step."""

    proposer: GuardedProposer
    needs: Needs
    num_speculative_tokens: int
    dummy_run: Callable[[DraftInput], None] | None = None  # the proposer's, if it has one
    passes: DraftPasses | None = None  # what runs them over `layers`; None: the proposer itself
    # Set by the chain, for who needs them.
    queue: FeatureQueue | None = None
    layers: Sequence[LayerCache] = ()
    num_stored: dict[str, int] = field(default_factory=dict)  # positions its KV layers hold
    known_maps: list[Any] = field(default_factory=list)  # of its sampler, from step to step

    @property
    def takes_features(self) -> bool:
        """Whether anything comes along with committed positions."""
        needs = self.needs
        return needs.hidden_state or bool(needs.aux_layers) or bool(needs.kv_layers)

    def reaches(self, num_tokens: int) -> bool:
        """Whether it drafts for requests of so many tokens."""
        return self.needs.max_context is None or num_tokens < self.needs.max_context

    def wants(self, request: DraftRequest, k: int) -> bool:
        """Whether it is to be called for a request in this step, for `k` draft tokens or none."""
        if not self.reaches(len(request.token_ids)):
            return False
        if k > 0:
            return True
        if self.queue is None:
            return False
        num_pending = self.queue.num_pending(request.req_id)
        # An unfinished prompt, or one that this step completed: its blocks may be hit soon.
        is_prompt = len(request.token_ids) <= request.num_prompt_tokens + request.num_new_tokens
        return num_pending >= MOST_PENDING or (num_pending > 0 and is_prompt)

    def request(self, request: DraftRequest, k: int, min_confidence: float) -> DraftRequest:
        """Return the request as this proposer is to see it."""
        k = min(k, self.num_speculative_tokens)
        if not self.needs.tree:
            k = min(k, request.max_depth)
        if self.needs.max_context is not None:
            k = min(k, self.needs.max_context - len(request.token_ids))
        return replace(
            request,
            k=k,
            prediction_ids=request.prediction_ids if self.needs.prediction else (),
            min_confidence=min_confidence,
        )


@dataclass(frozen=True, slots=True)
class Drafted:
    """A request's draft: one token at least, who made it, and what it was drawn from."""

    token_ids: list[int]
    proposer: str
    probs: DraftProbs | None  # None: deterministic, or drawn with the target's own noise
    parents: list[int] | None = None  # of a tree; None: a chain


class ProposerChain:
    """The proposers of an engine, in the order in which they are asked."""

    def __init__(
        self,
        members: Sequence[Member],
        vocab_size: int,
        *,
        hidden_size: int = 0,
        cache: KVCache | None = None,
    ) -> None:
        """`members`: one at least, with distinct names. Target ids are in range(vocab_size).

        `hidden_size` of the target, and its KV `cache` with the members' layers in their order:
        only if a member needs hidden states or KV layers.
        """
        self.members = tuple(members)
        self.name = ",".join(member.proposer.name for member in self.members)
        self._vocab_size = vocab_size
        self._cache = cache
        self._seconds: dict[str, float] = {}  # of each member called, not yet taken
        self._sees_noise = any(m.needs.tree and m.needs.sampled for m in self.members)
        num_layers = 0
        for member in self.members:
            if not member.takes_features:
                continue
            assert cache is not None, "features come with a KV cache"
            member.layers = cache.proposer_layers[
                num_layers : num_layers + len(member.needs.kv_layers)
            ]
            num_layers += len(member.needs.kv_layers)
            like = cache.layers[0].slots
            member.queue = FeatureQueue(member.needs, hidden_size, like.dtype, like.device)

    @property
    def limits(self) -> tuple[tuple[str, int], ...]:
        """Each member's name and its own most draft tokens per step."""
        return tuple((m.proposer.name, m.num_speculative_tokens) for m in self.members)

    @property
    def tree_members(self) -> tuple[str, ...]:
        """The names of those whose drafts may be trees."""
        return tuple(m.proposer.name for m in self.members if m.needs.tree)

    @property
    def num_speculative_tokens(self) -> int:
        """The most draft tokens of a step, whoever drafts."""
        return max(member.num_speculative_tokens for member in self.members)

    @property
    def max_context(self) -> int | None:
        """Requests that are longer get no draft from anyone; None: no limit."""
        limits = [member.needs.max_context for member in self.members]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    @property
    def max_contexts(self) -> dict[str, int]:
        """By name, for those with a limit: longer requests get no draft from them."""
        return {
            member.proposer.name: member.needs.max_context
            for member in self.members
            if member.needs.max_context is not None
        }

    @property
    def takes_prediction(self) -> bool:
        """Whether a member drafts from the output that a caller expects."""
        return any(member.needs.prediction for member in self.members)

    @property
    def has_kv(self) -> bool:
        """Whether a member has KV layers of its own."""
        return any(member.needs.kv_layers for member in self.members)

    @property
    def kv_reach(self) -> int:
        """How many tokens behind a position the members' KV depends on, at most."""
        return max(member.needs.kv_reach for member in self.members)

    @property
    def draft_slots(self) -> int:
        """Rows per request that a member adds to its own batch."""
        return max(member.needs.draft_slots for member in self.members)

    @property
    def dropped(self) -> bool:
        """Whether no member is left."""
        return all(member.proposer.dropped for member in self.members)

    def capture(self) -> Capture | None:
        """Return what a pass of the target is to leave for the members; None: nothing."""
        needs = [member.needs for member in self._with_queue()]
        layers = sorted({layer for need in needs for layer in need.aux_layers})
        hidden_state = any(need.hidden_state for need in needs)
        if not layers and not hidden_state:
            return None
        return Capture(hidden_state=hidden_state, layers=layers)

    def add_features(
        self, req_id: str, start: int, capture: Capture | None, rows: Sequence[int]
    ) -> None:
        """Take what a pass left for the kept `rows` of a request, at positions `start`, ..."""
        for member in self._with_queue():
            if member.queue is not None and member.reaches(start):
                member.queue.add(req_id, start, capture, rows)

    def propose(
        self,
        requests: Sequence[DraftRequest],
        sampling: Mapping[str, SamplingData],
        slots: Slots | None = None,
        plans: Mapping[str, DraftPlan] = _NO_PLANS,
    ) -> dict[str, Drafted]:
        """Return the drafts by request id, without those that nobody has one for.

        `requests`: those of the step, also such with k = 0, whose features may be due. `sampling`:
        their sampling parameters, by id, for who samples its drafts. `slots`: where the KV of
        their positions lies, for who has layers. `plans`: what each member is to do for a request,
        by id; without one, whoever comes first drafts up to the request's k.
        """
        drafted: dict[str, Drafted] = {}
        for number, member in enumerate(self.members):
            if member.proposer.dropped:
                continue
            asked = []
            for request in requests:
                plan = plans.get(request.req_id)
                k = 0 if request.req_id in drafted else request.k
                if plan is not None:
                    k = min(k, plan.num_draft_tokens[number])
                if member.wants(request, k):
                    # A chain that is sampled ends for nothing its tokens may depend on; at a
                    # temperature the largest probability says little anyway.
                    confidence = 0.0
                    if plan is not None and (
                        member.needs.tree or is_greedy(sampling[request.req_id])
                    ):
                        confidence = plan.confidence_of(number)
                    asked.append(member.request(request, k, confidence))
            if not asked:
                continue
            began = time.perf_counter()
            sampler = self._sampler(member, asked, sampling) if member.needs.sampled else None
            drafts = self._call(member, DraftInput(tuple(asked), sampler), slots)
            self._seconds[member.proposer.name] = time.perf_counter() - began
            trees = drafts.parents or [None] * len(asked)
            for row, (request, token_ids, parents) in enumerate(
                zip(asked, drafts.token_ids, trees, strict=True)
            ):
                if token_ids:
                    probs = sampler.draft_probs(row) if sampler is not None else None
                    name = member.proposer.name
                    drafted[request.req_id] = Drafted(token_ids, name, probs, parents)
        for member in self._with_queue():
            if member.queue is not None:
                member.queue.settle()
        return drafted

    def num_stored(self, req_ids: Sequence[str]) -> dict[str, int]:
        """Return how many leading positions the KV layers of all members hold, by request."""
        members = [member for member in self._with_queue() if member.layers]
        if not members:
            return {}
        return {
            req_id: min(member.num_stored.get(req_id, 0) for member in members)
            for req_id in req_ids
        }

    def admit(self, req_id: str, num_computed_tokens: int) -> None:
        """Take a request whose first positions the prefix cache holds, the members' KV included."""
        for member in self._with_queue():
            if member.layers:
                member.num_stored[req_id] = num_computed_tokens

    def release(self, req_id: str) -> None:
        """Tell everyone that a request ended or was preempted."""
        for member in self.members:
            if member.queue is not None:
                member.queue.forget(req_id)
                member.num_stored.pop(req_id, None)
            member.proposer.release(req_id)

    def take_seconds(self) -> dict[str, float]:
        """Return how long each member took that was called since this was asked last."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def take_faults(self) -> dict[str, int]:
        """Return how many faults of each kind were met since this was asked last."""
        faults: Counter[str] = Counter()
        for member in self.members:
            faults.update(member.proposer.take_faults())
        return dict(faults)

    def _with_queue(self) -> Iterator[Member]:
        """The members that take features, less those that were dropped."""
        return (m for m in self.members if m.queue is not None and not m.proposer.dropped)

    def _call(self, member: Member, batch: DraftInput, slots: Slots | None) -> Draft:
        """Have a member draft, with the features and the KV view it needs."""
        if member.queue is None:
            return member.proposer.propose(batch)
        assert self._cache is not None
        assert slots is not None
        features = member.queue.take([request.req_id for request in batch.requests])
        view = None
        if member.layers:
            view = StepKV(
                member.layers,
                self._cache.null_slot,
                batch.requests,
                slots,
                draft_slots=member.needs.draft_slots,
                device=features.positions.device,
                passes=member.passes,
            )
        drafts = member.proposer.propose(
            replace(
                batch,
                hidden_states=features.hidden_states,
                aux_hidden_states=features.aux_hidden_states,
                positions=features.positions,
                row_starts=features.row_starts,
                kv=view,
            )
        )
        if view is not None and not member.proposer.dropped:
            member.proposer.check_stored(view, features.ranges)
            for request, handed in zip(batch.requests, features.ranges, strict=True):
                if handed:
                    # The last ones may be stored again, before the tokens that follow then; and
                    # all the tokens behind the others must be there to tell them apart.
                    num_stored = handed.stop - (self.kv_reach - 1)
                    held = member.num_stored.get(request.req_id, 0)
                    member.num_stored[request.req_id] = max(held, num_stored)
        return drafts

    def _drawn_by(self, sampling: SamplingData) -> SamplingData:
        return replace(sampling, verification="coupled") if self._sees_noise else sampling

    def _sampler(
        self,
        member: Member,
        requests: Sequence[DraftRequest],
        sampling: Mapping[str, SamplingData],
    ) -> StepSampler:
        return StepSampler(
            [
                DrawRequest(
                    req_id=request.req_id,
                    sampling=self._drawn_by(sampling[request.req_id]),
                    num_tokens=len(request.token_ids),
                    k=min(request.k, request.max_depth),
                )
                for request in requests
            ],
            self._vocab_size,
            member.known_maps,
            may_branch=member.needs.tree,
        )
