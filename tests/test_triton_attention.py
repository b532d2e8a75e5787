"""The Triton attention kernels against the definition and the torch path, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import HAS_TRITON, interpreted
from paged_batches import (
    Step,
    Text,
    Tree,
    by_definition,
    check_kernels,
    in_torch,
    in_triton,
    make_step,
    random_parents,
    through_paged_attention,
)

from foresay.core.worker.attention import TreeLayout

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")

Kernels = Callable[..., torch.Tensor]
SMALL = (16, 16, 32)  # rows of a tile, keys of a block, keys of a split
WHOLE, SPLIT = 1, 1000  # programs that keep the device busy: the fewer, the fewer tiles are split
MOST_ITEMS = 14  # no fewer than tiles; so few that some items have both splits of theirs
SCALE = {"scale": 0.4}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -30.0])
TREE = [-1, -1, 0, 0, 1, 2, 2, 5, -1, 3]
# One token, a prompt, drafts that end where a block and a split do, a tree, nodes alone.
MIXED = [
    Text(37, 1),
    Text(21, 21),
    Text(32, 5),
    Tree(30, TREE, [-1, *range(10)]),
    Text(1, 1),
    Tree(16, [-1, 0, -1, 0, 3], [3, 4]),
]


@pytest.fixture(params=["interpreter", "gpu"] if torch.cuda.is_available() else ["interpreter"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels' results of a step, a tiling, a number of programs and options."""
    return partial(interpreted, in_triton) if request.param == "interpreter" else _on_gpu


def _on_gpu(
    step: Step, tiling: Any, num_programs: int | None, options: Any, max_items: int | None = None
) -> torch.Tensor:
    moved = replace(step, query=step.query.cuda(), cache=step.cache.cuda())
    return in_triton(moved, tiling, num_programs, options, max_items).cpu()


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param((2, 2, 16, 16), {}, id="multi-head"),
        pytest.param((6, 2, 24, 24), {}, id="three-heads-a-key"),
        pytest.param((4, 1, 64, 16), {}, id="four-heads-a-key"),
        pytest.param((3, 1, 16, 40), {"softcap": 1.5}, id="softcap-wide-values"),
        pytest.param((2, 1, 16, 16), {"sliding_window": 9}, id="window"),
        pytest.param((4, 2, 16, 16), {"sliding_window": 2}, id="window-within-the-tree"),
        pytest.param((6, 2, 16, 16), {"sinks": SINKS}, id="sinks"),
        pytest.param(
            (6, 2, 24, 16), {"sinks": SINKS, "softcap": 2.0, "sliding_window": 20}, id="all"
        ),
    ],
)
def test_texts_and_trees_in_one_launch_equal_the_definition(
    shape: tuple[int, int, int, int], options: dict[str, Any], kernels: Kernels
) -> None:
    """Every slot that no request holds is NaN; and it is all the same who takes which split."""
    step, options = make_step(MIXED, shape), SCALE | options
    whole, split = (kernels(step, SMALL, n, options) for n in (WHOLE, SPLIT))
    assert torch.equal(whole, split)
    assert torch.equal(whole, kernels(step, SMALL, SPLIT, options, MOST_ITEMS))
    assert (whole - by_definition(step, **options)).abs().max() < 5e-6
    assert (whole - in_torch(step, **options)).abs().max() < 5e-6


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_narrow_dtypes(dtype: torch.dtype, tolerance: float, kernels: Kernels) -> None:
    step = make_step(MIXED, (4, 2, 16, 16), dtype)
    out = kernels(step, SMALL, SPLIT, SCALE)
    assert out.dtype == dtype
    assert (out - by_definition(step, **SCALE)).abs().max() < tolerance


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64, 65])
def test_borders_of_blocks_and_splits(length: int, kernels: Kernels) -> None:
    """Of the keys, of the text before a tree, and of the rows of a tile: 5 tokens, 3 heads each."""
    tree = Tree(length - 3, random_parents(6, length), range(-1, 6))
    step = make_step([Text(length, min(length, 11)), tree], (3, 1, 16, 16), seed=length)
    options = SCALE | {"sliding_window": 17} if length % 2 else SCALE
    out = kernels(step, SMALL, SPLIT, options)
    assert (out - by_definition(step, **options)).abs().max() < 5e-6


