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


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's own kernels are not there."""
    from foresay.core.worker import cpu_kernels  # not before the number of threads is set

    monkeypatch.setattr(cpu_kernels, "_kernels", None)


@pytest.fixture(params=["own", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Whose operations there are: the CPU's own kernels', or torch's alone."""
    from foresay.core.worker import cpu_kernels

    if request.param == "torch":
        request.getfixturevalue("only_torch")
    elif not cpu_kernels.is_available():
        pytest.skip("the CPU's own kernels are not built, or switched off")
    return str(request.param)


@pytest.fixture
def products(kernels: str) -> str:
    """Whose products there are."""
    from foresay.core.worker import cpu_kernels

    if kernels == "own" and not cpu_kernels.has_products():
        pytest.skip("the CPU's own kernels have no products here")
    return kernels
