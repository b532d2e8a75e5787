"""Synthetic MTP modules with the published names, and what they compute, in plain torch.

The reference keeps no cache and knows nothing of the plugin: it runs the whole sequence again for
every draft token, as the models' authors describe their modules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Names:
    """A layout's published names; N stands for a module's number."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    block: str


NAMES = {
    "deepseek": Names(
        "model.layers.N.enorm.weight",
        "model.layers.N.hnorm.weight",
        "model.layers.N.eh_proj.weight",
        "model.layers.N.shared_head.norm.weight",
        "model.layers.N.",
    ),
    "mimo": Names(
        "model.mtp_layers.N.token_layernorm.weight",
        "model.mtp_layers.N.hidden_layernorm.weight",
        "model.mtp_layers.N.input_proj.weight",
        "model.mtp_layers.N.final_layernorm.weight",
        "model.mtp_layers.N.",
    ),
    "qwen3_next": Names(
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.N.",
    ),
}


def numbers(layout: str, config: Any, count: int) -> list[int]:
    """The modules' numbers: DeepSeek's go on behind the model's own layers."""
    first = config.num_hidden_layers if layout == "deepseek" else 0
    return list(range(first, first + count))


def module_tensors(layout: str, config: Any, count: int = 1, seed: int = 1) -> Tensors:
    """Random modules for a target of this config, as its family's block has it."""
    generator = torch.Generator().manual_seed(seed)
    size, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
    width, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    def norm(width: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(width, generator=generator)

    names = NAMES[layout]
    found: Tensors = {}
    for number in numbers(layout, config, count):
        block = {
            "input_layernorm.weight": norm(size),
            "post_attention_layernorm.weight": norm(size),
            "self_attn.q_proj.weight": matrix(width, size),
            "self_attn.k_proj.weight": matrix(kv_width, size),
            "self_attn.v_proj.weight": matrix(kv_width, size),
            "self_attn.o_proj.weight": matrix(size, width),
            "mlp.gate_proj.weight": matrix(inner, size),
            "mlp.up_proj.weight": matrix(inner, size),
            "mlp.down_proj.weight": matrix(size, inner),
        }
        if config.model_type == "qwen2":
            for name, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
                block[f"self_attn.{name}_proj.bias"] = matrix(rows, 1)[:, 0]
        if config.model_type == "qwen3":
            block["self_attn.q_norm.weight"] = norm(head_dim)
            block["self_attn.k_norm.weight"] = norm(head_dim)
        found |= {names.block.replace("N", str(number)) + n: t for n, t in block.items()}
        for name, tensor in (
            (names.embedding_norm, norm(size)),
            (names.hidden_norm, norm(size)),
            (names.projection, matrix(size, 2 * size)),
            (names.output_norm, norm(size)),
        ):
            found.setdefault(name.replace("N", str(number)), tensor)
    return found


def save_target(model: Any, folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Save a model, with modules among its tensors and further fields in its config.json."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    _add(folder / "config.json", config)
    return folder


def save_drafter(folder: Path, tensors: Tensors, target_config: Any, **config: Any) -> Path:
    """Save modules in a folder of their own, with a config.json like the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    kept = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "rms_norm_eps", "model_type", "hidden_act")  # fmt: skip
    values = {name: getattr(target_config, name, None) for name in kept}
    theta = target_config.rope_parameters["rope_theta"]
    (folder / "config.json").write_text("{}", encoding="utf-8")
    own = {name: value for name, value in values.items() if value is not None}
    _add(folder / "config.json", {**own, "rope_theta": theta, **config})
    return folder


def _add(file: Path, fields: dict[str, Any]) -> None:
    known = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**known, **fields}), encoding="utf-8")


class Reference:
    """What modules of a layout draft, for one text at a time."""

    def __init__(
        self,
        model: Any,
        layout: str,
        tensors: Tensors,
        count: int = 1,
        *,
        zero_centred: bool = False,
    ) -> None:
        self.model = model
        self.config = model.config
        self.layout = layout
        self.tensors = tensors
        self.numbers = numbers(layout, model.config, count)
        self.zero_centred = zero_centred
        self.embeddings: Sequence[torch.Tensor] = [model.model.embed_tokens.weight] * count
        self.heads: Sequence[torch.Tensor] = [model.lm_head.weight] * count
        self._hidden: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def logits(self, history: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """Logits of the draft token that follows `history` and `drafted`, by the module for it."""
        tokens = [*history, *drafted]
        num_rows = len(history) - 1  # all but the last token have hidden states
        module = min(len(drafted), len(self.numbers) - 1)
        # The module's input is the model's last hidden state: after its final norm.
        hidden = self.hidden_states(tuple(history[:num_rows]))
        for number in range(module):
            hidden = self.run(number, hidden, tokens[1 + number : 1 + number + num_rows])
        # The last module goes on with its own output, one position further each time.
        for extra in range(len(drafted) - module + 1):
            taken = tokens[1 + module : 1 + module + num_rows + extra]
            out = self.run(module, hidden, taken)
            hidden = torch.cat([hidden, out[-1:]])
        return out[-1] @ self.heads[module].T

    def hidden_states(self, tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in self._hidden:
            out = self.model.model(torch.tensor([tokens]))
            self._hidden[tokens] = out.last_hidden_state[0]
        return self._hidden[tokens]

    def run(self, module: int, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Run one module over rows 0, 1, ...; return what its head and the next module take."""
        number = str(self.numbers[module])
        names = NAMES[self.layout]
        embedded = self.embeddings[module][torch.tensor(tokens)].clone()
        if self.layout == "deepseek":
            embedded[0] = 0.0
        e = self.norm(embedded, names.embedding_norm.replace("N", number))
        h = self.norm(hidden, names.hidden_norm.replace("N", number))
        joined = torch.cat([h, e] if self.layout == "mimo" else [e, h], dim=1)
        x = joined @ self.tensors[names.projection.replace("N", number)].T
        x = self.block(x, names.block.replace("N", number))
        return self.norm(x, names.output_norm.replace("N", number))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[name] + (1.0 if self.zero_centred else 0.0)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight

    def block(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        def product(name: str, y: torch.Tensor) -> torch.Tensor:
            z = y @ self.tensors[f"{prefix}{name}.weight"].T
            return z + self.tensors.get(f"{prefix}{name}.bias", torch.zeros(()))

        config, num_rows = self.config, len(x)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        y = self.norm(x, f"{prefix}input_layernorm.weight")
        q = product("self_attn.q_proj", y).view(num_rows, num_heads, -1)
        k = product("self_attn.k_proj", y).view(num_rows, num_kv_heads, -1)
        v = product("self_attn.v_proj", y).view(num_rows, num_kv_heads, -1)
        if f"{prefix}self_attn.q_norm.weight" in self.tensors:
            q = self.norm(q, f"{prefix}self_attn.q_norm.weight")
            k = self.norm(k, f"{prefix}self_attn.k_norm.weight")
        q, k = self.rotated(q), self.rotated(k)
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores + torch.full((num_rows, num_rows), float("-inf")).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(num_rows, -1)
        x = x + product("self_attn.o_proj", attended)
        y = self.norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = product("mlp.gate_proj", y)
        gated = gate * torch.sigmoid(gate) * product("mlp.up_proj", y)
        return x + product("mlp.down_proj", gated)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        dim = x.shape[-1]
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(len(x))[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
