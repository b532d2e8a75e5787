"""The two kinds of head, as `drafting.draft` runs them. Knows tensors and rows, no requests.

EAGLE (Li et al., 2024, arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858), which is the same head;
EAGLE-3 (arXiv 2503.01840). A row at position i pairs the embedding of token i + 1 with the target's
features at i, and predicts token i + 2; later rows take the head's own state in place of features.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.core.errors import ModelError
from foresay.core.proposer import KVRows, TargetView
from foresay.core.worker.decoder import (
    MLP,
    Attend,
    Heads,
    Linear,
    RMSNorm,
    RotaryTable,
    SelfAttention,
)
from foresay.core.worker.drafter_linear import drafter_linear
from foresay_eagle.layout import HeadLayout
from foresay_eagle.weights import HeadWeights

logger = logging.getLogger("foresay")


class _Head:
    """What both kinds have: embeddings, one layer, an output matrix over a draft vocabulary."""

    def __init__(self, layout: HeadLayout, weights: HeadWeights, target: TargetView) -> None:
        self.layout = layout
        dtype, device = target.dtype, target.device
        linear = drafter_linear(target)
        self.embeddings = _embeddings(layout, weights, target)
        vocabulary = _vocabulary(layout, weights, target)
        self.lm_head, self.draft_to_target = vocabulary.lm_head, vocabulary.draft_to_target
        self.fc = linear(
            weights.fc.to(device, dtype),
            None if weights.fc_bias is None else weights.fc_bias.to(device, dtype),
            dtype,
            pack=True,
            row_invariant=False,
        )
        self.attention = SelfAttention(
            weights.attention,
            Heads(layout.num_heads, layout.num_kv_heads, layout.head_dim),
            eps=layout.eps,
            dtype=dtype,
            device=device,
            window=layout.window,
            row_invariant=False,
            linear=linear,
            kv_apart=True,
        )
        self.mlp = MLP(weights.mlp, dtype, device, row_invariant=False, linear=linear)
        self.norms = {
            name: RMSNorm(weight.to(device, dtype), layout.eps)
            for name, weight in weights.norms.items()
        }
        self.rotary = RotaryTable(_rotary(layout).to(device), dtype, device)
        self.rotary.reserve(target.max_model_len)

    def _layer(
        self, x: torch.Tensor, residual: torch.Tensor, rows: KVRows, step: int
    ) -> torch.Tensor:
        """Run the layer; at step 0, of features, return the rows `rows.last_rows` alone."""
        cos, sin = self.rotary.rows(rows.positions)
        if step == 0:
            residual = self.attention.last_rows(x, residual, cos, sin, rows, 0)
        else:
            attend: Attend = functools.partial(rows.attend, 0)
            residual = self.attention(x, residual, cos, sin, attend)
        return self.mlp(self.norms["post_attention_layernorm"](residual), residual)


class EagleHead(_Head):
    """EAGLE-1 and 2: fc joins embedding and state; no norm before attention, none at the end."""

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows]
        hidden: torch.Tensor | None,  # [num_rows, hidden_size]
        rows: KVRows,
        step: int,
    ) -> torch.Tensor:
        """Return what the lm_head and the next step take; [num_rows, hidden_size].

        At step 0 of the rows `rows.last_rows` alone.
        """
        assert hidden is not None
        x = self.fc(torch.cat([F.embedding(token_ids, self.embeddings), hidden], dim=-1))
        return self._layer(x, x, rows, step)

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:  # noqa: ARG002
        """Return logits [n, draft_vocab]."""
        return self.lm_head(hidden)


class Eagle3Head(_Head):
    """EAGLE-3: fc joins the target's streams, once; attention takes embedding and state as one."""

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows]
        hidden: torch.Tensor
        | None,  # [num_rows, num_streams, H] at step 0, [num_rows, hidden_size]
        rows: KVRows,
        step: int,
    ) -> torch.Tensor:
        """Return what the next step takes; the lm_head takes it normed; [num_rows, hidden_size].

        At step 0 of the rows `rows.last_rows` alone.
        """
        assert hidden is not None
        if step == 0:
            hidden = self._joined(hidden)
        normed = self.norms["hidden_norm"](hidden)
        embedded = self.norms["input_layernorm"](F.embedding(token_ids, self.embeddings))
        residual = normed if self.layout.norm_before_residual else hidden
        out = self._layer(torch.cat([embedded, normed], dim=-1), residual, rows, step)
        return self.norms["norm"](out) if self.layout.norm_output else out

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:  # noqa: ARG002
        """Return logits [n, draft_vocab]."""
        return self.lm_head(hidden if self.layout.norm_output else self.norms["norm"](hidden))

    def _joined(self, streams: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, hidden_size] of the target's `streams` [num_rows, num_streams, H]."""
        if "fc_norm.0" in self.norms:
            each = enumerate(streams.unbind(dim=1))
            x = torch.cat([self.norms[f"fc_norm.{i}"](stream) for i, stream in each], dim=-1)
        else:
            x = streams.flatten(1)
        if "input_norm" in self.norms:
            x = self.norms["input_norm"](x)
        return self.fc(x)


