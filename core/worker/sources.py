"""Says where a target model is: an alias, a folder, a GGUF file or an id on the hub. Loads nothing.

A source that is nowhere, or that cannot be a model, is a `ModelError` that lists what was tried.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub

from foresay.core.errors import ModelError, UnknownModelError, nearest, one_line
from foresay.core.registry import ModelAlias

_hub: Any = huggingface_hub  # its types do not say all that it exports
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Seconds for the first contact with the hub; transformers itself retries for half a minute.
_HUB_TIMEOUT = 5.0
_ADVICE = "use an installed alias, or --model DIR with a folder that holds a model"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is."""

    name: str  # as the user wrote it
    location: str  # what transformers takes: a folder or a hub id
    folder: Path | None  # None: on the hub
    gguf_file: str | None = None  # its name in the folder
    options: dict[str, Any] = field(default_factory=dict)  # for every call of transformers


def find_source(name: str, aliases: Mapping[str, ModelAlias]) -> Source:
    """Find the model `name`. An alias goes before a folder of that name; `./name` is the folder.

    Resolving an alias may download and convert. The hub is asked at most one quick question here:
    where it cannot be reached, a cached model is used and anything else is an error at once.
    """
    if name in aliases:
        folder = aliases[name].resolve()
        return Source(name, str(folder), folder)
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(name, path)
        return Source(name, str(path), path)
    if path.is_file():
        _check_gguf(name, path)
        return Source(name, str(path.parent), path.parent, gguf_file=path.name)
    installed = ", ".join(sorted(aliases)) or "none"
    tried = (
        f"no model {name!r}: no such alias (installed: {installed}) and no such file or folder"
        f"{nearest(name, aliases)}"
    )
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise UnknownModelError(f"{tried}; {_ADVICE}")
    return Source(name, name, None, options=_hub_options(name, tried))


def _check_folder(name: str, folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    advice = ""
    if ggufs := sorted(folder.glob("*.gguf")):
        advice = f"; name the GGUF file itself: {str(folder / ggufs[0].name)!r}"
    elif (folder / "adapter_config.json").is_file():
        advice = "; it holds an adapter: merge it into its model and save that"
    raise ModelError(f"the folder {name!r} is not a model: it has no config.json{advice}")


def _check_gguf(name: str, path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(
            f"the file {name!r} is not a GGUF file; give any other model as the folder that holds "
            "its config.json"
        )
    missing = [p for p in ("gguf", "accelerate") if importlib.util.find_spec(p) is None]
    if missing:
        raise ModelError(
            f"reading the GGUF file {name!r} needs the package {' and '.join(missing)}: "
            "pip install 'foresay[gguf]'"
        )


def _hub_options(name: str, tried: str) -> dict[str, Any]:
    """Return how to ask transformers for a hub id: the hub, or the local cache without it."""
    settings = _hub.constants
    reason = "HF_HUB_OFFLINE is set"
    if not settings.HF_HUB_OFFLINE:
        try:
            answer = _hub.utils.get_session().head(
                f"{settings.ENDPOINT}/{name}/resolve/main/config.json",
                headers=_hub.utils.build_hf_headers(),
                timeout=_HUB_TIMEOUT,
            )
        except Exception as error:  # noqa: BLE001  # the type depends on the hub's HTTP library
            reason = f"{settings.ENDPOINT} cannot be reached ({one_line(error)})"
        else:
            if answer.status_code not in (401, 403, 404):
                return {}
            code = answer.headers.get("X-Error-Code", "no such model, or not for you")
            raise UnknownModelError(
                f"{tried}; {settings.ENDPOINT} answers {answer.status_code} ({code})"
            )
    if isinstance(_hub.try_to_load_from_cache(name, "config.json"), str):
        return {"local_files_only": True}
    raise UnknownModelError(
        f"{tried}; {reason} and the hub's local cache does not hold it; {_ADVICE}"
    )
