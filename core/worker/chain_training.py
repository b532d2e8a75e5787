"""Training what drafts a chain with one layer: EAGLE's heads, MTP modules. Knows rows and texts.

A drafter meets the target's features at its first step only; at later ones it goes on from its own
state, and the keys and values it attends to are, as far as the chain goes, its own as well. It is
trained as it will be used, "training-time test" (EAGLE-3, Li et al., 2025, arXiv 2503.01840,
section 3.2): every position of a reply begins a chain; all chains take their first step together,
then their second from what the first one left, and so on. Step j of a chain that begins at i stands
at position i + j and attends to the first-step keys of positions up to i, and to its own of the
steps 1 to j. The tokens taken in are the text's.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from foresay.core.proposer import TargetView
from foresay.core.training import TrainingBatch, TrainingLoss
from foresay.core.worker.decoder import Heads, RotaryTable, rotate
from foresay.core.worker.distilling import OutputHead, cross_entropy, teacher_probs


class Chains:
    """The rows of a batch: *key rows*, all but each text's last; and those where chains begin."""

    def __init__(self, batch: TrainingBatch) -> None:
        device = batch.token_ids.device
        lens = np.diff(batch.starts)
        prompts = np.asarray(batch.num_prompt_tokens)
        num_chains = lens - prompts - 1
        key_rows, bases = [], []
        for start, length, prompt in zip(batch.starts[:-1], lens, prompts, strict=True):
            key_rows.append(np.arange(start, start + length - 1))
            bases.append(np.arange(start + prompt - 1, start + length - 2))
        text = np.repeat(np.arange(len(lens)), num_chains)
        base = np.concatenate(bases)
        starts = np.asarray(batch.starts)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.key_rows = tensor(np.concatenate(key_rows))  # [num_key_rows], rows of the batch
        self.base_rows = tensor(base)  # [num_chains], rows of the batch
        # Where chains begin among the key rows: each text before has one row less.
        self.base_keys = tensor(base - text)
        self.key_positions = tensor(np.concatenate([np.arange(n - 1) for n in lens]))
        self.base_positions = tensor(base - starts[text])
        self._ends = tensor(starts[text + 1] - 1)  # each chain's text's last row
        # Padded for attention: [num_texts, most rows], into the flat rows.
        self._key_pad = tensor(_padded(np.concatenate(([0], np.cumsum(lens - 1)))))
        self._chain_pad = tensor(_padded(np.concatenate(([0], np.cumsum(num_chains)))))
        width = self._chain_pad.shape[1]
        place = np.concatenate([np.arange(n) for n in num_chains])
        self._chain_unpad = tensor(text * width + place)
        keys = torch.arange(self._key_pad.shape[1], device=device)
        hidden = keys > self.base_positions[self._chain_pad][..., None]
        self._mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))

    def rows_ahead(self, num_tokens: int) -> torch.Tensor:
        """Return the row so many tokens after each chain's begin, at most the text's last."""
        return torch.minimum(self.base_rows + num_tokens, self._ends)

    def reaches(self, num_tokens: int) -> torch.Tensor:
        """Return for each chain whether its text goes on so far after its begin."""
        return self.base_rows + num_tokens <= self._ends

    def pad_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_texts, most, ...] of key rows [num_key_rows, ...]."""
        return rows[self._key_pad]

    def pad_chains(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_texts, most, ...] of chains [num_chains, ...]."""
        return rows[self._chain_pad]

    def unpad_chains(self, padded: torch.Tensor) -> torch.Tensor:
        """Return [num_chains, ...] of [num_texts, most, ...]."""
        return padded.flatten(0, 1)[self._chain_unpad]

    @property
    def mask(self) -> torch.Tensor:
        """Additive, [num_texts, most chains, most keys]: no key lies behind a chain's begin."""
        return self._mask


def _padded(starts: np.ndarray) -> np.ndarray:
    """Return indices [n, longest] of n ranges; a short one goes on with its last index."""
    lens = np.diff(starts)
    offsets = np.minimum(np.arange(lens.max()), lens[:, None] - 1)
    return np.asarray(starts[:-1, None] + offsets)


