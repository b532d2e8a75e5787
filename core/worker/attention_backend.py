"""Whether a device has Triton kernels for attention: looked up once, without importing them on CPU.

Knows that there is triton; not whether its kernels are right here (`triton_check` tries them).
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch

logger = logging.getLogger("foresay")


@cache
def triton_backend(device: torch.device) -> Any | None:
    """Return the module `triton_check`; None on devices without Triton kernels."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module("foresay.core.worker.triton_check")
    except Exception as error:  # noqa: BLE001  # no triton, or one that does not fit this machine
        logger.warning(
            "attention runs in torch on %s: triton cannot be imported: %s: %s",
            device, type(error).__name__, error,
        )  # fmt: skip
        return None
