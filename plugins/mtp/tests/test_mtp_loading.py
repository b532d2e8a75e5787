"""Finding modules and reading their tensors: every mistake is an error that names it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from mtp_checkpoints import NAMES, Tensors, module_tensors, numbers, save_drafter, save_target
from safetensors.torch import save_file

from foresay import LLM
from foresay.core.config import build_settings
from foresay.core.errors import ConfigError, ForesayError, ModelError
from foresay.core.proposer import KVLayer, Needs
from foresay_mtp import MTPConfig, foresay_register_proposers
from foresay_mtp.layout import find_layout, modules_inside, read_layout
from foresay_mtp.shape import block_shape
from foresay_mtp.weights import read_weights

LAYOUTS = tuple(NAMES)


@functools.cache
def model(kind: str = "qwen3") -> Any:
    return {"qwen2": tiny_models.qwen2, "qwen3": tiny_models.qwen3}[kind]()


def load(drafter: Path, target: Any | None = None) -> None:
    """Read a folder of modules as an engine does, for a target's config."""
    config = (target or model()).config
    layout = find_layout(str(drafter), config)
    read_weights(layout, block_shape(layout, config), config.vocab_size)


def drafter(path: Path, layout: str = "mimo", count: int = 1, **config: Any) -> Path:
    return save_drafter(
        path, module_tensors(layout, model().config, count), model().config, **config
    )


def changed(path: Path, layout: str, change: Callable[[Tensors], None], count: int = 1) -> Path:
    """A folder of modules whose tensors are changed."""
    tensors = module_tensors(layout, model().config, count)
    change(tensors)
    return save_drafter(path, tensors, model().config)


