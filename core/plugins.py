"""Find, load, check and attribute plugins. Imports no torch, and no plugin by name.

Every offer is known with the distribution, version and entry point it comes from. A plugin that
cannot be used is kept in `PluginManager.records` with the reason, named when someone asks for what
it might have offered, and stops nobody else. Loading plugins runs their hooks only; proposers,
models and drafters are built later, by whoever asks for them.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from foresay import hookspecs
from foresay.core.automatic import AutomaticProposer, ask_who_serves
from foresay.core.errors import PluginError, nearest, one_line
from foresay.core.offers import Offers, PluginRecord, checked
from foresay.core.proposer import ProposerSpec
from foresay.core.proposer_class import spec_of_class, spec_of_path
from foresay.core.registry import DrafterSpec, ModelAlias

if TYPE_CHECKING:
    import typer

    from foresay.core.outputs import RequestOutput
    from foresay.core.stats import StepStats

GROUP = "foresay"
DISABLE_VARIABLE = "FORESAY_DISABLE_PLUGINS"
FALLBACK_PROPOSER = "ngram"  # what "auto" takes when no drafter was made for the model
NEVER_AUTOMATIC = ("custom_example",)  # the plugin authors' example: right, but no gain

_HOOKS = {name for name in vars(hookspecs) if name.startswith("foresay_")}
_STEP_END = "foresay_step_end"
_REQUEST_END = "foresay_request_end"

logger = logging.getLogger(__name__)

Offer = TypeVar("Offer")


@dataclass(frozen=True, slots=True)
class _Observer:
    record: PluginRecord
    hook: pluggy.HookImpl


class PluginManager:
    """The plugins of one process. An instance is passed around; there is no global one."""

    def __init__(self) -> None:
        self.records: list[PluginRecord] = []
        self.registered: list[PluginRecord] = []  # those of them that no entry point brought
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT_NAME)
        self._pluggy.add_hookspecs(hookspecs)
        self._proposers: Offers[ProposerSpec] = Offers("proposer")
        self._models: Offers[ModelAlias] = Offers("model")
        self._drafters: Offers[DrafterSpec] = Offers("drafter")
        self._loaded: list[tuple[PluginRecord, object]] = []
        self._observers: dict[str, list[_Observer]] = {_STEP_END: [], _REQUEST_END: []}

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ) -> PluginManager:
        """Load every installed plugin but those that `FORESAY_DISABLE_PLUGINS` names.

        Never raises for a plugin's fault; see `records`.
        """
        manager = cls()
        found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, *_source(entry)))
        disabled = {name.strip() for name in environ.get(DISABLE_VARIABLE, "").split(",")} - {""}
        names = sorted({entry.name for entry in found})
        for unknown in sorted(disabled.difference(names)):
            logger.warning(
                "%s: no plugin %r; installed: %s%s",
                DISABLE_VARIABLE,
                unknown,
                ", ".join(names) or "none",
                nearest(unknown, names),
            )
        for entry in found:
            record = PluginRecord(*_source(entry), entry_point=entry.name)
            manager.records.append(record)
            if entry.name in disabled:
                record.status = "disabled"
                continue
            try:
                plugin = entry.load()
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a module may raise
                record.fail("load", one_line(error))
                continue
            manager._admit(plugin, record)
        return manager

    def register(self, plugin: object, name: str) -> PluginRecord:
        """Add an object with hook implementations, for tests and programs.

        Raises `PluginError` if it is no valid plugin, or if a name it offers is taken.
        """
        record = PluginRecord(distribution=name, version="", entry_point=name)
        self.records.append(record)
        self.registered.append(record)
        self._admit(plugin, record)
        if record.error:
            raise PluginError(f"plugin {name!r}: {record.error}")
        return record

    @property
    def proposers(self) -> Mapping[str, ProposerSpec]:
        """Every proposer that can be used, by name."""
        return self._proposers.usable()

    @property
    def models(self) -> Mapping[str, ModelAlias]:
        """Every model alias that can be used, by name."""
        return self._models.usable()

    @property
    def drafters(self) -> Mapping[str, DrafterSpec]:
        """Every drafter that can be used, by name."""
        return self._drafters.usable()

    def proposer(self, name: str) -> ProposerSpec:
        """Return the proposer of that name; `PluginError` if there is none, or more than one."""
        spec = self._proposers.get(name)
        if spec is None:
            raise PluginError(self._missing(name))
        return spec

    def proposer_owner(self, name: str) -> str:
        """Who is to blame for a proposer: "foresay-ngram 0.1.0", or the class's own name."""
        return str(self._proposers.owner(name) or name)

    def model(self, name: str) -> ModelAlias | None:
        """Return the alias, or None if nobody offers it; a clash raises `PluginError`."""
        return self._models.get(name)

    def locate_model(self, name: str) -> Path | None:
        """Return an alias's folder if it is on this machine, else None; does no work.

        A `locate` that raises or returns something else is logged, and its model is not there.
        """
        alias = self.model(name)
        if alias is None:
            return None
        try:
            found: object = alias.locate()
        except Exception as error:  # noqa: BLE001  # whatever a plugin may raise
            fault = f"raised {one_line(error)}"
        else:
            if found is None or isinstance(found, Path):
                return found
            fault = f"returned {found!r}, not a Path or None"
        logger.warning("locate() of model %r, %s, %s", name, self._models.owner(name), fault)
        return None

    def drafter(self, name: str) -> DrafterSpec | None:
        """Return the drafter, or None if nobody offers it; a clash raises `PluginError`."""
        return self._drafters.get(name)

    def resolve_proposer(self, proposer: str | type[Any]) -> ProposerSpec:
        """Return the spec for a name, for "module:Class", or for a class; not for a chain.

        A class is built as `Class(config)`; see `foresay.core.proposer_class`. Raises
        `PluginError` if there is no such thing.
        """
        if not isinstance(proposer, str):
            name = getattr(proposer, "__qualname__", type(proposer).__qualname__)
            return spec_of_class(proposer, f"{proposer.__module__}:{name}")
        if ":" in proposer:
            return spec_of_path(proposer)
        return self.proposer(proposer)

    def best_drafter(
        self, proposers: Collection[str], model_name: str, model_path: Path | None = None
    ) -> DrafterSpec | None:
        """Return the drafter made for a model and one of `proposers` that accepts most, if any.

        `model_path` as in `automatic_proposer`.
        """
        candidates = [
            drafter
            for drafter in self.drafters.values()
            if drafter.proposer in proposers and self._made_for(drafter, model_name, model_path)
        ]
        return max(candidates, key=lambda drafter: drafter.mean_acceptance_length, default=None)

    def automatic_proposer(
        self, model_name: str, model_path: Path | None = None
    ) -> AutomaticProposer | None:
        """Choose a proposer for a model.

        The best drafter made for it; else a proposer that finds its weights in the checkpoint;
        else n-gram lookup. `model_path` is the folder that `model_name` resolved to: a drafter
        registered for an alias also serves the same model given as a folder. None if nothing
        suitable is installed.
        """
        proposers = {n: spec for n, spec in self.proposers.items() if n not in NEVER_AUTOMATIC}
        best = self.best_drafter(proposers, model_name, model_path)
        if best is not None:
            return AutomaticProposer(
                best.proposer,
                best.name,
                f"drafter {best.name!r} of {self._drafters.owner(best.name)} was made for "
                f"{model_name!r} (mean acceptance length {best.mean_acceptance_length:.2f})",
            )
        reasons = [f"no drafter is registered for {model_name!r}"]
        if model_path is not None:
            served = ask_who_serves(proposers, model_path.expanduser(), self.proposer_owner)
            if served.choice is not None:
                return served.choice
            reasons += served.refusals
        if FALLBACK_PROPOSER in proposers:
            return AutomaticProposer(FALLBACK_PROPOSER, None, "; ".join(reasons))
        return None

    def register_commands(self, app: typer.Typer) -> None:
        """Add the plugins' commands to `app`, which has foresay's own already.

        A name that exists already, in foresay or in another plugin, is an error of that plugin's.
        """
        # Here, not at the top: who uses `LLM` needs no command line.
        from foresay.core.plugin_commands import add_commands

        add_commands(
            app,
            [
                (record, partial(_fill, hook))
                for record, plugin in self._loaded
                for hook in self._implementations("foresay_register_commands", plugin)
            ],
        )

    def unavailable(self) -> str:
        """What might have offered a name that is not there: "; failed to load: x (why)", or ""."""
        absent = {
            "failed to load": [
                f"{record.entry_point} ({record.reasons['load']})"
                for record in self.records
                if "load" in record.reasons
            ],
            f"disabled by {DISABLE_VARIABLE}": [
                record.entry_point for record in self.records if record.status == "disabled"
            ],
        }
        return "".join(f"; {why}: {', '.join(who)}" for why, who in absent.items() if who)

    @property
    def has_observers(self) -> bool:
        """Whether anyone watches steps or requests: without, nothing need be gathered for them."""
        return any(self._observers.values())

    def step_end(self, stats: StepStats) -> None:
        """Tell the observers of steps; one that raises is logged once and dropped."""
        if self._observers[_STEP_END]:
            self._notify(_STEP_END, stats=stats)

    def request_end(self, output: RequestOutput) -> None:
        """Tell the observers of requests; one that raises is logged once and dropped."""
        if self._observers[_REQUEST_END]:
            self._notify(_REQUEST_END, output=output)

    def _notify(self, hook_name: str, **arguments: Any) -> None:
        for observer in list(self._observers[hook_name]):
            try:
                _call(observer.hook, **arguments)
            except Exception as error:  # whatever an observer may raise
                self._observers[hook_name].remove(observer)
                logger.warning(
                    "%s of plugin %s raised %s; it is not called again",
                    hook_name,
                    observer.record,
                    one_line(error),
                )
                logger.debug("the observer's traceback", exc_info=True)

    def _admit(self, plugin: Any, record: PluginRecord) -> None:
        """Check a loaded plugin and take its offers: all of them, or none."""
        try:
            self._register(plugin, f"{record.entry_point} of {record}")
            proposers = self._collect("foresay_register_proposers", ProposerSpec, plugin)
            models = self._collect("foresay_register_models", ModelAlias, plugin)
            drafters = self._collect("foresay_register_drafters", DrafterSpec, plugin)
        except PluginError as error:
            record.fail("load", str(error))
            return
        for proposer in proposers:
            record.proposers.append(proposer.name)
            self._proposers.add(proposer.name, proposer, record)
        for model in models:
            record.models.append(model.name)
            self._models.add(model.name, model, record)
        for drafter in drafters:
            record.drafters.append(drafter.name)
            self._drafters.add(drafter.name, drafter, record)
        for hook_name, observers in self._observers.items():
            for hook in self._implementations(hook_name, plugin):
                observers.append(_Observer(record, hook))
        self._loaded.append((record, plugin))

    def _register(self, plugin: Any, name: str) -> None:
        try:
            if self._pluggy.is_registered(plugin):
                raise PluginError(f"it is loaded already, as {self._pluggy.get_name(plugin)}")
            if self._pluggy.has_plugin(name):
                raise PluginError(f"a plugin is loaded already as {name}")
            _check_surface(self._pluggy, plugin)
            self._pluggy.register(plugin, name)
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(one_line(error)) from error

    def _collect(self, hook_name: str, kind: type[Offer], plugin: object) -> list[Offer]:
        offers: list[Offer] = []
        for hook in self._implementations(hook_name, plugin):
            try:
                offers += checked(_call(hook), kind, hook_name)
            except PluginError:
                raise
            except (Exception, SystemExit) as error:
                raise PluginError(f"{hook_name} raised {one_line(error)}") from error
        return offers

    def _implementations(self, hook_name: str, plugin: object) -> Iterator[pluggy.HookImpl]:
        """One plugin's implementations of a hook: calling them one by one keeps attribution."""
        for hook in getattr(self._pluggy.hook, hook_name).get_hookimpls():
            if hook.plugin is plugin:
                yield hook

    def _made_for(self, drafter: DrafterSpec, model_name: str, model_path: Path | None) -> bool:
        if drafter.model == model_name:
            return True
        if model_path is None or drafter.model not in self.models:
            return False
        located = self.locate_model(drafter.model)
        return located is not None and located.resolve() == model_path.resolve()

    def _missing(self, name: str) -> str:
        names = list(self.proposers)
        hint = ""
        if all(part in names for part in name.split("+")):  # as `bench` has it, which lists chains
            hint = f"; a chain is written {name.replace('+', ',')!r}"
        return (
            f"no proposer {name!r}; installed: {', '.join(names) or 'none'}"
            f"{self.unavailable()}{nearest(name, names)}{hint}"
        )


