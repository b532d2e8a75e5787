"""Loading a target model: where it may come from, what is refused, and what is known of it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tiny_models
import tokenizers
import torch
import transformers
from paging import TOLERANCE, Pages, largest_difference, own_logits, tokens

from foresay.core.errors import ConfigError, ForesayError, ModelError
from foresay.core.registry import ModelAlias
from foresay.core.worker import loading
from foresay.core.worker.decoder import FastDecoder
from foresay.core.worker.loading import choose_dtype, end_of_sequence_ids, length_limit
from foresay.core.worker.target import load_target

CPU = torch.device("cpu")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A hub that nobody answers for, and an empty cache; returns its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return address


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, eos: str | None = None) -> None:
    words = {f"w{i}": i for i in range(tiny_models.VOCAB_SIZE)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")  # noqa: S106
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), eos_token=eos
    ).save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def message(kind: type[ForesayError], *arguments: Any, **settings: Any) -> str:
    """The error that loading ends in."""
    with pytest.raises(kind) as error:
        load_target(*arguments, **settings)
    assert isinstance(error.value, kind)
    return str(error.value)


# Sources


def test_a_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(save(tiny_models.llama(), tmp_path))
    target = load_target(tmp_path)
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (160, 48, 3)
    assert (target.dtype, target.device) == (torch.float32, CPU)
    assert [(kv.num_kv_heads, kv.head_dim, kv.value_dim) for kv in target.kv_layout] == [
        (2, 12, 12)
    ] * 3
    assert target.max_model_len == 256
    assert target.checkpoint == tmp_path
    assert target.tokenizer.decode([7, 8]) == "w7 w8"
    assert target.config.model_type == "llama"


@pytest.mark.parametrize(
    ("family", "is_fast"),
    [("llama", True), ("mistral", True), ("qwen2_sliding", True), ("qwen3", True),
     ("gpt2", False), ("gemma2", False), ("mixtral", False)],
)  # fmt: skip
def test_the_llama_family_runs_on_the_fast_decoder(
    family: str, is_fast: bool, tmp_path: Path
) -> None:
    target = load_target(save(tiny_models.BUILDERS[family](), tmp_path))
    assert target.is_fast is is_fast
    assert isinstance(target.decoder, FastDecoder) is is_fast
    how = "foresay's own decoder" if is_fast else "transformers' modules"
    assert target.description == f"{target.config.model_type}, float32 on cpu, {how}"
    assert not load_target(tmp_path, force_transformers=True).is_fast


def test_an_alias_is_resolved_and_goes_before_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_models.llama(), tmp_path / "real")
    save(tiny_models.gpt2(), tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    aliases = {"tiny": ModelAlias("tiny", "a test", lambda: tmp_path / "real")}
    assert load_target("tiny", aliases=aliases).config.model_type == "llama"
    assert load_target("./tiny", aliases=aliases).config.model_type == "gpt2"


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_target(save(tiny_models.gpt2(), tmp_path)).tokenizer is None


def test_a_tokenizer_is_taken_from_the_caller(tmp_path: Path) -> None:
    save(tiny_models.gpt2(), tmp_path / "model")
    save_tokenizer(tmp_path / "tokenizer", eos="w9")
    target = load_target(tmp_path / "model", tokenizer=str(tmp_path / "tokenizer"))
    assert target.tokenizer.decode([5]) == "w5"
    assert target.eos_token_ids == {2, 9}
    assert load_target(tmp_path / "model", tokenizer=target.tokenizer).tokenizer is (
        target.tokenizer
    )


def test_a_damaged_tokenizer_is_an_error_unless_another_is_given(tmp_path: Path) -> None:
    save(tiny_models.gpt2(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    found = message(ModelError, tmp_path / "model")
    assert found.startswith(f"cannot load the tokenizer of {str(tmp_path / 'model')!r}: ")
    assert found.endswith("another one can be given with tokenizer=...")
    save_tokenizer(tmp_path / "tokenizer")
    target = load_target(tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    assert target.tokenizer.decode([5]) == "w5"


def test_an_unknown_name_lists_what_was_tried(offline: str) -> None:
    aliases = {n: ModelAlias(n, "", lambda: Path()) for n in ("smollm2", "other")}
    found = message(ModelError, "smolm2", aliases=aliases)
    assert found.startswith(
        "no model 'smolm2': no such alias (installed: other, smollm2) and no such file or folder; "
        f"did you mean 'smollm2'?; {offline} cannot be reached ("
    )
    assert found.endswith(
        "and the hub's local cache does not hold it; use an installed alias, or --model DIR with "
        "a folder that holds a model"
    )


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "two words", "model.gguf"])
def test_what_cannot_be_a_hub_id_is_not_looked_for_there(name: str, offline: str) -> None:
    assert message(ModelError, name) == (
        f"no model {name!r}: no such alias (installed: none) and no such file or folder; use an "
        "installed alias, or --model DIR with a folder that holds a model"
    )


def test_the_hub_is_not_asked_if_the_user_forbids_it(
    offline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set and the hub's local cache does not hold it" in message(
        ModelError, "someone/model"
    )


def test_a_cached_hub_model_is_used_without_the_hub(offline: str, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--someone--model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    save_tokenizer(save(tiny_models.gpt2(), repo / "snapshots" / commit))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    target = load_target("someone/model")
    assert target.checkpoint == repo / "snapshots" / commit
    assert target.tokenizer.decode([3]) == "w3"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    name = repr(str(tmp_path))
    assert message(ModelError, tmp_path) == (
        f"the folder {name} is not a model: it has no config.json"
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    assert message(ModelError, tmp_path).endswith(
        "it holds an adapter: merge it into its model and save that"
    )
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert message(ModelError, tmp_path).endswith(
        f"name the GGUF file itself: {str(tmp_path / 'a.gguf')!r}"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is no JSON: "), ("[]", "holds no JSON object"), ("{}", "cannot load the model ")],
)
def test_a_damaged_config_is_an_error(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert reason in message(ModelError, tmp_path)


# What is refused


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    save(tiny_models.llama(), tmp_path)
    edit_weights(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert message(ModelError, tmp_path) == (
        f"the checkpoint of {str(tmp_path)!r} lacks model.layers.1.mlp.up_proj.weight"
    )


def test_a_damaged_weights_file_is_an_error(tmp_path: Path) -> None:
    save(tiny_models.llama(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert message(ModelError, tmp_path).startswith(f"cannot load the model {str(tmp_path)!r}: ")


def test_tensors_that_are_not_used_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tiny_models.llama(), tmp_path)
    edit_weights(tmp_path, lambda t: t.update(extra=torch.zeros(2)))
    load_target(tmp_path)
    assert caplog.messages == [f"tensors of {str(tmp_path)!r} that the model does not use: extra"]


def _eagle(tensors: dict[str, Any]) -> None:
    """What EAGLE's published checkpoints hold: a layer and `fc`, no norms, no head."""
    for name in list(tensors):
        if not name.startswith("model.layers.0.") or "input_layernorm" in name:
            del tensors[name]
    tensors["fc.weight"] = torch.zeros(48, 96)


