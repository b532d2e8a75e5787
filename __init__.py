"""foresay: lossless speculative decoding, every proposer a plugin.

    from foresay import LLM, SamplingParams

Importing this package is cheap: torch and transformers are imported with `LLM`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from foresay.hookspecs import hookimpl

if TYPE_CHECKING:
    from foresay.core.config import EngineConfig, SamplingParams
    from foresay.core.llm import LLM

__version__ = version("foresay")

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__", "hookimpl"]

_LAZY = {
    "LLM": "foresay.core.llm",
    "SamplingParams": "foresay.core.config",
    "EngineConfig": "foresay.core.config",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
