"""What several test modules share: the real model's folder, and tests' own working conditions."""

from __future__ import annotations

from pathlib import Path

import pytest

from foresay.core.plugins import PluginManager


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model's folder: fetched and converted at its first use on a machine."""
    alias = PluginManager.load().model("smollm2")
    assert alias is not None, "foresay-smollm2 is not installed: run `make install`"
    return alias.resolve()
