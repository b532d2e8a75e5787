"""How the eagle plugin reads folders: published forms of config.json, and every mistake named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_heads
import pytest
import tiny_models
import torch
from eagle_heads import Head

import foresay_eagle
from foresay import LLM
from foresay.core.config import build_settings
from foresay.core.errors import ConfigError, ModelError
from foresay.core.proposer import KVLayer, Needs, TargetView
from foresay_eagle import EagleConfig
from foresay_eagle.layout import read_layout
from foresay_eagle.proposer import EagleProposer
from foresay_eagle.taps import aux_layers


def named(value: object) -> str:
    """A parameter in a test's name: the same in every process."""
    return str(getattr(value, "__name__", value))


def target_config(**changes: Any) -> Any:
    fields = {"hidden_size": 48, "vocab_size": 160, "num_hidden_layers": 3}
    text = SimpleNamespace(**{**fields, "max_position_embeddings": 256, **changes})
    return SimpleNamespace(get_text_config=lambda decoder: text)


def needs(folder: Path | str | None, config: Any = None, **settings: Any) -> Needs:
    drafter = None if folder is None else str(folder)
    [spec] = foresay_eagle.foresay_register_proposers()
    return spec.needs(EagleConfig(drafter=drafter, **settings), config or target_config())


def load(folder: Path, **settings: Any) -> EagleProposer:
    """Do what an engine does: ask for the needs, then load."""
    needs(folder, **settings)
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(160, 48, generator=generator)
    proposer = EagleProposer(EagleConfig(drafter=str(folder), **settings))
    proposer.load(
        TargetView(
            config=None,
            vocab_size=160,
            hidden_size=48,
            num_layers=3,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=256,
            checkpoint=None,
            tokenizer=None,
            embeddings=torch.randn(160, 48, generator=generator),
            lm_head=lambda hidden: hidden @ head.T,
            lm_head_rows=lambda ids: (head[ids], None),
        )
    )
    return proposer


def speculators1() -> Head:
    head = eagle_heads.eagle().without("embed_tokens.weight")
    head = head.renamed(("fc.", "fusion_fc."), ("layers.0.", "transformer."))
    return head.as_speculators("eagle", fusion_bias=True)


def speculators3() -> Head:
    return eagle_heads.eagle3().renamed(("midlayer.", "layers.0.")).as_speculators("eagle3")


MAKERS: dict[str, Callable[[], Head]] = {
    "eagle": eagle_heads.eagle,
    "eagle reduced": lambda: eagle_heads.reduced(eagle_heads.eagle(), 64),
    "eagle speculators": speculators1,
    "eagle3": eagle_heads.eagle3,
    "eagle3 speculators": speculators3,
}
# What may be left out: it is shared with the target, or only checked.
OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "t2d"}
EVERY = [(maker, name) for maker, make in MAKERS.items() for name in make().tensors]


# -- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("maker", "name"), EVERY, ids=lambda value: value)
def test_a_tensor_that_is_missing_is_named_or_shared(maker: str, name: str, tmp_path: Path) -> None:
    folder = MAKERS[maker]().without(name).save(tmp_path)
    if name in OPTIONAL:
        load(folder)
        return
    if maker == "eagle reduced" and name == "d2t":  # then it is no reduced head
        with pytest.raises(
            ModelError, match=r"'lm_head.weight' is \[64, 48\], .* needs a tensor 'd2t'"
        ):
            load(folder)
        return
    with pytest.raises(ModelError, match=f"has no tensor '{name}'"):
        load(folder)


@pytest.mark.parametrize(("maker", "name"), EVERY, ids=lambda value: value)
def test_a_tensor_of_another_shape_is_named(maker: str, name: str, tmp_path: Path) -> None:
    head = MAKERS[maker]()
    grown = torch.cat([head.tensors[name], head.tensors[name][:1]])
    folder = head.with_(**{name: grown}).save(tmp_path)
    named = "lm_head.weight" if (maker, name) == ("eagle reduced", "d2t") else name
    with pytest.raises(ModelError, match=rf"tensor '{named}' is \[.*expected \["):
        load(folder)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["layers.0.input_layernorm.bias", "medusa.weight"])
def test_a_tensor_that_nobody_knows_is_named(maker: str, name: str, tmp_path: Path) -> None:
    folder = MAKERS[maker]().with_(**{name: torch.ones(48)}).save(tmp_path)
    with pytest.raises(ModelError, match=f"does not know: {name}"):
        load(folder)


def test_what_training_leaves_behind_is_passed_over(tmp_path: Path) -> None:
    head = eagle_heads.eagle3().with_(
        midlayer__self_attn__rotary_emb__inv_freq=torch.ones(6),
        verifier_norm__weight=torch.ones(48),
    )
    load(head.save(tmp_path))


