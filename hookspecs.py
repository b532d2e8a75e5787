"""Every hook of foresay, with its contract. This is the whole surface a plugin can implement.

A plugin is a distribution with an entry point in the group `foresay` that names a module:

    [project.entry-points.foresay]
    myplugin = "my_package"

and in that module functions marked `@foresay.hookimpl` with the names and arguments below.
Hooks find and observe, any number of implementations each. Drafting itself is done by the
`Proposer` object that a `ProposerSpec` builds, one per engine.

Compatibility, before 1.0: additions come in patch versions; a removal comes in a minor version
and is warned of by a patch release before it. Plugins pin `foresay>=0.1,<0.2`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from foresay.core.outputs import RequestOutput
    from foresay.core.proposer import ProposerSpec
    from foresay.core.registry import DrafterSpec, ModelAlias
    from foresay.core.stats import StepStats

PROJECT_NAME = "foresay"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def foresay_register_proposers() -> Iterable[ProposerSpec]:  # type: ignore[empty-body]
    """Return the proposers this distribution offers. Called once; import no weights, no torch."""


@hookspec
def foresay_register_models() -> Iterable[ModelAlias]:  # type: ignore[empty-body]
    """Return short names for target models that this distribution can provide."""


@hookspec
def foresay_register_drafters() -> Iterable[DrafterSpec]:  # type: ignore[empty-body]
    """Return drafter weights that this distribution ships or can fetch."""


@hookspec
def foresay_register_commands(app: typer.Typer) -> None:
    """Add commands to the `foresay` command line. A name that exists already is an error."""


@hookspec
def foresay_step_end(stats: StepStats) -> None:
    """Observe one engine step, after its tokens were committed and the next drafts were made.

    Called in the engine's process, on the decoding thread: be quick. Raising drops this observer.
    """


@hookspec
def foresay_request_end(output: RequestOutput) -> None:
    """Observe one finished request (also aborted and failed ones). Raising drops this observer."""
