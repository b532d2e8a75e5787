"""Random steps of attention, for the kernels in Triton's interpreter and what they are held to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from foresay.core.worker.attention import (
    AttentionMetadata,
    AttentionRules,
    TreeLayout,
    paged_attention,
)
from foresay.core.worker.kv_cache import LayerCache, LayerKV

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Text:
    """The last rows of a text of `length` keys."""

    length: int
    num_rows: int


@dataclass(frozen=True)
class Tree:
    """`first` committed positions, then nodes; rows: the nodes asked for, -1 the last position."""

    first: int
    parents: Sequence[int]
    rows: Sequence[int]


@dataclass
class Step:
    """Rows of several requests, and a layer's cache that holds NaN wherever none of them reads."""

    query: torch.Tensor
    layer: LayerKV
    cache: torch.Tensor
    null_slot: int
    positions: list[np.ndarray]
    slots: list[np.ndarray]
    trees: list[TreeLayout | None]

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def take(self, requests: Sequence[int]) -> Step:
        """A step of some of the requests."""
        ends = np.cumsum([len(rows) for rows in self.positions])
        rows = [self.query[ends[i] - len(self.positions[i]) : ends[i]] for i in requests]
        positions, slots, trees = (
            [of_all[i] for i in requests] for of_all in (self.positions, self.slots, self.trees)
        )
        return Step(
            torch.cat(rows), self.layer, self.cache, self.null_slot, positions, slots, trees
        )


