"""The conformance suite, on heads of two forms, drafting the likeliest tokens and drawn ones.

Trees and chains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from medusa_heads import Files, as_authors, as_reduced, random_heads

from foresay.core.testing import ProposerConformance, tiny_gpt2, tiny_llama


class _Conformance(ProposerConformance):
    proposer_name = "medusa"

    def models(self) -> dict[str, Callable[[], Any]]:
        return {"llama": tiny_llama, "gpt2": tiny_gpt2}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _heads(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.drafter = str(cls.files().save(tmp_path_factory.mktemp("heads")))

    @classmethod
    def files(cls) -> Files:
        raise NotImplementedError


class TestConformance(_Conformance):
    settings = {"sample": False, "tree": False}  # noqa: RUF012

    @classmethod
    def files(cls) -> Files:
        return as_authors(random_heads(4, size=32, num_rows=61, vocab_size=61))


class TestConformanceOfTrees(TestConformance):
    settings = {"sample": False}  # noqa: RUF012


class TestConformanceSampledFromASharedReducedVocabulary(_Conformance):
    settings = {"tree": False}  # noqa: RUF012
    num_output_tokens = 10

    def models(self) -> dict[str, Callable[[], Any]]:
        return {"llama": tiny_llama}

    @classmethod
    def files(cls) -> Files:
        return as_reduced(random_heads(3, 2, size=32, num_rows=30, vocab_size=61, shared=True))


class TestConformanceOfSampledTrees(TestConformanceSampledFromASharedReducedVocabulary):
    settings = {}  # noqa: RUF012
