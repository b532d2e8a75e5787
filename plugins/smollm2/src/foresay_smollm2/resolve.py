"""The alias `smollm2` as a folder: where it is cached, and the order of work when it is not.

How the file is obtained, converted and stored is the business of `source`, `convert` and `store`.
A start that finds the folder imports neither transformers nor anything else that is slow.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from foresay.core.errors import ModelError
from foresay_smollm2.progress import Progress
from foresay_smollm2.source import RELEASE, Obtained, Release, obtain
from foresay_smollm2.store import publish

# The last part counts the ways of converting: a change there must not find the old folder.
FOLDER = "smollm2-135m-instruct-q4_1-bf16-1"
PROVENANCE = "provenance.json"  # written last: a folder that has it is complete

Obtain = Callable[[Path, Progress], Obtained]
Convert = Callable[[Path, Path], None]


def cache_root() -> Path:
    """Return `$FORESAY_CACHE`, else `$XDG_CACHE_HOME/foresay`, else `~/.cache/foresay`."""
    if own := os.environ.get("FORESAY_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and Path(xdg).is_absolute():  # the XDG specification says: ignore relative paths
        return Path(xdg) / "foresay"
    return Path.home() / ".cache" / "foresay"


def locate(root: Path | None = None) -> Path | None:
    """Return the model's folder if it is in the cache (default: `cache_root()`), else None."""
    folder = (root or cache_root()) / "models" / FOLDER
    return folder if _is_complete(folder) else None


def resolve(
    root: Path | None = None, *, obtain: Obtain = obtain, convert: Convert | None = None
) -> Path:
    """Return the model's folder, making it first if need be, with progress on stderr.

    `obtain(folder, progress)` brings the GGUF file, `convert(gguf, folder)` makes the model of it.
    Raises `ModelError` if the file cannot be had, is not the right one, or cannot be stored.
    """
    root = root or cache_root()
    if folder := locate(root):
        return folder
    folder = root / "models" / FOLDER
    try:
        with Progress(sys.stderr) as progress:
            make = partial(_make, progress=progress, obtain=obtain, convert=convert)
            return publish(
                folder,
                make,
                is_complete=_is_complete,
                on_wait=lambda: progress.step("waiting for another process that prepares it"),
            )
    except OSError as error:
        raise ModelError(
            f"the model 'smollm2' could not be prepared in {str(folder.parent)!r}: {error}; "
            "name another folder in FORESAY_CACHE, or give a model of your own with --model DIR"
        ) from error


def _is_complete(folder: Path) -> bool:
    return (folder / PROVENANCE).is_file()


def _make(
    work: Path, model: Path, *, progress: Progress, obtain: Obtain, convert: Convert | None
) -> None:
    """Make the folder `model`; `work` is a scratch folder beside it."""
    obtained = obtain(work, progress)
    progress.step("converting Q4_1 to bfloat16 safetensors")
    if convert is None:
        from foresay_smollm2 import convert as conversion  # imports torch and transformers

        convert = conversion.convert
    convert(obtained.path, model)
    provenance = _provenance(RELEASE, obtained.origin)
    (model / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def _provenance(release: Release, origin: str) -> dict[str, str]:
    return {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "source": f"{release.project} {release.version} on the Python Package Index",
        "obtained_from": origin,
        "file": release.gguf,
        "sha256": release.gguf_sha256,
        "conversion": "the Q4_1 file dequantised to bfloat16: not the original weights",
    }
