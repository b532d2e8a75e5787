"""The draft loop of several modules: module i predicts the token at i + 2, from what i - 1 made.

As they were trained (DeepSeek-V3's report, equations 21 to 23; modules count from 0 here): row p
of module i takes the token at p + 1 + i, and what module i - 1 made of row p; it attends to rows
0 to p of its own. So at the end of a text module i has i rows whose token is not committed yet,
but drafted, by the modules before it. They draft well enough; but what they store is a guess, and
the next call computes these rows again, with the tokens that were committed in their place. What
such a row takes is kept for that: one vector for each module and request, since all later ones
are computed again by the module before.

Past the last module it is applied again to its own output, as a single module is.

Chains only: in a tree each branch would need rows of its own at these i positions of each module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.core.proposer import Draft, DraftInput, DraftRequest
from foresay.core.worker.drafting import TokenPicker, first_positions, go_on
from foresay_mtp.modules import Modules


@dataclass(frozen=True, slots=True)
class _Tail:
    """Where a request's rows end, by module."""

    first: int  # before it nothing was handed over: the prefix cache held it
    end: int  # positions up to here were handed over
    starts: list[int]  # the first row that is to be computed (again)
    # What that row takes, if the module before does not compute it again; [hidden_size].
    inputs: list[torch.Tensor | None]


@dataclass(slots=True)
class _Member:
    """A request that has rows in this step."""

    index: int
    request: DraftRequest
    end: int
    before: _Tail
    after: list[tuple[int, torch.Tensor | None]]  # starts and inputs of the next tail

    def tokens(self, module: int, drafted: Sequence[int]) -> list[int]:
        """Return the tokens that a module's rows take: committed ones, then drafted ones."""
        committed = self.request.token_ids
        positions = range(self.before.starts[module] + 1 + module, self.end + 1 + module)
        known = [*committed[positions.start : positions.stop], *drafted]
        # Where fewer are drafted, this module drafts nothing now: any token will do, since the
        # row is computed again before another one needs it.
        known += [committed[-1]] * module
        return known[: len(positions)]


class SeveralModules:
    """Drafts with several modules. Remembers, by request, where their rows end."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._tails: dict[str, _Tail] = {}

    def release(self, req_id: str) -> None:
        """Forget a request."""
        self._tails.pop(req_id, None)

    @torch.inference_mode()
    def draft(self, batch: DraftInput, *, sample: bool) -> Draft:
        """Take the step's features, then draft up to k tokens for each request."""
        assert batch.hidden_states is not None
        assert batch.kv is not None
        modules = self._modules
        picker = TokenPicker(batch, sample, modules.draft_to_target)
        members = self._members(batch)
        if not members:
            return Draft(picker.token_ids)
        drafting: list[int] = []
        states = batch.hidden_states[:0]
        out = batch.hidden_states  # of the members' rows alone: others have none
        for number in range(len(modules)):
            spans = [range(member.before.starts[number], member.end) for member in members]
            taken = out if number == 0 else _taken(members, number, out)
            token_ids = [
                token_id
                for member in members
                for token_id in member.tokens(number, picker.token_ids[member.index])
            ]
            rows = batch.kv.rows([member.index for member in members], spans)
            device = rows.positions.device
            out = modules.forward(torch.tensor(token_ids, device=device), taken, rows, number)
            self._note(members, number, spans, taken)
            # The last row of each request that wants a token of this module.
            last, num_rows = {}, 0
            for member, span in zip(members, spans, strict=True):
                num_rows += len(span)
                if picker.wants(member.index, number):
                    last[member.index] = num_rows - 1
            drafting = list(last)
            states = out[torch.tensor(list(last.values()), dtype=torch.int64, device=device)]
            if drafting and number + 1 < len(modules):
                picker.pick(modules.logits(states, number), number, drafting)
        for member in members:
            self._tails[member.request.req_id] = _Tail(
                member.before.first,
                member.end,
                [start for start, _ in member.after],
                [taken for _, taken in member.after],
            )
        num_modules = len(modules)
        go_on(
            batch,
            modules,
            picker,
            drafting,
            states,
            step=num_modules - 1,
            offset=-1 - num_modules,
        )
        return Draft(picker.token_ids)

    def _members(self, batch: DraftInput) -> list[_Member]:
        assert batch.row_starts is not None
        members = []
        for index, (request, start) in enumerate(
            zip(batch.requests, first_positions(batch), strict=True)
        ):
            end = start + batch.row_starts[index + 1] - batch.row_starts[index]
            if end == start:
                continue
            before = self._tails.get(request.req_id)
            if before is None or before.end != start:
                num_modules = len(self._modules)
                before = _Tail(start, start, [start] * num_modules, [None] * num_modules)
            members.append(_Member(index, request, end, before, []))
        return members

    def _note(
        self, members: list[_Member], number: int, spans: list[range], taken: torch.Tensor
    ) -> None:
        """Note where the next call's rows of this module begin, and what the first of them takes.

        `taken` [num_rows, hidden_size] is what this call's rows take, span after span.
        """
        offset = 0
        for member, span in zip(members, spans, strict=True):
            last_known = len(member.request.token_ids) - 1
            # The first row whose token is not committed; what the cache held stays as it is.
            start = max(member.before.first, min(member.end, last_known - number))
            kept = None
            if number and start < member.after[number - 1][0]:
                kept = taken[offset + start - span.start].clone()
            member.after.append((start, kept))
            offset += len(span)


def _taken(members: Sequence[_Member], number: int, out: torch.Tensor) -> torch.Tensor:
    """Return what a module's rows take: what was kept, and `out` of the module before."""
    parts = []
    offset = 0
    for member in members:
        kept = member.before.inputs[number]
        if kept is not None:
            parts.append(kept[None])
        num_rows = member.end - member.before.starts[number - 1]
        parts.append(out[offset : offset + num_rows])
        offset += num_rows
    return torch.cat(parts)
