"""What a checkpoint folder holds, without reading a tensor: names, shapes, config.json.

No torch: the automatic choice of a proposer reads these before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foresay.core.errors import ModelError, one_line

_LENGTH_BYTES = 8  # of a safetensors file's first field, the length of its header
_MOST_HEADER_BYTES = 100_000_000  # as the safetensors library has it

Shapes = Mapping[str, tuple[int, ...]]


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor in a folder's safetensors files, by name.

    Raises `ModelError` for a file that cannot be read; without any, there are no names.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if length > _MOST_HEADER_BYTES:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    shapes[name] = tuple(map(int, entry["shape"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{str(path)!r} cannot be read as a safetensors file: {one_line(error)}"
            ) from error
    return shapes


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return a folder's config.json. Raises `ModelError` if there is none that can be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{str(folder)!r} holds no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object")
    return config
