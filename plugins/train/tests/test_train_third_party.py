"""A proposer of somebody else's gets training by a `TrainingSpec`: here a table of next tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import nn

from foresay import LLM, SamplingParams, hookimpl
from foresay.core.errors import ConfigError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import (
    Draft,
    DraftInput,
    Needs,
    ProposerConfig,
    ProposerSpec,
    TargetView,
)
from foresay.core.training import TrainingBatch, TrainingConfig, TrainingLoss, TrainingSpec
from foresay_train.job import Job, Outcome
from foresay_train.running import run
from foresay_train.training import Recipe


class TableTraining(TrainingConfig):
    scale: float = Field(default=1.0, gt=0, description="What logits are multiplied by.")


class Table:
    """Drafts what the table says comes next, again and again."""

    def __init__(self, config: ProposerConfig) -> None:
        assert config.drafter is not None
        self._next = load_file(Path(config.drafter) / "model.safetensors")["next"].tolist()

    def propose(self, batch: DraftInput) -> Draft:
        drafts = []
        for request in batch.requests:
            token, draft = request.token_ids[-1], []
            for _ in range(request.k):
                token = self._next[token]
                draft.append(token)
            drafts.append(draft)
        return Draft(drafts)


class TrainableTable(nn.Module):
    def __init__(self, config: TableTraining, target: TargetView, ids: torch.Tensor | None) -> None:
        super().__init__()
        assert ids is not None
        self.register_buffer("ids", ids, persistent=False)
        self.scale = config.scale
        self.logits = nn.Parameter(torch.zeros(target.vocab_size, len(ids), device=target.device))

    def forward(self, batch: TrainingBatch) -> TrainingLoss:
        ranges = zip(batch.starts, batch.starts[1:], batch.num_prompt_tokens, strict=False)
        last = torch.cat([torch.arange(a + prompt, b - 1) for a, b, prompt in ranges])
        wanted = batch.token_ids[last + 1]
        logits = self.logits[batch.token_ids[last]] * self.scale
        labels = torch.searchsorted(self.ids, wanted).clamp(max=len(self.ids) - 1)
        drafted = self.ids[labels] == wanted
        loss = nn.functional.cross_entropy(logits[drafted], labels[drafted])
        hits = self.ids[logits.argmax(dim=-1)] == wanted
        return TrainingLoss(loss, hits[:, None], torch.ones_like(hits)[:, None])

    def save(self, folder: Path) -> None:
        save_file({"next": self.ids[self.logits.argmax(dim=-1)]}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "table"}), encoding="utf-8")


class Plugin:
    def __init__(self, **training: Any) -> None:
        fields = {"config_type": TableTraining, "build": TrainableTable, **training}
        self.spec = ProposerSpec("table", ProposerConfig, Table, training=TrainingSpec(**fields))

    @hookimpl
    def foresay_register_proposers(self) -> list[ProposerSpec]:
        return [self.spec]


def plugins_of(plugin: Plugin) -> PluginManager:
    manager = PluginManager()
    manager.register(plugin, "third-party")
    return manager


def job(plugin: Plugin, model: Path, prompts: Path, out: Path, **changes: Any) -> Job:
    asked = Job(
        spec=plugin.spec,
        config=TableTraining(draft_vocab_size=100),
        model=str(model),
        out=out,
        prompts=prompts,
        replies=None,
        recipe=Recipe(epochs=20, learning_rate=0.5, max_tokens_per_batch=200, eval_steps=40),
        num_held_out=2,
        max_tokens=48,
        temperature=0.0,
        states=None,
        begin=None,
        layers_also=(),
        num_measured=2,
        dtype="auto",
        device="cpu",
    )
    return replace(asked, **changes)


def test_a_table_is_trained_measured_and_loaded_as_any_drafter(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    plugin, out = Plugin(), tmp_path / "out"

    outcome = run(job(plugin, model, prompts, out), plugins_of(plugin))

    assert isinstance(outcome, Outcome)
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "curve.svg", "work"),
    }
    assert outcome.data.num_texts == 12
    assert outcome.vocabulary.size == 100
    # A table can say all there is to say of this model, but for tokens that it never saw.
    curve = outcome.trained.curve
    assert curve[0].acceptance[0] < 0.2
    assert curve[-1].acceptance[0] > 0.9
    assert outcome.measured is not None
    assert outcome.measured.mean_acceptance_length is not None
    assert outcome.measured.mean_acceptance_length > 5  # of 6: five drafted, and one more
    assert outcome.measured.num_faults == 0
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(model, None) as plain:
        wanted = plain.generate("say 3", params)[0].outputs[0].token_ids
    with LLM(
        model, "table", drafter=out, plugins=plugins_of(plugin), strict=True, adaptive=False
    ) as llm:
        assert llm.generate("say 3", params)[0].outputs[0].token_ids == wanted
        assert llm.stats.num_accepted_tokens > 0


def test_replies_and_states_serve_a_second_training(
    tmp_path: Path, model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "states"
    also = Plugin(needs=lambda _config, _target: Needs(hidden_state=True, aux_layers=(2,)))
    first = job(also, model, prompts, tmp_path / "a", states=shared, layers_also=(1,))
    run(replace(first, num_measured=0), plugins_of(also))
    replies = tmp_path / "a" / "work" / "replies.jsonl"

    def fail(*_arguments: Any) -> Any:
        raise AssertionError("the model is not needed again")

    monkeypatch.setattr(LLM, "__init__", fail)
    again = Plugin(needs=lambda _config, _target: Needs(hidden_state=True, aux_layers=(1,)))
    asked = job(again, model, prompts, tmp_path / "b", states=shared, num_measured=0)
    second = run(replace(asked, prompts=None, replies=replies), plugins_of(again))

    assert second is not None
    assert second.data.digest
    assert "answers that existed" in (tmp_path / "b" / "README.md").read_text(encoding="utf-8")


def test_another_recipe_in_the_same_folder_is_refused(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    plugin = Plugin()
    asked = job(plugin, model, prompts, tmp_path / "out", num_measured=0)
    run(asked, plugins_of(plugin))

    run(replace(asked, recipe=replace(asked.recipe, eval_steps=7)), plugins_of(plugin))
    for changed, says in (
        (replace(asked, recipe=replace(asked.recipe, learning_rate=0.1)), "learning_rate 0.5, now"),
        (replace(asked, config=TableTraining(scale=2.0)), "--set scale 1.0, now 2.0"),
        (replace(asked, num_held_out=1), "held_out 2, now 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(changed, plugins_of(plugin))


def test_a_training_begins_with_another_ones_weights(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    plugin, manager = Plugin(), plugins_of(Plugin())
    first = job(plugin, model, prompts, tmp_path / "a", num_measured=0)
    learned = run(first, manager)
    little = replace(first.recipe, max_steps=1, learning_rate=1e-9)
    again = replace(first, out=tmp_path / "b", recipe=little, begin=first.out)

    found = run(again, manager)

    assert learned is not None
    assert found is not None
    assert found.trained.curve[0].acceptance == learned.trained.curve[-1].acceptance
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        run(replace(again, out=tmp_path / "c", begin=tmp_path), manager)


def test_a_folder_that_holds_something_else_is_left_alone(
    tmp_path: Path, model: Path, prompts: Path
) -> None:
    plugin = Plugin()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(ConfigError, match="is not empty, and no training began there"):
        run(job(plugin, model, prompts, tmp_path), plugins_of(plugin))

    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("training", "changes", "error", "says"),
    [
        ({"needs": lambda *_: None}, {}, PluginError, "training.needs returned None"),
        ({"build": lambda *_: nn.Linear(1, 1)}, {}, PluginError, "returned a Linear, not a torch"),
        (
            {"needs": lambda *_: Needs(aux_layers=(4,))},
            {},
            ConfigError,
            r"layer 4: the model has 3 \(0 to 3\)",
        ),
        ({}, {"layers_also": (-1,)}, ConfigError, "layer -1"),
    ],
    ids=["no needs", "nothing to save", "a layer too high", "a layer too low"],
)
def test_what_cannot_be_trained_is_said(
    training: dict[str, Any],
    changes: dict[str, Any],
    error: type[Exception],
    says: str,
    tmp_path: Path,
    model: Path,
    prompts: Path,
) -> None:
    plugin = Plugin(**training)

    with pytest.raises(error, match=says):
        run(job(plugin, model, prompts, tmp_path / "out", **changes), plugins_of(plugin))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"p": [1], "o": [999, 1]}], "hold token id 999, and .* has 256"),
        ([{"p": [1], "o": [2]}, {"p": [1], "o": [2, 3]}], "1 of the 2 replies"),
        ([{"p": [1] * 300, "o": [2, 3]}] * 3, "0 of the 3 replies"),
    ],
    ids=["another model's", "too short", "too long"],
)
def test_replies_that_are_no_use_are_refused(
    rows: list[Any], says: str, tmp_path: Path, model: Path, prompts: Path
) -> None:
    plugin, path = Plugin(), tmp_path / "replies.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked = replace(job(plugin, model, prompts, tmp_path / "out"), prompts=None, replies=path)

    with pytest.raises(ConfigError, match=says):
        run(asked, plugins_of(plugin))
