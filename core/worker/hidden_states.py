"""The target's hidden states over whole texts, by the same passes that decode. Knows no requests.

For those who train drafters: what a drafter will be handed is what it should be trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from foresay.core.errors import RequestError
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.capture import Capture
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel

LAST_HIDDEN = -1  # in place of a layer: the input of the lm_head, after the final norm


def hidden_states(
    target: TargetModel,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int],
    max_tokens: int,
) -> list[torch.Tensor]:
    """Run the target on texts of one token or more; a pass has `max_tokens` tokens or one text.

    `layers`: residual streams *entering* these layers, the number of layers for the one leaving the
    last; `LAST_HIDDEN` for the input of the lm_head. Returns for each text a tensor [num_tokens,
    len(layers), hidden_size] in the target's dtype, on its device. Raises `RequestError`.

    A pass has a KV cache of its own: requests that are being decoded are not disturbed.
    """
    _check_layers(layers, target.num_layers)
    found: dict[int, torch.Tensor] = {}
    for batch in _batches([len(text) for text in texts], max_tokens):
        with torch.inference_mode():
            states = _one_pass(target, [texts[index] for index in batch], layers)
        # Copies: each with a storage of its own, to be kept and sent alone; and outside of
        # inference mode, so that training may take them.
        found |= zip(batch, (state.clone() for state in states), strict=True)
    return [found[index] for index in range(len(texts))]


def _check_layers(layers: Sequence[int], num_layers: int) -> None:
    wrong = [
        layer
        for layer in layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not -1 <= layer <= num_layers
    ]
    if wrong or not layers:
        raise RequestError(
            f"layers={list(layers)!r}: expected at least one number from 0 to {num_layers} (the "
            f"residual stream entering that layer; {num_layers}: leaving the last), or -1 (the "
            "last hidden state, after the final norm)"
        )


def _batches(lens: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Share texts out to passes, by their indices; like lengths together: little is padded."""
    batch: list[int] = []
    num_tokens = 0
    for index in sorted(range(len(lens)), key=lambda index: (lens[index], index)):
        if batch and num_tokens + lens[index] > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(index)
        num_tokens += lens[index]
    if batch:
        yield batch


def _one_pass(
    target: TargetModel, texts: Sequence[Sequence[int]], layers: Sequence[int]
) -> list[torch.Tensor]:
    capture = Capture(
        hidden_state=LAST_HIDDEN in layers,
        layers=[layer for layer in layers if layer != LAST_HIDDEN],
    )
    lens = [len(text) for text in texts]
    input_ids = [token for text in texts for token in text]
    cache = KVCache(target.kv_layout, 1, sum(lens), target.dtype, target.device)
    starts = np.concatenate(([0], np.cumsum(lens)))
    slots = [np.arange(start, end) for start, end in itertools.pairwise(starts)]
    positions = [np.arange(num_tokens) for num_tokens in lens]
    num_padding = max(0, target.min_rows - len(input_ids))
    if num_padding:
        # Repeat the last row; its key and value go where nobody reads.
        input_ids += input_ids[-1:] * num_padding
        positions[-1] = np.append(positions[-1], [positions[-1][-1]] * num_padding)
    metadata = AttentionMetadata.build(
        positions,
        slots,
        np.concatenate([*slots, np.full(num_padding, cache.scratch_slot)]),
        cache.null_slot,
        target.attention_rules,
        target.device,
    )
    target.forward(
        torch.tensor(input_ids, device=target.device),
        torch.zeros(1, dtype=torch.int64, device=target.device),
        cache,
        metadata,
        capture,
    )
    wanted = [
        capture.hidden if layer == LAST_HIDDEN else capture.streams([layer])[:, 0]
        for layer in layers
    ]
    return list(torch.stack(wanted, dim=1)[: sum(lens)].split(lens))
