"""The mtp proposer keeps the rules of the proposer contract: one module, and several.

One drafts trees, which depend by design on how a request's earlier ones fared, or chains.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from mtp_checkpoints import module_tensors, save_drafter

from foresay.core.testing import ProposerConformance, tiny_llama


class OneModule(ProposerConformance):
    proposer_name = "mtp"
    layout: ClassVar[str] = "mimo"
    count: ClassVar[int] = 1

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _drafter(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        config = tiny_llama().config
        tensors = module_tensors(cls.layout, config, cls.count)
        cls.drafter = str(save_drafter(tmp_path_factory.mktemp("modules"), tensors, config))


class TestOneModule(OneModule):
    learns_from_steps = True


class TestOneModuleOfChains(OneModule):
    settings: ClassVar[dict[str, bool]] = {"tree": False}


class TestSeveralModules(OneModule):
    layout = "deepseek"
    count = 3
