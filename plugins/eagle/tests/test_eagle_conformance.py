"""The suite that every proposer passes, on both kinds of head with random weights.

Trees depend by design on how a request's earlier ones fared; chains on the text alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import eagle_heads
import pytest
from eagle_heads import Head

from foresay.core.testing import ProposerConformance, tiny_gpt2, tiny_llama


class _Conformance(ProposerConformance):
    proposer_name = "eagle"
    num_output_tokens = 8

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _folder(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.drafter = str(cls.head().save(tmp_path_factory.mktemp("head")))

    @staticmethod
    def head() -> Head:
        raise NotImplementedError


class TestEagleConforms(_Conformance):
    learns_from_steps = True

    @staticmethod
    def head() -> Head:
        return eagle_heads.eagle(hidden_size=32, vocab_size=61, max_position_embeddings=96)


class TestEagle3Conforms(_Conformance):
    settings = {"aux_layers": (0, 1, 2)}  # noqa: RUF012
    learns_from_steps = True

    def models(self) -> dict[str, Callable[[], Any]]:
        return {"llama": tiny_llama, "gpt2": tiny_gpt2}

    @staticmethod
    def head() -> Head:
        return eagle_heads.eagle3(
            hidden_size=32, vocab_size=61, draft_vocab=40, max_position_embeddings=96
        )


class TestEagle3ChainsConform(TestEagle3Conforms):
    settings = {"aux_layers": (0, 1, 2), "tree": False}  # noqa: RUF012
    learns_from_steps = False


del _Conformance
