"""What plugins offer: who offers which name, and whether it is what the hook promises.

Knows the types a hook may return and words every fault as a sentence. Does not know how plugins
are found, loaded or called; that is `plugins`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from foresay.core.errors import PluginError
from foresay.core.proposer import ProposerConfig, ProposerSpec
from foresay.core.registry import DrafterSpec, ModelAlias

Offer = TypeVar("Offer")

Status = Literal["ok", "disabled", "failed"]


@dataclass(slots=True, eq=False)
class PluginRecord:
    """One plugin: where it comes from, what it offers, and what is wrong with it.

    "failed" means that something it offers cannot be used, and `error` says what. A plugin that
    did not load, or whose hook raised or returned something wrong, offers nothing at all; one
    whose name clashes with another's keeps its other names.
    """

    distribution: str
    version: str
    entry_point: str
    status: Status = "ok"
    proposers: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # by subject, in order of appearance

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def fail(self, subject: str, reason: str) -> None:
        """Note a fault; a later one on the same subject replaces it."""
        self.status = "failed"
        self.reasons[subject] = reason

    @property
    def error(self) -> str | None:
        """All faults in one line, or None."""
        return "; ".join(self.reasons.values()) or None

    def row(self) -> dict[str, Any]:
        """The record as `foresay plugins --json` prints it; its keys are stable."""
        return {
            "distribution": self.distribution,
            "version": self.version,
            "entry_point": self.entry_point,
            "status": self.status,
            "proposers": self.proposers,
            "models": self.models,
            "drafters": self.drafters,
            "commands": self.commands,
            "error": self.error,
        }


class Offers(Generic[Offer]):
    """All offers of one kind, by name. A name that two plugins offer belongs to neither.

    Which of the two was meant cannot be known, and taking the first found would make the choice
    depend on the order of folders on `sys.path`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind  # "proposer", "model", ...: how messages call it
        self._by_name: dict[str, list[tuple[PluginRecord, Offer]]] = {}

    def add(self, name: str, offer: Offer, record: PluginRecord) -> None:
        """Add an offer; if the name is taken, everyone who offers it is marked as failed."""
        claims = self._by_name.setdefault(name, [])
        claims.append((record, offer))
        clash = self._clash(name)
        if clash:
            for claimant, _ in claims:
                claimant.fail(f"{self.kind} {name}", clash)

    def get(self, name: str) -> Offer | None:
        """Return the offer, or None if nobody offers it; a clash raises `PluginError`."""
        clash = self._clash(name)
        if clash:
            raise PluginError(clash)
        claims = self._by_name.get(name)
        return claims[0][1] if claims else None

    def owner(self, name: str) -> PluginRecord | None:
        """Return who offers `name`, or None if nobody does, or several do."""
        claims = self._by_name.get(name, ())
        return claims[0][0] if len(claims) == 1 else None

    def usable(self) -> dict[str, Offer]:
        """Every name that exactly one plugin offers, sorted."""
        return {n: c[0][1] for n, c in sorted(self._by_name.items()) if len(c) == 1}

    def clashes(self) -> dict[str, str]:
        """Every name that several plugins offer, with the error for whoever asks for it."""
        texts = {name: self._clash(name) for name in sorted(self._by_name)}
        return {name: text for name, text in texts.items() if text}

    def _clash(self, name: str) -> str | None:
        records = [record for record, _ in self._by_name.get(name, ())]
        if len(records) < 2:
            return None
        advice = "uninstall all but one of them"
        entry_points = sorted({record.entry_point for record in records})
        if len(entry_points) == len(records):
            choices = " or ".join(entry_points)
            advice += f", or turn one off: FORESAY_DISABLE_PLUGINS={choices}"
        owners = " and ".join(str(record) for record in records)
        return f"{self.kind} {name!r} is offered by {owners}; {advice}"


def checked(result: object, kind: type[Offer], hook: str) -> list[Offer]:
    """Return what a `foresay_register_*` hook returned as a list, or raise `PluginError`."""
    if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
        raise PluginError(
            f"{hook} returned {shown(result)}; it must return a list of {kind.__name__}"
        )
    offers: list[Offer] = []
    names: set[str] = set()
    for item in result:
        if not isinstance(item, kind):
            raise PluginError(f"{hook} returned {shown(item)} among its {kind.__name__} objects")
        fault = _CHECKS[kind](item)
        if fault:
            raise PluginError(f"{hook}: {fault}")
        name = item.name  # type: ignore[attr-defined]  # the check saw to it
        if name in names:
            raise PluginError(f"{hook} returned two {kind.__name__} objects named {name!r}")
        names.add(name)
        offers.append(item)
    return offers


def is_subclass(value: object, parent: type) -> bool:
    """Whether `value` is a class at all, and one of `parent`'s."""
    return isinstance(value, type) and issubclass(value, parent)


def shown(value: object) -> str:
    """Word a value that is not what was expected: None as it is, else with its type."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} (a {type(value).__name__})"


def _check_proposer(spec: ProposerSpec) -> str | None:
    if fault := _check_name("ProposerSpec", spec.name):
        return fault
    if spec.name in ("auto", "none") or any(character in spec.name for character in ",:="):
        # `--proposer` gives these a meaning: a choice, no proposer, a chain, a class, a setting.
        return (
            f"a proposer cannot be named {spec.name!r}: 'auto' and 'none' are taken, and ',', ':' "
            "and '=' separate names and settings"
        )
    if not is_subclass(spec.config_type, ProposerConfig):
        return (
            f"proposer {spec.name!r}: config_type is {shown(spec.config_type)}; it must be "
            "ProposerConfig or a subclass of it"
        )
    for attribute in ("serves", "recognises"):
        value = getattr(spec, attribute)
        if value is not None and not callable(value):
            return f"proposer {spec.name!r}: {attribute} is {shown(value)}, not a function"
    return _check_callables(spec, "proposer", "build", "needs")


def _check_model(alias: ModelAlias) -> str | None:
    if fault := _check_name("ModelAlias", alias.name):
        return fault
    if not isinstance(alias.description, str):
        return f"model {alias.name!r}: description is {shown(alias.description)}, not a str"
    return _check_callables(alias, "model", "resolve", "locate")


def _check_drafter(spec: DrafterSpec) -> str | None:
    if fault := _check_name("DrafterSpec", spec.name):
        return fault
    for attribute in ("proposer", "model"):
        value = getattr(spec, attribute)
        if not isinstance(value, str) or not value:
            return f"drafter {spec.name!r}: {attribute} is {shown(value)}, not a name"
    length = spec.mean_acceptance_length
    if not isinstance(length, int | float) or not math.isfinite(length):
        # It ranks drafters: a NaN would make the order arbitrary.
        return f"drafter {spec.name!r}: mean_acceptance_length is {shown(length)}, not a number"
    return _check_callables(spec, "drafter", "path")


_CHECKS: dict[type[Any], Callable[[Any], str | None]] = {
    ProposerSpec: _check_proposer,
    ModelAlias: _check_model,
    DrafterSpec: _check_drafter,
}


def _check_name(owner: str, name: object) -> str | None:
    if isinstance(name, str) and name and not any(character.isspace() for character in name):
        return None
    return f"a {owner} is named {name!r}; a name is a word without spaces"


def _check_callables(offer: Any, kind: str, *attributes: str) -> str | None:
    for attribute in attributes:
        value = getattr(offer, attribute)
        if not callable(value):
            return f"{kind} {offer.name!r}: {attribute} is {shown(value)}, which cannot be called"
    return None
