"""The three published layouts of MTP modules: names, and what is joined to what. Imports no torch.

A module joins two vectors of a position, the embedding of a later token and a hidden state, each
behind a norm of its own, into one; runs a decoder block over it; and norms the result. What goes
in and what is handed on is settled here, layout by layout, from the models' authors:

- DeepSeek-V3 (arXiv 2412.19437, section 2.2; README_WEIGHTS.md in deepseek-ai/DeepSeek-V3: enorm,
  hnorm, eh_proj, shared_head) and GLM-4-MoE. (embedding, hidden), the embedding at position 0 is
  zero. The hidden state is the target's *after* its final norm, and what a module hands on is
  *after* `shared_head.norm`. The report leaves that open and its code has no MTP; Megatron-Core
  (multi_token_prediction.py, which trains these modules) and SGLang's deepseek_nextn.py agree on
  it. vLLM's deepseek_mtp.py (which has the zero at position 0, as glm4_moe_mtp.py by the ZhipuAI
  team) used to hand on what precedes the norm, and was changed: ROCm/ATOM's pull request 1764
  measures 64.6 % acceptance for 61.4 % with DeepSeek-R1.
- MiMo (modeling_mimo.py in XiaomiMiMo/MiMo-7B-*, class MiMoMTPLayers; vLLM's mimo_mtp.py by
  Xiaomi): (hidden, embedding). After the norm in both places: `final_layernorm` is part of the
  module, the input is the model's last hidden state. Only the engines' copies zero the embedding
  at position 0; the authors' module does not.
- Qwen3-Next (vLLM's qwen3_next_mtp.py, by the Qwen team; transformers leaves `mtp.*` out):
  (embedding, hidden), after the norm in both places. One projection and its norms for all blocks.
  Norms are zero-centred: a weight w scales by 1 + w, as everywhere in that model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.core.errors import ConfigError, ModelError
from foresay_mtp.files import Shapes, read_config, read_shapes

# Parts of a decoder block that is no Llama-like one, and what it then is.
_FOREIGN_PARTS = {
    r"self_attn\.(q_a_|kv_a_|kv_b_|q_b_)\w+": "multi-head latent attention",
    r"linear_attn\.": "linear attention, which keeps a recurrent state",
    r"(mlp|block_sparse_moe|feed_forward)\.(experts|gate\.|router|shared_expert)": "experts",
    r"self_attn\.sinks": "attention sinks",
    r".*\.(weight_scale(_inv)?|qweight|scales|input_scale)$": "quantised weights",
}
_COUNT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")
# Families of targets whose RMSNorm scales by 1 + weight.
_ZERO_CENTRED = ("qwen3_next", "qwen3_5")


@dataclass(frozen=True, slots=True)
class Family:
    """One layout. In names, `{}` stands for a module's number."""

    name: str
    belongs: re.Pattern[str]  # names of the modules' tensors; group 1: the number, if it has one
    joint: str  # before the names of what joins embedding and hidden state
    block: str  # before the names of the decoder block
    embedding_norm: str
    hidden_norm: str
    projection: str  # [hidden_size, 2 * hidden_size]
    output_norm: str
    hidden_first: bool  # in the projection's columns
    zeroes_first_embedding: bool
    # What may be a module's own; None: it never is.
    embeddings: str | None = None
    lm_head: str | None = None


DEEPSEEK = Family(
    name="DeepSeek-V3",
    belongs=re.compile(r"model\.layers\.(\d+)\."),
    joint="model.layers.{}.",
    block="model.layers.{}.",
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    projection="eh_proj.weight",
    output_norm="shared_head.norm.weight",
    hidden_first=False,
    zeroes_first_embedding=True,
    embeddings="embed_tokens.weight",
    lm_head="shared_head.head.weight",
)
MIMO = Family(
    name="MiMo",
    belongs=re.compile(r"model\.mtp_layers\.(\d+)\."),
    joint="model.mtp_layers.{}.",
    block="model.mtp_layers.{}.",
    embedding_norm="token_layernorm.weight",
    hidden_norm="hidden_layernorm.weight",
    projection="input_proj.weight",
    output_norm="final_layernorm.weight",
    hidden_first=True,
    zeroes_first_embedding=False,
)
QWEN3_NEXT = Family(
    name="Qwen3-Next",
    belongs=re.compile(r"mtp\.(?:layers\.(\d+)\.)?"),
    joint="mtp.",
    block="mtp.layers.{}.",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    projection="fc.weight",
    output_norm="norm.weight",
    hidden_first=False,
    zeroes_first_embedding=False,
)
FAMILIES = (DEEPSEEK, MIMO, QWEN3_NEXT)


