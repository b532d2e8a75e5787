"""EAGLE-3 heads as they are trained (Li et al., 2025, arXiv 2503.01840). Knows tensors, no texts.

All matrices are drawn. To begin with the target's own was tried for its MLP, and learns more slowly
where the target's weights are large: what is drawn beside them is not heard for long.
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
from foresay_eagle import EagleTraining
from foresay_eagle.taps import training_layers


class _Layer(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.self_attn = ChainAttention(2 * size, size, shape.heads)
        self.mlp = GatedMLP(size, shape.intermediate_size)
        self.hidden_norm = nn.RMSNorm(size, shape.eps)
        self.input_layernorm = nn.RMSNorm(size, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(size, shape.eps)


class TrainableEagle3(ChainDrafter):
    """An EAGLE-3 head; its parameters are named as in a checkpoint."""

    def __init__(
        self, config: EagleTraining, target: TargetView, draft_to_target: torch.Tensor | None
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
        self._config = config
        self._shape = shape
        self._target_vocab_size = target.vocab_size
        self._aux_layers = training_layers(config.aux_layers, target.num_layers)
        size, num_streams = shape.hidden_size, len(self._aux_layers)
        self.fc = nn.Linear(num_streams * size, size, bias=False)
        self.fc_norm = nn.ModuleList(
            nn.RMSNorm(size, shape.eps) for _ in range(num_streams if config.fc_norm else 0)
        )
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(size, shape.eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.to(target.device)

    @property
    def attention(self) -> ChainAttention:
        """The layer's attention."""
        return self.midlayer.self_attn

    def features(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the target's streams, [num_rows, num_streams, hidden_size]."""
        assert batch.aux_hidden_states is not None, "they were asked for"
        return batch.aux_hidden_states

    def enter(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the streams, once; norm embedding and state and lay them side by side."""
        if step == 0:
            streams = hidden.float()
            if self._config.fc_norm:
                each = zip(self.fc_norm, streams.unbind(dim=1), strict=True)
                streams = torch.stack([norm(stream) for norm, stream in each], dim=1)
            hidden = self.fc(streams.flatten(1))
        normed = self.midlayer.hidden_norm(hidden)
        x = torch.cat([self.midlayer.input_layernorm(embedded), normed], dim=-1)
        return x, normed if self._config.norm_before_residual else hidden

    def leave(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state as it is for the next step, and normed for the head."""
        state = residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))
        return state, self.norm(state)

    def save(self, folder: Path) -> None:
        """Write the head as its authors do."""
        tensors = {
            name: value for name, value in self.state_dict().items() if not name.startswith("head.")
        }
        draft_ids = self.head.draft_to_target
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **self._shape.config(),
            "vocab_size": self._target_vocab_size,
            "draft_vocab_size": self._target_vocab_size if draft_ids is None else len(draft_ids),
            "tie_word_embeddings": False,
            "norm_before_residual": self._config.norm_before_residual,
            "fc_norm": self._config.fc_norm,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self._aux_layers),
                "use_aux_hidden_state": True,
            },
        }
        save_drafter(folder, config, tensors | self.head.tensors())