@pytest.mark.parametrize("num_nodes", [32, 33, 64, 100])
def test_trees_of_more_nodes_than_a_word_has_bits(num_nodes: int, kernels: Kernels) -> None:
    """The one-word tree beside it has the wider mask's stride."""
    large = Tree(3, random_parents(num_nodes, 1), [num_nodes - 1, 31, 0, num_nodes // 2, 30])
    step = make_step([large, Tree(5, TREE, range(10))], (2, 1, 16, 16))
    assert (kernels(step, SMALL, WHOLE, SCALE) - by_definition(step, **SCALE)).abs().max() < 5e-6


def test_nodes_may_be_asked_for_in_any_order_and_twice(kernels: Kernels) -> None:
    step = make_step([Tree(6, TREE, [7, -1, 3, 9, 3, 3])], (2, 1, 16, 16))
    out = kernels(step, SMALL, WHOLE, SCALE)
    assert (out - by_definition(step, **SCALE)).abs().max() < 5e-6


@pytest.mark.parametrize("options", [{}, {"sliding_window": 21}], ids=["full", "window"])
def test_a_row_of_a_text_has_the_same_bits_in_every_batch(
    options: dict[str, Any], kernels: Kernels
) -> None:
    """Alone, in a prompt that it shares tiles with, between other requests, however split."""
    options = SCALE | options
    step = make_step([Text(75, 30), Text(40, 40), Tree(30, TREE, range(-1, 10))], (3, 1, 16, 16))
    mixed = kernels(step, SMALL, WHOLE, options)
    prompt = kernels(step.take([0]), SMALL, SPLIT, options)
    assert torch.equal(mixed[:30], prompt)
    for row, num_programs in ((0, SPLIT), (7, WHOLE), (29, SPLIT)):
        end = int(step.positions[0][row]) + 1
        alone = replace(
            step.take([0]),
            query=step.query[row : row + 1],
            positions=[np.array([end - 1])],
            slots=[step.slots[0][:end]],
        )
        assert torch.equal(kernels(alone, SMALL, num_programs, options), prompt[row : row + 1])


def test_what_later_rows_hold_does_not_count(kernels: Kernels) -> None:
    """Values of keys that a row does not see are multiplied by exact zeros, keys by nothing."""
    step = make_step([Text(20, 4), Tree(18, TREE, range(-1, 10))], (2, 1, 16, 16))
    before = kernels(step, SMALL, WHOLE, SCALE)
    step.cache[[step.slots[0][18], step.slots[1][18 + 2]], :16] = torch.nan  # keys
    step.cache[[step.slots[0][18], step.slots[1][18 + 2]], 16:] = 1e30
    after = kernels(step, SMALL, WHOLE, SCALE)
    sees = [2, 3, 4 + 1 + 2, 4 + 1 + 5, 4 + 1 + 6, 4 + 1 + 7]  # of the tree: node 2, those below
    unseen = [row for row in range(len(before)) if row not in sees]
    assert torch.equal(after[unseen], before[unseen])
    assert after[sees].isnan().all()


def test_the_default_tiling(kernels: Kernels) -> None:
    step = make_step([Text(530, 1), Tree(70, TREE, range(-1, 10))], (4, 2, 16, 16))
    assert (kernels(step, None, None, SCALE) - by_definition(step, **SCALE)).abs().max() < 5e-6


def test_a_query_that_is_part_of_a_wider_tensor(kernels: Kernels) -> None:
    step = make_step([Text(9, 4)], (2, 1, 16, 16))
    wide = torch.cat([step.query, torch.full_like(step.query, torch.nan)], dim=1)
    out = kernels(replace(step, query=wide[:, :2]), SMALL, WHOLE, SCALE)
    assert (out - by_definition(step, **SCALE)).abs().max() < 5e-6


def test_as_many_nodes_as_rows_are_asked_for() -> None:
    step = make_step([Tree(6, TREE, [0, 1])], (2, 1, 16, 16))
    step.trees = [TreeLayout(6, np.array(TREE), np.array([0, 1, 2]))]
    with pytest.raises(ValueError, match="3 nodes for 2 query rows"):
        interpreted(in_triton, step, SMALL, WHOLE, SCALE)


# -- whether they are used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "has_options", [(False, False, False), (True, True, True)], ids=["plain", "all"]
)
def test_the_self_check_passes(has_options: tuple[bool, bool, bool]) -> None:
    assert interpreted(check_kernels, has_options, None) == (True, [])


@pytest.mark.parametrize(
    ("fault", "told"),
    [("differs", "they differ from the torch path by"), ("raises", "RuntimeError: no memory")],
)
def test_kernels_that_fail_the_check_are_not_used_and_one_warning_says_why(
    fault: str, told: str
) -> None:
    used, warnings = interpreted(check_kernels, (False, False, False), fault)
    assert not used
    assert len(warnings) == 1
    assert told in warnings[0]
    assert "attention runs in torch" in warnings[0]


def test_paged_attention_takes_the_kernels_where_they_are_right_and_else_torch() -> None:
    step = make_step([Text(21, 4), Tree(18, TREE, range(-1, 10))], (4, 2, 16, 16))
    options = SCALE | {"sliding_window": 12, "softcap": 2.0}
    in_kernels = interpreted(in_triton, step, None, None, options)
    plain = in_torch(step, **options)
    assert not torch.equal(in_kernels, plain)  # or this would show nothing
    for are_right, expected in ((True, in_kernels), (False, plain)):
        assert torch.equal(interpreted(through_paged_attention, step, are_right, options), expected)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="triton compiles on Linux")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    code = "import paged_batches; print(paged_batches.compile_kernels())"
    assert int(run_python(code, TRITON_CACHE_DIR=str(tmp_path))) == 3


def test_on_a_cpu_without_the_interpreter_the_kernels_say_what_they_need() -> None:
    code = """
from paged_batches import Text, in_triton, make_step
try:
    in_triton(make_step([Text(3, 1)], (2, 1, 16, 16)), None, None, {"scale": 1.0})
except ValueError as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1" in run_python(code)
