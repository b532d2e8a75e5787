"""What several test modules share: the real model's folder, and tests' own working conditions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foresay.core.plugins import PluginManager

# Before torch is imported. On a machine that others use too, two threads that wait for each other
# after every small operation can be ten times slower than one; alone, one is hardly slower here.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model's folder: fetched and converted at its first use on a machine."""
    alias = PluginManager.load().model("smollm2")
    assert alias is not None, "foresay-smollm2 is not installed: run `make install`"
    return alias.resolve()