@pytest.mark.parametrize(
    ("fields", "tensors", "missing"),
    [
        ({"bias": True}, {}, "fc.bias"),
        ({}, {}, "fc.bias"),  # its authors' default
        ({"bias": False, "attention_bias": True}, {}, "layers.0.self_attn.q_proj.bias"),
        ({"bias": False, "qkv_bias": True}, {}, "layers.0.self_attn.q_proj.bias"),
        ({"bias": False, "mlp_bias": True}, {}, "layers.0.mlp.gate_proj.bias"),
        (
            {"bias": False},
            {"layers.0.self_attn.v_proj.bias": torch.ones(24)},
            "layers.0.self_attn.q_proj.bias",
        ),
        (
            {"bias": False},
            {"layers.0.mlp.gate_proj.bias": torch.ones(64)},
            "layers.0.mlp.up_proj.bias",
        ),
    ],
    ids=named,
)
def test_a_bias_that_belongs_there_is_missed(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor], missing: str, tmp_path: Path
) -> None:
    head = eagle_heads.eagle().without("fc.bias").configured(**fields).with_(**tensors)
    with pytest.raises(ModelError, match=f"has no tensor '{missing}'"):
        load(head.save(tmp_path))


@pytest.mark.parametrize(
    ("field", "missing"),
    [("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")],
)
def test_a_norm_that_belongs_there_is_missed(field: str, missing: str, tmp_path: Path) -> None:
    head = eagle_heads.eagle3().configured(**{field: True})
    with pytest.raises(ModelError, match=f"has no tensor '{missing}'"):
        load(head.save(tmp_path))


def test_a_head_of_two_layers_is_refused(tmp_path: Path) -> None:
    head = eagle_heads.eagle()
    name = "layers.1.self_attn.q_proj.weight"
    folder = head.with_(**{name: torch.ones(48, 48)}).save(tmp_path)
    with pytest.raises(ModelError, match=f"head of several layers .it has '{name}'"):
        load(folder)


# -- vocabularies --------------------------------------------------------------------------------


def test_ids_in_place_of_offsets_are_noticed(tmp_path: Path) -> None:
    head = eagle_heads.eagle3()
    ids = head.tensors["d2t"] + torch.arange(64)
    folder = head.with_(d2t=ids).save(tmp_path)
    with pytest.raises(ModelError, match=r"'d2t' leads from draft id \d+ .* it must hold offsets"):
        load(folder)


def test_d2t_and_t2d_that_contradict_each_other_are_noticed(tmp_path: Path) -> None:
    head = eagle_heads.eagle3()
    mask = head.tensors["t2d"].clone()
    first = int(mask.nonzero()[5])
    mask[first] = False
    folder = head.with_(t2d=mask).save(tmp_path)
    told = rf"the target id {first} is drafted, by t2d it is the other way \(so with 1 ids\)"
    with pytest.raises(ModelError, match=told):
        load(folder)


def test_a_whole_vocabulary_with_an_empty_mask_is_fine(tmp_path: Path) -> None:
    head = eagle_heads.eagle3(draft_vocab=160)
    load(head.with_(t2d=torch.zeros(160, dtype=torch.bool)).save(tmp_path))


def test_a_reduced_head_tells_its_size_in_config_json_too(tmp_path: Path) -> None:
    head = eagle_heads.reduced(eagle_heads.eagle(), 64).configured(draft_vocab_size=64)
    assert needs(head.save(tmp_path)).hidden_state  # by its tensors: it is no EAGLE-3 head
    proposer = load(tmp_path)
    assert proposer._head is not None
    mapping = proposer._head.draft_to_target
    assert mapping is not None
    assert torch.equal(mapping, head.tensors["d2t"] + torch.arange(64))


def test_a_reduced_head_without_a_map_is_refused(tmp_path: Path) -> None:
    head = eagle_heads.reduced(eagle_heads.eagle(), 64).configured(draft_vocab_size=64)
    with pytest.raises(ModelError, match="has no tensor 'd2t'"):
        load(head.without("d2t").save(tmp_path))


@pytest.mark.parametrize("shared", [False, True], ids=["its own lm_head", "the target's"])
def test_ids_that_only_the_heads_vocabulary_has_are_not_drafted(
    shared: bool, tmp_path: Path
) -> None:
    head = eagle_heads.eagle3(vocab_size=170, draft_vocab=80)
    ids = head.tensors["d2t"] + torch.arange(80)
    assert int(ids.max()) >= 160
    proposer = load((head.without("lm_head.weight") if shared else head).save(tmp_path))
    assert proposer._head is not None
    assert torch.equal(proposer._head.draft_to_target, ids[ids < 160])  # type: ignore[arg-type]
    hidden = torch.randn(2, 48)
    assert proposer._head.logits(hidden, 0).shape == (2, int((ids < 160).sum()))


