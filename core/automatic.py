"""What proposers say of files: which serves a model out of its own folder, whose a drafter is.

Knows specs and folders; which drafters are registered is `plugins`' affair. Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foresay.core.errors import ForesayError, one_line
from foresay.core.proposer import ProposerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AutomaticProposer:
    """What `proposer="auto"` takes for a model, and why."""

    proposer: str
    drafter: str | None  # a registered drafter's name; None: the proposer needs none
    reason: str


@dataclass(slots=True)
class Served:
    """What the proposers say to a model's folder; see `ProposerSpec.serves`."""

    choice: AutomaticProposer | None = None
    refusals: list[str] = field(default_factory=list)  # of what is there and cannot be used


@dataclass(slots=True)
class Recognised:
    """What the proposers say to a drafter; see `ProposerSpec.recognises`."""

    by: dict[str, str] = field(default_factory=dict)  # what it is, by the proposer's name
    refusals: list[str] = field(default_factory=list)  # of who cannot tell, or cannot use it


def ask_who_serves(
    proposers: Mapping[str, ProposerSpec], folder: Path, owner: Callable[[str], str]
) -> Served:
    """Ask the proposers, in their order, until one serves a model's folder.

    `owner` names a proposer's distribution. One that raises something else than a `ForesayError`,
    or returns something else than it should, is logged and serves nothing.
    """
    served = Served()
    for name, spec in proposers.items():
        reason = _answer(spec.serves, "serves", name, folder, owner, served.refusals)
        if reason is not None:
            served.choice = AutomaticProposer(name, None, reason)
            break
    return served


def ask_who_recognises(
    proposers: Mapping[str, ProposerSpec], path: Path, owner: Callable[[str], str]
) -> Recognised:
    """Ask all proposers whose drafter a folder or a file is; faults are survived, as above."""
    recognised = Recognised()
    for name, spec in proposers.items():
        what = _answer(spec.recognises, "recognises", name, path, owner, recognised.refusals)
        if what is not None:
            recognised.by[name] = what
    return recognised


def _answer(
    ask: Callable[[Path], str | None] | None,
    question: str,
    name: str,
    path: Path,
    owner: Callable[[str], str],
    refusals: list[str],
) -> str | None:
    """Return what a proposer says of a path, or None: nothing, or nothing that can be used."""
    if ask is None:
        return None
    try:
        answer: object = ask(path)
    except ForesayError as error:
        refusals.append(f"{name} cannot be used: {error}")
        return None
    except Exception as error:  # noqa: BLE001  # whatever a plugin may raise
        fault = f"raised {one_line(error)}"
    else:
        if answer is None or isinstance(answer, str):
            return answer
        fault = f"returned {answer!r}, not a str or None"
    logger.warning("%s() of proposer %r, %s, %s", question, name, owner(name), fault)
    return None
