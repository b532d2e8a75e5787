"""The proposer contract, with the target's vocabulary and with another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
from tiny_tokenizers import byte_level

import foresay_draft_model.proposer
from foresay import LLM
from foresay.core.testing import ProposerConformance

TARGET = byte_level([" the", " then", "and", "ing"])
FEWER_TOKENS = byte_level([" the", "ng"], shuffled=6)  # so that some of the target's are spelt out


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    """The suite builds hundreds of proposers: they share a drafter, which they only read."""
    original = foresay_draft_model.proposer.load_drafter
    known: dict[str, Any] = {}

    def load(config: Any, view: Any) -> Any:
        if config.drafter not in known:
            known[config.drafter] = original(config, view)
        return known[config.drafter]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foresay_draft_model.proposer, "load_drafter", load)
        yield


@pytest.fixture(scope="module")
def same_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama for the suite's own targets."""
    path = tmp_path_factory.mktemp("drafter")
    tiny_models.llama(vocab_size=61, num_hidden_layers=1).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("drafter")
    tiny_models.llama(vocab_size=len(FEWER_TOKENS), num_hidden_layers=1).save_pretrained(path)
    FEWER_TOKENS.save_pretrained(path)
    return str(path)


class TestSameVocabulary(ProposerConformance):
    """Its KV lies in the core's blocks."""

    proposer_name = "draft_model"

    @pytest.fixture(autouse=True)
    def _with_drafter(self, same_vocabulary: str) -> None:
        type(self).drafter = same_vocabulary


class TestOtherTokenizer(ProposerConformance):
    """Its KV is its own."""

    proposer_name = "draft_model"

    @pytest.fixture(autouse=True)
    def _with_drafter(self, other_tokenizer: str) -> None:
        type(self).drafter = other_tokenizer

    def models(self) -> dict[str, Callable[[], Any]]:
        return {"llama": lambda: tiny_models.llama(vocab_size=len(TARGET))}

    def engine(self, model: str, build: Callable[[Any], Any] | None, **settings: Any) -> LLM:
        return super().engine(model, build, tokenizer=TARGET, **settings)
