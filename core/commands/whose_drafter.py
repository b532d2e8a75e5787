"""Which proposer loads a drafter: asked for, registered with it, or found by what it recognises.

Knows names and what plugins offer; looks into no file itself.
"""

from __future__ import annotations

from pathlib import Path

from foresay.core.automatic import ask_who_recognises
from foresay.core.errors import ConfigError, nearest
from foresay.core.plugins import PluginManager


def find_proposer(drafter: str, proposer: str | None, plugins: PluginManager) -> tuple[str, str]:
    """Return the name of who loads a drafter, and what it recognised ("" if it was not asked).

    `proposer`: asked for; None: to be found. `ConfigError` if nobody, or more than one, takes the
    drafter for its own; `PluginError` if the proposer is not installed.
    """
    if proposer is not None:
        if proposer in ("auto", "none") or "," in proposer:
            raise ConfigError(f"--proposer {proposer!r}: expected the one proposer that loads it")
        plugins.resolve_proposer(proposer)
        return proposer, ""
    registered = plugins.drafter(drafter)
    if registered is not None:
        plugins.resolve_proposer(registered.proposer)
        return registered.proposer, ""
    path = Path(drafter).expanduser()
    if not path.exists():
        return _for_a_model(drafter, plugins), ""
    return _by_its_files(drafter, path, plugins)


def lies_inside(drafter: str, proposer: str, model: str, plugins: PluginManager) -> bool:
    """Whether a drafter is the target's own folder, for a proposer that finds its weights there."""
    if plugins.resolve_proposer(proposer).serves is None:
        return False
    folder = plugins.locate_model(model) or Path(model).expanduser()
    return folder.is_dir() and folder.resolve() == Path(drafter).expanduser().resolve()


def _by_its_files(drafter: str, path: Path, plugins: PluginManager) -> tuple[str, str]:
    found = ask_who_recognises(plugins.proposers, path, plugins.proposer_owner)
    if len(found.by) == 1:
        return next(iter(found.by.items()))
    if found.by:
        said = ", ".join(f"{name} ({what})" for name, what in found.by.items())
        raise ConfigError(
            f"{drafter!r} may be for several proposers: {said}; say which with --proposer"
        )
    asked = [name for name, spec in plugins.proposers.items() if spec.recognises is not None]
    refusals = "".join(f"; {refusal}" for refusal in found.refusals)
    if path.is_file() and (path.parent / "config.json").is_file():
        refusals += f"; a drafter is a folder with its config.json: {str(path.parent)!r}, perhaps"
    raise ConfigError(
        f"no proposer recognises {drafter!r} (asked: {', '.join(asked) or 'none is installed'})"
        f"{refusals}{plugins.unavailable()}; if one can load it all the same, name it with "
        "--proposer"
    )


def _for_a_model(drafter: str, plugins: PluginManager) -> str:
    """Return who drafts with whole models, if `drafter` is a model's short name."""
    takers = [name for name, spec in plugins.proposers.items() if spec.drafter_is_model]
    if plugins.model(drafter) is not None and len(takers) == 1:
        return takers[0]
    names = list(plugins.drafters)
    by_id = f"; a model of the hub is taken with --proposer {takers[0]}" if takers else ""
    raise ConfigError(
        f"no drafter {drafter!r}: no such file or folder, and none of that name is registered "
        f"(registered: {', '.join(names) or 'none'})"
        f"{nearest(drafter, [*names, *(plugins.models if takers else ())])}{by_id}"
    )
