"""Random EAGLE heads as folders in the published forms, and what they compute, written out plainly.

The reference keeps no cache: the whole sequence is computed anew for every draft token, from the
published description. Nothing here imports the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

NAMES = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Head:
    """A head: what its files hold, under the names of the EAGLE authors."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    is_eagle3: bool
    taps: tuple[int, ...] = ()
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_output: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    def renamed(self, *pairs: tuple[str, str]) -> Head:
        """The same head with other names for its tensors."""
        tensors = {}
        for name, tensor in self.tensors.items():
            for old, new in pairs:
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                    break
            tensors[name] = tensor
        return replace(self, tensors=tensors)

    def without(self, *names: str) -> Head:
        assert set(names) <= set(self.tensors)
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in names})

    def with_(self, **tensors: torch.Tensor) -> Head:
        new = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        return replace(self, tensors={**self.tensors, **new})

    def configured(self, **fields: Any) -> Head:
        """The same with other fields in config.json; None leaves a field out."""
        config = {**self.config, **fields}
        return replace(self, config={n: v for n, v in config.items() if v is not None})

    def as_speculators(self, kind: str, **fields: Any) -> Head:
        """The same with a config.json of the `speculators` layout."""
        layer = {n: v for n, v in self.config.items() if n not in ("architectures", "bias")}
        layer.pop("draft_vocab_size", None)
        config = {
            "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
            "auto_map": {"": f"{kind}.{kind.title()}SpeculatorConfig"},
            "speculators_model_type": kind,
            "speculators_version": "0.1.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "x/y"},
            },
            "transformer_layer_config": layer,
            **fields,
        }
        if "draft_vocab_size" in self.config:
            config["draft_vocab_size"] = self.config["draft_vocab_size"]
        return replace(self, config=config)

    def save(self, folder: Path, kind: str = "safetensors") -> Path:
        """Write the folder; kind: safetensors, shards or bin."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        names = list(tensors)
        if kind == "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
        elif kind == "shards":
            for number, part in enumerate((names[::2], names[1::2]), 1):
                name = f"model-{number:05}-of-00002.safetensors"
                save_file({n: tensors[n] for n in part}, folder / name)
        else:
            save_file(tensors, folder / "model.safetensors")
        return folder


def _sizes(**changes: int) -> dict[str, int]:
    return {
        "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 256, **changes,
    }  # fmt: skip


class _Random:
    """Random tensors; large enough that the likeliest tokens differ from row to row."""

    def __init__(self, seed: int, scale: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator) * self.scale / columns**0.5

    def bias(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator) * 0.3

    def norm(self, size: int) -> torch.Tensor:
        return 1 + torch.randn(size, generator=self.generator) * 0.3

    def layer(self, prefix: str, sizes: dict[str, int], width: int) -> dict[str, torch.Tensor]:
        size, inner = sizes["hidden_size"], sizes["intermediate_size"]
        dim = sizes.get("head_dim", size // sizes["num_attention_heads"])
        queries, keys = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim
        return {
            f"{prefix}self_attn.q_proj.weight": self.matrix(queries, width),
            f"{prefix}self_attn.k_proj.weight": self.matrix(keys, width),
            f"{prefix}self_attn.v_proj.weight": self.matrix(keys, width),
            f"{prefix}self_attn.o_proj.weight": self.matrix(size, queries),
            f"{prefix}mlp.gate_proj.weight": self.matrix(inner, size),
            f"{prefix}mlp.up_proj.weight": self.matrix(inner, size),
            f"{prefix}mlp.down_proj.weight": self.matrix(size, inner),
            f"{prefix}post_attention_layernorm.weight": self.norm(size),
        }

    def offsets(self, draft_vocab: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
        """d2t, and the t2d that belongs to it."""
        ids = torch.randperm(vocab, generator=self.generator)[:draft_vocab].sort().values
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[ids] = True
        return ids - torch.arange(draft_vocab), mask


def _config(sizes: dict[str, int], eps: float) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "num_hidden_layers": 1,
        "rope_scaling": None,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **sizes,
    }


def eagle(*, seed: int = 0, scale: float = 1.0, **sizes: int) -> Head:
    """An EAGLE-1 head as its authors publish it: with embeddings and a bias, without an lm_head."""
    sizes, random = _sizes(**sizes), _Random(seed, scale)
    size = sizes["hidden_size"]
    tensors = {
        "embed_tokens.weight": random.matrix(sizes["vocab_size"], size),
        "fc.weight": random.matrix(size, 2 * size),
        "fc.bias": random.bias(size),
        **random.layer("layers.0.", sizes, size),
    }
    return Head(_config(sizes, 1e-5), tensors, is_eagle3=False, sizes=sizes)


def reduced(head: Head, draft_vocab: int, *, seed: int = 9, scale: float = 1.0) -> Head:
    """The head with an lm_head of its own over some of the target's tokens."""
    random = _Random(seed, scale)
    d2t, _ = random.offsets(draft_vocab, head.sizes["vocab_size"])
    own = random.matrix(draft_vocab, head.sizes["hidden_size"])
    return head.with_(lm_head__weight=own, d2t=d2t)


