"""A proposer that checks what it is handed: features, their order, and its own KV layers.

It drafts nothing clever. Each position's value in its KV layers is a code of the position and of
the tokens there and behind it, so that attention with an empty query, which is the mean over all
positions before, shows whether every slot holds what it should.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from foresay.core.proposer import Draft, DraftInput, KVLayer, Needs, ProposerConfig, TargetView

WIDTH = 8
NUM_LAYERS = 2


class Tracker:
    """See above. `seen` is kept after a request's end, for the test to look at."""

    needs = Needs(
        hidden_state=True,
        aux_layers=(0, 2, 3),
        kv_layers=(KVLayer(1, WIDTH), KVLayer(2, WIDTH, WIDTH // 2)),
    )
    made: list[Tracker] = []  # noqa: RUF012  # by `LLM(proposer=Tracker)`, which keeps them

    def __init__(self, config: ProposerConfig) -> None:
        self.made.append(self)
        self.random = random.Random(0)
        self.vocab_size = 0
        self.next: dict[str, int] = {}  # the position that must come next; absent: any
        # By the tokens up to and including a position's: the features that were handed over.
        self.seen: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.num_rows = 0
        self.num_checked = 0
        self.num_idle_calls = 0  # calls with k = 0 for all

    def load(self, target: TargetView) -> None:
        self.vocab_size = target.vocab_size

    def release(self, req_id: str) -> None:
        self.next.pop(req_id, None)

    def propose(self, batch: DraftInput) -> Draft:
        starts = batch.row_starts
        assert starts is not None
        assert batch.positions is not None
        assert batch.kv is not None
        assert batch.hidden_states is not None
        assert batch.aux_hidden_states is not None
        assert len(starts) == len(batch.requests) + 1
        assert len(batch.hidden_states) == len(batch.aux_hidden_states) == starts[-1]
        self.num_idle_calls += not any(request.k for request in batch.requests)
        members, spans, tokens = [], [], []
        for index, request in enumerate(batch.requests):
            rows = range(starts[index], starts[index + 1])
            ids = list(request.token_ids)
            positions = batch.positions[rows.start : rows.stop].tolist()
            assert positions or request.k
            if positions:
                assert positions == list(range(positions[0], positions[0] + len(positions)))
                expected = self.next.get(request.req_id, positions[0])
                assert positions[0] == expected, f"{request}: {positions}, expected {expected}"
                self.next[request.req_id] = positions[-1] + 1
                members.append(index)
                spans.append(range(positions[0], positions[-1] + 1))
                tokens.append(ids)
            if request.k:
                assert self.next[request.req_id] == len(ids) - 1
            for row, position in zip(rows, positions, strict=True):
                features = (batch.hidden_states[row].clone(), batch.aux_hidden_states[row].clone())
                self.seen[tuple(ids[: position + 1])] = features
            self.num_rows += len(rows)
        if members:
            self.store(batch, members, spans, tokens, guessed=False)
        drafts: list[list[int]] = []
        for index, request in enumerate(batch.requests):
            if not request.k:
                drafts.append([])
                continue
            last = len(request.token_ids) - 1
            if request.k > 1:  # what a drafter guesses is written too, and must be overwritten
                span = range(last, last + request.k - 1)
                self.store(batch, [index], [span], [list(request.token_ids)], guessed=True)
            size = self.random.randint(0, request.k)
            drafts.append([self.random.randrange(self.vocab_size) for _ in range(size)])
        return Draft(drafts)

    def store(
        self,
        batch: DraftInput,
        members: list[int],
        spans: list[range],
        tokens: list[list[int]],
        *,
        guessed: bool,
    ) -> None:
        assert batch.kv is not None
        rows = batch.kv.rows(members, spans)
        assert rows.positions.tolist() == [p for span in spans for p in span]
        codes, means = [], []
        for span, ids in zip(spans, tokens, strict=True):
            if guessed:
                codes.append(torch.full((len(span), WIDTH), 1e3))
                means.append(torch.zeros(len(span), WIDTH))
                continue
            every = torch.stack([code(ids, position) for position in range(span.stop)])
            codes.append(every[span.start :])
            mean = every.cumsum(0) / torch.arange(1, span.stop + 1)[:, None]
            means.append(mean[span.start :])
        value = torch.cat(codes)  # [num_rows, WIDTH]
        for layer, (num_kv_heads, width) in enumerate(((1, WIDTH), (2, WIDTH // 2))):
            found = rows.attend(
                layer,
                torch.zeros(len(value), 2, WIDTH),
                torch.zeros(len(value), num_kv_heads, WIDTH),
                value[:, None, :width].repeat(1, num_kv_heads, 1),
                scale=1.0,
            )
            if not guessed:
                expected = torch.cat(means)[:, None, :width].expand(-1, 2, -1)
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                self.num_checked += len(value)


def code(ids: list[int], position: int) -> torch.Tensor:
    """What this proposer stores at a position: it depends on the token after it, too."""
    generator = torch.Generator().manual_seed(
        (position * 1009 + ids[position]) * 1009 + ids[position + 1]
    )
    return torch.randn(WIDTH, generator=generator)


def expected_features(model: Any, ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the tracker must have seen of the last of `ids`, by transformers."""
    entering = []
    handle = model.get_decoder().norm.register_forward_pre_hook(
        lambda _module, inputs: entering.append(inputs[0][0, -1])
    )
    with torch.inference_mode():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    handle.remove()
    states = [layer[0, -1] for layer in out.hidden_states]
    return states[-1], torch.stack([states[0], states[2], entering[0]])
