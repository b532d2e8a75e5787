"""Requests to verify, and rows of logits, that tests of verification share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from laws import make_sampling

from foresay.core.worker.draft_sampler import DraftProbs
from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult

INF, NAN = float("inf"), float("nan")
EOS = 2


def make_request(
    drafts: Sequence[int] = (),
    num_committed: int = 5,
    num_output: int = 0,
    draft_probs: DraftProbs | None = None,
    **changes: Any,
) -> VerifyRequest:
    return VerifyRequest(
        "r",
        drafts,
        [1] * num_committed,
        num_committed - num_output,
        make_sampling(**({"temperature": 0.0} | changes)),
        draft_probs,
    )


def emitted(token_ids: Sequence[int]) -> VerifyResult:
    """What becomes of a chain that emits these: all of them but the last are its first drafts."""
    return VerifyResult(list(token_ids), accepted=list(range(len(token_ids) - 1)))


def one_hot(*tops: int, size: int = 6) -> torch.Tensor:
    """Rows of logits whose argmax are `tops`."""
    return torch.nn.functional.one_hot(torch.tensor(tops), size).float() * 9


def bad_rows() -> dict[str, tuple[torch.Tensor, str]]:
    good = one_hot(1)[0]
    partly = good.clone()
    partly[4] = NAN
    masked = torch.full_like(good, -INF)
    masked[EOS] = 1.0
    infinite = good.clone()
    infinite[5] = INF
    return {
        "all NaN": (torch.full_like(good, NAN), "the target model's logits contain NaN"),
        "partly NaN": (partly, "the target model's logits contain NaN"),
        "+inf": (infinite, "the target model's logits contain +inf"),
        "all -inf": (torch.full_like(good, -INF), "no token is allowed: every logit is -inf"),
        "only EOS, masked": (
            masked,
            "no token is allowed: every logit is -inf, once min_tokens masks the stop ids [2]",
        ),
    }


def drawn_probs(
    logits: torch.Tensor, rule: str, num_tokens: int = 5, token_ids: torch.Tensor | None = None
) -> DraftProbs:
    """Probs of a drafter whose rows are `logits` [k, draft_vocab]."""
    return DraftProbs(rule, num_tokens, logits.float().softmax(dim=-1), token_ids)  # type: ignore[arg-type]


KINDS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k, min_p": {"temperature": 1.5, "top_k": 20, "min_p": 0.05},
    "another sample": {"temperature": 1.0, "sample_index": 3, "seed": 2**63 + 1},
}
VOCABULARIES = {"the target's": 0, "longer": 2, "shorter": -1, "reduced": None}


def random_request(
    rng: random.Random, size: int, rule: str, vocabulary: str
) -> tuple[torch.Tensor, VerifyRequest]:
    """Rows [k+1, size] and a request whose draft was drawn, by Python, from the probs it brings."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    k, num_committed = rng.randrange(5), 2 + rng.randrange(9)
    rows = torch.randn(k + 1, size, generator=generator) * 2
    extra = VOCABULARIES[vocabulary]
    token_ids = None
    if extra is None:
        token_ids = torch.tensor(sorted(rng.sample(range(size + 3), k=1 + size // 2)))
        draft_logits = rows[:k, token_ids.clamp(max=size - 1)] * 0.7
    else:
        width = max(1, size + extra)
        draft_logits = torch.zeros(k, width)
        draft_logits[:, :size] = rows[:k, : min(size, width)] * 0.7
    draft_logits = draft_logits + torch.randn(draft_logits.shape, generator=generator)
    draft_probs = drawn_probs(draft_logits, rule, num_committed, token_ids)
    ids = list(range(draft_logits.shape[1])) if token_ids is None else token_ids.tolist()
    drafts = [rng.choices(ids, weights=row)[0] for row in draft_probs.probs.tolist()]
    kind = KINDS[rng.choice(list(KINDS))] | {"verification": rule}
    kind = {"seed": rng.randrange(2**40)} | kind
    return rows, make_request(drafts, num_committed, 1, draft_probs, **kind)


def mixed_batch(seed: int, size: int = 11) -> tuple[list[torch.Tensor], list[VerifyRequest]]:
    """Requests of every rule, with ragged drafts, some empty."""
    rng = random.Random(seed)
    rows, requests = [], []
    for i in range(24):
        rule = ("rejection", "block")[i % 2]
        logits, request = random_request(rng, size, rule, list(VOCABULARIES)[i % 4])
        if i % 3 == 1:  # verified by the deterministic rule
            request.draft_probs = None
        elif i % 6 == 2:
            request.sampling = replace(request.sampling, temperature=0.0)
        rows.append(logits)
        requests.append(request)
    order = rng.sample(range(24), 24)
    return [rows[i] for i in order], [requests[i] for i in order]
