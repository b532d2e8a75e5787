"""Medusa heads as folders in the published forms, and what they compute, written out plainly.

The reference computes the target's whole sequence anew for every draft, from the published
description. Nothing here imports the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foresay.core.proposer import TargetView

Block = tuple[torch.Tensor, torch.Tensor | None]  # weight [H, H], bias [H]


@dataclass(frozen=True)
class Heads:
    """Heads as they are described: blocks, output matrices, and the tokens of their rows."""

    blocks: list[list[Block]]  # by head, then by layer
    matrices: list[torch.Tensor]  # by head; one for all; or none: the target's lm_head
    ids: torch.Tensor | None = None  # the target ids of the rows
    biases: list[torch.Tensor] | None = None  # of the matrices

    @property
    def num_layers(self) -> int:
        return len(self.blocks[0])


@dataclass(frozen=True)
class Files:
    """A folder of heads: config.json, and tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def without(self, *names: str) -> Files:
        assert set(names) <= set(self.tensors)
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in names})

    def with_(self, tensors: dict[str, torch.Tensor]) -> Files:
        return replace(self, tensors={**self.tensors, **tensors})

    def renamed(self, rename: Callable[[str], str]) -> Files:
        return replace(self, tensors={rename(n): t for n, t in self.tensors.items()})

    def configured(self, **fields: Any) -> Files:
        """The same with other fields in config.json; None leaves a field out."""
        config = {**self.config, **fields}
        return replace(self, config={n: v for n, v in config.items() if v is not None})

    def save(self, folder: Path, name: str = "medusa_lm_head.pt") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if name.endswith(".safetensors"):
            save_file({n: t.clone() for n, t in self.tensors.items()}, folder / name)
        else:
            torch.save(self.tensors, folder / name)
        return folder


def random_heads(
    num_heads: int = 3,
    num_layers: int = 1,
    *,
    size: int = 48,
    num_rows: int = 160,
    shared: bool = False,
    vocab_size: int = 160,
    bias: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Heads:
    """Random heads; large enough that the likeliest tokens differ from row to row.

    Fewer rows than `vocab_size` stand for some of the target's ids, in no order.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = [
        [
            (
                (randn(size, size) * 2 / size**0.5).to(dtype),
                (randn(size) * 0.5).to(dtype) if bias else None,
            )
            for _ in range(num_layers)
        ]
        for _ in range(num_heads)
    ]
    matrices = [randn(num_rows, size).to(dtype) for _ in range(1 if shared else num_heads)]
    ids = None
    if num_rows < vocab_size:
        ids = torch.randperm(vocab_size, generator=generator)[:num_rows]
    return Heads(blocks, matrices, ids)


# -- as they are published -----------------------------------------------------------------------


def as_authors(heads: Heads) -> Files:
    """The Medusa authors' layout: `torch.save` of nn.Sequential(*ResBlocks, nn.Linear) by head."""
    tensors = {}
    for h, blocks in enumerate(heads.blocks):
        for i, (weight, bias) in enumerate(blocks):
            tensors[f"{h}.{i}.linear.weight"] = weight
            if bias is not None:
                tensors[f"{h}.{i}.linear.bias"] = bias
        if len(heads.matrices) > 1:
            tensors[f"{h}.{heads.num_layers}.weight"] = heads.matrices[h]
            if heads.biases is not None:
                tensors[f"{h}.{heads.num_layers}.bias"] = heads.biases[h]
    config = {
        "medusa_num_heads": len(heads.blocks),
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "transformers_version": "4.31.0",
    }
    return Files(config, tensors)


def as_vllm(heads: Heads, *, vocab_size: int = 160, map_only: bool = False) -> Files:
    """vLLM's layout; a reduced vocabulary as `token_map`.

    `map_only`: the matrices are whole, and the map says which of their rows are used.
    """
    tensors = {}
    for h, blocks in enumerate(heads.blocks):
        for i, (weight, bias) in enumerate(blocks):
            tensors[f"blocks.{h}.layers.{i}.weight"] = weight
            if bias is not None:
                tensors[f"blocks.{h}.layers.{i}.bias"] = bias
    for h, matrix in enumerate(heads.matrices):
        if map_only:
            assert heads.ids is not None
            whole = torch.full((vocab_size, matrix.shape[1]), 7.0, dtype=matrix.dtype)
            whole[heads.ids] = matrix
            matrix = whole
        tensors[f"lm_heads.{h}.weight"] = matrix
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.matrices[0].shape[1],
        "vocab_size": vocab_size,
        "num_heads": len(heads.blocks),
        "num_hidden_layers": heads.num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": vocab_size if heads.ids is None else len(heads.ids),
    }
    if heads.blocks[0] and heads.blocks[0][0][1] is not None:
        config["medusa_fc_bias"] = True
    if heads.ids is not None:
        tensors["token_map"] = heads.ids
    if len(heads.matrices) == 1:
        config["original_lm_head"] = True
    return Files(config, tensors)


