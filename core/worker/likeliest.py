"""The likeliest few of each row of logits, with their log probabilities.

Knows logits and columns; not token ids, requests, or sampling parameters.
"""

from __future__ import annotations

import torch

from foresay.core.worker import cpu_kernels

_FEW_PLACES = 32  # that the CPU's own kernel finds one by one
_BLOCK = 64
_FEW = 16384  # numbers of which the largest are found as fast at once


def likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's `width` likeliest columns, int64, and their log probs, float32.

    `logits` [n, num_columns], any float dtype, only read; both results are [n, width], or
    [n, num_columns] where that is less. Among equals the lower columns come first. What is not
    likely at all, and all of a row that holds NaN or +inf, has the column 0 and -inf.
    """
    width = min(width, logits.shape[1])
    if 0 < width <= _FEW_PLACES and cpu_kernels.serves(logits.dtype, logits.device):
        return cpu_kernels.likeliest(logits, width)
    tops, best = _top(logits, min(width + 1, logits.shape[1]))  # NaN comes first
    if tops.shape[1] > 1 and _are_plain(tops):
        tops = tops[:, :width].to(torch.float32)
        return best[:, :width], tops - logits.to(torch.float32).logsumexp(dim=1, keepdim=True)
    if logits.shape[1] > width:
        # Which of equals are left out is not for topk to say.
        is_cut = (tops[:, -1] == tops[:, -2]) & tops[:, -1].isfinite() & ~tops[:, 0].isnan()
        for row in is_cut.nonzero().squeeze(1).tolist():
            candidates = (logits[row] >= tops[row, -1]).nonzero().squeeze(1)
            order = logits[row, candidates].sort(descending=True, stable=True).indices
            best[row, :width] = candidates[order[:width]]
    best, _ = best[:, :width].sort(dim=1)
    tops, order = logits.gather(1, best).sort(dim=1, descending=True, stable=True)
    log_probs = tops.to(torch.float32) - logits.to(torch.float32).logsumexp(dim=1, keepdim=True)
    are_none = (tops == -torch.inf) | ~tops[:, :1].isfinite()
    return best.gather(1, order).masked_fill(are_none, 0), log_probs.masked_fill(
        are_none, -torch.inf
    )


def _are_plain(tops: torch.Tensor) -> bool:
    """Whether all are finite and no two of a row are equal; `tops` descend in each row."""
    least, largest = (tops[:, :-1] - tops[:, 1:]).aminmax()
    return float(least) > 0 and float(largest) < torch.inf  # NaN is neither


def _top(logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's n largest values and where they are; which of equals is left open.

    The n blocks of columns with the largest maxima hold them, and a maximum is found several times
    faster than the largest n.
    """
    num_rows, num_columns = logits.shape
    num_blocks, rest = divmod(num_columns, _BLOCK)
    if rest or logits.numel() <= _FEW or num_blocks < 4 * n:
        tops, columns = logits.topk(n)
        return tops, columns
    blocks = logits.reshape(num_rows, num_blocks, _BLOCK)
    chosen = blocks.amax(dim=2).topk(n).indices  # [num_rows, n]
    values = blocks.gather(1, chosen.unsqueeze(2).expand(-1, -1, _BLOCK)).flatten(1)
    tops, places = values.topk(n)
    columns = chosen.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
    return tops, columns
