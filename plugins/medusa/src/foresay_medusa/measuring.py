"""Measuring heads on replies that are known, for `accuracies`. Knows tensors, no texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from foresay_medusa.accuracies import FILE, NUM_CANDIDATES, NUM_RANKS


class Measuring:
    """Counts, head by head, of which rank the replies' tokens are."""

    def __init__(self, num_heads: int) -> None:
        self._tokens = [0] * num_heads
        self._right = torch.zeros(num_heads, NUM_RANKS, dtype=torch.float64)
        self._promised = torch.zeros(num_heads, NUM_RANKS, dtype=torch.float64)

    def add(
        self,
        head: int,
        logits: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor,
        draft_to_target: torch.Tensor | None,
    ) -> torch.Tensor:
        """Take in a head's `logits` [n, draft_vocab] for tokens whose target ids are `labels` [n].

        `counts` [n] bool: where there is such a token, and the heads before had theirs among their
        candidates. Returns the same for the next head: [n] bool.
        """
        log_probs, ids = likeliest(logits, draft_to_target)
        are_right = ids == labels[:, None]
        self._tokens[head] += int(counts.sum())
        kept = are_right[counts][:, :NUM_RANKS].sum(dim=0).double().cpu()
        promised = log_probs[counts][:, :NUM_RANKS].exp().sum(dim=0).double().cpu()
        self._right[head, : len(kept)] += kept
        self._promised[head, : len(promised)] += promised
        return counts & are_right.any(dim=1)

    def save(self, folder: Path) -> None:
        """Write the file that `Accuracies.read` reads.

        A rank that was right, or promised, less than half of once counts as that: of a few tokens
        nothing is concluded. Heads that no token reached are left out.
        """
        reached = [number for number, tokens in enumerate(self._tokens) if tokens]
        heads, promised = [], []
        for number in reached:
            tokens = self._tokens[number]
            heads.append([_share(value, tokens) for value in self._right[number].tolist()])
            promised.append([_share(value, tokens) for value in self._promised[number].tolist()])
        fields: dict[str, list[list[float]] | list[int]] = {
            "heads": heads,
            "promised": promised,
            "tokens": [self._tokens[number] for number in reached],
        }
        lines = ",\n".join(f'  "{name}": {_rows(value)}' for name, value in fields.items())
        (folder / FILE).write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def likeliest(
    logits: torch.Tensor, draft_to_target: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probs and target ids [n, NUM_CANDIDATES or less] of the likeliest tokens."""
    logits = logits.to(torch.float32)
    best, ids = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]))
    if draft_to_target is not None:
        ids = draft_to_target[ids]
    return best - logits.logsumexp(dim=-1, keepdim=True), ids


def _share(value: float, tokens: int) -> float:
    return round(min(1.0, max(value, 0.5) / tokens), 5)


def _rows(value: list[list[float]] | list[int]) -> str:
    """Return JSON with a line for each row."""
    if value and isinstance(value[0], list):
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in value) + "\n  ]"
    return json.dumps(value)