def as_reduced(heads: Heads) -> Files:
    """Our own: one `lm_head.weight` for all heads, and `d2t`, offsets, as EAGLE-3 has them."""
    files = as_authors(heads)
    tensors = {"lm_head.weight": heads.matrices[0]}
    if heads.ids is not None:
        tensors["d2t"] = heads.ids - torch.arange(len(heads.ids))
        files = files.configured(draft_vocab_size=len(heads.ids))
    return files.with_(tensors)


# -- the forms that are tested --------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    heads: Heads
    files: Files
    name: str = "medusa_lm_head.pt"


def of_authors() -> Form:
    heads = random_heads()
    return Form(heads, as_authors(heads))


def of_authors_safetensors() -> Form:
    heads = random_heads(5, seed=1)
    return Form(heads, as_authors(heads), "medusa_lm_head.safetensors")


def with_prefix() -> Form:
    heads = random_heads(seed=2)
    files = as_authors(heads).renamed(lambda name: f"medusa_heads.{name}")
    return Form(heads, files, "model.safetensors")


def several_blocks() -> Form:
    heads = random_heads(2, 3, seed=3)
    return Form(heads, as_authors(heads))


def one_block_several_times() -> Form:
    heads = random_heads(2, seed=4)
    heads = replace(heads, blocks=[[block] * 3 for [block] in heads.blocks])
    return Form(heads, as_authors(heads), "pytorch_model.bin")


def no_blocks() -> Form:
    heads = random_heads(2, 0, seed=5)
    return Form(heads, as_authors(heads))


def no_biases() -> Form:
    heads = random_heads(2, 2, bias=False, seed=6)
    return Form(heads, as_authors(heads).configured(medusa_fc_bias=False))


def biases_of_matrices() -> Form:
    heads = random_heads(2, seed=7)
    heads = replace(heads, biases=[torch.linspace(-4, 4, 160), torch.linspace(4, -4, 160)])
    return Form(heads, as_authors(heads))


def lm_head_of_the_target() -> Form:
    heads = replace(random_heads(seed=8), matrices=[])
    return Form(heads, as_authors(heads).configured(version="2"))


def lm_head_of_the_target_after_several_blocks() -> Form:
    heads = replace(random_heads(2, 2, seed=9), matrices=[])
    return Form(heads, as_authors(heads))


def reduced_and_shared() -> Form:
    heads = random_heads(4, num_rows=40, shared=True, seed=10)
    return Form(heads, as_reduced(heads), "model.safetensors")


def reduced_and_shared_with_mask_and_several_blocks() -> Form:
    heads = random_heads(2, 2, num_rows=40, shared=True, seed=11)
    mask = torch.zeros(160, dtype=torch.bool)
    assert heads.ids is not None
    mask[heads.ids] = True
    return Form(heads, as_reduced(heads).with_({"t2d": mask}), "model.safetensors")


def reduced_and_shared_with_prefix() -> Form:
    heads = random_heads(2, num_rows=40, shared=True, seed=12)
    heads = replace(heads, biases=[torch.linspace(-4, 4, 40)])
    files = as_reduced(heads).with_({"lm_head.bias": torch.linspace(-4, 4, 40)})
    return Form(heads, files.renamed(lambda name: f"medusa_heads.{name}"))


def rows_of_the_targets_lm_head() -> Form:
    heads = random_heads(3, num_rows=40, shared=True, seed=21)
    files = as_reduced(heads).without("lm_head.weight")
    return Form(replace(heads, matrices=[]), files, "model.safetensors")


def rows_of_the_targets_lm_head_by_d2t_alone() -> Form:
    form = rows_of_the_targets_lm_head()
    files = form.files.configured(draft_vocab_size=None)
    files = files.renamed(lambda name: f"medusa_heads.{name}")
    return replace(form, files=files)


def whole_and_shared() -> Form:
    heads = random_heads(2, shared=True, seed=13)
    return Form(heads, as_reduced(heads))


def of_vllm() -> Form:
    heads = random_heads(2, 2, bias=False, seed=14)
    return Form(heads, as_vllm(heads), "model.safetensors")


def of_vllm_with_biases_and_one_matrix() -> Form:
    heads = random_heads(3, shared=True, seed=15)
    return Form(heads, as_vllm(heads), "model.safetensors")


def of_vllm_truncated() -> Form:
    heads = random_heads(3, bias=False, num_rows=50, seed=16)
    return Form(heads, as_vllm(heads), "model.safetensors")


def of_vllm_truncated_by_the_map_alone() -> Form:
    heads = random_heads(3, bias=False, num_rows=50, seed=17)
    return Form(heads, as_vllm(heads, map_only=True), "model.safetensors")