def eagle3(
    *,
    taps: tuple[int, ...] = (2, 1, 0),  # the default for a target of three layers
    draft_vocab: int = 64,
    target_size: int | None = None,
    seed: int = 0,
    scale: float = 1.0,
    **sizes: int,
) -> Head:
    """An EAGLE-3 head as its authors publish it: no embeddings of its own."""
    sizes, random = _sizes(**sizes), _Random(seed, scale)
    size, vocab = sizes["hidden_size"], sizes["vocab_size"]
    d2t, t2d = random.offsets(draft_vocab, vocab)
    tensors = {
        "d2t": d2t,
        "t2d": t2d,
        "fc.weight": random.matrix(size, len(taps) * (target_size or size)),
        **random.layer("midlayer.", sizes, 2 * size),
        "midlayer.hidden_norm.weight": random.norm(size),
        "midlayer.input_layernorm.weight": random.norm(size),
        "norm.weight": random.norm(size),
        "lm_head.weight": random.matrix(draft_vocab, size),
    }
    config = {**_config(sizes, 1e-5), "draft_vocab_size": draft_vocab}
    if target_size is not None:
        config["target_hidden_size"] = target_size
    return Head(config, tensors, is_eagle3=True, taps=taps, sizes=sizes)


# -- what a head computes ------------------------------------------------------------------------


def reference_logits(
    head: Head, target: Any, token_ids: Sequence[int], drafts: Sequence[int]
) -> list[torch.Tensor]:
    """The logits [draft_vocab] that each of `drafts` was chosen by, after committed `token_ids`."""
    tensors = head.tensors
    hidden, streams = target_features(target, token_ids[:-1], head.taps)
    embeddings = tensors.get("embed_tokens.weight")
    if embeddings is None:
        embeddings = target.get_input_embeddings().weight
    features = hidden
    if head.is_eagle3:
        for i in range(len(streams)):
            if f"fc_norm.{i}.weight" in tensors:
                streams[i] = rms_norm(streams[i], tensors[f"fc_norm.{i}.weight"], head.eps)
        joined = torch.cat(streams, dim=-1)
        if "input_norm.weight" in tensors:
            joined = rms_norm(joined, tensors["input_norm.weight"], head.eps)
        features = F.linear(joined, tensors["fc.weight"], tensors.get("fc.bias"))
    shifted = list(token_ids[1:])
    found = []
    for draft in drafts:
        embedded = F.embedding(torch.tensor(shifted), embeddings)
        out = (
            _layer3(head, embedded, features)
            if head.is_eagle3
            else _layer1(head, embedded, features)
        )
        last = out[-1]
        recycled = last
        if head.is_eagle3:
            last = rms_norm(last, tensors["norm.weight"], head.eps)
            recycled = last if head.norm_output else recycled
        if "lm_head.weight" in tensors:
            logits = F.linear(last, tensors["lm_head.weight"], tensors.get("lm_head.bias"))
        else:
            logits = target.get_output_embeddings()(last)
        found.append(logits.detach())
        shifted.append(draft)
        features = torch.cat([features, recycled[None]])
    return found


def target_features(
    target: Any, token_ids: Sequence[int], taps: Sequence[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The target's last hidden states, and the residual streams entering the layers `taps`."""
    with torch.no_grad():
        out = target(torch.tensor([list(token_ids)]), output_hidden_states=True)
    return out.hidden_states[-1][0], [out.hidden_states[tap][0] for tap in taps]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _layer1(head: Head, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    tensors = head.tensors
    joined = torch.cat([embedded, features], dim=-1)
    x = F.linear(joined, tensors["fc.weight"], tensors.get("fc.bias"))
    x = x + _attention(head, "layers.0.self_attn.", x)
    normed = rms_norm(x, tensors["layers.0.post_attention_layernorm.weight"], head.eps)
    return x + _mlp(head, "layers.0.mlp.", normed)


def _layer3(head: Head, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    tensors = head.tensors
    normed = rms_norm(features, tensors["midlayer.hidden_norm.weight"], head.eps)
    embedded = rms_norm(embedded, tensors["midlayer.input_layernorm.weight"], head.eps)
    x = normed if head.norm_before_residual else features
    x = x + _attention(head, "midlayer.self_attn.", torch.cat([embedded, normed], dim=-1))
    normed = rms_norm(x, tensors["midlayer.post_attention_layernorm.weight"], head.eps)
    return x + _mlp(head, "midlayer.mlp.", normed)


def _product(head: Head, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, head.tensors[f"{name}.weight"], head.tensors.get(f"{name}.bias"))


def _mlp(head: Head, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = _product(head, prefix + "gate_proj", x), _product(head, prefix + "up_proj", x)
    return _product(head, prefix + "down_proj", gate * torch.sigmoid(gate) * up)


def _attention(head: Head, prefix: str, x: torch.Tensor) -> torch.Tensor:
    sizes, num_rows = head.sizes, len(x)
    num_heads, num_kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    dim = sizes.get("head_dim", sizes["hidden_size"] // num_heads)
    query, key, value = (_product(head, prefix + name, x).view(num_rows, -1, dim) for name in NAMES)
    angle = torch.arange(num_rows)[:, None] / head.rope_factor
    angle = angle * head.rope_theta ** (-torch.arange(0, dim, 2) / dim)  # [num_rows, dim / 2]
    query, key = _rotated(query, angle), _rotated(key, angle)
    out = torch.empty(num_rows, num_heads, dim)
    for i in range(num_heads):
        shared = i // (num_heads // num_kv_heads)
        scores = query[:, i] @ key[:, shared].T / dim**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        out[:, i] = scores.softmax(-1) @ value[:, shared]
    return _product(head, prefix + "o_proj", out.flatten(1))


def _rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
