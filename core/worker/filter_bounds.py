"""Where top_k and top_p end in a row, said by logits, so that a kernel need not rank anything.

Knows rows of processed logits and the filters; not what they are for. What a filter keeps is closed
upwards, but for the tokens of the last weight that is kept, of which the lower ids stay. So a row's
filters come down to three numbers, and comparing logits with them is exact, while weights computed
elsewhere may be rounded in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from foresay.core.messages import SamplingData

_NUCLEUS_GUESS = 1024  # most nuclei are smaller; finding that many is much cheaper than sorting


class FilterBounds(NamedTuple):
    """A token is kept if its logit is above `high`, or not below `low` and its id is <= `cut`."""

    low: torch.Tensor  # [num_rows] float32
    high: torch.Tensor  # [num_rows] float32
    cut: torch.Tensor  # [num_rows] int64


def is_filtered(sampling: SamplingData, vocab_size: int) -> bool:
    """Whether top_k or top_p may drop a token."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1


def filter_bounds(logits: torch.Tensor, samplings: Sequence[SamplingData]) -> FilterBounds:
    """Return the bounds of rows of processed logits, [num_rows, vocab_size] float32; only read.

    They leave the tokens that `sampling.target_probs` leaves, min_p apart. Of a row that is not
    finite or allows no token they mean nothing.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    temperatures = torch.tensor([s.temperature for s in samplings], dtype=torch.float32)
    top_ks = torch.tensor([s.top_k if 0 < s.top_k < vocab_size else 0 for s in samplings])
    top_ps = torch.tensor([min(s.top_p, 1.0) for s in samplings], dtype=torch.float64)
    max_k, has_nuclei = int(top_ks.max()), bool((top_ps < 1).any())
    top_ks, top_ps = top_ks.to(device), top_ps.to(device)

    scores = logits / temperatures.to(device).unsqueeze(1)
    least_score = scores.new_full((num_rows,), -torch.inf)
    if max_k > 0:
        ranked = scores.topk(max_k).values
        kth = ranked.gather(1, (top_ks - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        least_score = torch.where(top_ks > 0, kth, least_score)
    passes = scores >= least_score.unsqueeze(1)
    last = scores == least_score.unsqueeze(1)  # the tokens of the last score or weight kept
    cut = torch.full((num_rows,), vocab_size, device=device)
    if has_nuclei:
        tops = scores.amax(dim=1, keepdim=True)
        weights = torch.exp(scores - tops).masked_fill_(~passes, 0)
        num_kept, least_weight = _nuclei(weights, top_ps, passes.sum(dim=1))
        at_least = (weights == least_weight.unsqueeze(1)) & passes
        # Of the last weight, as many as there is room for: the lowest ids.
        room = num_kept - (weights > least_weight.unsqueeze(1)).sum(dim=1)
        nucleus_cut = (at_least.cumsum(dim=1) < room.unsqueeze(1)).sum(dim=1)
        has_nucleus = top_ps < 1
        last = torch.where(has_nucleus.unsqueeze(1), at_least, last)
        cut = torch.where(has_nucleus, nucleus_cut, cut)
    low = logits.masked_fill(~last, torch.inf).amin(dim=1)
    high = logits.masked_fill(~last, -torch.inf).amax(dim=1)
    return FilterBounds(low, high, cut)


def _nuclei(
    weights: torch.Tensor, top_ps: torch.Tensor, num_passing: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tokens, heaviest first, top_p keeps in each row, and the last one's weight.

    A token is kept while the tokens before it hold less than `top_p` of the mass.
    """
    limits = top_ps * weights.sum(dim=1, dtype=torch.float64)
    ranked = weights.topk(min(_NUCLEUS_GUESS, weights.shape[1])).values
    mass = ranked.cumsum(dim=1, dtype=torch.float64)
    is_cut_short = (mass[:, -1] < limits) & (top_ps < 1)
    if ranked.shape[1] < weights.shape[1] and bool(is_cut_short.any()):
        ranked = weights.sort(dim=1, descending=True).values
        mass = ranked.cumsum(dim=1, dtype=torch.float64)
    num_kept = torch.minimum((mass < limits.unsqueeze(1)).sum(dim=1) + 1, num_passing)
    places = (num_kept - 1).clamp(0, ranked.shape[1] - 1)
    return num_kept, ranked.gather(1, places.unsqueeze(1)).squeeze(1)
