"""The fast decoder against transformers' own eager forward pass of the same tiny models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foresay.core.worker import rotary as rotary_module
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.decoder import FastDecoder, RotaryTable, rotate, silu
from foresay.core.worker.kv_cache import KVCache

CPU = torch.device("cpu")
Part = tuple["Text", int, int]


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


ORIGINAL = {"original_max_position_embeddings": 32}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_models.llama,
    "tied head": lambda: tiny_models.llama(tie_word_embeddings=True),
    "biases": lambda: tiny_models.llama(attention_bias=True, mlp_bias=True),
    "one key head": lambda: tiny_models.llama(num_key_value_heads=1),
    "no shared key heads": lambda: tiny_models.llama(num_key_value_heads=4),
    "wide heads": lambda: tiny_models.llama(head_dim=32),
    "rope linear": lambda: tiny_models.llama(**rope("linear", factor=4.0)),
    "rope llama3": lambda: tiny_models.llama(**LLAMA3),
    "rope yarn": lambda: tiny_models.llama(**rope("yarn", factor=8.0, **ORIGINAL)),
    "mistral": tiny_models.mistral,
    "mistral without a window": lambda: tiny_models.mistral(sliding_window=None),
    "qwen2": tiny_models.qwen2,
    "qwen2 with a window in two layers": tiny_models.qwen2_sliding,
    "qwen3": tiny_models.qwen3,
    "qwen3 with biases and a tied head": lambda: tiny_models.qwen3(
        attention_bias=True, tie_word_embeddings=True
    ),
}


class Text:
    """Random token ids, and the slots of their positions."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, tiny_models.VOCAB_SIZE, (length,), generator=generator)
        self.slots = np.empty(0, dtype=np.int64)

    def logits(self, model: Any) -> torch.Tensor:
        """What transformers computes, all positions at once; [length, vocab_size]."""
        with torch.inference_mode():
            found: torch.Tensor = model(self.ids[None]).logits[0]
        return found


def far(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the differences."""
    return float((logits - exact).square().mean().sqrt())


class Run:
    """A fast decoder, its KV cache, and texts whose blocks lie in it in no order."""

    def __init__(
        self,
        model: Any,
        *texts: Text,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        row_invariant: bool = True,
    ) -> None:
        self.decoder = FastDecoder(model, device=CPU, dtype=dtype, row_invariant=row_invariant)
        counts = [-(-len(text.ids) // block_size) for text in texts]
        blocks = np.random.default_rng(0).permutation(sum(counts))
        for text, mine in zip(texts, np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
            text.slots = (mine[:, None] * block_size + np.arange(block_size)).ravel()
        self.cache = KVCache(self.decoder.kv_layout, sum(counts), block_size, dtype, CPU)

    def __call__(
        self, *parts: Part, rows: Sequence[int] | None = None, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run positions start..end of each text in one step; logits of `rows`, None: all."""
        metadata = AttentionMetadata.build(
            [np.arange(start, end) for _, start, end in parts],
            [text.slots[:end] for text, _, end in parts],
            np.concatenate([text.slots[start:end] for text, start, end in parts]),
            self.cache.null_slot,
            self.decoder.attention_rules,
            CPU,
        )
        if ids is None:
            ids = torch.cat([text.ids[start:end] for text, start, end in parts])
        output_rows = torch.tensor(range(len(ids)) if rows is None else rows, dtype=torch.int64)
        with torch.inference_mode():
            return self.decoder.forward(ids, output_rows, self.cache, metadata)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32 rounding, in proportion to the logits' size."""
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("build", MODELS.values(), ids=list(MODELS))
def test_ragged_chunks_give_transformers_logits(build: Callable[[], Any]) -> None:
    """Within twice the error that transformers' own float32 has beside its float64."""
    model = build()
    assert FastDecoder.supports(model.config) is None
    a, b, c = Text(70, 1), Text(45, 2), Text(9, 3)
    run = Run(model, a, b, c)
    theirs = {text: text.logits(model) for text in (a, b, c)}
    exact_model = copy.deepcopy(model).double()
    exact = {text: text.logits(exact_model) for text in (a, b, c)}
    steps: list[list[Part]] = [
        [(a, 0, 37)],
        [(a, 37, 38), (b, 0, 40), (c, 0, 1)],
        [(c, 1, 6), (a, 38, 69), (b, 40, 41)],
        [(a, 69, 70), (b, 41, 45), (c, 6, 9)],
    ]
    found: dict[Text, list[torch.Tensor]] = {a: [], b: [], c: []}
    for step in steps:
        parts = run(*step).split([end - start for _, start, end in step])
        for (text, _, _), part in zip(step, parts, strict=True):
            found[text].append(part)
    for text, parts in found.items():
        assert far(torch.cat(parts), exact[text]) <= 2 * far(theirs[text], exact[text])


def test_logits_are_those_of_the_rows_asked_for() -> None:
    model = tiny_models.llama()
    text = Text(20, 1)
    run = Run(model, text)
    assert_close(run((text, 0, 20), rows=[19, 3, 4]), text.logits(model)[[19, 3, 4]])
    assert run((text, 0, 20), rows=[]).shape == (0, tiny_models.VOCAB_SIZE)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_rejected_run_is_written_over(family: str) -> None:
    model = tiny_models.BUILDERS[family]()
    text, wrong = Text(30, 1), Text(30, 2)
    run = Run(model, text)
    run((text, 0, 12))
    run((text, 12, 20), ids=torch.cat([text.ids[12:13], wrong.ids[13:20]]))  # all 7 drafts rejected
    assert_close(run((text, 13, 30)), text.logits(model)[13:])


def test_positions_reach_beyond_one_chunk_of_the_rotary_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary_module, "_ROTARY_CHUNK", 16)
    model = tiny_models.llama()
    text = Text(60, 1)
    run = Run(model, text)
    run.decoder.rotary.reserve(60)
    assert_close(run((text, 0, 60)), text.logits(model))


