"""The rules for drafts that were drawn from kept probs: `rejection` and `block`.

Knows one request's rows, its draft, and what that was drawn from. Does not know noise, the batch,
or results.

With t_i(x) and d_i(x) the target and the draft probs of token x in place i = 1..k, x_i the draft's
token there, u_i uniforms, p_0 = 1, and S_i(p) = sum over x of max(p t_i(x) - d_i(x), 0):

- rejection (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): x_i is
  accepted iff u_i < t_i(x_i) / d_i(x_i). At the first that isn't, a token is drawn in proportion to
  max(t_i - d_i, 0).
- block (Sun et al. 2024, arXiv 2403.10444): p_i = min(p_{i-1} t_i(x_i) / d_i(x_i), 1), and the
  prefix of length i passes iff u_i < h_i, where h_k = p_k and, with S = S_{i+1}(p_i),
  h_i = S / (S + 1 - p_i). The longest prefix that passes is accepted, of length n; a token is drawn
  in proportion to max(p_n t_{n+1} - d_{n+1}, 0). A token that alone would be rejected may so be
  kept for what follows it, and in expectation no fewer are accepted than by `rejection`.

The residual is over the tokens that the target's filters leave: elsewhere it is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foresay.core.worker.draft_sampler import DraftProbs
from foresay.core.worker.sampling import Row, RowError, Survivors, survivors

_SUM_TOLERANCE = 1e-3  # probs that are further from 1 in sum are not what a token was drawn from


def are_usable(
    draft_probs: DraftProbs, token_ids: Sequence[int], num_committed: int, vocab_size: int
) -> bool:
    """Whether these can be the probs that the draft `token_ids` was drawn from, after that prefix.

    They are of this committed length and draft, finite, not negative, sum to 1, and give each token
    that the target has some probability. (Tokens it lacks are rejected whatever their probs.)
    """
    probs, columns = draft_probs.probs, draft_probs.token_ids
    if draft_probs.num_tokens != num_committed:
        return False
    if probs.ndim != 2 or probs.shape[0] != len(token_ids) or probs.shape[1] == 0:
        return False
    if columns is not None and columns.shape != probs.shape[1:]:
        return False
    # The comparisons are false for NaN.
    excess = probs.sum(dim=-1).sub_(1).abs_().amax()
    if not (probs.amin() >= 0 and excess <= _SUM_TOLERANCE):
        return False
    known = [j for j, token_id in enumerate(token_ids) if 0 <= token_id < vocab_size]
    ids = torch.tensor([token_ids[j] for j in known], dtype=torch.int64, device=probs.device)
    if columns is not None:
        places = torch.searchsorted(columns, ids).clamp_(max=columns.shape[0] - 1)
        if not torch.equal(columns[places], ids):
            return False
        ids = places
    elif not bool((ids < probs.shape[1]).all()):
        return False
    return bool((probs[known, ids] > 0).all())


class DrawnDraft:
    """A draft before its target rows, each of which is worked on when it is first needed."""

    def __init__(
        self,
        row: Callable[[int], Row],
        token_ids: Sequence[int],
        draft_probs: DraftProbs,
        vocab_size: int,
    ) -> None:
        """`row(j)`: what follows j draft tokens. `draft_probs` must be usable."""
        self.token_ids = token_ids
        self._row = row
        self._draft_probs = draft_probs
        self._vocab_size = vocab_size
        self._targets: dict[int, Survivors] = {}
        self._drafts: dict[int, torch.Tensor] = {}

    def ratio(self, j: int) -> float:
        """Return target prob over draft prob of the token after j; 0 for one the target lacks.

        Raises `RowError` if the target's row can't be used.
        """
        token_ids, probs = self._target(j)
        token_id = self.token_ids[j]
        if token_ids is None:
            target = probs[token_id].item() if 0 <= token_id < probs.shape[0] else 0.0
        else:
            place = int(torch.searchsorted(token_ids, token_id))
            is_left = place < token_ids.shape[0] and int(token_ids[place]) == token_id
            target = probs[place].item() if is_left else 0.0
        return target / self._draft(j)[token_id].item() if target > 0 else 0.0

    def residual(self, j: int, scale: float) -> Survivors:
        """Return max(scale * target - draft, 0) over the tokens that may follow j draft tokens.

        Raises `RowError` as `ratio` does.
        """
        token_ids, probs = self._target(j)
        draft = self._draft(j)
        if token_ids is not None:
            draft = draft[token_ids]
        return Survivors(token_ids, (probs * scale).sub_(draft).clamp_(min=0))

    def _target(self, j: int) -> Survivors:
        """Return the target's distribution after j draft tokens: weights that sum to 1."""
        if j not in self._targets:
            token_ids, weights = survivors(self._row(j))
            mass = weights.sum(dtype=torch.float64).to(torch.float32)
            self._targets[j] = Survivors(token_ids, weights / mass)
        return self._targets[j]

    def _draft(self, j: int) -> torch.Tensor:
        """Return what draft token j was drawn from, over the target's ids: [vocab_size] float32."""
        if j not in self._drafts:
            probs, columns = self._draft_probs.probs[j], self._draft_probs.token_ids
            if columns is None and probs.shape[0] < self._vocab_size:
                columns = torch.arange(probs.shape[0], device=probs.device)
            if columns is not None:
                is_known = (columns >= 0) & (columns < self._vocab_size)
                spread = probs.new_zeros(self._vocab_size)
                probs = spread.index_add_(0, columns[is_known], probs[is_known])
            self._drafts[j] = probs[: self._vocab_size]
        return self._drafts[j]


def accept_by_rejection(draft: DrawnDraft, uniforms: Sequence[float]) -> tuple[int, float]:
    """Return how many tokens are accepted, and the scale of the residual: always 1.

    A row that can't be used accepts nothing; whoever takes the residual there meets its error.
    """
    for j, uniform in enumerate(uniforms):
        try:
            if not uniform < draft.ratio(j):
                return j, 1.0
        except RowError:
            return j, 1.0
    return len(uniforms), 1.0


def accept_by_block(draft: DrawnDraft, uniforms: Sequence[float]) -> tuple[int, float]:
    """Return how many tokens are accepted, n, and p_n, the scale of the residual.

    A row that can't be used ends the draft before it, as if no more had been drawn: that depends on
    the tokens before only. If all of those are accepted, its error is met in the residual.
    """
    scales = [1.0]  # p_0, p_1, ...
    for j in range(len(uniforms)):
        try:
            scales.append(min(scales[-1] * draft.ratio(j), 1.0))
        except RowError:
            break
        if scales[-1] == 0:  # and so are all further ones: no prefix from here on can pass
            break
    last = len(scales) - 1
    for i in range(last, 0, -1):
        scale = passes = scales[i]
        if i < last and scale < 1:
            excess = draft.residual(i, scale).weights.sum(dtype=torch.float64).item()
            passes = excess / (excess + 1 - scale)
        if uniforms[i - 1] < passes:
            return i, scale
    return 0, 1.0
