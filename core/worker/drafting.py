"""The loop that drafts a chain, as eagle, mtp and draft models do, and how its tokens are picked.

Knows rows, positions and tokens. What a drafter computes of a row is the drafter's; when it is sure
enough to go on is told by `confidence`. Trees are drafted by `tree_drafting`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from foresay.core.proposer import Draft, DraftInput, KVRows
from foresay.core.worker.confidence import Confidence
from foresay.core.worker.drafter_kv import StepRows


class DrafterModel(Protocol):
    """What the loop needs of a drafter."""

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows] int64, target ids
        hidden: torch.Tensor | None,  # [num_rows, hidden_size]
        rows: KVRows,
        step: int,
    ) -> torch.Tensor:
        """Run rows through the drafter's layers; return [num_rows, hidden_size].

        `hidden` is what belongs to each row: at `step` 0 the target's features, as they were
        given to `draft`; later the drafter's own of the row before. None: it takes none. With
        `last_rows_only` it returns, at step 0, the rows `rows.last_rows` alone.
        """
        ...

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """Return logits [n, draft_vocab] of what `forward` returned for n rows."""
        ...


class DraftPasses(Protocol):
    """What may run a drafter's later passes in the core's own way: as CUDA graphs."""

    def run(
        self,
        model: DrafterModel,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        rows: StepRows,
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run a pass as `run_pass` does; None, and nothing is done, if it is not one of these."""
        ...


@dataclass(slots=True)
class TokenPicker:
    """Draft tokens of one step's requests: the likeliest each, or drawn by the sampler.

    A draft ends before its k where its confidence falls below the request's `min_confidence`.
    `draft_to_target` [draft_vocab] int64 maps draft ids to the target's; None: they are the same.
    """

    batch: DraftInput
    sample: bool
    draft_to_target: torch.Tensor | None = None
    _token_ids: list[list[int]] = field(init=False)
    # Picked, but on the device only: steps of a drafter need not wait for one another's results.
    _pending: list[tuple[list[int], torch.Tensor]] = field(init=False)
    _confidence: Confidence = field(init=False)

    def __post_init__(self) -> None:
        self._token_ids = [[] for _ in self.batch.requests]
        self._pending = []
        self._confidence = Confidence(self.batch.requests)

    @property
    def token_ids(self) -> list[list[int]]:
        """The drafts so far, by request. To ask for them is to wait for the device."""
        if self._pending:
            requests = [request for each, _ in self._pending for request in each]
            ids = torch.cat([ids for _, ids in self._pending]).tolist()
            self._pending = []
            for request, token_id in zip(requests, ids, strict=True):
                self._token_ids[request].append(token_id)
        return self._token_ids

    def wants(self, request: int, step: int) -> bool:
        """Whether token number `step` of a request is to be picked, once those before it are."""
        return self.batch.requests[request].k > step and not self._confidence.has_ended(request)

    def pick(self, logits: torch.Tensor, step: int, requests: Sequence[int]) -> torch.Tensor:
        """Pick token number `step` of `requests` by `logits` [n, draft_vocab]: [n] target ids.

        For a request whose draft ends before this token, or has ended, the id returned is a legal
        one, so that a batch can go on, and no draft.
        """
        going = self._confidence.going(logits, requests)
        if going is None:
            return self._pick(logits, step, requests)
        ids = torch.zeros(len(requests), dtype=torch.int64, device=logits.device)
        if going:
            ids[going] = self._pick(logits[going], step, [requests[i] for i in going])
        return ids

    def _pick(self, logits: torch.Tensor, step: int, requests: Sequence[int]) -> torch.Tensor:
        if self.sample:
            assert self.batch.sampler is not None, "a proposer that samples declares it"
            ids = self.batch.sampler.draw(logits, step, requests, self.draft_to_target)
        else:
            ids = logits.argmax(dim=-1)
            if self.draft_to_target is not None:
                ids = self.draft_to_target[ids]
        self._pending.append((list(requests), ids))
        return ids


@torch.inference_mode()
def draft(
    batch: DraftInput,
    model: DrafterModel,
    *,
    hidden: torch.Tensor | None,
    shifted: bool,
    sample: bool,
    draft_to_target: torch.Tensor | None = None,
    last_rows_only: bool = False,
) -> Draft:
    """Take the features of a step, then draft up to k tokens for each request, one after another.

    The arguments are those of `take_features`; see there.
    """
    picker = TokenPicker(batch, sample, draft_to_target)
    # 1. All rows of the step at once.
    drafting, states = take_features(
        batch, model, hidden=hidden, shifted=shifted, last_rows_only=last_rows_only
    )
    # 2. One row per request and token, fed with what came out of the row before.
    go_on(
        batch,
        model,
        picker,
        drafting,
        states,
        step=0,
        offset=-2 if shifted else -1,
        feeds_back=hidden is not None,
    )
    return Draft(picker.token_ids)