@dataclass(frozen=True, slots=True)
class Layout:
    """Modules in a folder: which family's, and which numbers they have."""

    folder: Path
    family: Family
    numbers: tuple[int, ...]
    shapes: Shapes  # of all tensors in the folder
    config: Mapping[str, Any]  # config.json
    is_drafter: bool  # the folder holds modules only, and their own config.json

    @property
    def num_modules(self) -> int:
        """How many modules there are; each has a decoder block."""
        return len(self.numbers)

    def joint(self, module: int, name: str) -> str:
        """Return the full name of a tensor that joins; `module` counts from 0."""
        return self.family.joint.format(self.numbers[module]) + name

    def block(self, module: int) -> str:
        """Return what stands before the names of a module's decoder block."""
        return self.family.block.format(self.numbers[module])

    def belongs(self, name: str) -> bool:
        """Whether a tensor is one of the modules'."""
        found = self.family.belongs.match(name)
        if found is None:
            return False
        return found.group(1) is None or int(found.group(1)) in self.numbers

    def is_zero_centred(self, model_type: str) -> bool:
        """Whether norms scale by 1 + weight, in a model of this type."""
        return self.family is QWEN3_NEXT and model_type.startswith(_ZERO_CENTRED)


class NoModulesError(ModelError):
    """There are no MTP modules in a folder."""


def find_layout(drafter: str | None, target_config: Any) -> Layout:
    """Find the modules: in the folder `drafter`, or in the target's own checkpoint.

    Raises `ModelError` or `ConfigError` that says what is missing, or what cannot be run.
    """
    if drafter is not None:
        folder = Path(drafter)
        if not folder.is_dir():
            raise ConfigError(f"drafter={drafter!r}: proposer 'mtp' needs a folder")
        layout = read_layout(folder, is_drafter=True)
    else:
        layout = read_layout(_target_folder(target_config), is_drafter=False)
    check_blocks(layout)
    return layout


def modules_inside(folder: Path) -> str | None:
    """Say what modules a model's folder holds; None: none. `ModelError`: none that can be run."""
    if not (folder / "config.json").is_file():
        return None
    try:
        layout = read_layout(folder, is_drafter=False)
    except NoModulesError:
        return None
    check_blocks(layout)
    return f"its checkpoint holds {_modules(layout.num_modules)} of the {layout.family.name} layout"


def recognise(path: Path) -> str | None:
    """Say what modules a folder holds, alone or beside a model; None: none."""
    if not (path / "config.json").is_file():
        return None
    try:
        layout = read_layout(path, is_drafter=True)
    except NoModulesError:
        return None
    return f"{_modules(layout.num_modules)} of the {layout.family.name} layout"


def read_layout(folder: Path, *, is_drafter: bool) -> Layout:
    """Read the names in a folder. Raises `NoModulesError`, or `ModelError` for incomplete ones."""
    config = read_config(folder)
    shapes = read_shapes(folder)
    found = [family for family in FAMILIES if _is_there(family, shapes)]
    declared = next((int(config[f]) for f in _COUNT_FIELDS if isinstance(config.get(f), int)), None)
    if not found:
        raise NoModulesError(_nothing_found(folder, shapes, declared))
    if len(found) > 1:
        raise ModelError(
            f"{str(folder)!r} holds MTP modules of {len(found)} layouts "
            f"({', '.join(family.name for family in found)}): which ones are meant?"
        )
    [family] = found
    numbers = _numbers(family, shapes)
    first = numbers[0] if numbers else 0
    if family is DEEPSEEK and not is_drafter:
        first = int(config.get("num_hidden_layers", first))
    elif family is not DEEPSEEK:
        first = 0
    count = max(declared or 1, len(numbers))
    expected = tuple(range(first, first + count))
    missing = [number for number in expected if number not in numbers]
    if missing:
        raise ModelError(
            f"{str(folder)!r} should hold {_modules(count)} of the {family.name} layout"
            f"{f' (config.json has {declared})' if declared else ''}, and lacks every tensor "
            f"{family.block.format(missing[0])}*"
        )
    if declared and len(numbers) > declared:
        raise ModelError(
            f"{str(folder)!r} holds {_modules(len(numbers))} of the {family.name} layout, and its "
            f"config.json has {declared}"
        )
    return Layout(folder, family, expected, shapes, config, is_drafter)