def truncated_in_the_authors_names() -> Form:
    heads = random_heads(2, num_rows=50, seed=18)
    assert heads.ids is not None
    files = as_authors(heads).with_({"token_map": heads.ids.to(torch.int32)})
    return Form(heads, files.configured(truncated_vocab_size=50))


def vocabulary_of_a_padded_target() -> Form:
    heads = random_heads(2, num_rows=164, vocab_size=164, seed=19)
    return Form(heads, as_authors(heads).configured(vocab_size=164))


def vocabulary_without_added_tokens() -> Form:
    heads = random_heads(2, num_rows=155, vocab_size=155, seed=20)
    return Form(heads, as_authors(heads))


FORMS: list[Callable[[], Form]] = [
    of_authors,
    of_authors_safetensors,
    with_prefix,
    several_blocks,
    one_block_several_times,
    no_blocks,
    no_biases,
    biases_of_matrices,
    lm_head_of_the_target,
    lm_head_of_the_target_after_several_blocks,
    reduced_and_shared,
    reduced_and_shared_with_mask_and_several_blocks,
    reduced_and_shared_with_prefix,
    rows_of_the_targets_lm_head,
    rows_of_the_targets_lm_head_by_d2t_alone,
    whole_and_shared,
    of_vllm,
    of_vllm_with_biases_and_one_matrix,
    of_vllm_truncated,
    of_vllm_truncated_by_the_map_alone,
    truncated_in_the_authors_names,
    vocabulary_of_a_padded_target,
    vocabulary_without_added_tokens,
]


def view(**changes: Any) -> TargetView:
    """A target as a proposer is shown it, of the sizes of `tiny_models`."""
    head = torch.randn(160, 48, generator=torch.Generator().manual_seed(0))
    values: dict[str, Any] = {
        "config": None,
        "vocab_size": 160,
        "hidden_size": 48,
        "num_layers": 3,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "max_model_len": 100,
        "checkpoint": None,
        "tokenizer": None,
        "lm_head": lambda hidden: hidden @ head.T,
        "lm_head_rows": lambda ids: (head[ids], None),
    }
    return TargetView(**{**values, **changes})


# -- what heads compute --------------------------------------------------------------------------


def hidden_states(target: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """What the target's lm_head takes, [num_tokens, hidden_size]."""
    with torch.no_grad():
        out = target(torch.tensor([list(token_ids)]), output_hidden_states=True)
    states: torch.Tensor = out.hidden_states[-1][0]
    return states


def reference_logits(heads: Heads, target: Any, token_ids: Sequence[int]) -> list[torch.Tensor]:
    """The logits of each head, over target ids, after the committed `token_ids`; -inf: no row."""
    last = hidden_states(target, token_ids[:-1])[-1]
    found = []
    for h, blocks in enumerate(heads.blocks):
        x = last
        for weight, bias in blocks:
            y = weight @ x + (0 if bias is None else bias)
            x = x + y / (1 + torch.exp(-y))
        if heads.matrices:
            shared = len(heads.matrices) == 1
            rows = heads.matrices[0 if shared else h] @ x
            if heads.biases is not None:
                rows = rows + heads.biases[0 if shared else h]
        else:
            rows = target.get_output_embeddings().weight @ x
            rows = rows if heads.ids is None else rows[heads.ids]
        logits = torch.full((target.config.vocab_size,), -torch.inf)
        if heads.ids is None:
            num_rows = min(len(rows), len(logits))
            logits[:num_rows] = rows[:num_rows]
        else:
            logits[heads.ids] = rows
        found.append(logits.detach())
    return found


def fitted_heads(
    target: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_heads: int
) -> Heads:
    """Heads that know some texts, prompt and output: head h's matrix has learnt the token at +h+2.

    The blocks are as the authors initialise them: zeros, which add nothing.
    """
    vocab_size = int(target.config.vocab_size)
    states = [hidden_states(target, [*prompt, *output]) for prompt, output in texts]
    size = states[0].shape[1]
    matrices = []
    for h in range(num_heads):
        rows, labels = [], []
        for (prompt, output), found in zip(texts, states, strict=True):
            first = max(0, len(prompt) - h - 2)  # the row that the first output token is drafted by
            whole = [*prompt, *output]
            rows.append(found[first : len(whole) - h - 2])
            labels += whole[first + h + 2 :]
        x, wanted = torch.cat(rows), torch.tensor(labels)
        matrix = torch.zeros(vocab_size, size, requires_grad=True)
        optimizer = torch.optim.Adam([matrix], lr=0.3)
        for _ in range(100):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(x @ matrix.T, wanted).backward()
            optimizer.step()
        matrices.append(matrix.detach())
    zeros = (torch.zeros(size, size), torch.zeros(size))
    return Heads([[zeros]] * num_heads, matrices)
