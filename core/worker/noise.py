"""Counter-based noise: Philox 4x32-10 in torch, and the exponentials of a race.

Knows seeds, positions, token ids and streams. Does not know logits, requests or drafts. Noise has
no state: a word depends on nothing but the request's seed and where it is used, so a text can be
replayed whatever the proposer, the batch, or the steps in which it was decoded.

Layout. key = (low, high 32 bits of the seed); counter = (token id // 4, position of the drawn
token, stream | offset << 8, sample index); a token's word is output number token id % 4.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BUMPS = tuple(tuple(bump * i & _MASK for bump in _WEYL) for i in range(_ROUNDS))
_CHUNK = 12288  # counters worked on at once, so that the buffers stay in the cache


class Stream(IntEnum):
    """What a word is used for; words of different streams are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Where noise is used: all of its coordinates but the token id.

    `position` is the index, in the request's tokens, of the token that is drawn. `offset` is the
    token's index in the draft, always 0 for TARGET. `sample` is the index among the `n` outputs of
    one prompt. Seeds are taken modulo 2**64.
    """

    seed: int
    position: int
    stream: Stream = Stream.TARGET
    offset: int = 0
    sample: int = 0

    @property
    def counter_tail(self) -> tuple[int, int, int]:
        """The counter's last three words."""
        return self.position, int(self.stream) | self.offset << 8, self.sample

    @property
    def philox_key(self) -> tuple[int, int]:
        """The low and the high 32 bits of the seed."""
        return self.seed & _MASK, (self.seed >> 32) & _MASK


def philox_words(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the four output words of each counter, as int64 in [0, 2**32).

    `counter` is [..., 4] and `key` [..., 2], int64 in [0, 2**32); leading dimensions broadcast.
    """
    shape = (counter[..., 0] + key[..., 0]).shape
    flat_counter = counter.expand(*shape, 4).reshape(-1, 4).T  # [4, num_counters]
    flat_key = key.expand(*shape, 2).reshape(-1, 2).T  # [2, num_counters]
    return _philox(flat_counter[0::2], flat_counter[1::2], flat_key).reshape(*shape, 4)


def vocabulary_words(key: NoiseKey, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return the words of token ids 0..vocab_size-1: [vocab_size] int64."""
    num_groups = -(-vocab_size // 4)
    position, use, sample = key.counter_tail
    even = torch.empty((2, num_groups), dtype=torch.int64, device=device)
    torch.arange(num_groups, out=even[0])
    even[1] = use
    odd = torch.tensor([[position], [sample]], device=device).expand(2, num_groups)
    words = _philox(even, odd, torch.tensor(key.philox_key, device=device).unsqueeze(1))
    return words.reshape(-1)[:vocab_size]


def token_words(
    keys: Sequence[NoiseKey], token_ids: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the words of `token_ids[i]` (int64 [n_i]) under `keys[i]`, for every i at once.

    The same words as `vocabulary_words(keys[i], ...)[token_ids[i]]`, at the cost of one counter a
    token, so cheaper for up to a quarter of the vocabulary.
    """
    lengths = [ids.shape[0] for ids in token_ids]
    ids = torch.cat(list(token_ids))  # [num_tokens]
    settings = torch.tensor([(*key.counter_tail, *key.philox_key) for key in keys])
    settings = settings.to(ids.device)
    position, use, sample, low, high = settings.repeat_interleave(
        torch.tensor(lengths, device=ids.device), dim=0, output_size=ids.shape[0]
    ).unbind(dim=1)  # [num_tokens] each
    words = _philox(
        torch.stack((ids // 4, use)), torch.stack((position, sample)), torch.stack((low, high))
    )
    return words.gather(1, (ids % 4).unsqueeze(1)).squeeze(1).split_with_sizes(lengths)


def uniforms(keys: Sequence[NoiseKey]) -> list[float]:
    """Return a number in (0, 1) for each key: (word + 0.5) / 2**32, with the word of token id 0."""
    counters = torch.tensor([(0, *key.counter_tail) for key in keys]).reshape(-1, 4)
    philox_keys = torch.tensor([key.philox_key for key in keys]).reshape(-1, 2)
    words = philox_words(counters.long(), philox_keys.long())[:, 0].tolist()
    return [(word + 0.5) * 2.0**-32 for word in words]


def exponential(word: int) -> float:
    """Turn a word into a standard exponential: -log1p(-(word + 0.5) / 2**32).

    The values lie in [2**-33, 33 log 2]: never 0, never infinite. In a race of `exponential /
    weight` each token wins with its probability; the total variation from that is below
    vocabulary size / 2**32. A scalar, so that it can't depend on a tensor's shape as torch's
    vectorised logarithms do: a race needs very few (see `sampling`).
    """
    return -math.log1p(-(word + 0.5) * 2.0**-32)


def _philox(even: torch.Tensor, odd: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return [n, 4] words from counter words 0, 2 [2, n], words 1, 3 [2, n], key [2, 1 or n]."""
    if even.shape[1] <= _CHUNK:
        return _philox_chunk(even, odd, key)
    key = key.expand(2, even.shape[1])
    cuts = [slice(start, start + _CHUNK) for start in range(0, even.shape[1], _CHUNK)]
    return torch.cat([_philox_chunk(even[:, c], odd[:, c], key[:, c]) for c in cuts])


def _philox_chunk(even: torch.Tensor, odd: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # Products are taken in int64, where they wrap modulo 2**64 and keep all their bits. `other`
    # and `product` take turns; what they hold is cut to 32 bits only where a high half is masked
    # anyway, and at the end. Calls are what costs here, so nothing is allocated in the rounds.
    state = even.clone(memory_format=torch.contiguous_format)
    other = odd.clone(memory_format=torch.contiguous_format)
    product = torch.empty_like(state)
    first, second = state.unbind()
    turns = ((product, *product.unbind(), other), (other, *other.unbind(), product))
    bumps = torch.tensor(_BUMPS, device=key.device).unsqueeze(2)  # [rounds, 2, 1]
    for index, round_key in enumerate(((key + bumps) & _MASK).unbind()):
        product, product_low, product_high, other = turns[index % 2]
        torch.mul(first, _MULTIPLIERS[0], out=product_high)
        torch.mul(second, _MULTIPLIERS[1], out=product_low)
        torch.bitwise_right_shift(product, 32, out=state)
        state.bitwise_xor_(other).bitwise_xor_(round_key).bitwise_and_(_MASK)
    product &= _MASK
    return torch.stack((first, product[0], second, product[1]), dim=1)
