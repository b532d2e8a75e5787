"""What the heads compute, all in one pass. Knows tensors and rows, no requests and no files.

Medusa (Cai et al., 2024, arXiv 2401.10774). Each head takes the target's last hidden state, after
the final norm: what the target's own lm_head takes (`outputs[0]` of the base model, in
`medusa/model/medusa_model.py` of the authors' code). Residual blocks, x + SiLU(Wx + b), then a
matrix: head h predicts the token at +h+2 of the row's position. No head sees another's token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foresay.core.proposer import TargetView
from foresay.core.worker.decoder import Linear, silu
from foresay.core.worker.drafter_linear import drafter_linear
from foresay_medusa.vocabulary import Matrix
from foresay_medusa.weights import MedusaWeights


class MedusaHeads:
    """Heads on a target's last hidden state.

    The first blocks of all heads, which take the same input, are one product; so are the output
    matrices if the heads share one.
    """

    def __init__(self, weights: MedusaWeights, num_heads: int, target: TargetView) -> None:
        """Take the first `num_heads` heads, packed; share the target's lm_head if need be."""
        self.num_heads = num_heads
        blocks = weights.blocks[:num_heads]
        layers = list(zip(*blocks, strict=True))  # by layer, then by head; maybe none
        self._first = _linear(_joined(layers[0]), target) if layers else None
        self._later = [[_linear(block, target) for block in layer] for layer in layers[1:]]
        vocabulary = weights.vocabulary
        ids = vocabulary.draft_to_target
        self.draft_to_target = None if ids is None else ids.to(target.device)
        self._shared: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._own: list[Linear] = []
        if len(vocabulary.matrices) == 1:
            self._shared = _linear(vocabulary.matrices[0], target)
        elif vocabulary.matrices:
            self._own = [_linear(matrix, target) for matrix in vocabulary.matrices[:num_heads]]
        elif self.draft_to_target is None:
            assert target.lm_head is not None, "it was asked for"
            self._shared = target.lm_head
        else:
            assert target.lm_head_rows is not None, "it was asked for"
            self._shared = _linear(Matrix(*target.lm_head_rows(self.draft_to_target)), target)

    def logits(
        self, hidden: torch.Tensor, rows_of_heads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """Return the logits [num_rows, draft_vocab] of the first heads, one tensor a head.

        `hidden` [n, hidden_size]. `rows_of_heads`: for each head that is wanted, which of the rows
        it is wanted for, int64; None: for all.
        """
        states = self._after_first(hidden)
        inputs = []
        for head, rows in enumerate(rows_of_heads):
            x = states[head] if rows is None else states[head].index_select(0, rows)
            for layer in self._later:
                x = x + silu(layer[head](x))
            inputs.append(x)
        if self._shared is not None:
            parts: Sequence[torch.Tensor] = self._shared(torch.cat(inputs)).split(
                [len(x) for x in inputs]
            )
            return parts
        return [matrix(x) for matrix, x in zip(self._own, inputs, strict=False)]

    def _after_first(self, hidden: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each head's state [n, hidden_size] after its first block, if there is one."""
        if self._first is None:
            return [hidden] * self.num_heads
        added = silu(self._first(hidden)).view(len(hidden), self.num_heads, -1)
        return added.add_(hidden[:, None]).transpose(0, 1).contiguous().unbind()


def _joined(blocks: Sequence[Matrix]) -> Matrix:
    """Return one matrix of several that take the same input; all have a bias or none has."""
    biases = [block.bias for block in blocks if block.bias is not None]
    assert len(biases) in (0, len(blocks))
    return Matrix(
        torch.cat([block.weight for block in blocks]), torch.cat(biases) if biases else None
    )


def _linear(matrix: Matrix, target: TargetView) -> Linear:
    dtype, device = target.dtype, target.device
    bias = None if matrix.bias is None else matrix.bias.to(device, dtype)
    return drafter_linear(target)(matrix.weight.to(device, dtype), bias, dtype, pack=True)
