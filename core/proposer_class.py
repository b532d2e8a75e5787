"""A bare class as a proposer, without a plugin around it: given itself, or as "module:Class".

Words every way in which that can go wrong. Builds no proposer; that is the worker's. No torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from foresay.core.errors import PluginError, nearest, one_line
from foresay.core.offers import is_subclass, shown
from foresay.core.proposer import Needs, ProposerConfig, ProposerSpec


def spec_of_path(path: str) -> ProposerSpec:
    """Make a spec of the class that "module:Class" names; `PluginError` says what is missing."""
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise PluginError(
            f"proposer {path!r}: expected 'module:Class', e.g. 'my_module:MyProposer'"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"proposer {path!r}: module {module_name!r} cannot be imported ({one_line(error)})"
        ) from error
    for part in class_name.split("."):
        if not hasattr(found, part):
            choices = [name for name in dir(found) if not name.startswith("_")]
            raise PluginError(
                f"proposer {path!r}: {module_name!r} has no {class_name!r}{nearest(part, choices)}"
            )
        found = getattr(found, part)
    return spec_of_class(found, path)


def spec_of_class(proposer: object, name: str) -> ProposerSpec:
    """Make a spec of a bare class, which is built as `Class(config)`; `PluginError` if it is none.

    The config is the class's own `Config` if it has one, else `ProposerConfig`; its `needs`
    attribute, a `Needs`, is optional.
    """
    if not isinstance(proposer, type):
        hint = "; pass its class" if callable(getattr(proposer, "propose", None)) else ""
        raise PluginError(f"proposer {name!r} is {shown(proposer)}, not a class{hint}")
    if not callable(getattr(proposer, "propose", None)):
        raise PluginError(
            f"proposer {name!r}: class {proposer.__name__} has no method propose(self, batch)"
        )
    config_type = getattr(proposer, "Config", ProposerConfig)
    if not is_subclass(config_type, ProposerConfig):
        raise PluginError(
            f"proposer {name!r}: {proposer.__name__}.Config is {shown(config_type)}; "
            "it must be a subclass of foresay.core.proposer.ProposerConfig"
        )
    declared = getattr(proposer, "needs", Needs())
    if not isinstance(declared, Needs):
        raise PluginError(
            f"proposer {name!r}: {proposer.__name__}.needs is {shown(declared)}; "
            "it must be a foresay.core.proposer.Needs"
        )

    def needs(_config: Any, _target_config: Any) -> Needs:
        return declared

    return ProposerSpec(name=name, config_type=config_type, build=proposer, needs=needs)
