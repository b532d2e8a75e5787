"""The columns of a drafter's logits as ids of the target. Knows vocabularies, nothing drawn."""

from __future__ import annotations

import torch


class Columns:
    """The target ids a draft vocabulary comes to: those the target has, each once, ascending."""

    def __init__(
        self, draft_vocab: int, draft_to_target: torch.Tensor | None, vocab_size: int
    ) -> None:
        if draft_vocab == 0:
            raise ValueError("logits have no columns: the draft vocabulary is empty")
        self.token_ids: torch.Tensor | None = None  # [num_columns]; None: 0..num_columns-1
        self.lowest_id = 0
        self._source = draft_vocab, draft_to_target
        self._kept: torch.Tensor | slice = slice(min(draft_vocab, vocab_size))  # draft ids
        self._column_of: torch.Tensor | None = None  # [num_kept], if some share a column
        self._num_columns = min(draft_vocab, vocab_size)
        if draft_to_target is None:
            return
        if draft_to_target.dtype != torch.int64 or draft_to_target.shape != (draft_vocab,):
            raise ValueError(
                f"draft_to_target is {list(draft_to_target.shape)} of {draft_to_target.dtype}; "
                f"for logits of {draft_vocab} columns it must be [{draft_vocab}] of torch.int64"
            )
        kept = ((draft_to_target >= 0) & (draft_to_target < vocab_size)).nonzero().squeeze(1)
        if kept.shape[0] == 0:
            raise ValueError(f"draft_to_target names no id of the target, in range({vocab_size})")
        self.token_ids, column_of = draft_to_target[kept].unique(return_inverse=True)
        self.lowest_id = int(self.token_ids[0])
        self._num_columns = self.token_ids.shape[0]
        if self._num_columns == kept.shape[0]:  # one draft id a column: only their order differs
            order = kept[column_of.argsort()]
            is_as_it_is = torch.equal(order, torch.arange(draft_vocab, device=order.device))
            self._kept = slice(None) if is_as_it_is else order
        else:
            self._kept, self._column_of = kept, column_of

    def are_of(self, draft_vocab: int, draft_to_target: torch.Tensor | None) -> bool:
        """Whether these are the columns of such a draft vocabulary."""
        own_vocab, own_map = self._source
        if own_map is None or draft_to_target is None or own_map is draft_to_target:
            return own_map is draft_to_target and own_vocab == draft_vocab
        return torch.equal(own_map, draft_to_target)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the columns: [num_rows, num_columns].

        `logits` [num_rows, draft_vocab]. Where draft ids share a target id, their probabilities are
        summed.
        """
        kept = logits[:, self._kept]
        if self._column_of is None:
            return kept
        kept = kept.to(torch.float32)
        top = kept.amax(dim=-1, keepdim=True)
        sums = kept.new_zeros(kept.shape[0], self._num_columns)
        return sums.index_add_(1, self._column_of, (kept - top).exp()).log().add_(top)

    def target_id(self, column: int) -> int:
        """Return the target id of a column."""
        return column if self.token_ids is None else int(self.token_ids[column])

    def target_ids(self, columns: torch.Tensor | None) -> torch.Tensor | None:
        """Return the target ids of some columns, or of all (None); None: they are 0, 1, ..."""
        if self.token_ids is None or columns is None:
            return columns if self.token_ids is None else self.token_ids
        return self.token_ids[columns]
