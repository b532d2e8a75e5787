"""The parameters that change single logits of a row, each row by its own prefix.

Knows a request's parameters, its tokens before a row, and logits. Does not know temperature, the
filters or the draw (`sampling` does), nor which drafts get accepted (`rejection_sampler` does).

Order: logit_bias; allowed_token_ids; bad words; min_tokens; repetition penalty (prompt and output);
presence and frequency penalty (output). The repetition penalty is that of transformers and of CTRL
(arXiv 1909.05858), presence and frequency those of OpenAI's API. Every operation is elementwise, so
a logit's value depends on neither the batch nor the place of its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from foresay.core.messages import SamplingData

_Ints = npt.NDArray[np.int64]


class Context:
    """One request in one step: its row j comes after all committed tokens and j of its drafts.

    If the draft is a tree, row 0 comes after the committed tokens, and row j after these and the
    drafts on the way to draft j - 1, itself included; its *depth* is their number.

    One object serves all rows of the request in the step: what needs a pass over the committed
    tokens is done once, and only if a processor asks. The tokens are not copied, and must not
    change while the object is in use.
    """

    def __init__(
        self,
        sampling: SamplingData,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        draft_token_ids: Sequence[int] = (),
        parents: Sequence[int] | None = None,
    ) -> None:
        """`token_ids`: the committed tokens, prompt and output. `parents`: None for a chain.

        `parents[j]` is the place of the draft above draft j, an earlier one, or -1.
        """
        self.sampling = sampling
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.draft_token_ids = draft_token_ids
        self._parents = parents
        self._counts: _Counts | None = None

    def depth(self, index: int) -> int:
        """Return how many drafts come before row `index`."""
        return index if self._parents is None else len(self.drafts_before(index))

    def drafts_before(self, index: int) -> Sequence[int]:
        """Return the places of the drafts before row `index`, in order."""
        if self._parents is None:
            return range(index)
        way: list[int] = []
        place = index - 1
        while place >= 0:
            way.append(place)
            place = self._parents[place]
        return way[::-1]

    def uses_processors(self, index: int) -> bool:
        """Whether anything in this module changes row `index`."""
        sampling = self.sampling
        return (
            self._masks_stop_ids(index)
            or sampling.allowed_token_ids is not None
            or bool(sampling.bad_words_token_ids)
            or self._moves_logits()
        )

    def only_bans(self) -> bool:
        """Whether `banned_ids` tells all that this module does to a row."""
        return self.sampling.allowed_token_ids is None and not self._moves_logits()

    def banned_ids(self, index: int, vocab_size: int) -> list[int]:
        """Return the ids of the vocabulary that bad words and min_tokens keep off a row.

        A bad word's last id is banned where the prefix, prompt included, ends with those before it.
        """
        banned: list[int] = []
        if words := self.sampling.bad_words_token_ids:
            tail = self._tail(index, max(map(len, words)) - 1)
            banned += [
                word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]
            ]
        if self._masks_stop_ids(index):
            banned += self.sampling.stop_token_ids
        # A tokenizer may name ids that the model lacks.
        return [token_id for token_id in banned if 0 <= token_id < vocab_size]

    def process(self, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Return row `index` as the processors leave it: a new tensor, float32 [vocab_size].

        `logits` [vocab_size], any float dtype, is only read.
        """
        sampling, device = self.sampling, logits.device
        processed = logits.to(torch.float32, copy=True)
        if sampling.logit_bias:
            ids, biases = (part.to(device) for part in self._logit_bias)
            processed[ids] += biases
        if sampling.allowed_token_ids is not None:
            ids = self._allowed_ids.to(device)
            processed = torch.full_like(processed, -torch.inf).index_copy_(0, ids, processed[ids])
        if banned := self.banned_ids(index, logits.shape[0]):
            processed.index_fill_(0, torch.tensor(banned, device=device), -torch.inf)
        if (penalty := sampling.repetition_penalty) != 1:
            ids = self._counted(logits.shape[0]).seen(self.drafts_before(index)).to(device)
            values = processed[ids]
            processed[ids] = torch.where(values < 0, values * penalty, values / penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            counted = self._counted(logits.shape[0]).output(self.drafts_before(index))
            ids, counts = (part.to(device) for part in counted)
            values = processed[ids] - sampling.frequency_penalty * counts
            processed[ids] = values - sampling.presence_penalty * (counts > 0)
        return processed

    def describe_bans(self, index: int) -> list[str]:
        """Say, one clause each, which parameters may ban tokens of row `index`."""
        sampling = self.sampling
        clauses = []
        if any(bias == -math.inf for _, bias in sampling.logit_bias):
            clauses.append("logit_bias bans tokens")
        if sampling.allowed_token_ids is not None:
            clauses.append("allowed_token_ids bans all others")
        if sampling.bad_words_token_ids:
            clauses.append("bad_words bans tokens")
        if self._masks_stop_ids(index):
            clauses.append(f"min_tokens masks the stop ids {list(sampling.stop_token_ids)}")
        return clauses

    def _moves_logits(self) -> bool:
        sampling = self.sampling
        return bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )

    def _masks_stop_ids(self, index: int) -> bool:
        if not self.sampling.stop_token_ids:
            return False
        output_index = len(self.token_ids) + self.depth(index) - self.num_prompt_tokens
        return output_index < self.sampling.min_tokens

    def _tail(self, index: int, length: int) -> tuple[int, ...]:
        """Return the last `length` tokens before a row; fewer if there are fewer."""
        way = self.drafts_before(index)
        drafts = [self.draft_token_ids[place] for place in way[max(0, len(way) - length) :]]
        first = len(self.token_ids) - (length - len(drafts))
        return (*self.token_ids[max(0, first) :], *drafts)

    @cached_property
    def _logit_bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids, biases = zip(*self.sampling.logit_bias, strict=True)
        return _tensor(ids), torch.tensor(biases, dtype=torch.float32)

    @cached_property
    def _allowed_ids(self) -> torch.Tensor:
        return _tensor(self.sampling.allowed_token_ids or ())

    def _counted(self, vocab_size: int) -> _Counts:
        if self._counts is None:
            self._counts = _Counts(self, vocab_size)
        return self._counts


