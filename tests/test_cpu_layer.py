"""A layer in one call against the same kernels one by one, and against transformers in float64."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from foresay.core.worker import cpu_kernels
from foresay.core.worker.attention import AttentionMetadata, TreeLayout
from foresay.core.worker.cpu_layer import CPULayers
from foresay.core.worker.decoder import FastDecoder
from foresay.core.worker.half_linear import HalfLinear
from foresay.core.worker.int8_linear import Int8Linear
from foresay.core.worker.kv_cache import KVCache

CPU = torch.device("cpu")
MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_models.llama,
    "biases": lambda: tiny_models.llama(attention_bias=True, mlp_bias=True),
    "one key head": lambda: tiny_models.llama(num_key_value_heads=1),
    "wide heads": lambda: tiny_models.llama(head_dim=32),
    "heads of no power of two": lambda: tiny_models.llama(head_dim=24),
    "mistral, with a window": tiny_models.mistral,
    "qwen2, with a window in two layers": tiny_models.qwen2_sliding,
    "qwen3, with norms of heads": tiny_models.qwen3,
}

needs_products = pytest.mark.skipif(
    not cpu_kernels.has_products(), reason="the kernels are not built, or have no products here"
)


def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    """Where they are not, all their tests are skipped: that is not to happen by mistake."""
    compiler = (sysconfig.get_config_var("CC") or "").split()
    if not compiler or shutil.which(compiler[0]) is None:
        pytest.skip("there is no compiler")
    assert cpu_kernels._built is not None
    assert cpu_kernels._built.VERSION == cpu_kernels._VERSION  # else: `make install`


def test_an_older_build_is_not_used() -> None:
    older = (
        "import sys, types; module = types.ModuleType('_cpu'); module.VERSION = 0; "
        "sys.modules['foresay.core.worker.kernels._cpu'] = module; "
        "from foresay.core.worker import cpu_kernels; print(cpu_kernels.is_available())"
    )
    done = subprocess.run([sys.executable, "-c", older], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def made(make: Callable[[], Any], linear: type[Any] = HalfLinear) -> tuple[Any, FastDecoder]:
    """A model with the numbers of bfloat16, and a decoder of it."""
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model, FastDecoder(model, device=CPU, dtype=torch.float32, linear=linear)


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, tiny_models.VOCAB_SIZE, (n,), generator=generator) for n in (70, 3, 21)
    ]


class Steps:
    """A cache, and texts in it that are run step by step."""

    def __init__(self, decoder: FastDecoder) -> None:
        self.decoder = decoder
        self.cache = KVCache(decoder.kv_layout, 40, 4, torch.float32, CPU)
        blocks = np.random.default_rng(0).permutation(40)
        slots = (blocks[:, None] * 4 + np.arange(4)).ravel()
        self.slots = np.split(slots, [80, 88])

    def run(
        self,
        ids: list[torch.Tensor],
        spans: list[tuple[int, int]],
        trees: list[TreeLayout | None] | None = None,
    ) -> torch.Tensor:
        positions = [np.arange(start, end) for start, end in spans]
        written = [self.slots[i][start:end] for i, (start, end) in enumerate(spans)]
        if trees is not None:
            for i, tree in enumerate(trees):
                if tree is not None:
                    depths = [len(_path(tree.parents.tolist(), n)) for n in tree.nodes.tolist()]
                    positions[i] = tree.first - 1 + np.array(depths)
        metadata = AttentionMetadata.build(
            positions,
            [self.slots[i][:end] for i, (_, end) in enumerate(spans)],
            np.concatenate(written),
            self.cache.null_slot,
            self.decoder.attention_rules,
            CPU,
            trees,
        )
        flat = torch.cat([text[start:end] for text, (start, end) in zip(ids, spans, strict=True)])
        with torch.inference_mode():
            return self.decoder.forward(flat, torch.arange(len(flat)), self.cache, metadata)


def _path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [node, *_path(parents, parents[node])]


@needs_products
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_in_one_call_has_the_bits_of_its_parts(name: str) -> None:
    _, decoder = made(MODELS[name])
    assert decoder.cpu_layers is not None
    apart = copy.copy(decoder)
    apart.cpu_layers = None
    tree = TreeLayout(20, np.array([-1, 0, 0, -1, 2]), np.arange(5))
    found = []
    for each in (decoder, apart):
        steps, ids = Steps(each), texts()
        out = [
            steps.run(ids, [(0, 60), (0, 2), (0, 20)]),
            steps.run(ids, [(60, 61), (2, 3), (20, 21)]),
            steps.run(
                [ids[0], ids[1], torch.cat([ids[2], ids[0][:4]])],
                [(61, 70), (2, 3), (20, 25)],
                [None, None, tree],
            ),
        ]
        found.append((torch.cat(out), [layer.slots for layer in steps.cache.layers]))
    (whole, pool), (parts, pool_of_parts) = found
    assert torch.equal(whole, parts)
    assert all(map(torch.equal, pool, pool_of_parts))


@needs_products
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    model, decoder = made(MODELS[name])
    ids = texts()
    out = Steps(decoder).run(ids, [(0, len(text)) for text in ids])
    exact = model.double()
    with torch.inference_mode():
        expected = torch.cat([exact(text[None]).logits[0] for text in ids])
    assert (out.double() - expected).abs().max() <= 5e-6 * expected.abs().max()


@needs_products
def test_a_layer_with_anything_else_is_run_in_parts() -> None:
    model, decoder = made(tiny_models.llama)
    assert CPULayers.of(decoder.layers, torch.bfloat16) is None
    assert CPULayers.of([], torch.float32) is None
    decoder.layers[1].mlp_norm.eps *= 2
    assert CPULayers.of(decoder.layers, torch.float32) is None
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 1 / 3  # not in float16
    assert FastDecoder(model, device=CPU, dtype=torch.float32, linear=HalfLinear).cpu_layers is None
    assert FastDecoder(model, device=CPU, dtype=torch.float32).cpu_layers is None


@needs_products
def test_other_defaults_of_torch_alter_nothing() -> None:
    _, decoder = made(tiny_models.llama)
    spans = [(0, len(text)) for text in texts()]
    expected = Steps(decoder).run(texts(), spans)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(Steps(decoder).run(texts(), spans), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@needs_products
def test_int8_layers_have_the_bits_of_their_parts() -> None:
    _, decoder = made(tiny_models.qwen3, Int8Linear)
    apart = copy.copy(decoder)
    apart.cpu_layers = None
    assert decoder.cpu_layers is not None
    spans = [(0, len(text)) for text in texts()]
    assert torch.equal(Steps(decoder).run(texts(), spans), Steps(apart).run(texts(), spans))


@needs_products
def test_a_shallow_decoder_has_the_layers_it_has() -> None:
    _, decoder = made(tiny_models.qwen2_sliding)
    shallow = decoder.shallow()
    apart = copy.copy(shallow)
    apart.cpu_layers = None
    assert shallow.cpu_layers is not None
    spans = [(0, len(text)) for text in texts()]
    assert torch.equal(Steps(shallow).run(texts(), spans), Steps(apart).run(texts(), spans))
