"""The CPU's own kernels: against formulas in float64, a row against itself among others, and off.

Every instruction set that this CPU has is tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paged_batches import Step, Text, Tree, by_definition, in_torch, make_step, path, random_parents

from foresay.core.worker import cpu_kernels
from foresay.core.worker.attention import AttentionRules
from foresay.core.worker.cpu_kernels import (
    CPURows,
    Panels,
    product,
    rms_norm,
    rotate_,
    silu_mul,
)
from foresay.core.worker.kv_cache import LayerCache
from foresay.core.worker.rotary import rotate

pytestmark = pytest.mark.skipif(
    not cpu_kernels.is_available(), reason="they are not built, or switched off"
)

OWN = AttentionRules(own_kernels=True)
SETS = [] if cpu_kernels._kernels is None else cpu_kernels._kernels.supported()
AT_FIRST = None if cpu_kernels._kernels is None else cpu_kernels.instructions()
TREE = [-1, -1, 0, 0, 1, 2, 2, 5, -1, 3]
# One token, a prompt, drafts that end where a block does, trees with committed rows and without.
MIXED = [
    Text(37, 1),
    Text(21, 21),
    Text(32, 5),
    Tree(30, TREE, [-1, *range(10)]),
    Text(1, 1),
    Tree(16, [-1, 0, -1, 0, 3], [3, 4]),
    Text(300, 40),
]


@pytest.fixture(params=SETS, autouse=True)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    assert cpu_kernels._kernels is not None
    cpu_kernels._kernels.use(request.param)
    yield request.param
    cpu_kernels._kernels.use(SETS[0])


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_the_best_set_is_used_first(instructions: str) -> None:
    assert SETS[0] == AT_FIRST
    assert cpu_kernels.instructions() == instructions
    assert SETS[-1] == "baseline"
    flags = {"avx512": "avx512dq", "avx2": "avx2"}
    try:
        with open("/proc/cpuinfo") as file:
            known = file.read()
    except OSError:
        pytest.skip("this system does not tell its CPU's instructions so")
    for name, flag in flags.items():
        assert (name in SETS) == (flag in known.split()), name


# --- row by row


@pytest.mark.parametrize("width", [16, 37, 576, 577, 1536])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_the_norm_is_its_formula(width: int, size: float) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(7, width) * size, torch.randn(width)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [8, 37, 1536])
def test_the_gate_is_its_formula(width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(5, 2 * width) * 8
    x[0, :5] = torch.tensor([0.0, -30.0, 30.0, -80.0, 80.0])
    gate, up = x.double().chunk(2, dim=1)
    torch.testing.assert_close(silu_mul(x).double(), F.silu(gate) * up, rtol=1e-6, atol=1e-30)


def test_a_gate_at_the_ends_of_its_exponential_fades_or_passes() -> None:
    gate = torch.tensor([-1e4, -104.0, -88.0, 88.0, 104.0, 1e4])
    out = silu_mul(torch.cat([gate, torch.ones(6)])[None])[0]
    assert (out[:3].abs() < 1e-30).all()
    assert torch.equal(out[3:], gate[3:])


@pytest.mark.parametrize(("num_heads", "dim"), [(12, 64), (3, 80), (2, 20), (1, 2)])
def test_rotation_is_that_of_torch_and_touches_nothing_else(num_heads: int, dim: int) -> None:
    torch.manual_seed(dim)
    rows = torch.randn(9, num_heads + 2, dim)
    cos, sin = torch.randn(9, 1, dim), torch.randn(9, 1, dim)
    expected = rotate(rows[:, :num_heads].double(), cos.double(), sin.double())
    others = rows[:, num_heads:].clone()
    rotated = rotate_(rows[:, :num_heads], cos, sin)
    torch.testing.assert_close(rotated.double(), expected, rtol=1e-6, atol=1e-6)
    assert rotated.data_ptr() == rows.data_ptr()
    assert torch.equal(rows[:, num_heads:], others)


@pytest.mark.parametrize("num_rows", [1, 2, 9, 130, 700])
def test_a_row_has_the_same_bits_among_any_others(num_rows: int, threads: int) -> None:
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 1154), torch.randn(1154)
    cos, sin = torch.randn(num_rows, 1, 64), torch.randn(num_rows, 1, 64)
    heads = torch.randn(num_rows, 9, 64)
    normed, gated = rms_norm(x, weight, 1e-5), silu_mul(x)
    rotated = rotate_(heads.clone(), cos, sin)
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = slice(row, row + 1)
        assert torch.equal(rms_norm(x[alone], weight, 1e-5), normed[alone])
        assert torch.equal(silu_mul(x[alone]), gated[alone])
        assert torch.equal(rotate_(heads[alone].clone(), cos[alone], sin[alone]), rotated[alone])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = bad
    for out in (rms_norm(x, torch.ones(64), 1e-5), silu_mul(x)):
        assert out[[0, 2]].isfinite().all()
    assert rms_norm(x, torch.ones(64), 1e-5)[1].isnan().any()
    assert not silu_mul(x)[1].isfinite().all()


# --- attention


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        pytest.param((2, 2, 16, 16), None, id="multi-head"),
        pytest.param((9, 3, 64, 64), None, id="three-heads-a-key"),
        pytest.param((9, 3, 64, 64), 9, id="three-heads-a-key-window"),
        pytest.param((5, 1, 64, 16), 2, id="five-heads-a-key-window-within-the-tree"),
        pytest.param((4, 2, 80, 48), 20, id="uneven-heads"),
        pytest.param((16, 1, 32, 256), None, id="sixteen-heads-a-key"),
        pytest.param((4, 2, 8, 8), None, id="short-heads"),
        pytest.param((4, 2, 20, 12), 30, id="short-heads-window"),
        pytest.param((7, 1, 128, 128), 33, id="seven-heads-a-key"),
    ],
)
def test_attention_is_its_definition(
    shape: tuple[int, int, int, int], window: int | None, threads: int
) -> None:
    """Slots that no row reads hold NaN, so what is read besides shows."""
    step = make_step(MIXED, shape)
    out = in_torch(step, OWN, scale=0.2, sliding_window=window)
    expected = by_definition(step, 0.2, window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("window", [None, 24])
def test_a_row_attends_with_the_same_bits_in_any_batch(window: int | None, threads: int) -> None:
    step = make_step([*MIXED, Text(1500, 90)], (9, 3, 64, 64))
    whole = in_torch(step, OWN, scale=0.2, sliding_window=window)
    start = 0
    for index, positions in enumerate(step.positions):
        rows = whole[start : start + len(positions)]
        start += len(positions)
        alone = step.take([index])
        assert torch.equal(in_torch(alone, OWN, scale=0.2, sliding_window=window), rows)
        for at in {0, len(positions) // 2, len(positions) - 1}:
            one = _row(alone, at)
            assert torch.equal(in_torch(one, OWN, scale=0.2, sliding_window=window), rows[[at]])


def _row(step: Step, at: int) -> Step:
    """The step of one row of its only request."""
    tree = step.trees[0]
    if tree is not None:
        tree = replace(tree, nodes=tree.nodes[[at]])
    position = step.positions[0][[at]]
    slots = step.slots[0] if tree is not None else step.slots[0][: position[0] + 1]
    return replace(step, query=step.query[[at]], positions=[position], slots=[slots], trees=[tree])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [None, 11])
def test_a_node_has_the_bits_of_its_path_as_a_text(seed: int, window: int | None) -> None:
    parents = random_parents(14, seed)
    first = 25 + 5 * seed  # so that nodes lie before, behind and across blocks of keys
    step = make_step([Tree(first, parents, range(14))], (6, 2, 32, 32), seed=seed)
    out = in_torch(step, OWN, scale=0.2, sliding_window=window)
    for node in range(14):
        way = path(parents, node)[::-1]
        slots = np.concatenate([step.slots[0][:first], step.slots[0][first + np.array(way)]])
        text = replace(
            step,
            query=step.query[[node]],
            positions=[np.array([len(slots) - 1])],
            slots=[slots],
            trees=[None],
        )
        assert torch.equal(in_torch(text, OWN, scale=0.2, sliding_window=window), out[[node]])


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    step = make_step(MIXED, (4, 2, 16, 16))
    whole = in_torch(step, OWN, scale=0.2)
    query = step.query.clone()
    query[3, 1, 2] = torch.nan
    out = in_torch(replace(step, query=query), OWN, scale=0.2)
    assert out[3, 1].isnan().all()
    out[3, 1] = whole[3, 1]
    assert torch.equal(out, whole)


def test_scores_far_apart_do_not_overflow() -> None:
    step = make_step([Text(40, 40)], (2, 1, 16, 16))
    step.query.mul_(1e4)
    out = in_torch(step, OWN, scale=1.0)
    torch.testing.assert_close(out.double(), by_definition(step, 1.0), rtol=1e-5, atol=1e-5)


def test_caps_and_sinks_are_left_to_torch() -> None:
    step = make_step(MIXED, (4, 2, 16, 16))
    for options in ({"softcap": 1.5}, {"sinks": torch.randn(4)}):
        out = in_torch(step, OWN, scale=0.2, **options)
        assert torch.equal(out, in_torch(step, scale=0.2, **options))


def test_heads_of_other_shapes_are_left_to_torch() -> None:
    assert not cpu_kernels.attends(4, 2, 22, 16)
    assert not cpu_kernels.attends(4, 2, 16, 272)
    assert not cpu_kernels.attends(17, 1, 16, 16)
    assert cpu_kernels.attends(16, 1, 256, 16)
    step = make_step(MIXED, (4, 2, 22, 16))
    assert torch.equal(in_torch(step, OWN, scale=0.2), in_torch(step, scale=0.2))


def test_a_tree_with_too_few_nodes_is_refused() -> None:
    step = make_step([Tree(5, [-1, 0], [0, 1])], (2, 1, 16, 16))
    tree = step.trees[0]
    assert tree is not None
    step.trees[0] = replace(tree, nodes=tree.nodes[:1])
    with pytest.raises(ValueError, match="1 nodes for 2 query rows"):
        in_torch(step, OWN, scale=0.2)


# --- the module


def test_arguments_are_counted_and_read() -> None:
    kernels = cpu_kernels._kernels
    assert kernels is not None
    with pytest.raises(TypeError, match="expected 8"):
        kernels.rms_norm(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="expected 16"):
        kernels.attend(*range(15))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        kernels.silu_mul(*["1"] * 6)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mmx'"):
        kernels.use("mmx")
    with pytest.raises(ValueError, match="shape"):
        kernels.attend(*[0] * 6, 0, 0, 0, 4, 2, 22, 16, 0, 1, 0.2)


def test_the_likeliest_are_those_of_a_sort() -> None:
    for num_columns in (1, 5, 64, 1000, 8192):
        for width in (1, 3, 8):
            torch.manual_seed(num_columns)
            logits = torch.randn(4, num_columns).mul_(3).round_()  # with many equals
            logits[1] = torch.randn(num_columns) * 30
            logits[2, ::2] = -torch.inf
            few = min(width, num_columns)
            columns, log_probs = cpu_kernels.likeliest(logits, few)
            order = logits.sort(dim=1, descending=True, stable=True)
            expected = logits.double().log_softmax(dim=1).gather(1, order.indices)[:, :few]
            is_none = order.values[:, :few] == -torch.inf
            assert torch.equal(columns, order.indices[:, :few].masked_fill(is_none, 0))
            expected = expected.masked_fill(is_none, -torch.inf)
            torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 70, 199])
def test_nothing_is_likely_beside_what_is_no_number(bad: float, place: int) -> None:
    logits = torch.randn(2, 200)
    logits[1, place] = bad
    columns, log_probs = cpu_kernels.likeliest(logits, 4)
    assert log_probs[0].isfinite().all()
    assert (columns[1] == 0).all()
    assert (log_probs[1] == -torch.inf).all()


def test_likeliest_of_no_rows_of_some_rows_and_of_none_at_all(threads: int) -> None:
    logits = torch.randn(9, 2000)
    columns, log_probs = cpu_kernels.likeliest(logits, 4)
    every_other = cpu_kernels.likeliest(logits[:, ::2], 4)[0]
    assert torch.equal(every_other, logits[:, ::2].topk(4).indices)
    for row in range(9):
        alone = cpu_kernels.likeliest(logits[row : row + 1], 4)
        assert torch.equal(alone[0][0], columns[row])
        assert torch.equal(alone[1][0], log_probs[row])
    assert cpu_kernels.likeliest(logits[:0], 4)[0].shape == (0, 4)
    with pytest.raises(ValueError, match="a width of 0"):
        cpu_kernels.likeliest(logits, 0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_of_any_kind_are_taken(dtype: type) -> None:
    step = make_step([Text(37, 3)], (4, 2, 16, 16))
    apart = np.repeat(step.slots[0], 2).astype(dtype)[::2]
    rows = CPURows.build(step.positions, [apart], None)
    out = cpu_kernels.attend(step.query, LayerCache(step.layer, step.cache), rows, scale=0.2)
    assert torch.equal(out, in_torch(step, OWN, scale=0.2))


def test_they_can_be_switched_off() -> None:
    code = (
        "from foresay.core.worker import cpu_kernels as k; import torch; "
        "print(k.is_available(), k.serves(torch.float32, torch.device('cpu')))"
    )
    for value, expected in (("0", "False False"), ("1", "True True")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "FORESAY_CPU_KERNELS": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


# --- products

SHAPES = [(7, 5), (33, 64), (100, 65), (160, 200), (576, 1536)]


def panels_of(out_features: int, in_features: int, kind: str) -> tuple[Panels, torch.Tensor]:
    """A matrix as `product` takes it, and as it is."""
    generator = torch.Generator().manual_seed(out_features)
    if kind == "float16":
        weight = torch.randn(out_features, in_features, generator=generator).half().float() / 512
        return Panels.in_float16(weight, -9), weight
    shape = (out_features, in_features)
    integers = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scales = torch.rand(out_features, generator=generator) / 4096
    return Panels.in_int8(integers, scales), integers.float() * scales[:, None]


def multiplied(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if not cpu_kernels.has_products():
        pytest.skip("this instruction set has no products")
    return product(x, *arguments)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("kind", ["float16", "int8"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("has_residual", [False, True], ids=["no residual", "residual"])
def test_a_product_is_its_formula(
    out_features: int, in_features: int, kind: str, has_bias: bool, has_residual: bool
) -> None:
    panels, weight = panels_of(out_features, in_features, kind)
    assert torch.equal(panels.rows(torch.arange(out_features)), weight)
    x = torch.randn(13, in_features)
    bias = torch.randn(out_features) if has_bias else None
    residual = torch.randn(13, out_features) if has_residual else None
    exact = x.double() @ weight.double().T
    for more in (bias, residual):
        exact = exact if more is None else exact + more.double()
    out = multiplied(x, panels, bias, residual)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(
    out_features: int, in_features: int, kind: str, threads: int
) -> None:
    (panels, _), x = panels_of(out_features, in_features, kind), torch.randn(61, in_features)
    residual, bias = torch.randn(61, out_features), torch.randn(out_features)
    whole = multiplied(x, panels, bias, residual)
    for num_rows in [*range(1, 28), 60]:
        for start in (0, 61 - num_rows):
            rows = slice(start, start + num_rows)
            out = product(x[rows], panels, bias, residual[rows])
            assert torch.equal(out, whole[rows]), (num_rows, start)


def test_long_sums_are_rounded_in_pieces() -> None:
    """One sum after another over 1e5 inputs would be off by thousands of ulps."""
    panels = Panels.in_float16(torch.full((32, 100_000), 0.1).half().float(), 0)
    out = multiplied(torch.ones(1, 100_000), panels, None)
    exact = 100_000 * float(torch.tensor(0.1).half())
    assert abs(float(out[0, 0]) / exact - 1) < 2e-5


def test_products_keep_what_is_no_number_in_its_row() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    out = multiplied(x, panels_of(40, 64, "float16")[0], None)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_what_a_product_would_read_beyond_its_end_is_refused() -> None:
    panels, _ = panels_of(40, 64, "float16")
    with pytest.raises(ValueError, match="5 inputs for a matrix of 64"):
        multiplied(torch.randn(1, 5), panels, None)
    with pytest.raises(ValueError, match=r"float32, not torch\.bfloat16"):
        multiplied(torch.randn(1, 64).bfloat16(), panels, None)
    with pytest.raises(ValueError, match=r"a residual of \[2, 40\] for \[1, 40\]"):
        multiplied(torch.randn(1, 64), panels, None, torch.randn(2, 40))


def test_what_would_be_read_beyond_its_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a weight of \[5\] for rows of 64"):
        rms_norm(torch.randn(1, 64), torch.randn(5), 1e-5)
    with pytest.raises(ValueError, match=r"float32, not torch\.bfloat16"):
        rms_norm(torch.randn(1, 64).bfloat16(), torch.randn(64), 1e-5)
    with pytest.raises(ValueError, match=r"angles of \[3, 1, 32\]"):
        rotate_(torch.randn(3, 2, 64), *torch.randn(2, 3, 1, 32))
    step = make_step([Text(9, 3)], (4, 2, 16, 16))
    with pytest.raises(ValueError, match=r"queries \[2, 4, 16\] for 3 rows"):
        in_torch(replace(step, query=step.query[:2]), OWN, scale=0.2)
    assert not cpu_kernels.attends(5, 2, 16, 16)  # query heads that no key head is shared by


def test_without_instructions_for_it_a_product_is_refused() -> None:
    assert cpu_kernels._kernels is not None
    cpu_kernels._kernels.use("baseline")
    if cpu_kernels.has_products():
        pytest.skip("all sets have it")
    with pytest.raises(RuntimeError, match="no products"):
        product(torch.randn(1, 64), panels_of(40, 64, "float16")[0], None)