@pytest.mark.parametrize("shared", [False, True], ids=["its own lm_head", "the target's"])
def test_a_head_of_none_of_the_targets_ids_is_refused(shared: bool, tmp_path: Path) -> None:
    head = eagle_heads.eagle3(vocab_size=170, draft_vocab=5)
    head = head.with_(d2t=torch.full((5,), 162)).without("t2d")
    folder = (head.without("lm_head.weight") if shared else head).save(tmp_path)
    with pytest.raises(ModelError, match="drafts no token id that the target has"):
        load(folder)


# -- what is shared with the target --------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (eagle_heads.eagle, ["embeddings of its own", "shares the target's lm_head"]),
        (
            eagle_heads.eagle3,
            [
                "residual streams entering the target's layers 2, 1, 0",
                "shares the target's embeddings",
                "lm_head of its own, over 64 of the target's 160 tokens",
            ],
        ),
        (
            lambda: eagle_heads.reduced(eagle_heads.eagle(), 64).without("lm_head.weight"),
            ["embeddings of its own", "shares the target's lm_head, over 64 of its 160 tokens"],
        ),
    ],
    ids=["eagle", "eagle3", "eagle, d2t alone"],
)
def test_what_is_shared_is_decided_by_presence_and_logged(
    make: Callable[[], Head],
    expected: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="foresay"):
        load(make().save(tmp_path))
    assert len(caplog.messages) == len(expected)
    for message, part in zip(caplog.messages, expected, strict=True):
        assert part in message


def test_a_narrow_head_cannot_share_the_targets_lm_head(tmp_path: Path) -> None:
    head = eagle_heads.eagle3(hidden_size=32, target_size=48)
    head = head.with_(embed_tokens__weight=torch.ones(160, 32)).without("lm_head.weight")
    with pytest.raises(ModelError, match=r"no 'lm_head.weight', and the target's does not fit"):
        load(head.save(tmp_path))


def test_a_bias_without_its_matrix_is_named(tmp_path: Path) -> None:
    head = eagle_heads.eagle3().without("lm_head.weight").with_(lm_head__bias=torch.ones(64))
    with pytest.raises(ModelError, match=r"does not know: lm_head\.bias"):
        load(head.save(tmp_path))


def test_a_narrow_head_cannot_share_embeddings(tmp_path: Path) -> None:
    head = eagle_heads.eagle3(hidden_size=32, target_size=48)
    with pytest.raises(ModelError, match=r"no 'embed_tokens.weight', and the target's embeddings"):
        load(head.save(tmp_path))


