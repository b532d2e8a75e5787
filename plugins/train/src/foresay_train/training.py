"""The training itself, on transformers' Trainer: batches in, a trained drafter and its curve out.

Checkpoints, resuming, several processes (torchrun) and mixed precision are the Trainer's. It knows
neither how replies and states came about nor what kind of drafter it trains.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from foresay.core.errors import ConfigError
from foresay.core.training import TrainableDrafter, TrainingBatch
from foresay.core.worker.linear import computes_natively
from foresay_train.packing import Batches, pack
from foresay_train.replies import Reply
from foresay_train.states import HiddenStates

CHECKPOINTS = "checkpoints"
CURVE = "curve.jsonl"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train; a step is one batch on each process."""

    epochs: float = 3.0
    max_tokens_per_batch: int = 2048
    learning_rate: float = 1e-3  # the highest: it rises, then falls along a cosine
    warmup: float = 0.05  # of all steps
    weight_decay: float = 0.0
    seed: int = 0
    save_steps: int = 100
    eval_steps: int = 100
    max_steps: int = -1  # instead of epochs, if positive


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What the held-out texts said at some time.

    Length and acceptance are those of an engine that gives these replies, drafting as many tokens
    as there are steps: of the chains it would begin, each after what the one before had right.
    """

    step: int
    reply_tokens: int  # seen so far, each time they were
    loss: float
    acceptance: list[float]  # of each draft position, among those that reached it
    mean_acceptance_length: float


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training did."""

    reply_tokens_per_second: float  # of this run, evaluation left out; 0: nothing was left to do
    num_reply_tokens: int  # seen, each time they were
    num_steps: int
    curve: list[CurvePoint]


def train(
    drafter: TrainableDrafter,
    replies: Sequence[Reply],
    held_out: Sequence[int],
    states: HiddenStates,
    aux_layers: Sequence[int],
    recipe: Recipe,
    folder: Path,
    begin: Path | None = None,
) -> Trained:
    """Train `drafter` in place on all replies but the `held_out`; go on where a run ended.

    Checkpoints and the curve lie in `folder`. Replies have two tokens or more. `begin`: the
    `folder` of another training, whose last checkpoint's weights this one begins with. Raises
    `ConfigError` if they do not fit.
    """
    assert isinstance(drafter, nn.Module)
    apart = set(held_out)
    trained_on = [text for text in range(len(replies)) if text not in apart]

    def batches(texts: Sequence[int]) -> Batches:
        return _packed(texts, replies, states, aux_layers, recipe)

    device = next(drafter.parameters()).device
    on_cpu = device.type == "cpu"
    data = batches(trained_on)
    arguments = TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        use_cpu=on_cpu,
        bf16=computes_natively(torch.bfloat16) if on_cpu else torch.cuda.is_bf16_supported(),
        num_train_epochs=recipe.epochs,
        max_steps=recipe.max_steps,
        per_device_train_batch_size=1,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=recipe.eval_steps,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=recipe.save_steps,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        seed=recipe.seed,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
    )
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    last = get_last_checkpoint(str(folder / CHECKPOINTS))
    curve = _Curve(folder / CURVE, data.num_reply_tokens() / max(1, len(data)))
    if arguments.process_index == 0:
        curve.keep_until(0 if last is None else int(last.rsplit("-", 1)[1]))
    module = _Module(drafter)
    if last is None and begin is not None:
        _load(module, begin)
    trainer = _Trainer(
        model=module,
        args=arguments,
        train_dataset=data,
        data_collator=_collated,
        eval_dataset=batches(held_out),
        callbacks=[curve],
    )
    trainer.curve = curve
    trainer.train(resume_from_checkpoint=last)
    if not curve.points or curve.points[-1].step < trainer.state.global_step:
        trainer.evaluate()
    return Trained(
        reply_tokens_per_second=curve.reply_tokens_per_second,
        num_reply_tokens=curve.reply_tokens(trainer.state.global_step),
        num_steps=trainer.state.global_step,
        curve=curve.points,
    )


def held_out_batches(
    drafter: TrainableDrafter,
    replies: Sequence[Reply],
    held_out: Sequence[int],
    states: HiddenStates,
    aux_layers: Sequence[int],
    recipe: Recipe,
) -> Iterator[TrainingBatch]:
    """Return the texts that a training was measured on, where the drafter's parameters are."""
    assert isinstance(drafter, nn.Module)
    device = next(drafter.parameters()).device
    batches = _packed(held_out, replies, states, aux_layers, recipe)
    for index in range(len(batches)):
        batch = batches[index]
        yield replace(
            batch,
            token_ids=batch.token_ids.to(device),
            hidden_states=batch.hidden_states.to(device),
            aux_hidden_states=(
                None if batch.aux_hidden_states is None else batch.aux_hidden_states.to(device)
            ),
        )


def _packed(
    texts: Sequence[int],
    replies: Sequence[Reply],
    states: HiddenStates,
    aux_layers: Sequence[int],
    recipe: Recipe,
) -> Batches:
    packed = pack([len(replies[text]) for text in texts], recipe.max_tokens_per_batch, 0)
    return Batches(replies, states, [[texts[at] for at in one] for one in packed], aux_layers)


