"""Make a folder once, whole or not at all, whoever else tries and whoever is killed.

The folder is made beside its place, under a lock that the system releases when its holder dies,
and moved into place when it is complete. It knows nothing of models.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout


def publish(
    folder: Path,
    make: Callable[[Path, Path], None],
    *,
    is_complete: Callable[[Path], bool],
    on_wait: Callable[[], None],
) -> Path:
    """Return `folder`, made by `make(work, result)` unless it is complete already.

    `make` fills the new folder `result`; `work` is for what it needs meanwhile. Both lie on the
    file system of `folder`. `on_wait` is called once if another process holds the lock. What
    `make` raises is raised, and leaves nothing behind.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        if is_complete(folder):  # by the process we waited for
            return folder
        _clean(folder)
        scratch = folder.with_name(f"{_scratch_prefix(folder)}{uuid.uuid4().hex}")
        try:
            work, result = scratch / "work", scratch / "result"
            work.mkdir(parents=True)
            result.mkdir()
            make(work, result)
            os.rename(result, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder
    finally:
        lock.release()


def _scratch_prefix(folder: Path) -> str:
    return f".{folder.name}.making-"


def _clean(folder: Path) -> None:
    """Remove what earlier holders of the lock left when they were killed. Call with the lock."""
    for entry in folder.parent.iterdir():
        if entry.name.startswith(_scratch_prefix(folder)):
            shutil.rmtree(entry, ignore_errors=True)
    if folder.exists():  # incomplete: someone removed files from it
        shutil.rmtree(folder)