def _check_surface(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Raise `PluginError` unless every hook the plugin implements exists, with these arguments.

    pluggy accepts unknown hooks until `check_pending`, which speaks of one plugin only and after
    the fact; and its words are about specs and impls. An `optionalhook` may be unknown.
    """
    implemented = 0
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute in _HOOKS:
                raise PluginError(f"{attribute} is not marked with @foresay.hookimpl")
            continue
        implemented += 1
        hook_name = options.get("specname") or attribute
        if hook_name not in _HOOKS:
            if options.get("optionalhook"):
                continue
            raise PluginError(
                f"no hook {hook_name!r}; hooks: {', '.join(sorted(_HOOKS))}"
                f"{nearest(hook_name, _HOOKS)}"
            )
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(f"{hook_name} is a hook wrapper; foresay calls plain functions only")
        offered = list(inspect.signature(getattr(hookspecs, hook_name)).parameters)
        wanted = [
            parameter.name
            for parameter in inspect.signature(getattr(plugin, attribute)).parameters.values()
            if parameter.default is parameter.empty  # else the plugin's own; pluggy leaves it be
        ]
        if not set(wanted) <= set(offered):
            raise PluginError(
                f"{hook_name}({', '.join(wanted)}) asks for arguments that do not exist; "
                f"the hook is {hook_name}({', '.join(offered)})"
            )
    if not implemented:
        raise PluginError(f"it implements no hook; hooks: {', '.join(sorted(_HOOKS))}")


def _call(hook: pluggy.HookImpl, **arguments: Any) -> Any:
    """Call one implementation with those of the hook's arguments that it asks for."""
    return hook.function(*[arguments[name] for name in hook.argnames])


def _fill(hook: pluggy.HookImpl, app: typer.Typer) -> None:
    _call(hook, app=app)


def _source(entry: EntryPoint) -> tuple[str, str]:
    """The distribution and version of an entry point; damaged metadata may have neither."""
    if entry.dist is None:
        return "unknown", ""
    return entry.dist.name or "unknown", entry.dist.version or ""