DRAFTERS = {
    "EAGLE-3": ({"architectures": ["LlamaForCausalLMEagle3"]},
                "its architecture is 'LlamaForCausalLMEagle3'"),
    "EAGLE-3 by its vocabulary": ({"draft_vocab_size": 32},
                "its config has 'draft_vocab_size', so it holds an EAGLE-3 drafter"),
    "Medusa": ({"medusa_num_heads": 3, "model_type": None, "architectures": None},
                "its config has 'medusa_num_heads', so it holds Medusa heads"),
    "speculators": ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
                "its config has 'speculators_model_type', so it holds a drafter in the "
                "speculators layout"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_given_as_the_target_is_refused(kind: str, tmp_path: Path) -> None:
    changes, reason = DRAFTERS[kind]
    save(tiny_models.llama(num_hidden_layers=1), tmp_path)
    edit_config(tmp_path, **changes)
    assert message(ModelError, tmp_path) == (
        f"{str(tmp_path)!r} is a drafter, not a target model: {reason}; give the model it was "
        "trained for as the model, and this as the drafter"
    )


def test_a_drafter_with_the_config_of_a_llama_is_known_by_its_tensors(tmp_path: Path) -> None:
    save(tiny_models.llama(num_hidden_layers=1), tmp_path)
    edit_weights(tmp_path, _eagle)
    found = message(ModelError, tmp_path)
    assert found.startswith(f"{str(tmp_path)!r} is a drafter, not a target model: it has fc.weight")
    assert "lacks lm_head.weight" in found


ARCHITECTURES = {
    "an encoder": (
        {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
        "is a 'BertForMaskedLM', not a decoder-only causal language model: it cannot generate text",
    ),
    "a classifier": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "is a 'LlamaForSequenceClassification', not a decoder-only causal language model",
    ),
    "an encoder-decoder": (
        {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
        },
        "'t5' is an encoder-decoder model; foresay runs decoder-only language models",
    ),
    "code of its own": (
        {"architectures": ["NovelForCausalLM"], "auto_map": {"AutoConfig": "novel.Config"}},
        "has the architecture 'NovelForCausalLM', which transformers "
        f"{transformers.__version__} does not know; foresay runs no code from checkpoints",
    ),
    "an unknown type": (
        {"architectures": None, "model_type": "novel"},
        "cannot load the model ",
    ),
    "vision": (
        {"architectures": None, "model_type": "vit"},
        "is of type 'vit', which transformers "
        f"{transformers.__version__} does not have as a causal language model",
    ),
    "a recurrent model": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "cannot be decoded speculatively",
    ),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_is_no_decoder_only_model_is_refused_before_weights_are_read(
    kind: str, tmp_path: Path
) -> None:
    changes, reason = ARCHITECTURES[kind]
    save(tiny_models.llama(), tmp_path)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").unlink()
    assert reason in message(ModelError, tmp_path)


# Dtype and device


@pytest.mark.parametrize(
    ("dtype", "stored", "native", "chosen", "reason"),
    [
        ("auto", torch.float32, False, torch.float32, ""),
        ("auto", torch.bfloat16, True, torch.bfloat16, ""),
        ("auto", torch.bfloat16, False, torch.float32, "this CPU does not compute in bfloat16"),
        ("auto", torch.float16, False, torch.float32, "this CPU does not compute in float16"),
        ("auto", torch.float64, True, torch.float32, "the checkpoint is in float64"),
        ("bfloat16", torch.float32, False, torch.bfloat16, ""),
        ("float32", torch.bfloat16, True, torch.float32, ""),
    ],
)
def test_auto_takes_the_stored_dtype_where_the_cpu_computes_in_it(
    dtype: str,
    stored: torch.dtype,
    native: bool,
    chosen: torch.dtype,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "computes_natively", lambda dtype: native)
    assert choose_dtype(dtype, stored, CPU) == (chosen, reason)


def test_auto_takes_the_stored_dtype_on_a_gpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert choose_dtype("auto", dtype, torch.device("cuda")) == (dtype, "")


def test_the_reason_for_a_dtype_is_in_the_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "computes_natively", lambda dtype: dtype == torch.float32)
    save(tiny_models.gpt2().to(torch.float16), tmp_path)
    assert load_target(tmp_path, quantization="none").description == (
        "gpt2, float32 on cpu (this CPU does not compute in float16), transformers' modules"
    )
    # The same if the config does not say it: then the tensors do.
    edit_config(tmp_path, dtype=None, torch_dtype=None)
    assert load_target(tmp_path).description.startswith("gpt2, float32 on cpu (this CPU")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_dtype_that_is_asked_for_is_taken(family: str, tmp_path: Path) -> None:
    save(tiny_models.BUILDERS[family](), tmp_path)
    assert load_target(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


WRONG_SETTINGS = {
    "dtype": (
        {"dtype": "bfloat"},
        "dtype='bfloat': expected 'auto', 'float32', 'bfloat16', 'float16'; did you mean "
        "'bfloat16'?",
    ),
    "device": ({"device": "gpu"}, "device='gpu': expected 'auto', 'cpu', 'cuda' or 'cuda:N'"),
    "meta": ({"device": "meta"}, "device='meta': expected 'auto', 'cpu', 'cuda' or 'cuda:N'"),
}


@pytest.mark.parametrize("kind", WRONG_SETTINGS)
def test_a_wrong_dtype_or_device_is_an_error_before_any_model_is_looked_for(kind: str) -> None:
    settings, expected = WRONG_SETTINGS[kind]
    assert message(ConfigError, "no/such/model", **settings) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    assert message(ConfigError, "no/such/model", device="cuda:0") == (
        f"device='cuda:0': torch {torch.__version__} finds no CUDA device here; use 'auto' or 'cpu'"
    )


# Facts


def test_end_of_sequence_ids_come_from_all_three_places() -> None:
    model = tiny_models.llama(eos_token_id=2)
    model.generation_config.eos_token_id = [2, 5]

    class Tokenizer:
        eos_token_id = 9

    assert end_of_sequence_ids(model, Tokenizer(), 160) == {2, 5, 9}
    assert end_of_sequence_ids(model, Tokenizer(), 8) == {2, 5}  # 9 is no token of the model
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_of_sequence_ids(model, None, 160) == frozenset()


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (transformers.LlamaConfig(max_position_embeddings=4096), 4096),
        (transformers.GPT2Config(n_positions=512), 512),
        (
            transformers.Qwen2Config(
                max_position_embeddings=1000,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1000,
                },
            ),
            4000,
        ),
        (
            transformers.LlamaConfig(
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            ),
            131072,
        ),
        (transformers.MambaConfig(), None),
    ],
    ids=["rope", "learned", "yarn", "llama3", "none"],
)
def test_the_length_limit_is_what_the_config_says(config: Any, limit: int | None) -> None:
    assert length_limit(config) == limit