def build_head(
    layout: HeadLayout, weights: HeadWeights, target: TargetView
) -> EagleHead | Eagle3Head:
    """Build a head for a target; `ModelError` if it lacks what the target cannot share."""
    kind = Eagle3Head if layout.variant == "eagle3" else EagleHead
    return kind(layout, weights, target)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    draft_to_target: torch.Tensor | None


def _embeddings(layout: HeadLayout, weights: HeadWeights, target: TargetView) -> torch.Tensor:
    """Return [target's vocab_size or more, hidden_size]: the head's own, or the target's."""
    shared = target.embeddings
    fits = shared is not None and shared.shape[1] == layout.hidden_size
    own = weights.embeddings
    if own is None:
        if not fits:
            raise ModelError(
                f"{layout.folder!r} has no 'embed_tokens.weight', and the target's embeddings do "
                f"not fit a head of hidden size {layout.hidden_size}"
            )
        logger.info("eagle: %s shares the target's embeddings", layout.folder)
        assert shared is not None
        return shared
    logger.info("eagle: %s has embeddings of its own", layout.folder)
    own = own.to(target.device, target.dtype)
    missing = target.vocab_size - len(own)
    if missing <= 0:
        return own
    # Ids of the target alone can be committed, too, and a head must take them somehow.
    if fits and shared is not None:
        return torch.cat([own, shared[len(own) : target.vocab_size].to(own)])
    return torch.cat([own, own.new_zeros(missing, own.shape[1])])


def _vocabulary(layout: HeadLayout, weights: HeadWeights, target: TargetView) -> _Vocabulary:
    """Return the output matrix, the head's own or the target's, over ids that the target has."""
    own, ids = weights.lm_head, weights.draft_to_target
    if own is None:
        return _shared_vocabulary(layout, ids, target)
    kept = _kept(layout, torch.arange(len(own)) if ids is None else ids, target)
    logger.info(
        "eagle: %s has an lm_head of its own, over %d of the target's %d tokens",
        layout.folder,
        len(kept),
        target.vocab_size,
    )
    bias = weights.lm_head_bias
    if len(kept) < len(own):
        own = own[kept]
        bias = None if bias is None else bias[kept]
        ids = None if ids is None else ids[kept]
    return _Vocabulary(_matrix(own, bias, target), None if ids is None else ids.to(target.device))


def _shared_vocabulary(
    layout: HeadLayout, ids: torch.Tensor | None, target: TargetView
) -> _Vocabulary:
    """Return the target's output matrix; of `ids`, its rows for those that the target has."""
    if target.lm_head is None or layout.hidden_size != target.hidden_size:
        raise ModelError(
            f"{layout.folder!r} has no 'lm_head.weight', and the target's does not fit a head of "
            f"hidden size {layout.hidden_size}"
        )
    if ids is None:
        logger.info("eagle: %s shares the target's lm_head", layout.folder)
        return _Vocabulary(target.lm_head, None)
    assert target.lm_head_rows is not None, "it comes with lm_head"
    ids = ids[_kept(layout, ids, target)].to(target.device)
    logger.info(
        "eagle: %s shares the target's lm_head, over %d of its %d tokens",
        layout.folder,
        len(ids),
        target.vocab_size,
    )
    return _Vocabulary(_matrix(*target.lm_head_rows(ids), target), ids)


def _kept(layout: HeadLayout, ids: torch.Tensor, target: TargetView) -> torch.Tensor:
    """Return where `ids` are the target's, too; `ModelError` if none is."""
    kept = (ids < target.vocab_size).nonzero().squeeze(1)
    if not len(kept):
        raise ModelError(f"{layout.folder!r} drafts no token id that the target has")
    return kept


def _matrix(weight: torch.Tensor, bias: torch.Tensor | None, target: TargetView) -> Linear:
    return drafter_linear(target)(
        weight.to(target.device, target.dtype),
        None if bias is None else bias.to(target.device, target.dtype),
        target.dtype,
        pack=True,
        row_invariant=False,
    )


def _rotary(layout: HeadLayout) -> torch.nn.Module:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=layout.hidden_size,
            num_attention_heads=layout.num_heads,
            num_key_value_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            max_position_embeddings=layout.max_positions,
            rope_parameters=dict(layout.rope),
        )
    )
