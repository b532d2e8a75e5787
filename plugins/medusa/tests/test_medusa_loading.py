"""What the medusa plugin refuses to load, and what it says then; names in config.json and in files.

Targets are tiny; most are only described.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from medusa_heads import (
    Files,
    Form,
    as_authors,
    as_reduced,
    as_vllm,
    lm_head_of_the_target,
    of_authors,
    of_vllm,
    of_vllm_truncated,
    of_vllm_with_biases_and_one_matrix,
    random_heads,
    reduced_and_shared,
    rows_of_the_targets_lm_head,
    several_blocks,
    view,
    with_prefix,
)

from foresay import LLM
from foresay.core.errors import ConfigError, ForesayError, ModelError
from foresay.core.proposer import DraftInput, DraftRequest
from foresay_medusa import MedusaConfig, _needs
from foresay_medusa.proposer import MedusaProposer


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.llama(eos_token_id=None)


def medusa(model: Any, folder: Path) -> LLM:
    return LLM(model=model, proposer="medusa", drafter=str(folder), strict=True, adaptive=False)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make, name)
        for make in (of_authors, with_prefix, several_blocks, of_vllm)
        for name in make().files.tensors
    ]
    + [
        (reduced_and_shared, "1.0.linear.weight"),
        (reduced_and_shared, "1.0.linear.bias"),
        (reduced_and_shared, "d2t"),
        (rows_of_the_targets_lm_head, "d2t"),
        (of_vllm_truncated, "token_map"),
        (of_vllm_with_biases_and_one_matrix, "lm_heads.0.weight"),
        (of_vllm_with_biases_and_one_matrix, "blocks.1.layers.0.bias"),
    ],
)
def test_a_missing_tensor_is_named(make: Callable[[], Form], name: str, tmp_path: Path) -> None:
    form = make()
    folder = form.files.without(name).save(tmp_path, form.name)
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        load(folder)


def load(folder: Path, **changes: Any) -> None:
    MedusaProposer(MedusaConfig(drafter=str(folder))).load(view(**changes))


@pytest.mark.parametrize(
    ("make", "tensors", "words"),
    [
        (of_authors, {"0.0.linear.extra": (3,)}, "not know: 0.0.linear.extra"),
        (of_authors, {"0.1.linear.weight": (48, 48)}, "not know: 0.1.linear.weight"),
        (of_authors, {"4.1.weight": (160, 48)}, "not know: 4.1.weight"),
        (of_authors, {"d2t": (160,)}, "'d2t' is of torch.float32; expected whole numbers"),
        (reduced_and_shared, {"0.1.weight": (160, 48)}, "not know: 0.1.weight"),
        (lm_head_of_the_target, {"d2t": (40,)}, "'d2t' is of torch.float32; expected whole"),
        (lm_head_of_the_target, {"token_map": (40,)}, "not know: token_map"),
        (lm_head_of_the_target, {"t2d": (160,)}, "not know: t2d"),
        (lm_head_of_the_target, {"lm_head.bias": (160,)}, "not know: lm_head.bias"),
        (rows_of_the_targets_lm_head, {"d2t": (39,)}, "'d2t' is [39], expected [40]"),
        (rows_of_the_targets_lm_head, {"t2d": (160,)}, "they name 40 and 160 tokens"),
        (of_authors, {"1.0.linear.weight": (48, 47)}, "'1.0.linear.weight' is [48, 47]"),
        (of_authors, {"1.0.linear.bias": (47,)}, "'1.0.linear.bias' is [47], expected [48]"),
        (of_authors, {"2.1.weight": (159, 48)}, "'2.1.weight' is [159, 48]"),
        (of_authors, {"2.1.weight": (160, 47)}, "'2.1.weight' is [160, 47]"),
        (of_authors, {"0.1.bias": (159,)}, "'0.1.bias' is [159], expected [160]"),
        (reduced_and_shared, {"d2t": (39,)}, "'d2t' is [39], expected [40]"),
        (reduced_and_shared, {"lm_head.weight": (41, 48)}, "40, and the output matrix has 41"),
        (of_vllm_truncated, {"token_map": (49,)}, "'token_map' is [49], expected [50]"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (next(iter(value), "") if value else ""),
)
def test_an_extra_or_misshapen_tensor_is_named(
    make: Callable[[], Form], tensors: dict[str, tuple[int, ...]], words: str, tmp_path: Path
) -> None:
    form = make()
    new = {name: torch.ones(shape) for name, shape in tensors.items()}
    folder = form.files.with_(new).save(tmp_path, form.name)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("d2t", torch.arange(40) + 130, "'d2t' says that row 15 is the target id 160, and there"),
        ("d2t", -torch.arange(40) - 1, "'d2t' says that row 0 is the target id -1"),
        ("t2d", torch.arange(160) < 39, "contradict each other: they name 40 and 39 tokens"),
        ("token_map", torch.arange(40), "not know: token_map"),
    ],
)
def test_a_map_that_cannot_be_right_is_refused(
    name: str, values: torch.Tensor, words: str, tmp_path: Path
) -> None:
    files = reduced_and_shared().files.with_({name: values})
    with pytest.raises(ModelError) as caught:
        load(files.save(tmp_path))
    assert words in str(caught.value)


def test_a_map_that_config_json_does_not_ask_for_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM's rule: a token_map counts with a truncated_vocab_size below the vocabulary's only.
    heads = random_heads(2, bias=False)
    files = as_vllm(heads).with_({"token_map": torch.arange(50)})
    proposer = MedusaProposer(MedusaConfig(drafter=str(files.save(tmp_path, "model.safetensors"))))
    with caplog.at_level(logging.INFO):
        proposer.load(view())
    assert proposer._heads is not None
    assert proposer._heads.draft_to_target is None
    assert "'token_map'" in caplog.text
    assert "is not used" in caplog.text


@pytest.mark.parametrize("shared", [False, True], ids=["their own lm_head", "the target's"])
def test_a_target_of_fewer_tokens_gets_drafts_of_its_own_tokens_only(
    shared: bool, tmp_path: Path
) -> None:
    heads = random_heads(2, num_rows=40, shared=True)
    files = as_reduced(heads).configured(vocab_size=160)
    folder = (files.without("lm_head.weight") if shared else files).save(tmp_path)
    proposer = MedusaProposer(MedusaConfig(drafter=str(folder), sample=False))
    proposer.load(view(vocab_size=155))
    hidden = torch.randn(200, 48, generator=torch.Generator().manual_seed(0)) * 3
    requests = [DraftRequest(f"r{i}", range(40), num_new_tokens=1, k=2) for i in range(200)]
    batch = DraftInput(requests, hidden_states=hidden, row_starts=range(201))
    drafts = proposer.propose(batch).token_ids
    ids = {token_id for draft in drafts for token_id in draft}
    assert heads.ids is not None
    assert int(heads.ids.max()) >= 155, "the test needs an id that the target lacks"
    assert len(ids) > 10
    assert max(ids) < 155


@pytest.mark.parametrize("name", ["lm_head.weight", None], ids=["the target's lm_head", "own"])
def test_heads_of_none_of_the_targets_tokens_are_refused(name: str | None, tmp_path: Path) -> None:
    heads = replace(random_heads(2, num_rows=3, shared=True), ids=torch.tensor([157, 158, 159]))
    files = as_reduced(heads).configured(vocab_size=160)
    folder = (files if name is None else files.without(name)).save(tmp_path)
    with pytest.raises(ModelError, match="drafts no token id that the target has"):
        load(folder, vocab_size=155)


def test_what_is_shared_with_the_target_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load(lm_head_of_the_target().files.save(tmp_path / "all"))
        load(rows_of_the_targets_lm_head().files.save(tmp_path / "some"))
    assert [message.split(" share ")[1] for message in caplog.messages] == [
        "the target's lm_head",
        "the target's lm_head, over 40 of its 160 tokens",
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            as_authors(random_heads(size=32)),
            "hidden states of size 32, and the target model's have 48",
        ),
        (as_vllm(random_heads(size=32, bias=False)), "of size 32, and the target model's have 48"),
        (
            as_authors(replace(random_heads(size=32), matrices=[])),
            "of size 32, and the target model's have 48",
        ),
        (as_authors(random_heads(num_rows=90)), "heads of 90 rows, a token each, and the target"),
        (
            as_vllm(random_heads(bias=False, num_rows=320), vocab_size=320),
            "a vocabulary of 320 tokens, and the target model's has 160",
        ),
    ],
    ids=["size", "size in config.json", "size without matrices", "rows", "vocabulary"],
)
def test_heads_of_another_model_are_refused(
    files: Files, words: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        medusa(model, files.save(tmp_path))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"medusa_num_heads": 0}, "'medusa_num_heads': 0; expected a whole number, at least 1"),
        ({"medusa_num_heads": "3"}, "'medusa_num_heads': '3'"),
        ({"medusa_num_layers": -1}, "'medusa_num_layers': -1; expected a whole number, at least 0"),
        ({"medusa_fc_bias": 1}, "'medusa_fc_bias': 1; expected true or false"),
        ({"logit_scale": 0.5}, "'logit_scale': 0.5"),
        ({"hidden_size": "48"}, "'hidden_size': '48'"),
        ({"medusa_num_heads": None}, "its config.json has no 'medusa_num_heads'"),
        (
            {"medusa_num_heads": None, "architectures": ["LlamaForCausalLM"]},
            "a whole language model (LlamaForCausalLM); run one as drafter with --proposer draft_m",
        ),
        (
            {"medusa_num_heads": None, "architectures": ["LlamaForCausalLMEagle3"]},
            "a drafter of another kind (LlamaForCausalLMEagle3)",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_config_json_that_cannot_be_right_is_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = as_authors(random_heads(3)).configured(**fields).save(tmp_path)
    target_config = tiny_models.transformers.LlamaConfig(
        vocab_size=160, hidden_size=48, num_attention_heads=4
    )
    with pytest.raises(ModelError) as caught:
        _needs(MedusaConfig(drafter=str(folder)), target_config)
    assert words in str(caught.value)


def test_unknown_and_left_out_fields_of_config_json_are_no_matter(tmp_path: Path) -> None:
    files = as_authors(random_heads(3)).configured(
        decoding_strategy="tree_decoding", logit_scale=1.0, medusa_num_layers=None
    )
    load(files.save(tmp_path))


def test_a_model_as_heads_and_heads_as_a_model_are_refused(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="is a whole language model"):
        medusa(model, tmp_path / "model")
    folder = as_authors(random_heads()).save(tmp_path / "heads")
    with pytest.raises(ForesayError):
        LLM(model=str(folder), proposer=None)


def test_without_a_folder_it_says_what_it_needs(model: Any) -> None:
    with pytest.raises(ConfigError, match="proposer 'medusa' needs heads"):
        LLM(model=model, proposer="medusa", adaptive=False)


def test_a_trainers_files_beside_the_heads_are_not_read(tmp_path: Path) -> None:
    folder = as_authors(random_heads()).save(tmp_path)
    (folder / "training_args.bin").write_bytes(b"a pickled object")
    load(folder)