def make_step(
    requests: Sequence[Text | Tree],
    shape: tuple[int, int, int, int],  # query heads, key heads, their dimension, that of values
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads, head_dim, value_dim = shape
    layer = LayerKV(num_kv_heads, head_dim, value_dim)
    lens = [r.length if isinstance(r, Text) else r.first + len(r.parents) for r in requests]
    num_blocks = [-(-length // BLOCK_SIZE) for length in lens]
    blocks = np.split(rng.permutation(sum(num_blocks) + 3), np.cumsum(num_blocks))
    slots = [
        (mine[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()[:length]
        for mine, length in zip(blocks, lens, strict=False)
    ]
    null_slot = (sum(num_blocks) + 3) * BLOCK_SIZE
    cache = torch.full((null_slot + 1, layer.width), torch.nan)
    used = np.concatenate(slots)
    cache[used] = torch.from_numpy(rng.standard_normal((len(used), layer.width))).float()
    cache[null_slot] = 0
    positions: list[np.ndarray] = []
    trees: list[TreeLayout | None] = []
    for request in requests:
        if isinstance(request, Text):
            positions.append(np.arange(request.length - request.num_rows, request.length))
            trees.append(None)
        else:
            tree = TreeLayout(request.first, np.array(request.parents), np.array(request.rows))
            depths = [len(path(request.parents, node)) for node in request.rows]
            positions.append(request.first - 1 + np.array(depths))
            trees.append(tree)
    num_rows = sum(len(rows) for rows in positions)
    query = torch.from_numpy(rng.standard_normal((num_rows, num_heads, head_dim))).float()
    return Step(query.to(dtype), layer, cache.to(dtype), null_slot, positions, slots, trees)


def path(parents: Sequence[int], node: int) -> list[int]:
    """A node and those above it; nothing for -1."""
    return [] if node < 0 else [node, *path(parents, int(parents[node]))]


def random_parents(num_nodes: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(rng.integers(-1, node)) for node in range(num_nodes)]


def by_definition(
    step: Step,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend row by row in float64."""
    cache = LayerCache(step.layer, step.cache.double())
    rows: list[torch.Tensor] = []
    for positions, slots, tree in zip(step.positions, step.slots, step.trees, strict=True):
        for at, position in enumerate(positions.tolist()):
            seen = {p: int(slots[p]) for p in range(position + 1)}
            if tree is not None and tree.nodes[at] >= 0:
                above = path(tree.parents.tolist(), int(tree.nodes[at]))
                seen = {p: int(slots[p]) for p in range(tree.first)}
                seen |= {position - i: int(slots[tree.first + n]) for i, n in enumerate(above)}
            if sliding_window is not None:
                seen = {p: slot for p, slot in seen.items() if p > position - sliding_window}
            keys, values = (t[list(seen.values())] for t in (cache.key, cache.value))  # [k, Hkv, .]
            query = step.query[len(rows)].double()
            fold = len(query) // step.layer.num_kv_heads
            keys, values = (t.repeat_interleave(fold, dim=1) for t in (keys, values))
            scores = torch.einsum("hd,khd->hk", query, keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = scores.softmax(dim=1)[:, : len(seen)]
            rows.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(rows)


def in_torch(step: Step, rules: AttentionRules | None = None, **options: Any) -> torch.Tensor:
    """The torch path's result, or that of the CPU's own kernels, as the rules say."""
    cache = LayerCache(step.layer, step.cache.clone())
    mapping = np.concatenate(
        [
            slots[rows] if tree is None else slots[tree.first + tree.nodes]  # -1: first - 1
            for rows, slots, tree in zip(step.positions, step.slots, step.trees, strict=True)
        ]
    )
    metadata = AttentionMetadata.build(
        step.positions, step.slots, mapping, step.null_slot,
        rules or AttentionRules(), step.device, trees=step.trees,
    )  # fmt: skip
    key, value = cache.key[mapping].clone(), cache.value[mapping].clone()
    return paged_attention(step.query, key, value, cache, metadata, **options)


def in_triton(
    step: Step,
    tiling: tuple[int, int, int] | None,
    num_programs: int | None,
    options: Any,
    max_items: int | None = None,
) -> torch.Tensor:
    """The kernels' result, in the interpreter if it is there; `tiling`: None for the default.

    max_items: work items at most, all of whose splits are merged afterwards; None: as many as suit.
    """
    module: Any = import_module("foresay.core.worker.triton_attention")
    if step.device.type == "cpu":
        _mend_dot()
    metadata = module.TritonMetadata.build(step.positions, step.slots, step.trees, step.device)
    metadata.max_items = max_items
    result: torch.Tensor = module.attend(
        step.query,
        LayerCache(step.layer, step.cache),
        metadata,
        tiling=tiling and module.Tiling(*tiling),
        num_programs=num_programs,
        **options,
    )
    return result


def through_paged_attention(step: Step, are_right: bool, options: Any) -> torch.Tensor:
    """What `paged_attention` returns where the CPU is taken for a device with Triton kernels."""
    layout: Any = import_module("foresay.core.worker.attention_layout")
    attention: Any = import_module("foresay.core.worker.attention")
    checking: Any = import_module("foresay.core.worker.triton_check")
    plain = layout.triton_backend, checking.are_right
    layout.triton_backend = attention.triton_backend = lambda device: checking
    checking.are_right = lambda kind: are_right
    try:
        return in_torch(step, **options)
    finally:
        layout.triton_backend = attention.triton_backend = plain[0]
        checking.are_right = plain[1]


def _mend_dot() -> None:
    """Let the interpreter multiply bfloat16, which it keeps as integers and multiplies as such."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "plain_dot"):
        return
    builder.plain_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == language.bfloat16:
            a, b = (self.cast_impl(x, language.float32) for x in (a, b))
        return self.plain_dot(a, b, *rest)

    builder.create_dot = create_dot


def check_kernels(
    has_options: tuple[bool, bool, bool], fault: str | None
) -> tuple[bool, list[str]]:
    """Check the kernels, asked twice, and return whether they are used, and the warnings.

    has_options: window, softcap, sinks; fault: how `attend` is spoilt.
    """
    checking: Any = import_module("foresay.core.worker.triton_check")
    checking.are_right.cache_clear()
    plain, warnings = checking.attend, []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]

    def spoilt(*arguments: Any, num_programs: int, **options: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no memory")
        out: torch.Tensor = plain(*arguments, num_programs=num_programs, **options)
        if num_programs > 1:
            out[-1, -1, -1] += 1
        return out

    checking.attend = plain if fault is None else spoilt
    checking.logger.addHandler(handler)
    try:
        kind = checking.LayerKind(
            torch.device("cpu"), torch.float32, 4, LayerKV(2, 16, 16), *has_options
        )
        used, again = checking.are_right(kind), checking.are_right(kind)
        return used and again, warnings
    finally:
        checking.attend = plain
        checking.logger.removeHandler(handler)


def compile_kernels() -> int:
    """Compile the kernels for an H100, which needs no GPU; return how many."""
    module: Any = import_module("foresay.core.worker.kernels.attention")
    compiler: Any = import_module("triton.compiler")
    backends: Any = import_module("triton.backends.compiler")
    flags = ("has_window", "has_softcap", "has_sinks")
    sizes = {"num_heads": 8, "fold": 4, "head_dim": 24, "value_dim": 16, "block_m": 16}
    sizes |= {"block_n": 16, "block_d": 32, "block_v": 16, "split_len": 64}
    floats = ("sinks_ptr", "part_sums_ptr", "part_values_ptr")
    attention = module.attention_kernel
    kernels = ((attention, False), (attention, True), (module.merge_kernel, False))
    for kernel, all_parts in kernels:
        constants = {"precision": "tf32x3", **sizes, **dict.fromkeys(flags, True)}
        constants["all_parts"] = all_parts
        types = dict.fromkeys(("query_ptr", "cache_ptr", "out_ptr"), "*bf16")
        types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
        types |= dict.fromkeys(constants, "constexpr")
        names = kernel.arg_names
        signature = {n: types.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in names}
        used = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
        source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=used)
        target = backends.GPUTarget("cuda", 90, 32)
        compiler.compile(source, target=target, options={"enable_fp_fusion": True})
    return len(kernels)
