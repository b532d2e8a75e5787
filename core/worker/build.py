"""Builds the worker from the settings: model, KV pool, proposer, self-check. Runs no step.

What a proposer needs is checked against the model's config before any weight is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.core.config import EngineConfig, SpeculativeConfig, build_settings
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
from foresay.core.proposer import Needs, Proposer, ProposerConfig, ProposerSpec, TargetView
from foresay.core.worker.invariance import rows_are_invariant
from foresay.core.worker.kv_cache import KVCache, block_bytes
from foresay.core.worker.memory import CPU_SHARE, GPU_SHARE, dummy_step, free_memory, size_pool
from foresay.core.worker.model_runner import ModelRunner
from foresay.core.worker.proposing import GuardedProposer
from foresay.core.worker.target import TargetModel, load_target

DEFAULT_NUM_SPECULATIVE_TOKENS = 5

# What the core cannot provide yet: each is an error, never ignored.
_UNSUPPORTED_NEEDS = {
    "hidden_state": "the target's hidden states",
    "aux_layers": "the target's residual streams",
    "kv_layers": "KV layers of its own",
    "embeddings": "the target's embeddings",
    "lm_head": "the target's output head",
    "sampled": "sampled drafts",
    "prediction": "predicted output",
    "draft_slots": "rows of its own in the batch",
}


@dataclass(frozen=True, slots=True)
class _Choice:
    """The proposer that was asked for or chosen."""

    spec: ProposerSpec
    owner: str  # the distribution, for messages
    config: ProposerConfig
    why: str  # empty unless it was chosen automatically


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
    choice = _choose(config, plugins, proposer_type)
    needs, num_draft_tokens = Needs(), 0

    def check(target_config: Any) -> None:
        nonlocal needs, num_draft_tokens
        if choice is not None:
            needs = _checked_needs(choice, target_config)
            num_draft_tokens = _num_draft_tokens(choice, needs)

    if model is None:
        plugins.model(config.model)  # a name that two plugins claim is an error
    try:
        target = load_target(
            config.model if model is None else model,
            tokenizer=tokenizer,
            dtype=config.dtype,
            device=config.device,
            row_invariant=config.row_invariant,
            max_model_len=config.max_model_len,
            aliases=plugins.models,
            on_config=check,
        )
    except UnknownModelError as error:
        raise UnknownModelError(f"{error}{plugins.unavailable()}") from error
    if target.device.type == "cuda":
        num_output_rows = config.max_num_seqs * (1 + num_draft_tokens)
        dummy_step(target, config.max_num_batched_tokens, num_output_rows)
    pool = size_pool(
        layout=target.kv_layout,
        dtype=target.dtype,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        budget=int(
            free_memory(target.device) * (GPU_SHARE if target.device.type == "cuda" else CPU_SHARE)
        ),
        model_limit=target.max_model_len,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks,
    )
    target.reserve(pool.max_model_len)
    row_invariant = config.row_invariant and rows_are_invariant(target, pool.max_model_len)
    cache = KVCache(
        target.kv_layout, pool.num_blocks, config.block_size, target.dtype, target.device
    )
    proposer = None
    if choice is not None:
        proposer = _build_proposer(choice, target, pool.max_model_len, strict=config.strict)
    size = pool.num_blocks * block_bytes(target.kv_layout, config.block_size, target.dtype)
    summary = (
        f"foresay: {config.model} ({target.description}); "
        f"KV cache {pool.num_blocks} blocks of {config.block_size} ({size / 2**20:.0f} MiB), "
        f"max_model_len {pool.max_model_len}; rows invariant: {'yes' if row_invariant else 'no'}; "
        f"proposer: {_described(choice, config.speculative, num_draft_tokens)}"
    )
    return ModelRunner(
        target,
        cache,
        proposer,
        max_model_len=pool.max_model_len,
        num_speculative_tokens=num_draft_tokens,
        max_context=needs.max_context,
        row_invariant=row_invariant,
        summary=summary,
    )


def _choose(
    config: EngineConfig, plugins: PluginManager, proposer_type: type[Any] | None
) -> _Choice | None:
    """Return the proposer and its settings, or None for plain decoding."""
    speculative = config.speculative
    name: str | type[Any] | None = proposer_type or speculative.proposer
    drafter, why = speculative.drafter, ""
    if name == "auto":
        folder = plugins.locate_model(config.model) or Path(config.model)
        automatic = plugins.automatic_proposer(config.model, folder)
        if automatic is None:
            name = None
        else:
            name, why = automatic.proposer, automatic.reason
            drafter = drafter or automatic.drafter
    if name is None or name == "none":
        _refuse_settings_without_proposer(speculative)
        return None
    spec = plugins.resolve_proposer(name)
    if speculative.num_speculative_tokens == 0:  # plain decoding, by way of k
        return None
    known = isinstance(name, str) and ":" not in name
    owner = plugins.proposer_owner(spec.name) if known else "given as a class"
    return _Choice(spec, owner, _proposer_config(spec, speculative, plugins, drafter), why)


def _refuse_settings_without_proposer(speculative: SpeculativeConfig) -> None:
    given = [
        field
        for field in ("num_speculative_tokens", "proposer_settings", "drafter")
        if getattr(speculative, field)
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} would have no effect: there is no proposer "
            f"(proposer={speculative.proposer!r})"
        )


def _proposer_config(
    spec: ProposerSpec, speculative: SpeculativeConfig, plugins: PluginManager, drafter: str | None
) -> ProposerConfig:
    """Build the proposer's own settings out of the engine's."""
    values: dict[str, Any] = dict(speculative.proposer_settings)
    shared = {
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "drafter": drafter,
    }
    for key, value in shared.items():
        if value is None:
            continue
        if values.get(key, value) != value:
            raise ConfigError(
                f"proposer {spec.name!r}: {key} is given twice, as {value!r} and, in its "
                f"settings, as {values[key]!r}"
            )
        values[key] = value
    if isinstance(values.get("drafter"), str):
        values["drafter"] = _drafter_path(spec, plugins, values["drafter"])
    return build_settings(spec.config_type, values, f"proposer {spec.name!r}")


def _drafter_path(spec: ProposerSpec, plugins: PluginManager, drafter: str) -> str:
    """Return the folder of a registered drafter; anything else is a path that must exist."""
    registered = plugins.drafter(drafter)
    if registered is None:
        folder = os.path.expanduser(drafter)
        if not os.path.exists(folder):
            names = list(plugins.drafters)
            raise ConfigError(
                f"no drafter {drafter!r}: no such folder, and none of that name is registered "
                f"(registered: {', '.join(names) or 'none'}){nearest(drafter, names)}"
            )
        return folder
    if registered.proposer != spec.name:
        raise ConfigError(
            f"drafter {drafter!r} is for the proposer {registered.proposer!r}, not {spec.name!r}"
        )
    try:
        return str(registered.path())
    except ForesayError:
        raise
    except Exception as error:
        raise PluginError(f"drafter {drafter!r}: path: {one_line(error)}") from error


def _checked_needs(choice: _Choice, target_config: Any) -> Needs:
    """Ask the proposer what it needs, and refuse what the core does not provide."""
    name = choice.spec.name
    try:
        needs = choice.spec.needs(choice.config, target_config)
    except ForesayError:
        raise
    except Exception as error:
        raise PluginError(
            f"proposer {name!r} ({choice.owner}): needs: {one_line(error)}"
        ) from error
    if not isinstance(needs, Needs):
        raise PluginError(
            f"proposer {name!r} ({choice.owner}): needs returned {shown(needs)}, not a Needs"
        )
    missing = [what for field, what in _UNSUPPORTED_NEEDS.items() if getattr(needs, field)]
    if missing:
        raise ConfigError(
            f"proposer {name!r} ({choice.owner}) needs {', '.join(missing)}, which this version "
            "of foresay does not provide"
        )
    return needs


def _num_draft_tokens(choice: _Choice, needs: Needs) -> int:
    """Return k: the explicit setting, else the proposer's own default, at most 5."""
    explicit = "num_speculative_tokens" in choice.config.model_fields_set
    asked = choice.config.num_speculative_tokens
    if explicit and asked is not None:
        if needs.max_draft_tokens is not None and asked > needs.max_draft_tokens:
            raise ConfigError(
                f"num_speculative_tokens={asked}: proposer {choice.spec.name!r} drafts at most "
                f"{needs.max_draft_tokens} tokens a step"
            )
        return asked
    own = min(asked or DEFAULT_NUM_SPECULATIVE_TOKENS, DEFAULT_NUM_SPECULATIVE_TOKENS)
    return own if needs.max_draft_tokens is None else min(own, needs.max_draft_tokens)


def _build_proposer(
    choice: _Choice, target: TargetModel, max_model_len: int, *, strict: bool
) -> GuardedProposer:
    """Build the proposer and show it the target."""
    name = choice.spec.name
    view = TargetView(
        config=target.config,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        dtype=target.dtype,
        device=target.device,
        max_model_len=max_model_len,
        checkpoint=target.checkpoint,
        tokenizer=target.tokenizer,
    )
    try:
        proposer: Proposer = choice.spec.build(choice.config)
        if callable(getattr(proposer, "propose", None)) and hasattr(proposer, "load"):
            proposer.load(view)
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
    return GuardedProposer(
        proposer, name=name, owner=choice.owner, vocab_size=target.vocab_size, strict=strict
    )


def _described(choice: _Choice | None, speculative: SpeculativeConfig, num_drafts: int) -> str:
    if choice is None:
        return "none" + (" (none is installed)" if speculative.proposer == "auto" else "")
    why = f" (auto: {choice.why})" if choice.why else ""
    return f"{choice.spec.name}{why}, {num_drafts} tokens a step at most"
