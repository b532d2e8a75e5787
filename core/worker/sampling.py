"""From a row of logits to a token: the request's sampling parameters, and the draw.

Knows one row at a time: its logits, its request's parameters, the tokens before it. Does not know
which drafts get accepted; the rejection sampler does. A row's outcome depends on that row and its
own prefix alone, bit for bit: everything that rounds is computed on a fresh tensor of that row's
own, never across a batch.

Order: the processors (see there), whose result also decides greedy rows; temperature; top_k; top_p;
min_p. The filters are those of transformers' warpers of these names, applied in this order, each on
the renormalised rest. Where top_p cuts through tokens of equal weight the lower ids stay
(transformers leaves it to its sort). Logprobs are of the row as the model gave it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from foresay.core.config import GREEDY_BELOW
from foresay.core.errors import ForesayError
from foresay.core.messages import SamplingData
from foresay.core.worker.noise import NoiseKey
from foresay.core.worker.processors import Context
from foresay.core.worker.race import Race, draw

# A token that is less likely than this, relative to the likeliest, can't win the race: the
# exponentials lie in [2**-33, 33 log 2], so it would arrive after 2**5 and the likeliest before 23.
_NEGLIGIBLE = 2.0**-38
_FEW = 2048  # up to so many tokens, listing them is cheap, and so is their noise, row with row
_NUCLEUS_GUESS = 256  # most nuclei are smaller; finding that many is much cheaper than sorting


class RowError(ForesayError):
    """No token may be taken from this row of logits. The message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row to draw a token from: row `index` of a request; see `Context` for what it follows.

    Target rows and the bonus row are made alike. `logits` are only read.
    """

    logits: torch.Tensor  # [vocab_size], any float dtype
    context: Context  # shared by all rows of the request in this step
    index: int = 0

    @property
    def sampling(self) -> SamplingData:
        """The request's parameters."""
        return self.context.sampling

    @property
    def position(self) -> int:
        """Index of the drawn token in the request's tokens."""
        return len(self.context.token_ids) + self.context.depth(self.index)

    @property
    def output_index(self) -> int:
        """Index of the drawn token in the request's output."""
        return self.position - self.context.num_prompt_tokens


class Survivors(NamedTuple):
    """The tokens that a row's sampling parameters leave, less those that can't win a race."""

    token_ids: torch.Tensor | None  # [n] ascending; None: every id of the vocabulary
    weights: torch.Tensor  # [n] float32: probability relative to the likeliest's; 0: dropped


def is_greedy(sampling: SamplingData) -> bool:
    """Whether the likeliest token is taken at every position."""
    return sampling.temperature < GREEDY_BELOW


def processed_logits(row: Row) -> torch.Tensor | None:
    """Return the logits after the processors, before temperature: a new float32 [vocab_size].

    None if no processor is at work on this row: its logits are as they are.
    """
    if not row.context.uses_processors(row.index):
        return None
    return row.context.process(row.logits, row.index)


def greedy_token(row: Row, top_logit: float, top_id: int) -> int:
    """Return the likeliest allowed id (the lowest on ties), given the row's maximum and its id.

    Raises `RowError` for a row that is not finite or allows no token.
    """
    _check(top_logit)
    context = row.context
    if not context.uses_processors(row.index):
        return top_id
    if context.only_bans() and top_id not in context.banned_ids(row.index, row.logits.shape[0]):
        return top_id
    top, index = context.process(row.logits, row.index).max(dim=-1)
    _check_processed(row, top.item())
    return int(index)


def sample(rows: Sequence[Row]) -> list[int | RowError]:
    """Draw one token from each row, with the TARGET noise of its request's seed and its position.

    The i-th result is what `sample([rows[i]])` gives.
    """
    outcomes: list[int | RowError] = []
    races: dict[int, Race] = {}
    for index, row in enumerate(rows):
        key = NoiseKey(row.sampling.seed, row.position, sample=row.sampling.sample_index)
        try:
            races[index] = Race(key, *survivors(row))
            outcomes.append(-1)
        except RowError as error:
            outcomes.append(error)
    for index, token_id in zip(races, draw(list(races.values())), strict=True):
        outcomes[index] = token_id
    return outcomes


def row_logprobs(logits: torch.Tensor, token_id: int, n: int) -> dict[int, float]:
    """Return the log probability of `token_id` and then of the `n` likeliest tokens, in order.

    `logits` [vocab_size]: a row as the model gave it, only read; the log-softmax is in float32, of
    all of it: no parameter of the request changes it. Among equals the lower ids come first. The
    token has one entry, the first, even if it is one of the likeliest.
    """
    values = logits.to(torch.float32, copy=True)
    ids = [token_id]
    if n > 0:
        least = values.topk(min(n, values.shape[0])).values[-1]
        candidates = _where(values >= least)  # ascending, with all that equal the last
        order = values[candidates].sort(descending=True, stable=True).indices
        ids += candidates[order[:n]].tolist()
    chosen = torch.tensor(ids, device=values.device)
    return dict(zip(ids, values.log_softmax(dim=0)[chosen].tolist(), strict=True))


