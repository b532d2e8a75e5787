"""Triton's interpreter in a process of its own, so that the kernels run on any machine.

Triton decides between interpreter and compiler when a kernel is defined, and its own library when
it is imported: by the environment at that moment. Setting that in the tests' process would depend
on who imported triton before, and would change what others get. So `interpreted(f, ...)` computes
`f(...)` in a fresh process; f is a function of a module that can be imported there, and arguments
and result go through pickle.
"""

from __future__ import annotations

import atexit
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module, util
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from foresay.core.worker.rejection_sampler import VerifyRequest, VerifyResult

T = TypeVar("T")

HAS_TRITON = util.find_spec("triton") is not None


def interpreted(function: Callable[..., T], *arguments: Any) -> T:
    """Return what the function returns in the interpreter's process; its exception is raised."""
    message = pickle.dumps((function, arguments))
    result: T = pickle.loads(_pool().submit(_apply, message).result())  # noqa: S301 (our own)
    return result


@cache
def _pool() -> ProcessPoolExecutor:
    """One process for all test modules: it imports torch and triton once."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
    os.environ.update({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    try:
        pool.submit(_start).result()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    return pool


def _start() -> None:
    # numpy's warnings: a kernel may divide by 0 where it then takes the other branch.
    warnings.simplefilter("ignore", RuntimeWarning)
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    # Before each call of a function within a kernel the interpreter looks through all of
    # triton.language for what it has to replace, and finds nothing. That was nine tenths of the
    # time: once for each module that defines kernels is enough.
    patch, seen = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in seen:
            seen.add(id(function.__globals__))
            patch(function)
            # Bounds of loops are arrays of one element, which numpy no longer takes for a number.
            language.tensor.__index__ = lambda self: int(self.handle.data.item())
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _apply(message: bytes) -> bytes:
    function, arguments = pickle.loads(message)  # noqa: S301 (from our own parent)
    return pickle.dumps(function(*arguments))


# -- what is run there ---------------------------------------------------------------------------


def philox_words(counters: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Return the words [n, 4] of counters [n, 4] under seeds [n], all int64."""
    noise: Any = import_module("foresay.core.worker.kernels.noise")
    words = torch.empty_like(counters)
    noise.philox_kernel[(2,)](counters, seeds, words, len(counters), block=-(-len(counters) // 2))
    return words


def block_noise(
    seed: int, tail: tuple[int, int, int], num_tokens: int, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and exponentials of the ids below `num_tokens`; `tail`: counter words 1 to 3."""
    noise: Any = import_module("foresay.core.worker.kernels.noise")
    words = torch.empty(num_tokens, dtype=torch.int64)
    times = torch.empty(num_tokens)
    key = torch.tensor([seed - (seed >> 63 << 64), *tail])
    noise.block_noise_kernel[(-(-num_tokens // block),)](words, times, key, num_tokens, block=block)
    return words, times


def exponentials(words: torch.Tensor) -> torch.Tensor:
    """Return the exponentials, float32, of words, int64."""
    noise: Any = import_module("foresay.core.worker.kernels.noise")
    times = torch.empty(len(words))
    noise.exponential_kernel[(1,)](
        words, times, len(words), block=2 ** (len(words) - 1).bit_length()
    )
    return times


def run_plan(
    logits: torch.Tensor,
    requests: Sequence[VerifyRequest],
    tuning: tuple[int, int] | None = None,
    num_launches: int = 1,
) -> list[VerifyResult]:
    """Return the kernels' results, with rows shared out as `tuning` says: block, tiles."""
    sampler: Any = import_module("foresay.core.worker.triton_sampler")
    chosen = None if tuning is None else sampler.Tuning(*tuning)
    plan = sampler.VerifyPlan(logits, requests, chosen)
    for _ in range(num_launches):
        plan.launch()
    results: list[VerifyResult] = plan.results()
    return results


def inputs_after_verification(
    logits: torch.Tensor, requests: Sequence[VerifyRequest]
) -> list[torch.Tensor]:
    """Return the logits and the draft probs as they are after the kernels ran."""
    run_plan(logits, requests)
    return [logits, *(r.draft_probs.probs for r in requests if r.draft_probs is not None)]


# -- and what is compiled ------------------------------------------------------------------------

_ELEMENTS = {
    "fp64": ["ratios"],
    "fp32": ["processed", "bounds", "temperatures", "min_ps", "tops", "sums", "scales"],
    "i32": ["top_ids", "bad", "limits", "split_top_ids", "split_winners"],
}
_ELEMENTS["fp32"] += [f"split_{name}" for name in ("tops", "sums", "draft_sums", "residuals")]
_ELEMENTS["fp32"] += ["split_times", "split_residual_times", "draft_probs"]
_ELEMENTS["i32"] += ["split_residual_winners"]


def compile_all() -> int:
    """Compile the rules' kernels for an H100, which needs no GPU; return how many, with variants.

    All of them with all that a batch may use, and with nothing of it those that plain batches need.
    """
    kernels: Any = import_module("foresay.core.worker.kernels.rejection")
    rows: Any = import_module("foresay.core.worker.kernels.rows")
    row_kernels = [rows.row_statistics_kernel, rows.merge_statistics_kernel]
    always = [*row_kernels, kernels.decide_kernel, kernels.race_kernel, kernels.emit_kernel]
    for_drawn = [rows.min_p_sums_kernel, kernels.draft_sums_kernel, kernels.block_residual_kernel]
    variants = [(kernel, False) for kernel in always]
    variants += [(kernel, True) for kernel in (*always, *for_drawn)]
    for kernel, with_all in variants:
        _compile(kernel, with_all)
    return len(variants)


def _compile(kernel: Any, with_all: bool) -> None:
    compiler: Any = import_module("triton.compiler")
    backends: Any = import_module("triton.backends.compiler")
    flags = ("has_processed", "has_bounds", "has_drawn", "has_maps")
    constants = {"block": 256, "max_splits": 8, **dict.fromkeys(flags, with_all)}
    types = {f"{name}_ptr": f"*{kind}" for kind, names in _ELEMENTS.items() for name in names}
    signature = {}
    for name in kernel.arg_names:
        other = "*i64" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, other)
        if name == "logits_ptr":
            signature[name] = "*bf16"
    used = {(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants}
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=used)
    target = backends.GPUTarget("cuda", 90, 32)
    compiler.compile(source, target=target, options={"enable_fp_fusion": True})