class _Counts:
    """Which tokens a context has, and how often: the committed ones counted once for all rows."""

    def __init__(self, context: Context, vocab_size: int) -> None:
        # A draft may name an id that the target lacks. The rows after it are never used, so any
        # other id may stand in for it.
        drafts = [i if 0 <= i < vocab_size else 0 for i in context.draft_token_ids]
        self._drafts = np.array(drafts, dtype=np.int64)
        self._committed = np.array(context.token_ids, dtype=np.int64)
        self._num_prompt_tokens = context.num_prompt_tokens

    def seen(self, way: Sequence[int]) -> torch.Tensor:
        """Return the ids in prompt, output and the drafts before a row; a draft's may stand twice.

        `way`: the places of these drafts.
        """
        return torch.from_numpy(np.concatenate((self._committed_ids, self._drafts[way])))

    def output(self, way: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return distinct ids, and how often each is in the output before a row, as float32.

        An id that occurs in other drafts only counts 0.
        """
        ids, committed_counts, places = self._in_output
        counts = committed_counts + np.bincount(places[way], minlength=len(ids))
        return torch.from_numpy(ids), torch.from_numpy(counts.astype(np.float32))

    @cached_property
    def _committed_ids(self) -> _Ints:
        return np.flatnonzero(np.bincount(self._committed))

    @cached_property
    def _in_output(self) -> tuple[_Ints, _Ints, _Ints]:
        """The distinct ids of output and drafts, their counts in the output, the drafts' places."""
        output = self._committed[self._num_prompt_tokens :]
        counts = np.bincount(np.concatenate((output, self._drafts)))
        ids = np.flatnonzero(counts)
        places = np.searchsorted(ids, self._drafts)
        return ids, counts[ids] - np.bincount(places, minlength=len(ids)), places


def _tensor(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(token_ids, dtype=np.int64))  # faster than torch.tensor
