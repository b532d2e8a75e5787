"""What a proposer holds on to: a walk over everything reachable from it.

It knows Python's objects, not proposers. Other packages' modules, classes and globals are not
entered: they are not the proposer's. Its own module's globals and its classes are, since a table
kept there grows as well as one kept in an attribute.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Footprint:
    """How much is reachable."""

    num_objects: int
    num_bytes: int


class Reachable:
    """Every object reachable from `root`, and how it was reached."""

    def __init__(self, root: object) -> None:
        package = _package(type(root).__module__)
        own_module = sys.modules.get(type(root).__module__)
        self._objects: dict[int, object] = {}
        self._reached_from: dict[int, object] = {}
        stack: list[tuple[object, object]] = [(root, None), (own_module, None)]
        while stack:
            found, holder = stack.pop()
            if id(found) in self._objects:
                continue
            home = _home(found)
            if home is not None and _package(home) != package:
                continue
            self._objects[id(found)] = found
            self._reached_from[id(found)] = holder
            stack += [(referent, found) for referent in gc.get_referents(found)]

    def footprint(self) -> Footprint:
        """Count the objects and add up their sizes, tensors' storage included."""
        storages: dict[int, int] = {}
        num_bytes = 0
        for found in self._objects.values():
            num_bytes += sys.getsizeof(found, 0)
            storage = _storage(found)
            if storage is not None:
                storages[storage.data_ptr()] = storage.nbytes()
        return Footprint(len(self._objects), num_bytes + sum(storages.values()))

    def first_of(self, wanted: Iterable[object]) -> object | None:
        """Return the first of `wanted` that is reachable; None if none is."""
        return next((item for item in wanted if id(item) in self._objects), None)

    def path_to(self, found: object) -> str:
        """Name the types from the root to an object, e.g. "MyProposer > dict > list"."""
        names = [type(found).__name__]
        holder = self._reached_from[id(found)]
        while holder is not None:
            names.append(type(holder).__name__)
            holder = self._reached_from[id(holder)]
        return " > ".join(reversed(names))


def _home(found: object) -> str | None:
    """Return the module that a module, its globals, or a class belong to; None for other things.

    Functions lead to their module's globals, which is why those count.
    """
    name: object = None
    if isinstance(found, ModuleType):
        name = found.__name__
    elif isinstance(found, type):
        name = found.__module__
    elif type(found) is dict and "__name__" in found and "__spec__" in found:
        name = found["__name__"]
    return name if isinstance(name, str) else None


def _package(module: str) -> str:
    return module.partition(".")[0]


def _storage(found: object) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        return None  # packed weights, too, have no storage that can be looked at
    return found.untyped_storage()
