"""From a row of logits to a token: the request's sampling parameters, and the draw.

Knows one row at a time: its logits, its request's parameters, its position. Does not know drafts;
the rejection sampler does. A row's outcome depends on that row alone, bit for bit: everything that
rounds is computed on a fresh tensor of that row's own, never across a batch.

Order: min_tokens masks the stop ids; temperature; top_k; top_p; min_p. The filters are those of
transformers' warpers of these names, applied in this order, each on the renormalised rest. Where
top_p cuts through tokens of equal weight the lower ids stay (transformers leaves it to its sort).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foresay.core.config import GREEDY_BELOW
from foresay.core.errors import ForesayError
from foresay.core.messages import SamplingData
from foresay.core.worker.noise import NoiseKey, exponential, token_words, vocabulary_words

# A token that is less likely than this, relative to the likeliest, can't win the race: the
# exponentials lie in [2**-33, 33 log 2], so it would arrive after 2**5 and the likeliest before 23.
_NEGLIGIBLE = 2.0**-38
_FEW = 2048  # up to so many tokens, listing them is cheap, and so is their noise, row with row
_NUCLEUS_GUESS = 256  # most nuclei are smaller; finding that many is much cheaper than sorting


class RowError(ForesayError):
    """No token may be taken from this row of logits. The message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row to draw a token from. `logits` are only read."""

    logits: torch.Tensor  # [vocab_size], any float dtype
    sampling: SamplingData
    position: int  # index of the drawn token in the request's tokens
    output_index: int  # index of the drawn token in the request's output


@dataclass(frozen=True, slots=True)
class Survivors:
    """The tokens that a row's sampling parameters leave, less those that can't win a race."""

    token_ids: torch.Tensor | None  # [n] ascending; None: every id of the vocabulary
    weights: torch.Tensor  # [n] float32: probability relative to the likeliest's; 0: dropped


def is_greedy(sampling: SamplingData) -> bool:
    """Whether the likeliest token is taken at every position."""
    return sampling.temperature < GREEDY_BELOW


def greedy_token(row: Row, top_logit: float, top_id: int) -> int:
    """Return the likeliest allowed id (the lowest on ties), given the row's maximum and its id.

    Raises `RowError` for a row that is not finite or allows no token.
    """
    _check(top_logit)
    banned = _banned_ids(row)
    if top_id in banned:
        top, index = _ban(row.logits, banned).max(dim=-1)
        _check(top.item(), banned)
        return int(index)
    return top_id


def sample(rows: Sequence[Row]) -> list[int | RowError]:
    """Draw one token from each row, with the TARGET noise of its request's seed and its position.

    The i-th result is what `sample([rows[i]])` gives.
    """
    outcomes: list[int | RowError] = []
    contested: list[tuple[int, NoiseKey, torch.Tensor, torch.Tensor]] = []
    for row in rows:
        key = NoiseKey(row.sampling.seed, row.position)
        try:
            left = survivors(row)
        except RowError as error:
            outcomes.append(error)
            continue
        if left.token_ids is None:
            words = vocabulary_words(key, left.weights.shape[0], left.weights.device)
            outcomes.append(_race(words, left.weights))
        elif left.token_ids.shape[0] == 1:
            outcomes.append(int(left.token_ids))
        else:
            contested.append((len(outcomes), key, left.token_ids, left.weights))
            outcomes.append(-1)
    if contested:
        indices, keys, ids, weights = zip(*contested, strict=True)
        races = map(_race, token_words(keys, ids), weights)
        for index, token_ids, winner in zip(indices, ids, races, strict=True):
            outcomes[index] = int(token_ids[winner])
    return outcomes


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


def _race(words: torch.Tensor, weights: torch.Tensor) -> int:
    """Return the index whose `exponential(word) / weight` is least; the lowest on ties.

    A logarithm is at least its linear bound, -log1p(-u) >= u, so only those whose u / weight is
    within the time of the one with the least u / weight can win: a few, however many take part.
    """
    earliest = words.to(torch.float32).add_(0.5).div_(weights)  # [n], in units of 2**-32
    guess = earliest.argmin()
    deadline = exponential(int(words[guess])) / weights[guess].item() * 2.0**32
    contenders = _where(earliest <= deadline * (1 + 1e-6))  # the bounds are rounded to float32
    if contenders.shape[0] == 1:
        return int(contenders)
    entries = zip(words[contenders].tolist(), weights[contenders].tolist(), strict=True)
    times = [exponential(word) / weight for word, weight in entries]
    return int(contenders[times.index(min(times))])


def _scores(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the allowed logits over the temperature, float32 [vocab_size], and their maximum."""
    top_logit = row.logits.amax()
    _check(top_logit.item())
    logits = row.logits.to(torch.float32)
    if banned := _banned_ids(row):
        logits = _ban(logits, banned)
    scores = logits / row.sampling.temperature
    top = scores.amax()
    if top == math.inf:
        raise RowError(
            f"the target model's largest logit, {top_logit.item()}, over the temperature "
            f"{row.sampling.temperature} exceeds float32"
        )
    _check(top.item(), banned)
    return scores, top


def _banned_ids(row: Row) -> list[int]:
    """Return the ids that min_tokens keeps off this row: stop ids of the vocabulary, or none."""
    if row.output_index >= row.sampling.min_tokens:
        return []
    return [i for i in row.sampling.stop_token_ids if 0 <= i < row.logits.shape[0]]


def _ban(logits: torch.Tensor, banned: list[int]) -> torch.Tensor:
    return logits.index_fill(0, torch.tensor(banned, device=logits.device), -torch.inf)


def _check(top: float, banned: Sequence[int] = ()) -> None:
    """Raise unless a row with this maximum, which is NaN if any element is, allows a token."""
    if math.isnan(top):
        raise RowError("the target model's logits contain NaN")
    if top == math.inf:
        raise RowError("the target model's logits contain +inf")
    if top == -math.inf:
        reason = f", once min_tokens masks the stop ids {banned}" if banned else ""
        raise RowError(f"no token is allowed: every logit is -inf{reason}")


def _where(mask: torch.Tensor) -> torch.Tensor:
    """Return the indices at which a one-dimensional mask is true, ascending."""
    return mask.nonzero().squeeze(1)