class ChainAttention(nn.Module):
    """Attention of all chains, step after step; tensors are named as in checkpoints."""

    def __init__(self, input_size: int, hidden_size: int, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        width, kv_width = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def query(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return rotated queries [n, num_heads, head_dim] of `x` [n, input_size]."""
        query = self.q_proj(x).view(len(x), self.heads.num_heads, -1)
        return rotate(query, cos, sin)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys and values, [n, num_kv_heads, head_dim] each."""
        shape = (len(x), self.heads.num_kv_heads, -1)
        return rotate(self.k_proj(x).view(shape), cos, sin), self.v_proj(x).view(shape)

    def attend(
        self,
        query: torch.Tensor,  # [num_chains, num_heads, head_dim]
        first: tuple[torch.Tensor, torch.Tensor],  # of the key rows
        own: list[tuple[torch.Tensor, torch.Tensor]],  # of the chains, at steps 1, 2, ...
        chains: Chains,
    ) -> torch.Tensor:
        """Return [num_chains, hidden_size]."""
        num_kv, dim = self.heads.num_kv_heads, self.heads.head_dim
        fold = self.heads.num_heads // num_kv
        padded = chains.pad_chains(query)  # [B, Q, H, D]
        num_texts, num_queries = padded.shape[:2]
        # Query heads that share a key head become rows of one matrix: [B, Hkv, fold * Q, D].
        padded = padded.view(num_texts, num_queries, num_kv, fold, dim).permute(0, 2, 3, 1, 4)
        padded = padded.reshape(num_texts, num_kv, fold * num_queries, dim) * dim**-0.5
        keys, values = (chains.pad_keys(rows).transpose(1, 2) for rows in first)  # [B, Hkv, K, D]
        scores = torch.matmul(padded, keys.transpose(2, 3))
        scores = scores.view(num_texts, num_kv, fold, num_queries, -1)
        scores = scores + chains.mask[:, None, None].to(scores.dtype)
        num_keys = scores.shape[-1]
        parts = [scores]
        rows = padded.view(num_texts, num_kv, fold, num_queries, dim)
        own_padded = [
            [chains.pad_chains(x).transpose(1, 2)[:, :, None] for x in pair] for pair in own
        ]  # [B, Hkv, 1, Q, D]
        parts += [(rows * key).sum(dim=-1, keepdim=True) for key, _ in own_padded]
        probs = torch.softmax(torch.cat(parts, dim=-1) if own else scores, dim=-1)
        seen = probs[..., :num_keys].reshape(num_texts, num_kv, fold * num_queries, num_keys)
        out = torch.matmul(seen.to(values.dtype), values).view(rows.shape)
        for at, (_, value) in enumerate(own_padded, num_keys):
            out = out + probs[..., at : at + 1] * value
        out = out.permute(0, 3, 1, 2, 4).reshape(num_texts, num_queries, -1)
        attended: torch.Tensor = self.o_proj(chains.unpad_chains(out))
        return attended


class GatedMLP(nn.Module):
    """The Llama family's MLP; tensors are named as in checkpoints."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the shape of `x` [n, hidden_size]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftHead(nn.Module):
    """The output head over the draft vocabulary: the target's rows, trained on or shared."""

    draft_to_target: torch.Tensor | None
    is_drafted: torch.Tensor | None
    target_weight: torch.Tensor
    target_bias: torch.Tensor | None

    def __init__(
        self, target: TargetView, draft_to_target: torch.Tensor | None, *, trained: bool
    ) -> None:
        super().__init__()
        ids = draft_to_target
        if ids is None:
            ids = torch.arange(target.vocab_size, device=target.device)
        assert target.lm_head_rows is not None, "a training's target has it"
        weight, bias = target.lm_head_rows(ids.to(target.device))
        self.vocab_size = target.vocab_size
        drafted = None
        if draft_to_target is not None:
            drafted = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
            drafted[ids] = True
        for name, value in (
            ("draft_to_target", draft_to_target),
            ("is_drafted", drafted),
            ("target_weight", weight.float()),
            ("target_bias", None if bias is None else bias.float()),
        ):
            self.register_buffer(name, value, persistent=False)
        self.weight = nn.Parameter(weight.float().clone()) if trained else None

    @property
    def target(self) -> OutputHead:
        """The target's own head for these tokens."""
        return OutputHead(self.target_weight, self.target_bias)

    @property
    def own(self) -> OutputHead:
        """The drafter's."""
        return self.target if self.weight is None else OutputHead(self.weight)

    def weights_of(self, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return which rows count, [n] float32: those of a text's token that can be drafted."""
        return (valid if self.is_drafted is None else valid & self.is_drafted[labels]).float()

    def are_hits(self, best: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return whether the likeliest draft ids [n] are the labels, target ids [n]."""
        ids = best if self.draft_to_target is None else self.draft_to_target[best]
        return ids == labels

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs: `d2t`, offsets, and `lm_head.weight` if it is trained."""
        found = {}
        if self.draft_to_target is not None:
            ids = self.draft_to_target
            found["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        if self.weight is not None:
            found["lm_head.weight"] = self.weight.detach()
        return found


class ChainDrafter(nn.Module):
    """A drafter of one layer, with what its kind does before and after: see `enter` and `leave`.

    `loss_decay`: what step j + 1 counts, compared to step j. `argmax_share`: see `teacher_probs`.
    """

    embeddings: torch.Tensor

    def __init__(
        self,
        target: TargetView,
        head: DraftHead,
        *,
        rotary: Any,
        num_steps: int,
        loss_decay: float,
        argmax_share: float,
    ) -> None:
        """`rotary`: transformers' rotary module for the layer's heads."""
        super().__init__()
        assert target.embeddings is not None, "a training's target has them"
        self.head = head
        self.num_steps = num_steps
        self.loss_decay = loss_decay
        self._argmax_share = argmax_share
        self.register_buffer(
            "embeddings", target.embeddings[: target.vocab_size].float(), persistent=False
        )
        self._rotary = RotaryTable(rotary, torch.float32, target.device)
        self._rotary.reserve(target.max_model_len + num_steps)

    @property
    @abstractmethod
    def attention(self) -> ChainAttention:
        """The layer's attention."""

    @abstractmethod
    def features(self, batch: TrainingBatch) -> torch.Tensor:
        """Return what of the target's states the drafter takes, by row of the batch."""

    @abstractmethod
    def enter(
        self, embedded: torch.Tensor, hidden: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join embeddings [n, hidden_size] and features (at step 0) or state (later).

        Returns what attention takes, [n, input_size], and the residual [n, hidden_size].
        """

    @abstractmethod
    def leave(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run what follows attention; return the next step's state and what the head takes."""

    def forward(self, batch: TrainingBatch) -> TrainingLoss:
        """Unroll all chains of the batch."""
        chains = Chains(batch)
        probs, probs_row = reply_probs(batch, self.head, self._argmax_share)
        tokens = batch.token_ids
        features = self.features(batch)[chains.key_rows]
        x, residual = self.enter(self.embeddings[tokens[chains.key_rows + 1]], features, 0)
        first = self.attention.keys_values(x, *self._rotary.rows(chains.key_positions))
        x, residual = x[chains.base_keys], residual[chains.base_keys]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden = residual
        total = torch.zeros((), device=tokens.device)
        hits, valid = [], []
        for step in range(self.num_steps):
            cos, sin = self._rotary.rows(chains.base_positions + step)
            if step:
                x, residual = self.enter(
                    self.embeddings[tokens[chains.rows_ahead(step + 1)]], hidden, step
                )
                own.append(self.attention.keys_values(x, cos, sin))
            attended = self.attention.attend(self.attention.query(x, cos, sin), first, own, chains)
            hidden, output = self.leave(residual + attended)
            labels = tokens[chains.rows_ahead(step + 2)]
            valid.append(chains.reaches(step + 2))
            loss, best = cross_entropy(
                output,
                self.head.own,
                probs,
                probs_row[chains.rows_ahead(step + 1)],
                self.head.weights_of(labels, valid[-1]),
            )
            total = total + loss * self.loss_decay**step
            hits.append(self.head.are_hits(best, labels))
        return TrainingLoss(
            total / len(chains.base_rows), torch.stack(hits, dim=1), torch.stack(valid, dim=1)
        )


def reply_probs(
    batch: TrainingBatch, head: DraftHead, argmax_share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `teacher_probs` where they are wanted.

    [n, draft_vocab] float32, and for each row of the batch, [num_rows], which of the n it is; rows
    before a reply's first token have none, and say 0.
    """
    rows = np.concatenate(
        [
            np.arange(start + prompt, end)
            for start, end, prompt in zip(
                batch.starts[:-1], batch.starts[1:], batch.num_prompt_tokens, strict=True
            )
        ]
    )
    taken = torch.from_numpy(rows).to(batch.token_ids.device)
    place = torch.zeros(len(batch.token_ids), dtype=torch.int64, device=taken.device)
    place[taken] = torch.arange(len(taken), device=taken.device)
    return teacher_probs(batch.hidden_states[taken].float(), head.target, argmax_share), place


def save_drafter(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json and model.safetensors, floating point in bfloat16."""
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
        .detach()
        .cpu()
        .contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
