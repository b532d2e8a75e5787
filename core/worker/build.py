"""Builds the worker from the settings: model, KV pool, proposer, self-check. Runs no step.

What a proposer needs is checked against the model's config before any weight is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from foresay.core.config import EngineConfig
from foresay.core.errors import (
    ConfigError,
    ForesayError,
    PluginError,
    UnknownModelError,
    nearest,
    one_line,
)
from foresay.core.offers import shown
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Needs, TargetView
from foresay.core.worker.attention_backend import triton_backend
from foresay.core.worker.chain import Member, ProposerChain
from foresay.core.worker.choosing import Choice, choose, describe
from foresay.core.worker.drafter_linear import pays_for_drafters
from foresay.core.worker.int8_linear import is_available
from foresay.core.worker.invariance import rows_are_invariant
from foresay.core.worker.kv_cache import KVCache, LayerKV, block_bytes
from foresay.core.worker.memory import (
    CPU_SHARE,
    DEFAULT_MAX_MODEL_LEN,
    DENSE_SHARE,
    GPU_SHARE,
    dummy_step,
    free_memory,
    size_pool,
)
from foresay.core.worker.model_runner import ModelRunner
from foresay.core.worker.proposing import MAX_FAILURES_IN_A_ROW, GuardedProposer
from foresay.core.worker.target import TargetModel, load_target


def build_runner(
    config: EngineConfig,
    plugins: PluginManager,
    *,
    model: Any = None,
    proposer_type: type[Any] | None = None,
    tokenizer: Any = None,
) -> ModelRunner:
    """Load the model and build the worker.

    model: a loaded transformers model, or None for `config.model`. proposer_type: a class, or
    None for `config.speculative.proposer`. Raises `ConfigError`, `ModelError`, `PluginError`.
    """
    choices = choose(config, plugins, proposer_type)
    each_needs: list[Needs] = []
    nums_draft_tokens: list[int] = []

    def check(target_config: Any) -> None:
        each_needs[:] = [choice.needs(target_config) for choice in choices]
        nums_draft_tokens[:] = [
            choice.num_speculative_tokens(
                needs, config.max_num_batched_tokens // config.max_num_seqs
            )
            for choice, needs in zip(choices, each_needs, strict=True)
        ]

    if model is None:
        plugins.model(config.model)  # a name that two plugins claim is an error
    try:
        target = load_target(
            config.model if model is None else model,
            tokenizer=tokenizer,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            row_invariant=config.row_invariant,
            max_model_len=config.max_model_len,
            aliases=plugins.models,
            on_config=check,
        )
    except UnknownModelError as error:
        raise UnknownModelError(f"{error}{plugins.unavailable()}") from error
    int8_drafter = _int8_drafter(target, config, choices, each_needs)
    most_positions = config.max_model_len or target.max_model_len or DEFAULT_MAX_MODEL_LEN

    def view(needs: Needs) -> TargetView:
        return target.view(
            most_positions,
            embeddings=needs.embeddings,
            lm_head=needs.lm_head,
            int8_drafter=int8_drafter,
        )

    members = [
        _build_member(choice, view(needs), needs, k, config)
        for choice, needs, k in zip(choices, each_needs, nums_draft_tokens, strict=True)
    ]
    proposer_layout = [LayerKV.of(layer) for member in members for layer in member.needs.kv_layers]
    is_gpu = target.device.type == "cuda"
    most_draft_tokens = max(nums_draft_tokens, default=0)
    graphs = _graphs_module("triton_graphs", target, config) if target.is_fast else None
    extent: Any = graphs and graphs.Extent(
        max_num_seqs=config.max_num_seqs,
        max_rows=min(config.max_num_seqs * (1 + most_draft_tokens), config.max_num_batched_tokens),
        max_model_len=most_positions,
        max_nodes=most_draft_tokens,
    )
    graph_memory = graphs and graphs.memory_of_graphs(target, extent)
    draft_graphs = _graphs_module("triton_draft_graphs", target, config)
    draft_memory = [
        draft_graphs
        and draft_graphs.memory_of_draft_graphs(
            target, member, draft_graphs.extent_of(member, config.max_num_seqs, most_positions)
        )
        for member in members
    ]
    if is_gpu:
        num_output_rows = config.max_num_seqs * (1 + most_draft_tokens)
        dummy_step(target, config.max_num_batched_tokens, num_output_rows)
    pool = size_pool(
        layout=[*target.kv_layout, *proposer_layout],
        dtype=target.dtype,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        budget=int(
            max(0, free_memory(target.device) - sum(filter(None, (graph_memory, *draft_memory))))
            * (GPU_SHARE if is_gpu else CPU_SHARE)
        ),
        model_limit=target.max_model_len,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
    )
    target.reserve(pool.max_model_len)
    row_invariant = config.row_invariant and rows_are_invariant(target, pool.max_model_len)
    cache = KVCache(
        target.kv_layout,
        pool.num_blocks,
        config.block_size,
        target.dtype,
        target.device,
        proposer_layout,
        max_dense_bytes=0
        if is_gpu or target.attention_rules.own_kernels
        else int(free_memory(target.device) * DENSE_SHARE),
    )
    chain = None
    if members:
        chain = ProposerChain(
            members, target.vocab_size, hidden_size=target.hidden_size, cache=cache
        )
        capture = chain.capture()
        if capture is not None:  # a model that does not show them is an error now
            dummy_step(target, max(2, target.min_rows), 1, capture)
    captured = None
    if graphs and graph_memory is not None:
        captured = graphs.capture_graphs(
            target,
            cache,
            replace(extent, max_model_len=pool.max_model_len),
            chain.capture() if chain is not None else None,
        )
    how_graphs = captured.description if captured else "no CUDA graphs"
    for member, memory in zip(members, draft_memory, strict=True):
        if draft_graphs and memory is not None:
            passes = draft_graphs.capture_draft_graphs(
                target,
                member,
                member.layers,
                cache,
                draft_graphs.extent_of(member, config.max_num_seqs, pool.max_model_len),
            )
            if passes is not None:
                member.passes = passes
                how_graphs += f"; of {member.proposer.name}: {passes.description}"
    size = pool.num_blocks * block_bytes(
        [*target.kv_layout, *proposer_layout], config.block_size, target.dtype
    )
    summary = (
        f"foresay: {config.model} ({target.description}); "
        f"KV cache {pool.num_blocks} blocks of {config.block_size} ({size / 2**20:.0f} MiB), "
        f"max_model_len {pool.max_model_len}; rows invariant: {'yes' if row_invariant else 'no'}; "
        f"{f'{how_graphs}; ' if is_gpu else ''}"
        f"proposer: {describe(choices, nums_draft_tokens, config.speculative)}"
        f"{'; heads in int8' if int8_drafter else ''}"
    )
    return ModelRunner(
        target,
        cache,
        chain,
        max_model_len=pool.max_model_len,
        row_invariant=row_invariant,
        summary=summary,
        graphs=captured,
    )


def _graphs_module(name: str, target: TargetModel, config: EngineConfig) -> Any | None:
    """Return a module of the worker that needs triton, where passes can be captured."""
    if config.enforce_eager or triton_backend(target.device) is None:
        return None
    return importlib.import_module(f"foresay.core.worker.{name}")


def _int8_drafter(
    target: TargetModel,
    config: EngineConfig,
    choices: Sequence[Choice],
    each_needs: Sequence[Needs],
) -> bool:
    """Whether drafters are to have their products in int8; raises `ConfigError`."""
    wanted = config.speculative.drafter_quantization
    # Who asks for nothing of the model has no layers that would fit to it.
    has_heads = any(
        needs.hidden_state or needs.aux_layers or needs.lm_head or needs.embeddings
        for needs in each_needs
    )
    if wanted == "auto":
        return has_heads and pays_for_drafters(target.dtype, target.device, target.hidden_size)
    if wanted == "none":
        return False
    if not has_heads:
        names = ", ".join(choice.spec.name for choice in choices) or "none"
        raise ConfigError(
            f"drafter_quantization='int8' is for heads on the model's states, as eagle, medusa "
            f"and mtp have, and the proposer is {names}: leave it out"
        )
    if target.device.type != "cpu":
        raise ConfigError(
            "drafter_quantization='int8' is for a CPU, and the model's device is "
            f"{str(target.device)!r}: set device to 'cpu' or leave it out"
        )
    if not is_available():
        raise ConfigError(
            f"drafter_quantization='int8': torch {torch.__version__} has no integer products for "
            "this CPU"
        )
    return True


def _build_member(
    choice: Choice, view: TargetView, needs: Needs, num_draft_tokens: int, config: EngineConfig
) -> Member:
    """Build the proposer and show it the target: what it needs, `load` may know better."""
    name = choice.spec.name
    try:
        proposer: Any = choice.spec.build(choice.config)
        if callable(getattr(proposer, "propose", None)):
            narrowed = proposer.load(view) if hasattr(proposer, "load") else None
            if narrowed is not None:
                needs = choice.checked(narrowed, view.config, "load")
    except ForesayError:
        raise
    except Exception as error:
        raise PluginError(
            f"proposer {name!r} ({choice.owner}) cannot be built: {one_line(error)}"
        ) from error
    if not callable(getattr(proposer, "propose", None)):
        methods = [method for method in dir(proposer) if not method.startswith("_")]
        raise PluginError(
            f"proposer {name!r} ({choice.owner}) built {shown(proposer)}, which has no method "
            f"propose(self, batch){nearest('propose', methods)}"
        )
    has_state = needs.hidden_state or needs.aux_layers or needs.kv_layers
    guarded = GuardedProposer(
        proposer,
        name=name,
        owner=choice.owner,
        vocab_size=view.vocab_size,
        strict=config.strict,
        # Who missed a step's features cannot make up for them.
        max_failures=1 if has_state else MAX_FAILURES_IN_A_ROW,
        may_branch=needs.tree,
    )
    return Member(guarded, needs, num_draft_tokens, getattr(proposer, "dummy_run", None))
