"""A drafter's files: its config and its tensors by name, every one of them accounted for.

A tensor that is missing, has the wrong shape, or that nobody asked for is an error that names it:
a head that loads with a part left out drafts badly, and nothing else would show it. Knows files
and names, no architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from foresay.core.errors import ModelError, nearest, one_line

_MOST_LISTED = 8


class Checkpoint:
    """The tensors of a folder's safetensors or PyTorch files; read when they are taken.

    `torch.load` reads tensors only (`weights_only=True`).
    """

    def __init__(self, source: str, tensors: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        """`source` names it in messages; `tensors` are read by calling."""
        self.source = source
        self._tensors = dict(tensors)
        self._taken: set[str] = set()

    @staticmethod
    def open(folder: str | Path, files: Sequence[str] | None = None) -> Checkpoint:
        """Open all weight files of a folder, or a single file.

        Files are `*.safetensors`, or if there are none `*.bin` and `*.pt`. `files`: only those of
        these names. Raises `ModelError` if there are none, or one cannot be read.
        """
        path = Path(folder)
        if path.is_file():
            found = [path]
        else:
            found = sorted(path.glob("*.safetensors"))
            found = found or sorted([*path.glob("*.bin"), *path.glob("*.pt")])
            if files is not None:
                found = [file for file in found if file.name in files]
        if not found:
            raise ModelError(f"{str(folder)!r} holds no weights: no *.safetensors, *.bin or *.pt")
        tensors: dict[str, Callable[[], torch.Tensor]] = {}
        for file in found:
            try:
                tensors.update(_read(file))
            except Exception as error:
                raise ModelError(f"{str(file)!r} cannot be read: {one_line(error)}") from error
        return Checkpoint(str(folder), tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._tensors)

    def under(self, prefix: str) -> Checkpoint:
        """Return the tensors whose names begin with `prefix`, under the rest of their names."""
        return Checkpoint(
            f"{self.source} ({prefix}*)",
            {n.removeprefix(prefix): t for n, t in self._tensors.items() if n.startswith(prefix)},
        )

    def renamed(self, rename: Callable[[str], str]) -> Checkpoint:
        """Return the same tensors under other names; two of one name are an error."""
        tensors: dict[str, Callable[[], torch.Tensor]] = {}
        for name, tensor in self._tensors.items():
            if rename(name) in tensors:
                raise ModelError(f"{self.source!r} holds {rename(name)!r} twice")
            tensors[rename(name)] = tensor
        return Checkpoint(self.source, tensors)

    def take(self, name: str, shape: Sequence[int | None]) -> torch.Tensor:
        """Return a tensor that must be there, of this shape; None: any size.

        Raises `ModelError` that names it.
        """
        if name not in self._tensors:
            raise ModelError(
                f"{self.source!r} has no tensor {name!r}{nearest(name, self._tensors)} (it has "
                f"{_listed(self.names)})"
            )
        tensor = self._tensors[name]()
        if len(tensor.shape) != len(shape) or any(
            want is not None and size != want
            for size, want in zip(tensor.shape, shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ModelError(
                f"{self.source!r}: tensor {name!r} is {list(tensor.shape)}, expected [{wanted}]"
            )
        self._taken.add(name)
        return tensor

    def take_if_there(self, name: str, shape: Sequence[int | None]) -> torch.Tensor | None:
        """Return a tensor that may be left out; None if it is."""
        return self.take(name, shape) if name in self._tensors else None

    def ignore(self, names: Iterable[str]) -> None:
        """Say of tensors that they are known, and not needed."""
        self._taken.update(names)

    def finish(self) -> None:
        """Raise `ModelError` for tensors that nobody took: they would be left out silently."""
        left = [name for name in self.names if name not in self._taken]
        if left:
            raise ModelError(
                f"{self.source!r} has tensors that this proposer does not know: {_listed(left)}"
            )


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return a drafter's config.json. Raises `ModelError` if there is none that can be read."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{str(folder)!r} holds no config.json: is it a drafter's folder?"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{str(path)!r} holds no JSON object")
    return config


def _read(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return {name: _lazy(file, name) for name in opened.keys()}  # noqa: SIM118  # no dict
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in loaded.values()
    ):
        raise ValueError("it is no mapping of names to tensors")
    return {str(name): _same(tensor) for name, tensor in loaded.items()}


def _lazy(file: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    return read


def _same(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_LISTED])
    return shown + (f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else "")
