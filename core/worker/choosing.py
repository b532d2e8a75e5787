"""Which proposers an engine has, with which settings, and what they need. Builds none of them.

Everything here is settled before any weight is loaded, and what cannot be honoured is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.core.config import EngineConfig, SpeculativeConfig, build_settings
from foresay.core.errors import (
    ConfigError,
    ForesayError,
    ModelError,
    PluginError,
    UnknownModelError,
    nearest,
    one_line,
)
from foresay.core.offers import shown
from foresay.core.plugins import FALLBACK_PROPOSER, PluginManager
from foresay.core.proposer import Needs, ProposerConfig, ProposerSpec
from foresay.core.worker.sources import find_source

DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_NUM_TREE_NODES = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """A proposer that was asked for or chosen."""

    spec: ProposerSpec
    owner: str  # the distribution, for messages
    config: ProposerConfig
    why: str  # how it, or its drafter, was chosen; empty if the user named both, or needed not to

    def needs(self, target_config: Any) -> Needs:
        """Ask the proposer what it needs; `ConfigError` for what the target does not have."""
        return self.checked(self.declared(target_config), target_config, "needs")

    def declared(self, target_config: Any) -> object:
        """Ask the proposer what it needs, and leave the answer unchecked."""
        who = f"proposer {self.spec.name!r} ({self.owner})"
        try:
            return self.spec.needs(self.config, target_config)
        except ForesayError:
            raise
        except Exception as error:
            raise PluginError(f"{who}: needs: {one_line(error)}") from error

    def checked(self, needs: object, target_config: Any, source: str) -> Needs:
        """Return the needs that `source` returned, or raise as `needs` does."""
        who = f"proposer {self.spec.name!r} ({self.owner})"
        if not isinstance(needs, Needs):
            raise PluginError(f"{who}: {source} returned {shown(needs)}, not a Needs")
        num_layers = target_config.get_text_config(decoder=True).num_hidden_layers
        for layer in needs.aux_layers:
            if not 0 <= layer <= num_layers:
                raise ConfigError(
                    f"{who} needs the residual stream entering layer {layer}, and the target model "
                    f"has {num_layers}: was its drafter made for another model?"
                )
        return needs

    def num_speculative_tokens(self, needs: Needs, most_rows: int) -> int:
        """Return k: the explicit setting, else the proposer's own default, at most 5.

        Where drafts are trees, k counts nodes, and without a setting there are up to 16, or as many
        as leave each request `most_rows` rows of a step; but no less than a chain would have.
        """
        explicit = "num_speculative_tokens" in self.config.model_fields_set
        asked = self.config.num_speculative_tokens
        if explicit and asked is not None:
            if needs.max_draft_tokens is not None and asked > needs.max_draft_tokens:
                raise ConfigError(
                    f"num_speculative_tokens={asked}: proposer {self.spec.name!r} drafts at most "
                    f"{needs.max_draft_tokens} tokens a step"
                )
            return asked
        default = DEFAULT_NUM_SPECULATIVE_TOKENS
        if needs.tree:
            most = min(DEFAULT_NUM_TREE_NODES, most_rows - 1 - needs.draft_slots)
            default = max(default, most)
        own = min(asked or default, default)
        return own if needs.max_draft_tokens is None else min(own, needs.max_draft_tokens)


def choose(
    config: EngineConfig, plugins: PluginManager, proposer_type: type[Any] | None = None
) -> list[Choice]:
    """Return the proposers in the order in which they are asked; none for plain decoding.

    proposer_type: a class, or None for `config.speculative.proposer`. Raises `ConfigError` or
    `PluginError`.
    """
    speculative = config.speculative
    name: str | type[Any] | None = proposer_type or speculative.proposer
    drafter, whys = speculative.drafter, [""]
    folder = plugins.locate_model(config.model) or Path(config.model)
    if name == "auto":
        automatic = plugins.automatic_proposer(config.model, folder)
        if automatic is None:
            name = None
        else:
            name, whys = automatic.proposer, [f"auto: {automatic.reason}"]
            may_chain = (
                not (drafter or speculative.proposer_settings)
                and FALLBACK_PROPOSER in plugins.proposers
                and name != FALLBACK_PROPOSER
            )
            drafter = drafter or automatic.drafter
            if may_chain and automatic.drafter is not None:
                # A lookup costs next to nothing, and the control takes what is worth more.
                drafter = {name: automatic.drafter}
                name, whys = f"{FALLBACK_PROPOSER},{name}", ["auto", *whys]
    if name is None or name == "none":
        _refuse_settings_without_proposer(speculative)
        return []
    names: Sequence[str | type[Any]] = _members(name) if isinstance(name, str) else [name]
    specs = [plugins.resolve_proposer(member) for member in names]
    if speculative.num_speculative_tokens == 0:  # plain decoding, by way of k
        return []
    each_settings: Sequence[Mapping[str, Any]] = [speculative.proposer_settings]
    each_drafter: Sequence[str | None]
    if len(specs) > 1:
        each_settings = _settings_of_each(speculative.proposer_settings, specs)
        each_drafter = _drafter_of_each(drafter, specs)
    else:
        each_drafter = [_only_drafter(drafter, specs[0])]
    registered = [
        None if own else _registered_drafter(member, settings, plugins, config.model, folder)
        for own, member, settings in zip(each_drafter, names, each_settings, strict=True)
    ]
    return [
        Choice(
            spec,
            plugins.proposer_owner(spec.name)
            if isinstance(member, str) and ":" not in member
            else "given as a class",
            _proposer_config(spec, speculative, plugins, own_settings, own_drafter or found),
            why or (f"drafter {found!r}" if found else ""),
        )
        for member, spec, own_settings, own_drafter, found, why in zip(
            names,
            specs,
            each_settings,
            each_drafter,
            registered,
            whys if len(whys) == len(names) else [""] * len(names),
            strict=True,
        )
    ]


def describe(
    choices: Sequence[Choice], nums_draft_tokens: Sequence[int], speculative: SpeculativeConfig
) -> str:
    """Word the choice for the line that is printed at the start."""
    if not choices and speculative.num_speculative_tokens == 0:
        return "none (num_speculative_tokens is 0)"
    if not choices:
        return "none" + (" (none is installed)" if speculative.proposer == "auto" else "")
    parts = [
        f"{choice.spec.name}{f' ({choice.why})' if choice.why else ''}, {k} tokens a step at most"
        for choice, k in zip(choices, nums_draft_tokens, strict=True)
    ]
    return "; else ".join(parts)


def _members(name: str) -> list[str]:
    """Split a chain into its members' names."""
    if "," not in name:
        return [name]
    members = [member.strip() for member in name.split(",")]
    for index, member in enumerate(members):
        if not member:
            raise ConfigError(f"proposer {name!r}: a chain is names with commas between, 'a,b'")
        if member in ("auto", "none"):
            raise ConfigError(f"proposer {name!r}: {member!r} cannot be part of a chain")
        if member in members[:index]:
            raise ConfigError(f"proposer {name!r}: {member!r} is in the chain twice")
    return members