# Objects


def test_a_loaded_model_is_used_as_it_is() -> None:
    model = tiny_models.llama()
    target = load_target(model)
    assert (target.dtype, target.device) == (torch.float32, CPU)
    assert (target.checkpoint, target.tokenizer) == (None, None)
    assert target.description == "llama, float32 on cpu (a loaded model), foresay's own decoder"
    assert target.is_fast
    assert load_target(model.to(torch.bfloat16)).dtype == torch.bfloat16


OBJECTS: dict[str, tuple[Callable[[], Any], dict[str, str], type[ForesayError], str]] = {
    "a module": (lambda: torch.nn.Linear(2, 2), {}, ModelError, "model is a Linear; expected"),
    "without a head": (
        lambda: tiny_models.llama().model, {}, ModelError,
        "the LlamaModel object has no language-modelling head",
    ),
    "on no device": (
        lambda: tiny_models.llama().to("meta"), {}, ModelError,
        "the LlamaForCausalLM object lies on meta; foresay runs a model on one device",
    ),
    "another dtype": (
        tiny_models.llama, {"dtype": "bfloat16"}, ConfigError,
        "dtype='bfloat16', but the LlamaForCausalLM object is in 'float32'",
    ),
    "an encoder-decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1,
                                  num_heads=2)
        ), {}, ModelError, "'t5' is an encoder-decoder model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_that_cannot_be_a_target_is_refused(kind: str) -> None:
    build, settings, error, reason = OBJECTS[kind]
    assert message(error, build(), **settings).startswith(reason)