def target_probs(row: Row) -> torch.Tensor:
    """Return the distribution after all sampling parameters: [vocab_size] float32.

    The definition, written to be read: `survivors` must leave the same tokens. Greedy rows have no
    distribution. Raises `RowError` for a row that is not finite or allows no token.
    """
    sampling = row.sampling
    scores, top = _scores(row)
    if 0 < sampling.top_k < scores.shape[0]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    weights = torch.exp(scores - top)
    if sampling.top_p < 1:
        ranked, ids = weights.sort(descending=True, stable=True)
        mass = ranked.cumsum(dim=0, dtype=torch.float64)
        mass_before = torch.cat((mass.new_zeros(1), mass[:-1]))
        beyond = mass_before >= sampling.top_p * weights.sum(dtype=torch.float64)
        weights = weights.index_fill(0, ids[beyond], 0)
    weights = weights.masked_fill(weights < sampling.min_p, 0)
    return weights / weights.sum()


def survivors(row: Row) -> Survivors:
    """Return what `target_probs` would keep, without sorting or normalising the whole row.

    Raises `RowError` for a row that is not finite or allows no token.
    """
    sampling = row.sampling
    scores, top = _scores(row)
    token_ids: torch.Tensor | None = None
    if 0 < sampling.top_k < scores.shape[0]:
        token_ids = _where(scores >= scores.topk(sampling.top_k).values[-1])
        scores = scores[token_ids]
    weights = torch.exp(scores - top)  # [n], 1 for the likeliest

    # The likeliest token passes every filter, so min_p's bound is relative to it at any stage.
    least = max(sampling.min_p, _NEGLIGIBLE)
    num_nucleus = weights.shape[0]
    if sampling.top_p < 1:
        num_nucleus, nucleus_least = _nucleus(weights, sampling.top_p)
        least = max(least, nucleus_least)
    kept = weights >= least
    num_kept = int(kept.count_nonzero())
    if num_kept > num_nucleus:  # the nucleus ends within tokens of equal weight
        kept[_where(weights == least)[num_nucleus - num_kept :]] = False
        num_kept = num_nucleus
    if token_ids is None and num_kept > max(weights.shape[0] // 4, _FEW):
        return Survivors(None, weights.masked_fill_(~kept, 0))
    chosen = _where(kept)
    return Survivors(chosen if token_ids is None else token_ids[chosen], weights[chosen])


def _nucleus(weights: torch.Tensor, top_p: float) -> tuple[int, float]:
    """Return how many tokens, heaviest first, top_p keeps, and the weight of the last of them.

    A token is kept while the tokens before it hold less than `top_p` of the mass.
    """
    limit = top_p * weights.sum(dtype=torch.float64).item()
    ranked = weights.topk(min(_NUCLEUS_GUESS, weights.shape[0])).values
    mass = ranked.cumsum(dim=0, dtype=torch.float64)
    if ranked.shape[0] < weights.shape[0] and mass[-1] < limit:
        # Floats that are not negative sort as their bits do, and torch sorts integers by radix.
        ranked = weights.view(torch.int32).sort().values.flip(0).view(torch.float32)
        mass = ranked.cumsum(dim=0, dtype=torch.float64)
    num_kept = min(int(torch.searchsorted(mass, limit)) + 1, ranked.shape[0])
    return num_kept, ranked[num_kept - 1].item()


def _scores(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the processed logits over the temperature, float32 [vocab_size], and their maximum."""
    top_logit = row.logits.amax().item()
    _check(top_logit)
    processed = processed_logits(row)
    logits = row.logits.to(torch.float32) if processed is None else processed
    scores = logits / row.sampling.temperature
    top = scores.amax()
    if not math.isfinite(top.item()):
        if processed is not None:
            top_logit = processed.amax().item()
            _check_processed(row, top_logit)
        raise RowError(
            f"the target model's largest logit, {top_logit}, over the temperature "
            f"{row.sampling.temperature} exceeds float32"
        )
    return scores, top


def _check(top: float) -> None:
    """Raise unless a row with this maximum, which is NaN if any element is, allows a token."""
    if math.isnan(top):
        raise RowError("the target model's logits contain NaN")
    if top == math.inf:
        raise RowError("the target model's logits contain +inf")
    if top == -math.inf:
        raise RowError("no token is allowed: every logit is -inf")


def _check_processed(row: Row, top: float) -> None:
    """Raise unless a usable row still allows a token after its processors, given its maximum."""
    bans = row.context.describe_bans(row.index)
    if top == -math.inf and bans:
        raise RowError(f"no token is allowed: every logit is -inf, once {' and '.join(bans)}")
    if not math.isfinite(top):
        raise RowError(f"the largest logit after bias and penalties, {top}, exceeds float32")


def _where(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices at which a one-dimensional mask is true, ascending."""
    return mask.nonzero().squeeze(1)
