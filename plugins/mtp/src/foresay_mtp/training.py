"""An MTP module as it is trained, for a target that has none. Knows tensors, no texts.

One module of MiMo's layout, applied again and again to its own output, which is how it is used
where more tokens are drafted than there are modules. All matrices are drawn.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from foresay.core.proposer import TargetView
from foresay.core.training import TrainingBatch
from foresay.core.worker.chain_training import (
    ChainAttention,
    ChainDrafter,
    DraftHead,
    GatedMLP,
    save_drafter,
)
from foresay.core.worker.layer_shape import LayerShape
from foresay_mtp import MTPTraining

_PREFIX = "model.mtp_layers.0."


class TrainableModule(ChainDrafter):
    """A module; its parameters are named as in a checkpoint, without the prefix."""

    def __init__(
        self, config: MTPTraining, target: TargetView, draft_to_target: torch.Tensor | None
    ) -> None:
        shape = LayerShape.of(target.config)
        super().__init__(
            target,
            DraftHead(target, draft_to_target, trained=config.train_lm_head),
            rotary=shape.rotary().to(target.device),
            num_steps=config.num_steps,
            loss_decay=config.loss_decay,
            argmax_share=config.argmax_share,
        )
        self._shape = shape
        self._target_vocab_size = target.vocab_size
        size = shape.hidden_size
        self.token_layernorm = nn.RMSNorm(size, shape.eps)
        self.hidden_layernorm = nn.RMSNorm(size, shape.eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, shape.eps)
        self.self_attn = ChainAttention(size, size, shape.heads)
        self.post_attention_layernorm = nn.RMSNorm(size, shape.eps)
        self.mlp = GatedMLP(size, shape.intermediate_size)
        self.final_layernorm = nn.RMSNorm(size, shape.eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.to(target.device)

    @property
    def attention(self) -> ChainAttention:
        """The block's attention."""
        return self.self_attn

    def features(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the target's last hidden states, after its final norm."""
        return batch.hidden_states

    def enter(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        step: int,  # noqa: ARG002  # all steps are alike
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join state and embedding, in this order; norm the result for attention."""
        parts = [self.hidden_layernorm(hidden.float()), self.token_layernorm(embedded)]
        residual = self.input_proj(torch.cat(parts, dim=-1))
        return self.input_layernorm(residual), residual

    def leave(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed output twice: the head and the next step take the same."""
        out = residual + self.mlp(self.post_attention_layernorm(residual))
        normed = self.final_layernorm(out)
        return normed, normed

    def save(self, folder: Path) -> None:
        """Write a folder of one module."""
        tensors = {
            _PREFIX + name: value
            for name, value in self.state_dict().items()
            if not name.startswith("head.")
        }
        config = {
            "model_type": "mtp",
            "num_nextn_predict_layers": 1,
            **self._shape.config(),
            "vocab_size": self._target_vocab_size,
        }
        save_drafter(folder, config, tensors | self.head.tensors())