class _Scaled(torch.nn.Linear):
    """A layer with something beside its weights, as adapters and quantised layers have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_changed_layer_is_left_to_transformers() -> None:
    model = tiny_models.llama()
    old = model.model.layers[1].self_attn.q_proj
    changed = _Scaled(old.in_features, old.out_features, bias=False)
    changed.weight = old.weight
    model.model.layers[1].self_attn.q_proj = changed
    hooked = tiny_models.llama()
    hooked.model.norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert load_target(tiny_models.llama()).is_fast
    assert not load_target(model).is_fast
    assert not load_target(hooked).is_fast


# GGUF


def write_gguf(path: Path, model: Any) -> None:
    """Write a tiny Llama with tied embeddings as its converters do: heads' halves interleaved."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [chr(0x100 + i) for i in range(config.vocab_size - 2)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, tokens[0] + tokens[1], tokens[2] + tokens[3]])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}", f"{tokens[2]} {tokens[3]}"])
    writer.add_bos_token_id(config.eos_token_id)  # one token for both, as GPT-2 has
    writer.add_eos_token_id(config.eos_token_id)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, num_heads in heads.items():
            if projection in name:
                halves = array.reshape(num_heads, 2, -1, array.shape[1])
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        writer.add_tensor(re.sub("|".join(names), lambda m: names[m.group()], name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model = tiny_models.llama()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model)
    target = load_target(path, dtype="float32")
    assert target.is_fast
    assert target.description == (
        "llama, float32 on cpu (dequantised from GGUF), foresay's own decoder"
    )
    assert target.checkpoint == path
    assert target.max_model_len == 256
    assert target.tokenizer.encode("\x00\x01\x02") == [158, 2]  # the first two are merged
    assert target.eos_token_ids == {2}
    text = tokens(20, 0)
    rows = Pages(target, 1).run([(0, 0, text)])
    assert largest_difference(rows, own_logits(model, text)) <= TOLERANCE


def test_a_gguf_file_needs_two_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert message(ModelError, path) == (
        f"reading the GGUF file {str(path)!r} needs the package gguf: pip install 'foresay[gguf]'"
    )


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"something else")
    assert message(ModelError, path) == (
        f"the file {str(path)!r} is not a GGUF file; give any other model as the folder that holds "
        "its config.json"
    )


# The screen


def test_loading_prints_nothing(tmp_path: Path) -> None:
    save_tokenizer(save(tiny_models.llama(), tmp_path / "model"))
    shutil.copytree(tmp_path / "model", tmp_path / "broken")
    edit_weights(tmp_path / "broken", lambda t: t.pop("model.norm.weight"))
    program = (
        "import sys\n"
        "from foresay.core.errors import ModelError\n"
        "from foresay.core.worker.target import load_target\n"
        "load_target(sys.argv[1])\n"
        "load_target(sys.argv[1], force_transformers=True)\n"
        "try:\n    load_target(sys.argv[2])\n"
        "except ModelError:\n    pass\n"
        "else:\n    raise SystemExit('loaded a broken model')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model"), str(tmp_path / "broken")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_transformers_settings_are_as_before_after_loading(tmp_path: Path) -> None:
    log = transformers.utils.logging
    save(tiny_models.llama(), tmp_path)
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    load_target(tmp_path)
    message(ModelError, "/no/such/folder")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before
