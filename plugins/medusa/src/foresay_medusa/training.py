"""Medusa heads as they are trained (Cai et al., 2024, arXiv 2401.10774). Knows tensors, no texts.

Residual blocks begin at zero, so that a new head says what the target says, and all heads share one
output matrix over the draft vocabulary, which begins as the target's. The target is not trained
("Medusa-1").
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from foresay.core.proposer import TargetView
from foresay.core.training import TrainingBatch, TrainingLoss
from foresay.core.worker.chain_training import Chains, DraftHead, reply_probs, save_drafter
from foresay.core.worker.distilling import cross_entropy
from foresay_medusa import MedusaTraining
from foresay_medusa.measuring import Measuring


class TrainableMedusa(nn.Module):
    """All heads."""

    def __init__(
        self, config: MedusaTraining, target: TargetView, draft_to_target: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._config = config
        self._target_vocab_size, self._hidden_size = target.vocab_size, target.hidden_size
        self.head = DraftHead(target, draft_to_target, trained=config.train_lm_head)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(target.hidden_size, target.hidden_size) for _ in range(config.num_layers)
            )
            for _ in range(config.num_heads)
        )
        for linear in self.blocks.modules():
            if isinstance(linear, nn.Linear):
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)
        self.to(target.device)

    def forward(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the heads' losses; head h counts `loss_decay` to the power of h."""
        chains = Chains(batch)
        probs, probs_row = reply_probs(batch, self.head, self._config.argmax_share)
        hidden = batch.hidden_states[chains.base_rows].float()
        total = torch.zeros((), device=hidden.device)
        hits, valid = [], []
        for number in range(len(self.blocks)):
            x = self._state(number, hidden)
            labels = batch.token_ids[chains.rows_ahead(number + 2)]
            valid.append(chains.reaches(number + 2))
            loss, best = cross_entropy(
                x,
                self.head.own,
                probs,
                probs_row[chains.rows_ahead(number + 1)],
                self.head.weights_of(labels, valid[-1]),
            )
            total = total + loss * self._config.loss_decay**number
            hits.append(self.head.are_hits(best, labels))
        return TrainingLoss(
            total / len(hidden), torch.stack(hits, dim=1), torch.stack(valid, dim=1)
        )

    def _state(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the output head takes of head `number`, for `hidden` [n, hidden_size]."""
        x = hidden
        for linear in self.blocks[number]:  # type: ignore[attr-defined]  # a ModuleList is one
            x = x + F.silu(linear(x))
        return x

    @torch.inference_mode()
    def save_measured(self, folder: Path, held_out: Iterable[TrainingBatch]) -> None:
        """Write how often each head's candidates are right, by rank: what trees are chosen by."""
        measuring = Measuring(self._config.num_heads)
        own = self.head.own
        for batch in held_out:
            chains = Chains(batch)
            hidden = batch.hidden_states[chains.base_rows].float()
            counts = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
            for number in range(len(self.blocks)):
                logits = F.linear(self._state(number, hidden), own.weight, own.bias)
                labels = batch.token_ids[chains.rows_ahead(number + 2)]
                counts = measuring.add(
                    number,
                    logits,
                    labels,
                    counts & chains.reaches(number + 2),
                    self.head.draft_to_target,
                )
        measuring.save(folder)

    def save(self, folder: Path) -> None:
        """Write the heads with the authors' names for blocks, and one `lm_head` for all."""
        tensors = {}
        for name, value in self.blocks.state_dict().items():  # "head.layer.kind"
            head, layer, kind = name.split(".")
            tensors[f"{head}.{layer}.linear.{kind}"] = value
        draft_ids = self.head.draft_to_target
        config = {
            "model_type": "medusa",
            "medusa_num_heads": self._config.num_heads,
            "medusa_num_layers": self._config.num_layers,
            "hidden_size": self._hidden_size,
            "vocab_size": self._target_vocab_size,
        }
        if draft_ids is not None:
            config["draft_vocab_size"] = len(draft_ids)
        save_drafter(folder, config, tensors | self.head.tensors())
