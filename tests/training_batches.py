"""Batches as a training gets them, of random texts, and the loss written out plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foresay.core.proposer import TargetView
from foresay.core.training import TrainingBatch

VOCAB = 160
# Text by text: tokens of the prompt, and of the reply.
LENGTHS = ((5, 6), (1, 2), (9, 3), (3, 12))


@dataclass(frozen=True)
class Text:
    """A prompt and a reply."""

    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def bases(self) -> range:
        """The positions where chains begin: the token after them is the reply's, and another is."""
        return range(self.num_prompt_tokens - 1, len(self.token_ids) - 2)


def texts(seed: int = 0) -> list[Text]:
    random = torch.Generator().manual_seed(seed)
    return [
        Text(torch.randint(3, VOCAB, (prompt + reply,), generator=random).tolist(), prompt)
        for prompt, reply in LENGTHS
    ]


@torch.no_grad()
def batch(target: Any, some: Sequence[Text], taps: Sequence[int] = ()) -> TrainingBatch:
    """The batch of some texts, with transformers' own hidden states."""
    hidden, aux, starts = [], [], [0]
    for text in some:
        out = target(torch.tensor([text.token_ids]), output_hidden_states=True)
        hidden.append(out.hidden_states[-1][0])
        if taps:
            aux.append(torch.stack([out.hidden_states[tap][0] for tap in taps], dim=1))
        starts.append(starts[-1] + len(text.token_ids))
    return TrainingBatch(
        token_ids=torch.tensor([token for text in some for token in text.token_ids]),
        starts=tuple(starts),
        num_prompt_tokens=tuple(text.num_prompt_tokens for text in some),
        hidden_states=torch.cat(hidden),
        aux_hidden_states=torch.cat(aux) if taps else None,
    )


def view(target: Any, folder: Any = None) -> TargetView:
    """What a training sees of a transformers model."""
    head = target.get_output_embeddings()

    def rows(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return head.weight.detach()[ids], None if head.bias is None else head.bias.detach()[ids]

    return TargetView(
        config=target.config,
        vocab_size=VOCAB,
        hidden_size=target.config.hidden_size,
        num_layers=target.config.num_hidden_layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        checkpoint=folder,
        tokenizer=None,
        embeddings=target.get_input_embeddings().weight.detach(),
        lm_head=head,
        lm_head_rows=rows,
    )


def draft_ids(count: int, seed: int = 3) -> torch.Tensor:
    """Some target ids, ascending."""
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(VOCAB, generator=random)[:count].sort().values


def randomise(module: torch.nn.Module, seed: int = 5) -> None:
    """Draw all parameters anew, norms around 1: nothing stays as it begins."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)


@dataclass(frozen=True)
class Expected:
    """What a drafter should say of some texts."""

    loss: float
    hits: list[list[bool]]
    valid: list[list[bool]]


@torch.no_grad()
def expected(
    target: Any,
    some: Sequence[Text],
    ids: torch.Tensor | None,
    num_steps: int,
    decay: float,
    logits: Callable[[Text, int], Sequence[torch.Tensor]],
    argmax_share: float,
) -> Expected:
    """Work the loss out chain by chain.

    `logits(text, base)`: over the draft vocabulary, of each step of the chain that begins there.
    """
    drafted = list(range(VOCAB)) if ids is None else ids.tolist()
    losses, hits, valid = [], [], []
    for text in some:
        rows = target(torch.tensor([text.token_ids])).logits[0]
        for base in text.bases:
            own = logits(text, base)
            loss = 0.0
            hits.append([False] * num_steps)
            valid.append([False] * num_steps)
            for step in range(num_steps):
                at = base + 2 + step
                if at >= len(text.token_ids):
                    continue
                valid[-1][step] = True
                label = text.token_ids[at]
                hits[-1][step] = drafted[int(own[step].argmax())] == label
                if label in drafted:
                    wanted = (1 - argmax_share) * rows[at - 1][drafted].softmax(-1)
                    wanted[rows[at - 1][drafted].argmax()] += argmax_share
                    loss -= decay**step * float((wanted * own[step].log_softmax(-1)).sum())
            losses.append(loss)
    return Expected(sum(losses) / len(losses), hits, valid)


def slope(module: torch.nn.Module, loss: Callable[[], torch.Tensor], seed: int) -> tuple[Any, Any]:
    """How fast the loss grows along a way: by the gradient, and by going a little of it.

    The way leads upwards in every parameter, as far as it is drawn, so that slopes do not cancel.
    """
    random = torch.Generator().manual_seed(seed)
    parameters = [p for p in module.parameters() if p.requires_grad]
    module.zero_grad()
    loss().backward()
    slopes = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    way = [grad * torch.rand(grad.shape, generator=random) for grad in slopes]
    length = sum(float(part.square().sum()) for part in way) ** 0.5
    told = sum(float((g * part).sum()) for g, part in zip(slopes, way, strict=True)) / length
    step = 5e-4  # the loss is much curved
    tried = []
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, part in zip(parameters, way, strict=True):
                parameter += sign * step / length * part
            tried.append(float(loss()))
    return told, (tried[0] - tried[1]) / (2 * step)
