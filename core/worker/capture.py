"""What a pass of the target leaves for proposers: hidden states of all its rows.

Knows which are wanted and holds them; not who wants them, nor which rows will be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Capture:
    """The hidden states of one forward pass, filled in by the decoder while it runs.

    `hidden_state`: the input of the lm_head, after the final norm. `layers`: the residual streams
    *entering* these layers; the number of layers stands for the one leaving the last, before the
    final norm.
    """

    def __init__(self, *, hidden_state: bool, layers: Sequence[int] = ()) -> None:
        self.hidden_state = hidden_state
        self.layers = tuple(layers)
        self._hidden: torch.Tensor | None = None
        self._streams: dict[int, torch.Tensor] = {}
        self._stacked: dict[tuple[int, ...], torch.Tensor] = {}  # for all requests of the pass

    def put_hidden(self, hidden: torch.Tensor) -> None:
        """Keep the input of the lm_head: [num_tokens, hidden_size]."""
        self._hidden = hidden

    def put_stream(self, layer: int, stream: torch.Tensor) -> None:
        """Keep the residual stream entering `layer`, if it is wanted: [num_tokens, hidden_size]."""
        if layer in self.layers:
            self._streams[layer] = stream

    @property
    def hidden(self) -> torch.Tensor:
        """The input of the lm_head: [num_tokens, hidden_size]."""
        assert self._hidden is not None, "the decoder did not run, or it was not wanted"
        return self._hidden

    def streams(self, layers: Sequence[int]) -> torch.Tensor:
        """Return the streams entering `layers`, in that order: [num_tokens, n, hidden_size]."""
        key = tuple(layers)
        if key not in self._stacked:
            self._stacked[key] = torch.stack([self._streams[layer] for layer in key], dim=1)
        return self._stacked[key]