def _load(module: nn.Module, begin: Path) -> None:
    """Set a module's parameters to those of another training's last checkpoint."""
    folder = begin / CHECKPOINTS
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if last is None:
        raise ConfigError(f"{str(begin)!r} holds no checkpoint of a training to begin with")
    tensors = load_file(Path(last) / "model.safetensors")
    own = module.state_dict()
    for name in sorted({*tensors, *own}):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise ConfigError(
                f"the checkpoint in {str(begin)!r} is of another kind of drafter, or was trained "
                f"with other settings: {name.removeprefix('drafter.')!r} differs"
            )
    module.load_state_dict(tensors)


class _Module(nn.Module):
    """A drafter as the Trainer takes it: keywords in, a mapping with "loss" out."""

    def __init__(self, drafter: nn.Module) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, **fields: Any) -> dict[str, torch.Tensor]:
        loss = self.drafter(TrainingBatch(**fields))
        return {"loss": loss.loss, "hits": loss.hits, "valid": loss.valid}


def _collated(batches: list[TrainingBatch]) -> dict[str, Any]:
    """Return the fields of the one batch: texts are packed already."""
    [batch] = batches
    return {name: getattr(batch, name) for name in TrainingBatch.__slots__}


class _Trainer(Trainer):
    """Measures chains on the held-out texts in place of the usual evaluation."""

    curve: _Curve

    @torch.no_grad()
    def evaluate(self, *_arguments: Any, **_keywords: Any) -> dict[str, float]:
        began = time.monotonic()
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        losses, right, num_chains = [], [], []
        batches = self.eval_dataset
        assert isinstance(batches, Batches)
        for index in range(len(batches)):
            fields = self._prepare_inputs(_collated([batches[index]]))
            with self.compute_loss_context_manager():
                found = model(**fields)
            losses.append(found["loss"].double().cpu() * len(found["hits"]))
            right.append((found["hits"] & found["valid"]).cpu())
            starts, prompts = fields["starts"], fields["num_prompt_tokens"]
            ends = zip(itertools.pairwise(starts), prompts, strict=True)
            num_chains += [end - start - prompt - 1 for (start, end), prompt in ends]
        model.train()
        loss = float(sum(losses)) / max(1, sum(num_chains))
        point = _point(self.state.global_step, self.curve, loss, torch.cat(right), num_chains)
        if self.args.process_index == 0:
            self.curve.add(point)
        self.curve.left_out += time.monotonic() - began
        metrics = {
            "eval_loss": point.loss,
            "eval_mean_acceptance_length": point.mean_acceptance_length,
        }
        self.log(metrics)
        return metrics


def _point(
    step: int, curve: _Curve, loss: float, right: torch.Tensor, num_chains: Sequence[int]
) -> CurvePoint:
    """Walk through each text as an engine would.

    `right` [chains of all texts, num_steps] bool: the likeliest token is the text's.
    """
    num_accepted = right.long().cumprod(dim=1).sum(dim=1).tolist()
    num_steps = right.shape[1]
    reached, accepted = [0] * num_steps, [0] * num_steps
    num_verified = num_emitted = first = 0
    for length in num_chains:
        at = 0
        while at < length:
            count = num_accepted[first + at]
            possible = min(num_steps, length - at)  # the text has no more tokens to draft
            for position in range(min(count + 1, possible)):
                reached[position] += 1
                accepted[position] += position < count
            num_verified += 1
            num_emitted += min(count + 1, length - at)
            at += count + 1
        first += length
    rates = (a / max(1, n) for a, n in zip(accepted, reached, strict=True))
    return CurvePoint(
        step=step,
        reply_tokens=curve.reply_tokens(step),
        loss=loss,
        acceptance=[round(rate, 4) for rate in rates],
        mean_acceptance_length=round(num_emitted / max(1, num_verified), 4),
    )


class _Curve(TrainerCallback):
    """The points measured so far, kept in a file; and the time that steps took."""

    def __init__(self, path: Path, reply_tokens_per_step: float) -> None:
        self._path = path
        self._per_step = reply_tokens_per_step
        self._began = 0.0
        self._first_step = 0
        self._num_processes = 1
        self.left_out = 0.0  # seconds of evaluation
        self.reply_tokens_per_second = 0.0
        self.points: list[CurvePoint] = []

    def keep_until(self, step: int) -> None:
        """Take over what an earlier run measured, up to the step that is gone on from."""
        if self._path.exists() and step:
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    point = CurvePoint(**json.loads(line))
                except (ValueError, TypeError):  # the run was killed while it wrote
                    break
                if point.step <= step:
                    self.points.append(point)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(map(_line, self.points)), encoding="utf-8")

    def add(self, point: CurvePoint) -> None:
        """Note a point; one of a step that is there already says the same."""
        if self.points and self.points[-1].step == point.step:
            return
        self.points.append(point)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(point))

    def reply_tokens(self, step: int) -> int:
        """How many reply tokens were seen after a step, on average over the batches' order."""
        return round(step * self._per_step * self._num_processes)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,  # noqa: ARG002  # the callback's signature
        **_keywords: Any,
    ) -> None:
        self._num_processes = args.world_size
        self._began, self._first_step = time.monotonic(), state.global_step

    def on_train_end(
        self,
        args: Any,  # noqa: ARG002  # the callback's signature
        state: Any,
        control: Any,  # noqa: ARG002
        **_keywords: Any,
    ) -> None:
        seconds = time.monotonic() - self._began - self.left_out
        num_steps = state.global_step - self._first_step
        if num_steps:
            self.reply_tokens_per_second = self.reply_tokens(num_steps) / max(seconds, 1e-9)


def _line(point: CurvePoint) -> str:
    return json.dumps(asdict(point)) + "\n"