def test_the_rotary_table_holds_the_models_own_cos_and_sin_signed() -> None:
    model = tiny_models.llama(max_position_embeddings=20000)
    table = RotaryTable(model.model.rotary_emb, torch.float32, CPU)
    positions = torch.tensor([0, 1, 4095, 4096, 8191, 8192, 9999])
    early = table.rows(positions[:3])
    with pytest.raises(IndexError):
        table.rows(positions)
    table.reserve(4097)
    table.rows(positions[:4])
    table.reserve(10000)
    table.reserve(5)
    cos, sin = table.rows(positions)
    assert all(torch.equal(row[:3], old) for row, old in zip((cos, sin), early, strict=True))
    expected_cos, expected_sin = model.model.rotary_emb(torch.zeros(1), positions[None])
    sign = torch.tensor([-1.0] * 6 + [1.0] * 6)
    assert (cos[:, 0] - expected_cos[0]).abs().max() < 1e-6
    assert (sin[:, 0] * sign - expected_sin[0]).abs().max() < 1e-6
    query = torch.randn(7, 3, 12, generator=torch.Generator().manual_seed(0))
    rotated, _ = apply_rotary_pos_emb(query[None], query[None], expected_cos, expected_sin, 2)
    assert (rotate(query, cos, sin) - rotated[0]).abs().max() < 2e-6


def test_the_model_itself_is_left_as_it_was() -> None:
    model = tiny_models.qwen3()
    text = Text(12, 1)
    before = text.logits(model)
    run = Run(model, text, dtype=torch.bfloat16)
    run((text, 0, 12))
    assert torch.equal(text.logits(model), before)


