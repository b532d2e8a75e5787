"""The modules as they draft: tensors and rows, no requests.

One module may be applied again and again, to its own output; of several, each predicts a token
further on than the one before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foresay.core.errors import ModelError
from foresay.core.proposer import KVRows, TargetView
from foresay.core.worker.decoder import Attend, DecoderBlock, Heads, Linear, RMSNorm, RotaryTable
from foresay.core.worker.drafter_linear import drafter_linear
from foresay_mtp.layout import Layout
from foresay_mtp.shape import BlockShape
from foresay_mtp.weights import ModuleWeights, Weights, is_target_head

logger = logging.getLogger("foresay")

Head = Callable[[torch.Tensor], torch.Tensor]


class Module:
    """One module: joins embedding and hidden state, runs its block, norms the result."""

    def __init__(
        self,
        weights: ModuleWeights,
        layout: Layout,
        shape: BlockShape,
        embeddings: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        linear: type[Linear],
        *,
        kv_apart: bool,  # see `decoder.SelfAttention`
    ) -> None:
        self._embeddings = embeddings
        self._embedding_norm = RMSNorm(weights.embedding_norm.to(device, dtype), shape.eps)
        self._hidden_norm = RMSNorm(weights.hidden_norm.to(device, dtype), shape.eps)
        self._projection = linear(weights.projection.to(device, dtype), None, dtype, pack=True)
        self._block = DecoderBlock(
            weights.block,
            Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            eps=shape.eps,
            dtype=dtype,
            device=device,
            linear=linear,
            kv_apart=kv_apart,
        )
        self._output_norm = RMSNorm(weights.output_norm.to(device, dtype), shape.eps)
        self._hidden_first = layout.family.hidden_first
        self._zeroes_first_embedding = layout.family.zeroes_first_embedding

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows]
        hidden: torch.Tensor,  # [num_rows, hidden_size], after a norm
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: KVRows,
        layer: int,
        *,
        last_rows_only: bool,
    ) -> torch.Tensor:
        """Return what the head takes, and the next module: after the norm, [num_rows, H].

        With `last_rows_only` of the rows `rows.last_rows` alone. `layer`: its KV layer.
        """
        embedded = F.embedding(token_ids, self._embeddings)
        if self._zeroes_first_embedding:
            embedded = embedded.masked_fill((rows.positions == 0)[:, None], 0.0)
        parts = [self._embedding_norm(embedded), self._hidden_norm(hidden)]
        if self._hidden_first:
            parts.reverse()
        x = self._projection(torch.cat(parts, dim=-1))
        if last_rows_only:
            return self._output_norm(self._block.last_rows(x, cos, sin, rows, layer))
        attend: Attend = functools.partial(rows.attend, layer)
        return self._output_norm(self._block(x, cos, sin, attend))


class Modules:
    """All modules, as `drafting` runs them: step i is module i's, or the last one's."""

    def __init__(
        self, layout: Layout, shape: BlockShape, weights: Weights, target: TargetView
    ) -> None:
        """Fit modules to a target. Raises `ModelError` if they do not."""
        dtype, device = target.dtype, target.device
        linear = drafter_linear(target)
        self.is_single = len(weights.modules) == 1
        self._modules = [
            Module(
                each,
                layout,
                shape,
                _embeddings(layout, each, target),
                dtype,
                device,
                linear,
                kv_apart=self.is_single,
            )
            for each in weights.modules
        ]
        self._heads = _heads(layout, weights, target)
        self.draft_to_target = None
        if weights.draft_to_target is not None:
            self.draft_to_target = weights.draft_to_target.to(device)
        self._rotary = RotaryTable(_rotary(shape).to(device), dtype, device)
        self._rotary.reserve(target.max_model_len)

    def __len__(self) -> int:
        return len(self._modules)

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor | None, rows: KVRows, step: int
    ) -> torch.Tensor:
        """Run rows through a step's module; return [num_rows, hidden_size].

        A single module returns, at step 0, the rows `rows.last_rows` alone.
        """
        assert hidden is not None
        module = self._number(step)
        cos, sin = self._rotary.rows(rows.positions)
        last_rows_only = self.is_single and step == 0
        return self._modules[module].forward(
            token_ids, hidden, cos, sin, rows, module, last_rows_only=last_rows_only
        )

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """Return logits [n, draft_vocab] of what a step's module returned for n rows."""
        return self._heads[self._number(step)](hidden)

    def _number(self, step: int) -> int:
        return min(step, len(self._modules) - 1)


def _embeddings(layout: Layout, weights: ModuleWeights, target: TargetView) -> torch.Tensor:
    """Return [vocab_size or more, hidden_size]: a module's own, or the target's."""
    shared, own = target.embeddings, weights.embeddings
    assert shared is not None, "needs() asks for them"
    if own is None:
        return shared
    if len(own) < target.vocab_size:
        raise ModelError(
            f"{str(layout.folder)!r}: the modules' embeddings are of {len(own)} tokens, and the "
            f"target model has {target.vocab_size}"
        )
    own = own.to(target.device, target.dtype)
    if torch.equal(own[: target.vocab_size], shared[: target.vocab_size]):
        return shared  # a copy, as the layout has it
    logger.info("mtp: %s has embeddings of its own", layout.folder)
    return own


def _heads(layout: Layout, weights: Weights, target: TargetView) -> list[Head]:
    """Return each module's head: its own, the one they share, or the target's, maybe reduced."""
    assert target.lm_head is not None, "needs() asks for it"
    if weights.lm_head is not None:
        logger.info(
            "mtp: %s has a head of its own, over %d of the target's %d tokens",
            layout.folder,
            len(weights.lm_head),
            target.vocab_size,
        )
        return [_head(weights.lm_head, target)] * len(weights.modules)
    if weights.draft_to_target is not None:
        assert target.lm_head_rows is not None, "it comes with lm_head"
        weight, bias = target.lm_head_rows(weights.draft_to_target.to(target.device))
        logger.info(
            "mtp: %s shares the target's lm_head, over %d of its %d tokens",
            layout.folder,
            len(weight),
            target.vocab_size,
        )
        head = drafter_linear(target)(weight, bias, target.dtype, pack=True)
        return [head] * len(weights.modules)
    heads: list[Head] = []
    for each in weights.modules:
        if each.lm_head is None or is_target_head(layout, each.lm_head):
            heads.append(target.lm_head)
        else:
            logger.info("mtp: %s has heads of its own", layout.folder)
            heads.append(_head(each.lm_head, target))
    return heads


def _head(weight: torch.Tensor, target: TargetView) -> Head:
    # Rows beyond the target's vocabulary are padding.
    weight = weight[: target.vocab_size].to(target.device, target.dtype)
    return drafter_linear(target)(weight, None, target.dtype, pack=True)


def _rotary(shape: BlockShape) -> torch.nn.Module:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            **shape.rope,
        )
    )
