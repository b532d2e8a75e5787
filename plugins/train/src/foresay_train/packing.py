"""Texts packed into batches: whole texts of like length, up to a number of tokens each."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from foresay.core.training import TrainingBatch
from foresay_train.replies import Reply
from foresay_train.states import LAST_HIDDEN, HiddenStates


def pack(lens: Sequence[int], max_tokens: int, seed: int) -> list[list[int]]:
    """Share texts out to batches of at most `max_tokens`, or of a single text; return indices.

    Texts of a batch are of like length, so that little is padded where rows of texts stand side by
    side; which texts of like length come together is drawn.
    """
    draw = random.Random(seed)
    # A length and up to an eighth more count as alike.
    order = sorted(range(len(lens)), key=lambda text: lens[text] * draw.uniform(1.0, 1.125))
    batches: list[list[int]] = [[]]
    num_tokens = 0
    for text in order:
        if batches[-1] and num_tokens + lens[text] > max_tokens:
            batches.append([])
            num_tokens = 0
        batches[-1].append(text)
        num_tokens += lens[text]
    draw.shuffle(batches)
    return batches


class Batches(Dataset[TrainingBatch]):
    """Batches of texts with the states that a drafter takes."""

    def __init__(
        self,
        replies: Sequence[Reply],
        states: HiddenStates,
        batches: Sequence[Sequence[int]],
        aux_layers: Sequence[int],
    ) -> None:
        self._replies = replies
        self._states = states
        self._batches = batches
        self._layers = [*aux_layers, LAST_HIDDEN]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> TrainingBatch:
        texts = self._batches[index]
        replies = [self._replies[text] for text in texts]
        starts = [0]
        for reply in replies:
            starts.append(starts[-1] + len(reply))
        states = torch.cat([self._states.read(text, self._layers) for text in texts])
        return TrainingBatch(
            token_ids=torch.tensor([token for reply in replies for token in reply.token_ids]),
            starts=tuple(starts),
            num_prompt_tokens=tuple(len(reply.prompt_ids) for reply in replies),
            hidden_states=states[:, -1],
            aux_hidden_states=states[:, :-1] if len(self._layers) > 1 else None,
        )

    def num_reply_tokens(self) -> int:
        """How many tokens of replies there are in all batches."""
        return sum(len(self._replies[text].reply_ids) for texts in self._batches for text in texts)