@pytest.mark.parametrize(
    ("build", "changes", "reason"),
    [
        pytest.param(
            tiny_models.gpt2, {},
            "model type 'gpt2' is not one of llama, mistral, qwen2, qwen3", id="family",
        ),
        pytest.param(
            tiny_models.llama, {"hidden_act": "gelu"},
            "hidden_act 'gelu' is not 'silu'", id="activation",
        ),
        pytest.param(
            tiny_models.qwen2, rope("dynamic", factor=2.0),
            "rope type 'dynamic' is not one of default, linear, llama3, yarn", id="rope",
        ),
        pytest.param(
            tiny_models.llama, {"num_attention_heads": 4, "num_key_value_heads": 3},
            "the key heads do not divide the attention heads", id="heads",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_run_it_says(
    build: Callable[..., Any], changes: dict[str, Any], reason: str
) -> None:
    assert FastDecoder.supports(build(**changes).config) == reason


@pytest.mark.parametrize(
    ("family", "windows"),
    [("llama", [None]), ("mistral", [8]), ("qwen2_sliding", [8, None])],
)
def test_a_shallow_decoder_has_one_layer_for_each_window(
    family: str, windows: list[int | None]
) -> None:
    text = Text(20, 1)
    run = Run(tiny_models.BUILDERS[family](), text)
    deep = run((text, 0, 20))
    shallow = run.decoder.shallow()
    assert [block.window for block in shallow.layers] == windows
    assert set(shallow.layers) < set(run.decoder.layers)
    assert len(shallow.kv_layout) == len(windows)
    assert torch.equal(run((text, 0, 20)), deep)
    run.decoder = shallow
    run.cache = KVCache(shallow.kv_layout, 5, 4, torch.float32, CPU)
    assert not torch.allclose(run((text, 0, 20)), deep)


def test_a_window_in_a_llama_config_means_nothing_as_in_transformers() -> None:
    model = tiny_models.llama(sliding_window=4, layer_types=["sliding_attention"] * 3)
    text = Text(20, 1)
    assert_close(Run(model, text)((text, 0, 20)), text.logits(model))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_logits_are_as_near_to_float32_as_transformers_are(family: str) -> None:
    model = tiny_models.BUILDERS[family]().to(torch.bfloat16)
    text = Text(60, 1)
    run = Run(model, text, dtype=torch.bfloat16)
    ours = torch.cat([run((text, 0, 55)), run((text, 55, 60))])
    assert ours.dtype == torch.bfloat16
    theirs = text.logits(model)
    exact = text.logits(model.float())
    error, allowed = (((x.float() - exact) ** 2).mean().sqrt() for x in (ours, theirs))
    assert 0 < error <= 1.2 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "qwen3"])
def test_a_row_has_the_same_bits_in_every_batch(family: str, dtype: torch.dtype) -> None:
    model = tiny_models.BUILDERS[family](max_position_embeddings=1024)
    text, other = Text(560, 1), Text(80, 2)
    run = Run(model, text, other, block_size=16, dtype=dtype)
    whole = run((text, 0, 560), (other, 0, 80))[:560]
    for start in (20, 126, 509):
        expected = whole[start : start + 4]
        alone = [run((text, start + row, start + row + 1)) for row in range(4)]
        assert torch.equal(torch.cat(alone), expected)
        for before, after in ((0, 0), (0, 1), (2, 3), (13, 0), (19, 30)):
            rows = run((text, start - before, start + 4 + after))
            assert torch.equal(rows[before : before + 4], expected), (start, before, after)
        rows = run((other, 40, 43), (text, start, start + 4), (other, 7, 8))
        assert torch.equal(rows[3:7], expected), start


def test_rows_that_may_depend_on_their_batch_still_are_right() -> None:
    model = tiny_models.llama()
    text = Text(60, 1)
    run = Run(model, text, row_invariant=False)
    assert_close(torch.cat([run((text, 0, 50)), run((text, 50, 60))]), text.logits(model))


@pytest.mark.parametrize("width", [1000, 1536])
@pytest.mark.parametrize("num_threads", [2, 3, 5, 7])
def test_a_rows_activation_does_not_depend_on_how_threads_share_the_rows(
    num_threads: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(350, 2 * width, generator=generator).mul_(4)[:, :width]
    alone = torch.cat([F.silu(row) for row in x.split(1)])
    expected = x.double() * torch.sigmoid(x.double())
    with threads(num_threads):
        for num_rows in (0, 1, 2, 22, 50, 97, 110, 127, 200, 331, 350):
            assert torch.equal(silu(x[:num_rows]), alone[:num_rows]), num_rows
        assert (silu(x) - expected).abs().max() < 1e-5


def test_a_row_has_the_same_bits_however_threads_share_a_chunk() -> None:
    text = Text(130, 1)
    run = Run(tiny_models.llama(intermediate_size=1000), text)
    with threads(3):
        run((text, 0, 130))
        alone = torch.cat([run((text, row, row + 1)) for row in range(130)])
        for length in (76, 82, 85, 97, 103, 112, 127):
            assert torch.equal(run((text, 0, length)), alone[:length]), length