# -- config.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "fields", "variant"),
    [
        (eagle_heads.eagle, {}, "eagle"),
        (eagle_heads.eagle, {"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        (eagle_heads.eagle, {"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        (eagle_heads.eagle, {"architectures": None}, "eagle"),
        (eagle_heads.eagle3, {}, "eagle3"),
        (eagle_heads.eagle3, {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        (eagle_heads.eagle3, {"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        (eagle_heads.eagle3, {"architectures": None}, "eagle3"),
        (speculators1, {}, "eagle"),
        (speculators3, {}, "eagle3"),
        (speculators3, {"architectures": ["Eagle3DraftModel"]}, "eagle3"),
    ],
    ids=named,
)
def test_the_kind_of_head_is_told_from_its_folder(
    make: Callable[[], Head], fields: dict[str, Any], variant: str, tmp_path: Path
) -> None:
    folder = make().configured(**fields).save(tmp_path)
    assert read_layout(str(folder)).variant == variant
    found = needs(folder)
    assert found.hidden_state == (variant == "eagle")
    assert found.aux_layers == (() if variant == "eagle" else (2, 1, 0))
    assert found.kv_layers == (KVLayer(2, 12),)


def test_fields_may_stand_under_model(tmp_path: Path) -> None:
    head = eagle_heads.eagle()
    folder = head.save(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "eagle", "model": head.config}))
    load(folder)


def test_a_new_optional_field_is_no_obstacle(tmp_path: Path) -> None:
    load(
        eagle_heads.eagle3()
        .configured(some_new_field={"a": [1]}, max_window_layers=3)
        .save(tmp_path)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act': 'gelu'; .* with 'silu' only"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope of the type 'dynamic'"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config': {'bits': 4}"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "'use_aux_hidden_state': False"),
        ({"hidden_size": "48"}, "'hidden_size': '48'; expected a whole number"),
        ({"intermediate_size": None}, "no 'intermediate_size'"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key heads"),
        ({"norm_before_residual": "yes"}, "'norm_before_residual': 'yes'; expected true or false"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "expected a list of layer numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "layers 2, 4; the target model has 3"),
        (
            {"hidden_size": 64, "head_dim": 12},
            "hidden states of size 64, .* target model's have 48",
        ),
        ({"vocab_size": 32000}, "vocabulary of 32000 tokens, and the target model's has 160"),
        ({"medusa_num_heads": 4}, "Medusa heads; run them with --proposer medusa"),
        ({"speculators_model_type": "dflash"}, "of the type 'dflash'; .* takes 'eagle' and"),
    ],
    ids=named,
)
def test_what_cannot_be_honoured_is_refused_before_any_weight_is_read(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = eagle_heads.eagle3().configured(**fields).save(tmp_path)
    with pytest.raises(ModelError, match=message):
        needs(folder)


def test_extra_norms_of_a_speculators_eagle_head_are_refused(tmp_path: Path) -> None:
    head = eagle_heads.eagle().as_speculators("eagle", layernorms=True)
    with pytest.raises(ModelError, match="'layernorms': True"):
        needs(head.save(tmp_path))


@pytest.mark.parametrize("model", [tiny_models.llama, tiny_models.gpt2], ids=["llama", "gpt2"])
def test_a_whole_model_is_no_head(model: Callable[[], Any], tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"whole language model \(\w+\), not an EAGLE head"):
        needs(tmp_path)


@pytest.mark.parametrize("make", [eagle_heads.eagle, eagle_heads.eagle3], ids=["eagle", "eagle3"])
def test_a_head_is_no_target(make: Callable[[], Head], tmp_path: Path) -> None:
    folder = make().save(tmp_path)
    with pytest.raises(ModelError, match="is a drafter, not a target model"):
        LLM(model=str(folder), proposer=None)


def test_a_folder_without_a_head_and_no_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="proposer 'eagle' needs a head: give its folder"):
        needs(None)
    with pytest.raises(ModelError, match=r"holds no config.json"):
        needs(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no weights"):
        needs(tmp_path)


def test_a_misspelt_setting_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="aux_layers"):
        build_settings(EagleConfig, {"aux_layer": (1, 2)}, "proposer 'eagle'")


# -- limits and layers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_limit", "target_limit", "expected"),
    [(256, 256, None), (512, 256, None), (32, 64, 32), (32, None, 32)],
    ids=named,
)
def test_the_heads_limit_counts_where_it_is_the_lower(
    head_limit: int, target_limit: int | None, expected: int | None, tmp_path: Path
) -> None:
    folder = eagle_heads.eagle(max_position_embeddings=head_limit).save(tmp_path)
    config = target_config(max_position_embeddings=target_limit)
    assert needs(folder, config).max_context == expected


@pytest.mark.parametrize(
    ("published", "asked", "num_layers", "expected"),
    [
        pytest.param(None, None, 32, (2, 16, 29), id="EAGLE-3's default"),
        pytest.param([2, 46, 91], None, 94, (2, 46, 91), id="as published"),
        pytest.param(
            [1, 46, 90], None, 94, (2, 47, 91), id="the default, counted by what it leaves"
        ),
        pytest.param([24, 30, 36], None, 36, (24, 30, 36), id="up to the end of the last layer"),
        pytest.param([1, 46, 90], (1, 46, 90), 94, (1, 46, 90), id="the setting comes first"),
        pytest.param([5], None, 8, (5,), id="one stream"),
    ],
)
def test_the_streams_that_a_head_takes(
    published: list[int] | None,
    asked: tuple[int, ...] | None,
    num_layers: int,
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    head = eagle_heads.eagle3().configured(eagle_aux_hidden_state_layer_ids=published)
    layout = read_layout(str(head.save(tmp_path)))
    assert aux_layers(layout, asked, num_layers) == expected


@pytest.mark.parametrize(
    ("make", "asked", "num_layers", "message"),
    [
        (eagle_heads.eagle, (1,), 32, "EAGLE-1 head, which takes the target's last hidden state"),
        (eagle_heads.eagle3, (33,), 32, "setting aux_layers: .* layers 33; .* from 0 to 32"),
        (eagle_heads.eagle3, (), 32, "expected one number at least"),
        (eagle_heads.eagle3, None, 2, "EAGLE-3's default: .* layers 2, 1, -1; .* has 2 layers"),
    ],
    ids=named,
)
def test_streams_that_do_not_exist_are_refused(
    make: Callable[[], Head],
    asked: tuple[int, ...] | None,
    num_layers: int,
    message: str,
    tmp_path: Path,
) -> None:
    layout = read_layout(str(make().save(tmp_path)))
    with pytest.raises((ConfigError, ModelError), match=message):
        aux_layers(layout, asked, num_layers)