# -- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_is_needed(tmp_path: Path, layout: str) -> None:
    for name in module_tensors(layout, model().config):
        folder = changed(tmp_path / name, layout, lambda tensors, name=name: tensors.pop(name))

        with pytest.raises(ModelError, match=re.escape(f"has no tensor '{name}'")):
            load(folder)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_bias_that_the_models_attention_has_is_needed(tmp_path: Path, name: str) -> None:
    tensors = module_tensors("mimo", model("qwen2").config)
    del tensors[f"model.mtp_layers.0.self_attn.{name}.bias"]
    folder = save_drafter(tmp_path, tensors, model("qwen2").config)

    with pytest.raises(ModelError, match=rf"no tensor 'model.mtp_layers.0.self_attn.{name}.bias'"):
        load(folder, model("qwen2"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensors_shape_counts(tmp_path: Path, layout: str) -> None:
    for name, tensor in module_tensors(layout, model().config).items():

        def widen(tensors: Tensors, name: str = name, tensor: torch.Tensor = tensor) -> None:
            tensors[name] = torch.cat([tensor, tensor[:1]])

        folder = changed(tmp_path / name, layout, widen)

        with pytest.raises(ModelError, match=re.escape(name) + "|for hidden states of size 49"):
            load(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inside", [True, False], ids=["in the target", "a folder"])
def test_an_unknown_tensor_of_a_module_is_named(tmp_path: Path, layout: str, inside: bool) -> None:
    tensors = module_tensors(layout, model().config)
    number = numbers(layout, model().config, 1)[0]
    name = NAMES[layout].block.replace("N", str(number)) + "self_attn.extra.weight"
    tensors[name] = torch.zeros(2)
    config = model().config
    if inside:
        folder = save_target(model(), tmp_path, tensors)
        layout_found = read_layout(folder, is_drafter=False)
    else:
        layout_found = read_layout(save_drafter(tmp_path, tensors, config), is_drafter=True)

    with pytest.raises(ModelError, match=f"tensors that this proposer does not know: {name}"):
        read_weights(layout_found, block_shape(layout_found, config), config.vocab_size)


def test_a_folder_may_hold_nothing_else(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)

    with pytest.raises(ModelError, match=r"does not know: model\.layers\.0\.mlp\.up_proj\.weight"):
        load(changed(tmp_path, "mimo", add))


# -- how many, and where -------------------------------------------------------------------------


def test_a_module_that_is_missing_altogether_is_named(tmp_path: Path) -> None:
    def without_second(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".1." in name]:
            del tensors[name]

    folder = changed(tmp_path, "mimo", without_second, count=3)

    with pytest.raises(
        ModelError, match=r"should hold 2 MTP modules .* lacks every tensor model.mtp_layers.1.\*"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            3,
            r"3 MTP modules of the MiMo layout \(config.json has 3\), and lacks .*mtp_layers.2\.\*",
        ),
        (1, r"holds 2 MTP modules of the MiMo layout, and its config.json has 1"),
    ],
)
def test_config_json_and_tensors_agree_on_the_count(
    tmp_path: Path, declared: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(drafter(tmp_path, count=2, num_nextn_predict_layers=declared))


def test_deepseek_modules_follow_the_targets_layers_and_in_a_folder_any_number(
    tmp_path: Path,
) -> None:
    tensors = module_tensors("deepseek", model().config, 2)
    moved = {n.replace("layers.3", "layers.0").replace("layers.4", "layers.1"): t
             for n, t in tensors.items()}  # fmt: skip
    inside = read_layout(save_target(model(), tmp_path / "in", tensors), is_drafter=False)
    outside = read_layout(save_drafter(tmp_path / "out", moved, model().config), is_drafter=True)

    assert (inside.numbers, outside.numbers) == ((3, 4), (0, 1))
    assert not inside.belongs("model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"lacks every tensor model\.layers\.3\.\*"):
        read_layout(save_target(model(), tmp_path / "wrong", moved), is_drafter=False)


def test_modules_of_two_layouts_are_refused(tmp_path: Path) -> None:
    tensors = module_tensors("mimo", model().config) | module_tensors("deepseek", model().config)

    with pytest.raises(ModelError, match=r"of 2 layouts \(DeepSeek-V3, MiMo\): which ones"):
        load(save_drafter(tmp_path, tensors, model().config))


def test_a_target_without_modules_is_told_what_was_looked_for(tmp_path: Path) -> None:
    folder = save_target(model(), tmp_path, {}, num_nextn_predict_layers=1)

    with (
        pytest.raises(ModelError) as raised,
        LLM(model=str(folder), proposer="mtp", adaptive=False),
    ):
        pass

    assert str(raised.value) == (
        f"{str(folder)!r} holds no MTP modules: no tensor model.layers.N.eh_proj.weight "
        "(DeepSeek-V3), model.mtp_layers.N.input_proj.weight (MiMo), mtp.fc.weight (Qwen3-Next). "
        "Its config.json tells of 1 MTP module: transformers leaves them out when it saves a "
        "model, so take the original files"
    )
    assert modules_inside(folder) is None


def test_a_model_object_has_no_checkpoint_to_look_into() -> None:
    with (
        pytest.raises(ConfigError, match=r"is an object without a checkpoint folder; MTP modules"),
        LLM(model=model(), proposer="mtp", adaptive=False),
    ):
        pass


def test_a_hub_id_is_looked_for_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    config = tiny_models.qwen3().config
    config._name_or_path = "someone/model"
    found: list[str | None] = [None]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: found[0])

    with pytest.raises(ConfigError, match=r"hf download someone/model"):
        find_layout(None, config)
    save_target(model(), tmp_path, module_tensors("mimo", config))
    found[0] = str(tmp_path / "config.json")
    assert find_layout(None, config).folder == tmp_path


# -- what cannot be run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "rows", "what"),
    [
        ("self_attn.kv_a_proj_with_mqa.weight", 4, "multi-head latent attention"),
        ("self_attn.q_a_proj.weight", 4, "multi-head latent attention"),
        ("mlp.experts.0.up_proj.weight", 4, "experts"),
        ("mlp.gate.weight", 4, "experts"),
        ("mlp.shared_experts.up_proj.weight", 4, "experts"),
        ("linear_attn.in_proj.weight", 4, "linear attention, which keeps a recurrent state"),
        ("self_attn.q_proj.weight", 128, "gated attention"),
        ("self_attn.q_proj.weight_scale_inv", 4, "quantised weights"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_another_kind_are_refused_with_the_reason(
    tmp_path: Path, layout: str, tensor: str, rows: int, what: str
) -> None:
    tensors = module_tensors(layout, model().config)
    number = numbers(layout, model().config, 1)[0]
    name = NAMES[layout].block.replace("N", str(number)) + tensor
    tensors[name] = torch.zeros(rows, 4)
    folder = save_target(model(), tmp_path, tensors)

    message = re.escape(f"decoder blocks with {what} ({name!r})")
    with (
        pytest.raises(ModelError, match=message),
        LLM(model=str(folder), proposer="mtp", adaptive=False),
    ):
        pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "MTP modules with hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "MTP modules with partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope of the type 'dynamic'"),
        ({"hidden_size": 64}, "hidden states of size 64, and the target model's have 48"),
        ({"vocab_size": 32000}, "a vocabulary of 32000 tokens, and the target model's has 160"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key heads, which do not divide"),
        ({"num_attention_heads": "4"}, "'num_attention_heads': '4'; expected a whole number"),
        ({"head_dim": 8}, "'model.mtp_layers.0.self_attn.q_proj.weight' is [64, 48], expected [32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_json_that_does_not_fit_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        load(drafter(tmp_path, **fields))


def test_what_config_json_leaves_out_is_as_in_the_target(tmp_path: Path) -> None:
    folder = drafter(tmp_path, an_unknown_field={"a": 1})
    (folder / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")

    shape = block_shape(find_layout(str(folder), model().config), model().config)

    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert shape.rope["rope_parameters"]["rope_theta"] == 10000.0
    load(folder)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (None, ModelError, "holds no config.json"),
        ("{", ModelError, "config.json' cannot be read: JSONDecodeError"),
        ("[]", ModelError, "config.json' holds no JSON object"),
    ],
)
def test_a_folder_without_a_readable_config_json_is_refused(
    tmp_path: Path, content: str | None, kind: type[ForesayError], message: str
) -> None:
    folder = drafter(tmp_path)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content, encoding="utf-8")

    with pytest.raises(kind, match=message):
        load(folder)


def test_a_damaged_file_and_a_folder_without_weights_are_refused(tmp_path: Path) -> None:
    folder = drafter(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model.safetensors' cannot be read as a safetensors"):
        load(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        load(folder)
    with pytest.raises(ConfigError, match=r"config.json': proposer 'mtp' needs a folder"):
        load(folder / "config.json")


# -- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": torch.zeros(40, 48)}, "has no tensor 'd2t'"),
        ({"lm_head.weight": torch.zeros(40, 47)}, "'lm_head.weight' is [40, 47], expected"),
        (
            {"lm_head.weight": torch.zeros(40, 48), "d2t": torch.zeros(39, dtype=torch.int64)},
            "'d2t' is [39], expected [40]",
        ),
        (
            {"lm_head.weight": torch.zeros(40, 48), "d2t": torch.arange(40) * 5},
            "'d2t' leads from draft id 27 to the target id 162, and there are 160; it must hold "
            "offsets",
        ),
        (
            {"lm_head.weight": torch.zeros(40, 48), "d2t": torch.zeros(40)},
            "'d2t' is of torch.float32; expected whole numbers",
        ),
        ({"d2t": torch.arange(40) * 5}, "'d2t' leads from draft id 27 to the target id 162"),
        ({"d2t": torch.zeros(40)}, "'d2t' is of torch.float32; expected whole numbers"),
    ],
)
def test_a_reduced_head_is_checked(tmp_path: Path, tensors: Tensors, message: str) -> None:
    folder = changed(tmp_path, "mimo", lambda own: own.update(tensors))

    with pytest.raises(ModelError, match=re.escape(message)):
        load(folder)


@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ("lm_head.weight", "shared_head.head.weight"),
        ("d2t", "shared_head.head.weight"),
        ("embed_tokens.weight", "embed_tokens.weight"),
    ],
)
def test_a_module_has_one_head_and_one_embedding(tmp_path: Path, shared: str, own: str) -> None:
    def both(tensors: Tensors) -> None:
        tensors[shared] = torch.zeros(160, 48)
        tensors[f"model.layers.3.{own}"] = torch.zeros(160, 48)

    with pytest.raises(ModelError, match=f"has both '{shared}' and 'model.layers.3.{own}'"):
        load(changed(tmp_path, "deepseek", both))


def test_embeddings_of_too_few_tokens_are_refused(tmp_path: Path) -> None:
    folder = changed(
        tmp_path, "mimo", lambda own: own.update({"embed_tokens.weight": torch.zeros(100, 48)})
    )

    with (
        pytest.raises(ModelError, match=r"are of 100 tokens, and the target model has 160"),
        LLM(model=model(), proposer="mtp", drafter=str(folder), adaptive=False),
    ):
        pass


# -- needs and settings --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_needs_are_known_before_any_weight_is_read(tmp_path: Path, count: int) -> None:
    folder = drafter(tmp_path, count=count, max_position_embeddings=128)
    [spec] = foresay_register_proposers()
    config = build_settings(spec.config_type, {"drafter": str(folder)}, "proposer 'mtp'")

    assert spec.needs(config, model().config) == Needs(
        hidden_state=True,
        kv_layers=(KVLayer(2, 16),) * count,
        kv_reach=count,
        embeddings=True,
        lm_head=True,
        sampled=True,
        tree=count == 1,
        max_context=128,
    )
    assert not spec.needs(MTPConfig(drafter=str(folder), sample=False), model().config).sampled


def test_asking_who_serves_a_folder_imports_no_torch(tmp_path: Path) -> None:
    folder = save_target(model(), tmp_path, module_tensors("qwen3_next", model().config))
    code = (
        "import sys, pathlib, foresay_mtp; [spec] = foresay_mtp.foresay_register_proposers(); "
        f"print(spec.serves(pathlib.Path({str(folder)!r}))); "
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "its checkpoint holds 1 MTP module of the Qwen3-Next layout"


def test_a_file_list_in_shards_is_read_whole(tmp_path: Path) -> None:
    tensors = module_tensors("mimo", model().config, 2)
    folder = save_drafter(tmp_path, {}, model().config)
    (folder / "model.safetensors").unlink()
    for shard, part in enumerate((".0.", ".1.")):
        own = {name: tensor for name, tensor in tensors.items() if part in name}
        save_file(own, folder / f"model-0000{shard + 1}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({}), encoding="utf-8")

    load(folder)
    assert read_layout(folder, is_drafter=True).numbers == (0, 1)
