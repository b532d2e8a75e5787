"""Transformers' own modules over the paged KV cache, against the same models on their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from paging import TOLERANCE, Pages, largest_difference, own_logits, tokens, tolerance

from foresay.core.errors import ModelError
from foresay.core.worker.attention import AttentionRules
from foresay.core.worker.invariance import rows_are_invariant
from foresay.core.worker.target import TargetModel, load_target
from foresay.core.worker.transformers_model import private_copy

FAMILIES = pytest.mark.parametrize("family", tiny_models.BUILDERS)


def paged(model: Any, **settings: Any) -> TargetModel:
    return load_target(model, force_transformers=True, **settings)


@FAMILIES
def test_ragged_chunks_of_three_texts_give_the_models_own_logits(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    pages = Pages(paged(model), num_texts=3)
    texts = [tokens(31, 0), tokens(9, 1), tokens(48, 2)]
    # Lengths of one, of blocks and of odd sizes; a text that joins late and one that pauses.
    steps = [
        [(0, 0, 7), (2, 0, 16)],
        [(0, 7, 8), (1, 0, 9), (2, 16, 17)],
        [(2, 17, 41)],
        [(2, 41, 48), (0, 8, 31)],
    ]
    logits = [torch.zeros(len(text), tiny_models.VOCAB_SIZE) for text in texts]
    for step in steps:
        rows = pages.run([(text, a, texts[text][a:b]) for text, a, b in step])
        for text, a, b in step:
            logits[text][a:b], rows = rows[: b - a], rows[b - a :]
    for text, computed in zip(texts, logits, strict=True):
        expected = own_logits(model, text)
        assert largest_difference(computed, expected) <= tolerance(expected)


@FAMILIES
def test_rejected_drafts_are_written_over(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    pages = Pages(paged(model), num_texts=1)
    text, wrong = tokens(30, 3), tokens(6, 4)
    pages.run([(0, 0, text[:12])])
    # Position 12 is right, six drafts after it are not: they end beyond windows of 8.
    pages.run([(0, 12, [text[12], *wrong])])
    first = pages.run([(0, 13, text[13:15])])
    rest = pages.run([(0, 15, text[15:])])
    assert largest_difference(torch.cat([first, rest]), own_logits(model, text)[13:]) <= TOLERANCE


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi", "gemma2"])
def test_greedy_decoding_gives_the_ids_of_generate(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    pages = Pages(paged(model), num_texts=1)
    text = tokens(7, 5)
    expected = model.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, len(text), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=None,
    )[0].tolist()
    start = 0
    while len(text) < len(expected):
        logits = pages.run([(0, start, text[start:])], rows=[len(text) - start - 1])
        start = len(text)
        text.append(int(logits[0].argmax()))
    assert text == expected
    assert len(set(expected[7:])) > 5  # not a text that any broken model repeats


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss"])
def test_only_the_rows_asked_for_get_logits(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    pages = Pages(paged(model), num_texts=2)
    one, two = tokens(10, 6), tokens(5, 7)
    rows = pages.run([(0, 0, one), (1, 0, two)], rows=[12, 3])
    expected = torch.stack([own_logits(model, two)[2], own_logits(model, one)[3]])
    assert largest_difference(rows, expected) <= TOLERANCE
    assert pages.run([(0, 0, one)], rows=[]).shape == (0, tiny_models.VOCAB_SIZE)


def test_the_layout_of_the_kv_cache_is_what_each_layer_stores() -> None:
    layout = paged(tiny_models.deepseek_v3()).kv_layout
    # 8 + 8 numbers for keys without and with rope, 8 for values; 4 heads after the expansion.
    assert [(kv.num_kv_heads, kv.head_dim, kv.value_dim) for kv in layout] == [(4, 16, 8)] * 3


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama"])
def test_a_model_object_is_not_changed(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    text = tokens(20, 8)
    settings, before = copy.deepcopy(model.config.to_dict()), own_logits(model, text)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    Pages(paged(model), num_texts=1).run([(0, 0, text)])
    assert model.training
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == "eager"
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(own_logits(model.eval(), text), before)


def test_moving_a_model_object_later_does_not_reach_the_target() -> None:
    model = tiny_models.gpt2()
    text = tokens(20, 9)
    expected = own_logits(model, text)
    pages = Pages(paged(model), num_texts=1)
    model.double().train()
    assert largest_difference(pages.run([(0, 0, text)]), expected) <= TOLERANCE


def test_a_model_object_and_its_copy_share_their_weights() -> None:
    model = tiny_models.gpt2()
    copied = private_copy(model)
    pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
    assert len(pairs) > 20
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    assert copied.lm_head.weight is copied.transformer.wte.weight  # tied, as in the model


def test_longrope_keeps_its_short_form_up_to_its_original_length() -> None:
    model = tiny_models.phi3_longrope()
    target = paged(model)
    assert target.max_model_len == 64
    text = tokens(40, 10)
    assert largest_difference(Pages(target, 1).run([(0, 0, text)]), own_logits(model, text)) < (
        TOLERANCE
    )


def test_longrope_takes_its_long_form_for_every_text_when_more_is_asked_for() -> None:
    model = tiny_models.phi3_longrope()
    target = paged(model, max_model_len=65)
    assert target.max_model_len == 256
    text = tokens(40, 10)
    rows = Pages(target, 1).run([(0, 0, text)])
    short = own_logits(model, text)
    assert largest_difference(rows, short) > 0.1
    # Transformers takes the long form as soon as one text of the batch exceeds 64 positions.
    long = own_logits(model, text + tokens(30, 11))[:40]
    assert largest_difference(rows, long) <= tolerance(long)


def test_a_model_object_keeps_its_own_longrope() -> None:
    model = tiny_models.phi3_longrope()
    text = tokens(70, 12)
    before = own_logits(model, text)
    paged(model)
    assert torch.equal(own_logits(model, text), before)


REFUSED: dict[str, tuple[Any, str]] = {
    "dynamic rope": (
        lambda: tiny_models.llama(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        ),
        "with rope type 'dynamic' a row's logits depend on the other texts of its batch",
    ),
    "an encoder": (
        lambda: tiny_models.build(
            transformers.BertConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=64,
            )
        ),
        "attention layer 0 sees something else than all earlier tokens or a sliding window of "
        "them (is the model an encoder?)",
    ),
    "chunked attention": (
        lambda: tiny_models.build(
            transformers.Llama4TextConfig(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=64,
                intermediate_size_mlp=64,
                num_local_experts=2,
                layer_types=["full_attention", "chunked_attention"],
            )
        ),
        "has layers of type 'chunked_attention'; foresay's attention sees all earlier tokens",
    ),
    "alibi in a mask of its own": (
        lambda: tiny_models.build(
            transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
        ),
        "BloomForCausalLM does not let its attention be replaced",
    ),
    "recurrent layers, declared by type": (
        lambda: tiny_models.build(
            transformers.Lfm2Config(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=64,
                layer_types=["conv", "full_attention"],
            )
        ),
        "'lfm2' cannot be decoded speculatively: layers of type 'conv' keep a recurrent state, "
        "which cannot be rolled back when a draft is rejected",
    ),
    "a recurrent model": (
        lambda: tiny_models.build(
            transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
        ),
        "RwkvForCausalLM cannot be decoded speculatively: it keeps a recurrent state, which "
        "cannot be rolled back when a draft is rejected",
    ),
    "cross-attention": (
        lambda: tiny_models.gpt2(add_cross_attention=True),
        "'gpt2' attends to an encoder (add_cross_attention)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_not_be_exact_is_refused_with_the_reason(kind: str) -> None:
    build, reason = REFUSED[kind]
    with pytest.raises(ModelError) as refusal:
        paged(build())
    assert reason in str(refusal.value)


def _mix_rows(model: Any) -> None:
    """Give a layer what a token shift does: half of the row before."""
    layer = model.gpt_neox.layers[1].input_layernorm
    layer.register_forward_hook(
        lambda module, inputs, output: output + 0.5 * torch.roll(output, 1, dims=1)
    )


def _ignore_positions(model: Any) -> None:
    model.gpt_neox.rotary_emb.register_forward_pre_hook(
        lambda module, arguments, given: (
            arguments,
            {**given, "position_ids": torch.arange(given["position_ids"].shape[1])[None]},
        ),
        with_kwargs=True,
    )


def _adapt_to_the_longest(model: Any) -> None:
    model.gpt_neox.rotary_emb.register_forward_hook(
        lambda module, arguments, given, output: tuple(
            x * (1 + given["position_ids"].max() / 100) for x in output
        ),
        with_kwargs=True,
    )


def _change_keywords(model: Any, **keywords: Any) -> None:
    model.gpt_neox.layers[2].attention.register_forward_pre_hook(
        lambda module, arguments, given: (arguments, {**given, **keywords}), with_kwargs=True
    )


def _repeat_a_layer(model: Any) -> None:
    model.gpt_neox.layers[2].attention.layer_idx = 1


BENT: dict[str, tuple[Any, str]] = {
    "rows mixed outside attention": (
        _mix_rows,
        "layer 1 computes other keys and values for a text in two pieces than for the same text "
        "in one",
    ),
    "positions ignored": (
        _ignore_positions,
        "layer 0 computes other keys and values for a text in two pieces than for the same text "
        "in one",
    ),
    "rope by the longest text": (
        _adapt_to_the_longest,
        "in layer 0 a row's keys depend on the other positions of its batch",
    ),
    "an unknown keyword": (
        lambda model: _change_keywords(model, position_bias=torch.ones(1), head_mask=None),
        "its attention takes 'position_bias', which foresay's does not know",
    ),
    "a mask of its own": (
        lambda model: _change_keywords(model, attention_mask=torch.zeros(1, 1, 8, 8)),
        "attention layer 2 makes a mask of its own",
    ),
    "a layer called twice": (
        _repeat_a_layer,
        "one pass calls the attention of layers 0, 1, 1: not of each layer once",
    ),
}


@pytest.mark.parametrize("kind", BENT)
def test_what_only_shows_when_a_model_runs_is_found_and_refused(kind: str) -> None:
    bend, reason = BENT[kind]
    model = tiny_models.gpt_neox()
    bend(model)
    with pytest.raises(ModelError) as refusal:
        paged(model)
    assert str(refusal.value) == (
        f"GPTNeoXForCausalLM cannot be run over a paged KV cache: {reason}"
    )


def test_a_layer_without_replaceable_attention_is_refused() -> None:
    model = tiny_models.gpt_neox()
    model.config.num_hidden_layers = 4
    with pytest.raises(ModelError, match="1 of its 4 layers never call the attention"):
        paged(model)


class _Windowless:
    """A config that does not say its window."""

    sliding_window = None

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)


def test_a_window_is_taken_from_the_mask_even_if_the_layer_does_not_say_it() -> None:
    model = tiny_models.mistral()
    text = tokens(30, 13)
    expected = own_logits(model, text)
    for layer in model.model.layers:
        layer.self_attn.config = _Windowless(model.config)
    rows = Pages(paged(model), 1).run([(0, 0, text)])
    assert largest_difference(rows, expected) <= tolerance(expected)


# Without experts: their products are one call for all rows of an expert, however many there are.
PLAIN = [f for f in tiny_models.BUILDERS if f not in ("mixtral", "deepseek_v3", "gpt_oss")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", PLAIN)
def test_rows_have_the_same_bits_in_every_batch(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.BUILDERS[family]().to(dtype)
    assert rows_are_invariant(paged(model), tiny_models.MAX_POSITIONS)


@pytest.mark.usefixtures("only_torch")
def test_rows_may_differ_in_their_bits_if_that_is_not_asked_for() -> None:
    target = paged(tiny_models.gpt2(), row_invariant=False)
    assert target.attention_rules == AttentionRules()


class _Weighing(torch.nn.Module):
    """A module that looks at the weight of the linear layer inside it, as some models do."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias)


def test_a_model_that_reads_the_weights_of_its_layers_keeps_them() -> None:
    model = tiny_models.gpt_neox()
    mlp = model.gpt_neox.layers[1].mlp
    mlp.dense_4h_to_h = _Weighing(mlp.dense_4h_to_h)
    text = tokens(20, 14)
    rows = Pages(paged(model), 1).run([(0, 0, text)])
    assert largest_difference(rows, own_logits(model, text)) <= TOLERANCE


def test_a_layer_with_a_hook_is_kept() -> None:
    model = tiny_models.gpt_neox()
    model.gpt_neox.layers[1].mlp.dense_4h_to_h.register_forward_hook(
        lambda module, inputs, output: output * 2
    )
    text = tokens(20, 15)
    rows = Pages(paged(model), 1).run([(0, 0, text)])
    assert largest_difference(rows, own_logits(model, text)) <= TOLERANCE
