"""What a proposer needs once it knows the target and its own weights: what its `load` returns."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models

from foresay import LLM, SamplingParams
from foresay.core.errors import ConfigError, PluginError
from foresay.core.proposer import (
    Draft,
    DraftInput,
    KVLayer,
    Needs,
    ProposerConfig,
    TargetView,
)
from foresay.core.testing.driver import Ask, Driver


class Changing:
    """Declares KV layers, and finds at `load` that it needs something else."""

    needs = Needs(kv_layers=(KVLayer(1, 8),) * 2, draft_slots=1, max_context=30)
    found: Any = Needs(hidden_state=True)
    batches: list[DraftInput] = []  # noqa: RUF012  # of the instance that an engine holds

    def __init__(self, config: ProposerConfig) -> None:
        self.batches.clear()

    def load(self, target: TargetView) -> Any:
        return self.found

    def propose(self, batch: DraftInput) -> Draft:
        self.batches.append(batch)
        return Draft([[5] * request.k for request in batch.requests])


def with_found(found: Any) -> type[Changing]:
    return type("Changing", (Changing,), {"found": found})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.llama(eos_token_id=None)


def test_they_replace_what_the_spec_declared(model: Any) -> None:
    with LLM(
        model, proposer=with_found(Needs(hidden_state=True)), strict=True, adaptive=False
    ) as llm:
        runner: Any = llm._engine._runner  # type: ignore[union-attr]
        assert (runner.has_proposer_kv, runner.draft_slots, runner.max_context) == (False, 0, None)
        assert runner.cache.proposer_layers == []
        llm.generate(list(range(3, 40)), SamplingParams(temperature=0.0, max_tokens=4))
        batch = Changing.batches[0]
        assert batch.kv is None
        assert batch.hidden_states is not None
        assert batch.hidden_states.shape == (37, 48)


def test_nothing_leaves_the_declared_ones(model: Any) -> None:
    with LLM(model, proposer=with_found(None), adaptive=False) as llm:
        runner: Any = llm._engine._runner  # type: ignore[union-attr]
        assert (runner.has_proposer_kv, runner.draft_slots, runner.max_context) == (True, 1, 30)
        assert len(runner.cache.proposer_layers) == 2


@pytest.mark.parametrize(
    ("found", "kind", "message"),
    [
        (Needs(aux_layers=(4,)), ConfigError, "needs the residual stream entering layer 4"),
        ([KVLayer(1, 8)], PluginError, r": load returned \[KVLayer\(.*, not a Needs"),
    ],
    ids=["what the target does not have", "something else"],
)
def test_they_are_checked_like_declared_ones(
    model: Any, found: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        LLM(model, proposer=with_found(found), adaptive=False)


def test_the_conformance_suite_hands_over_what_they_say(model: Any) -> None:
    shown: list[TargetView] = []

    class Shown(Changing):
        found = None

        def load(self, target: TargetView) -> None:
            shown.append(target)

    LLM(model, proposer=Shown, adaptive=False).close()
    proposer = with_found(Needs(hidden_state=True))(ProposerConfig())
    Driver(proposer, shown[0], Changing.needs).draft(Ask("a", [5, 6, 7], 1))
    [batch] = Changing.batches
    assert batch.kv is None
    assert batch.hidden_states is not None
    with pytest.raises(AssertionError, match=r"load\(target\) returned 7; it may return a Needs"):
        Driver(with_found(7)(ProposerConfig()), shown[0], Changing.needs)