def _refuse_settings_without_proposer(speculative: SpeculativeConfig) -> None:
    given = [
        field
        for field in (
            "num_speculative_tokens",
            "proposer_settings",
            "drafter",
            "draft_tokens_by_batch",
        )
        if getattr(speculative, field)
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} would have no effect: there is no proposer "
            f"(proposer={speculative.proposer!r})"
        )


def _settings_of_each(
    settings: Mapping[str, Any], specs: Sequence[ProposerSpec]
) -> list[Mapping[str, Any]]:
    """Return each member's own settings of a chain's, which are by name."""
    names = [spec.name for spec in specs]
    for key, value in settings.items():
        if key not in names:
            raise ConfigError(
                f"proposer_settings[{key!r}]: the settings of a chain are by proposer, e.g. "
                f"{{{names[0]!r}: {{{key!r}: ...}}}}{nearest(key, names)} (the chain: "
                f"{', '.join(names)})"
            )
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"proposer_settings[{key!r}]={value!r}: expected the settings of {key!r} by name"
            )
    return [settings.get(name, {}) for name in names]


def _drafter_of_each(
    drafter: str | Mapping[str, str] | None, specs: Sequence[ProposerSpec]
) -> list[str | None]:
    """Return each member's drafter of a chain's, which are by name."""
    names = [spec.name for spec in specs]
    if isinstance(drafter, str):
        name, equals, path = drafter.partition("=")
        if not equals:
            raise ConfigError(
                f"drafter={drafter!r}: say which proposer of the chain it is for, e.g. "
                f"'{names[0]}={drafter}'"
            )
        drafter = {name: path}
    for name in drafter or {}:
        if name not in names:
            raise ConfigError(
                f"drafter: {name!r} is not in the chain {', '.join(names)}{nearest(name, names)}"
            )
    return [(drafter or {}).get(name) for name in names]


def _registered_drafter(
    member: str | type[Any],
    settings: Mapping[str, Any],
    plugins: PluginManager,
    model_name: str,
    folder: Path,
) -> str | None:
    """Return the drafter that was made for the model and a proposer given by its name, if any."""
    if not isinstance(member, str) or settings.get("drafter") is not None:
        return None
    found = plugins.best_drafter([member], model_name, folder)
    return None if found is None else found.name


def _only_drafter(drafter: str | Mapping[str, str] | None, spec: ProposerSpec) -> str | None:
    """Return the drafter of a proposer that is alone: given as it is, or by the name."""
    if isinstance(drafter, str) or drafter is None:
        name, equals, path = (drafter or "").partition("=")
        return path if equals and name == spec.name else drafter
    others = [name for name in drafter if name != spec.name]
    if others:
        raise ConfigError(f"drafter: {others[0]!r} is not the proposer, {spec.name!r}")
    return drafter.get(spec.name)


def _proposer_config(
    spec: ProposerSpec,
    speculative: SpeculativeConfig,
    plugins: PluginManager,
    settings: Mapping[str, Any],
    drafter: str | None,
) -> ProposerConfig:
    """Build the proposer's own settings out of the engine's."""
    values: dict[str, Any] = dict(settings)
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


def _model_path(plugins: PluginManager, drafter: str) -> str:
    """Return an alias's folder, or the name of a model that is somewhere."""
    plugins.model(drafter)  # a name that two plugins claim is an error
    try:
        source = find_source(drafter, plugins.models)
    except UnknownModelError as error:
        raise UnknownModelError(f"drafter: {error}{plugins.unavailable()}") from error
    except ModelError as error:
        raise ModelError(f"drafter: {error}") from error
    if drafter in plugins.models:
        return source.location
    return os.path.expanduser(drafter)


def _drafter_path(spec: ProposerSpec, plugins: PluginManager, drafter: str) -> str:
    """Return the folder of a registered drafter; anything else is a path that must exist.

    For a proposer whose drafter is a model, what names a target model names it, too.
    """
    registered = plugins.drafter(drafter)
    if registered is None and spec.drafter_is_model:
        return _model_path(plugins, drafter)
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
