"""How far a drafter's distributions are from the target's: the loss, and its gradient, in pieces.

Logits over a vocabulary are the largest thing in training a drafter. They are made, used and
forgotten some rows at a time, and the gradient is found on the way, so that no pass has to keep
them. Knows rows and vocabularies; nothing of texts and models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_ROWS = 256  # at a time: their logits stay in the cache


@dataclass(frozen=True, slots=True)
class OutputHead:
    """From hidden states to logits over the draft vocabulary; trained if the weight is."""

    weight: torch.Tensor  # [draft_vocab, hidden_size]
    bias: torch.Tensor | None = None  # [draft_vocab]


@torch.no_grad()
def teacher_probs(
    hidden_states: torch.Tensor, head: OutputHead, argmax_share: float = 0.0
) -> torch.Tensor:
    """Return what a drafter should say: [n, draft_vocab] float32, each row adding up to 1.

    It is the target's distribution within the draft vocabulary, `argmax_share` of it moved to its
    likeliest token. `hidden_states` [n, hidden_size], what the target's lm_head takes; `head`: of
    the target.
    """
    logits = torch.nn.functional.linear(hidden_states, head.weight, head.bias)
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if argmax_share:
        probs *= 1 - argmax_share
        best = logits.argmax(dim=-1, keepdim=True)
        probs.scatter_add_(1, best, torch.full_like(probs[:, :1], argmax_share))
    return probs


def cross_entropy(
    hidden: torch.Tensor,
    head: OutputHead,
    probs: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of cross entropies [], and each row's likeliest id [n].

    Row r of `hidden` [n, hidden_size] should give the distribution `probs[rows[r]]` (of `probs` [m,
    draft_vocab] float32), and counts `weights[r]`. Up to a constant it is the divergence from the
    target's distribution to the drafter's. Differentiable by `hidden` and the head.
    """
    is_learning = torch.is_grad_enabled()
    loss, best = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, probs, rows, weights, is_learning
    )
    return loss, best


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        probs: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        is_learning: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        compute = dtype or hidden.dtype
        matrix, states = weight.detach().to(compute), hidden.detach().to(compute)
        grad_hidden = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        grad_bias = None if bias is None or not bias.requires_grad else torch.zeros_like(bias)
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        with torch.autocast(device, enabled=False):
            for start in range(0, len(states), _ROWS):
                part = slice(start, start + _ROWS)
                logits = (states[part] @ matrix.T).float()
                if bias is not None:
                    logits += bias.detach()
                best[part] = logits.argmax(dim=-1)
                wanted = probs.index_select(0, rows[part])
                lse = torch.logsumexp(logits, dim=-1, keepdim=True)
                scale = weights[part, None]
                # The probabilities wanted add up to 1.
                agreement = (wanted * logits).sum(dim=-1, keepdim=True)
                loss += ((lse - agreement) * scale).sum()
                if not is_learning:
                    continue
                grad = logits.sub_(lse).exp_().sub_(wanted).mul_(scale)
                narrow = grad.to(compute)
                torch.matmul(narrow, matrix, out=grad_hidden[part])
                if grad_weight is not None:
                    grad_weight += narrow.T @ states[part]
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_weight, grad_bias)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _grad_best: torch.Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        return (
            hidden * grad_loss,
            None if weight is None else weight * grad_loss,
            None if bias is None else bias * grad_loss,
            None,
            None,
            None,
            None,
        )