def check_blocks(layout: Layout) -> None:
    """Refuse decoder blocks that are no Llama-like ones, by their tensors."""
    for module in range(layout.num_modules):
        prefix = layout.block(module)
        for name in layout.shapes:
            if not name.startswith(prefix):
                continue
            for pattern, what in _FOREIGN_PARTS.items():
                if re.match(pattern, name.removeprefix(prefix)):
                    raise _foreign(layout, what, name)
        query = layout.shapes.get(f"{prefix}self_attn.q_proj.weight", ())
        out = layout.shapes.get(f"{prefix}self_attn.o_proj.weight", ())
        if len(query) == len(out) == 2 and query[0] == 2 * out[1]:
            raise _foreign(layout, "gated attention", f"{prefix}self_attn.q_proj.weight")


def _target_folder(target_config: Any) -> Path:
    """Return where the target's weights lie, by its config."""
    name = str(getattr(target_config, "name_or_path", "") or "")
    if name and Path(name).is_dir():
        return Path(name)
    if name and not name.startswith((".", "/")):
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
            return Path(cached).parent
        raise ConfigError(
            f"proposer 'mtp': the weights of {name!r} are not on this machine yet, and whether "
            "they hold MTP modules is seen in them: fetch them first "
            f"(hf download {name}), or give a folder of modules as the drafter"
        )
    raise ConfigError(
        "proposer 'mtp': the target model is an object without a checkpoint folder; MTP modules "
        "are read from its safetensors files. Give the model as a folder, or a folder of modules "
        "as the drafter"
    )


def _is_there(family: Family, shapes: Shapes) -> bool:
    if family is DEEPSEEK:  # whose modules are named like the target's layers
        return bool(_numbers(family, shapes))
    return any(family.belongs.match(name) for name in shapes)


def _numbers(family: Family, shapes: Shapes) -> list[int]:
    parts = (family.embedding_norm, family.hidden_norm, family.projection, family.output_norm)
    numbers = set()
    for name in shapes:
        found = family.belongs.match(name)
        if found is None or found.group(1) is None:
            continue
        if family is not DEEPSEEK or name[found.end() :] in parts:
            numbers.add(int(found.group(1)))
    return sorted(numbers)


def _nothing_found(folder: Path, shapes: Shapes, declared: int | None) -> str:
    if not shapes:
        return f"{str(folder)!r} holds no *.safetensors, in which MTP modules are looked for"
    sought = ", ".join(f"{f.joint.format('N')}{f.projection} ({f.name})" for f in FAMILIES)
    text = f"{str(folder)!r} holds no MTP modules: no tensor {sought}"
    if declared:
        text += (
            f". Its config.json tells of {_modules(declared)}: transformers leaves them out when "
            "it saves a model, so take the original files"
        )
    return text


def _foreign(layout: Layout, what: str, tensor: str) -> ModelError:
    return ModelError(
        f"the MTP modules in {str(layout.folder)!r} ({layout.family.name} layout) have decoder "
        f"blocks with {what} ({tensor!r}); proposer 'mtp' runs blocks of the Llama kind: attention "
        "with q, k, v and o projections and a gated MLP"
    )


def _modules(count: int) -> str:
    return "1 MTP module" if count == 1 else f"{count} MTP modules"