@torch.inference_mode()
def take_features(
    batch: DraftInput,
    model: DrafterModel,
    *,
    hidden: torch.Tensor | None,
    shifted: bool,
    last_rows_only: bool = False,
) -> tuple[list[int], torch.Tensor]:
    """Run the rows that a step handed over; return who drafts, and what predicts the first token.

    `hidden` [num_rows, hidden_size] belongs to the batch's rows; None for a drafter that takes
    tokens only. `shifted`: the row at position i takes the token at i + 1, as EAGLE and MTP do, so
    that the last row takes the token that was committed last. Otherwise it takes its own, and each
    request that drafts adds a row for the last token (`Needs.draft_slots` is 1).

    `last_rows_only`: `model.forward` returns one row for each range that it was given, its last.
    (Of the others keys and values are needed, but nothing else of the last layer, nor logits.)

    The rows are stored in the KV cache by this, also those of requests with k = 0. Returns the
    indices of the requests with k >= 1, and the last state of each, [num_drafting, hidden_size].
    """
    requests = batch.requests
    assert batch.kv is not None
    assert batch.row_starts is not None
    members: list[int] = []
    spans: list[range] = []
    ids: list[int] = []
    last: dict[int, int] = {}  # which row of the result predicts a request's first token
    starts = batch.row_starts
    firsts = first_positions(batch)
    for index, request in enumerate(requests):
        start = firsts[index]
        end = start + starts[index + 1] - starts[index]
        if shifted:
            ids += request.token_ids[start + 1 : end + 1]
        else:
            if request.k:
                end = len(request.token_ids)
                start = min(start, end - 1)
            ids += request.token_ids[start:end]
        if end > start:
            members.append(index)
            spans.append(range(start, end))
            if request.k:
                last[index] = (len(members) if last_rows_only else len(ids)) - 1
    if not members:
        return [], torch.empty(0)
    rows = batch.kv.rows(members, spans)
    device = rows.positions.device
    out = model.forward(on_device(ids, device), hidden, rows, 0)
    return list(last), out[on_device(list(last.values()), device)]


def go_on(
    batch: DraftInput,
    model: DrafterModel,
    picker: TokenPicker,
    drafting: list[int],
    states: torch.Tensor,  # [len(drafting), hidden_size]
    *,
    step: int,
    offset: int,
    feeds_back: bool = True,
) -> None:
    """Draft tokens number `step` and on, until each draft of the requests `drafting` is complete.

    That is when it has its k, or ended before it by its confidence.

    `states` are what `model.forward` returned for the rows that predict token number `step`. The
    row that predicts token number s has the position len(token_ids) + offset + s, and takes what
    came out of the row before (None unless `feeds_back`), and the token that it gave.
    """
    requests = batch.requests
    assert batch.kv is not None
    if not drafting:
        return
    logits = model.logits(states, step)
    while True:
        token_ids = picker.pick(logits, step, drafting)
        step += 1
        going = [i for i, index in enumerate(drafting) if picker.wants(index, step)]
        if not going:
            break
        if len(going) < len(drafting):
            kept = on_device(going, states.device)
            token_ids, states = token_ids[kept], states[kept]
            drafting = [drafting[i] for i in going]
        positions = [len(requests[index].token_ids) + offset + step for index in drafting]
        rows = batch.kv.rows(drafting, [range(p, p + 1) for p in positions])
        states, logits = run_pass(model, token_ids, states if feeds_back else None, rows, step)


def run_pass(
    model: DrafterModel,
    token_ids: torch.Tensor,
    hidden: torch.Tensor | None,
    rows: KVRows,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a pass after the first; return what `model.forward` and `model.logits` return.

    It may be run as a CUDA graph, and what is returned then holds until the next pass.
    """
    if isinstance(rows, StepRows) and rows.passes is not None:
        found = rows.passes.run(model, token_ids, hidden, rows, step)
        if found is not None:
            return found
    states = model.forward(token_ids, hidden, rows, step)
    return states, model.logits(states, step)


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers as int64 on the device, without waiting for what it is doing."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def first_positions(batch: DraftInput) -> list[int]:
    """Return the position of each request's first row; for one without, where it would end."""
    assert batch.row_starts is not None
    assert batch.positions is not None
    starts = batch.row_starts
    # Only these cannot be told from the tokens.
    asked = [
        starts[index]
        for index, request in enumerate(batch.requests)
        if not request.k and starts[index + 1] > starts[index]
    ]
    known = iter(batch.positions[asked].tolist() if asked else ())
    found = []
    for index, request in enumerate(batch.requests):
        num_rows = starts[index + 1] - starts[index]
        if not num_rows:
            found.append(max(len(request.token_ids) - 1, 0))
        elif request.k:  # they reach the last token but one
            found.append(len(request.token_ids) - 1 - num_rows)
        else:
            found.append(next(known))
    return found
