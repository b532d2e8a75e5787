"""`foresay train`: what its options are, and what is wrong with them. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foresay.core.commands import options
from foresay.core.config import build_settings
from foresay.core.errors import ConfigError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import ProposerSpec


def train(
    context: typer.Context,
    proposer: Annotated[
        str | None, typer.Argument(help="What the drafter is for. Left out: those there are.")
    ] = None,
    model: options.Model = "smollm2",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='The model answers these: rows {"prompt": text}, {"turns": [...]} (the first) or '
            '{"messages": [...]}.',
        ),
    ] = None,
    replies: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Its own answers that exist: rows {"p": [prompt ids], "o": [reply ids]}.',
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the drafter goes; a run that was killed goes on there."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of this kind of drafter, e.g. draft_vocab_size=8192. Repeatable.",
        ),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the replies.")] = 3.0,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="So many steps instead, a batch each.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a batch, prompts included; or one text.")
    ] = 2048,
    learning_rate: Annotated[
        float, typer.Option(help="The highest: it rises, then falls along a cosine.")
    ] = 1e-3,
    warmup: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="For this part of all steps it rises.")
    ] = 0.05,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="AdamW's.")] = 0.0,
    held_out: Annotated[
        int, typer.Option(min=1, help="Replies that are not trained on, for measuring.")
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 192,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of answers, order and first weights.")] = 0,
    states: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the model's hidden states lie, for several drafters to share. Default: "
            "in the output folder.",
        ),
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Begin with the weights of another training, of the same kind and settings: its "
            "output folder.",
        ),
    ] = None,
    layers_also: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Keep the streams entering these layers as well, for another drafter.",
        ),
    ] = None,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    eval_steps: Annotated[
        int, typer.Option(min=1, help="Steps between measurements on the replies held out.")
    ] = 100,
    measure: Annotated[
        int, typer.Option(min=0, help="Held-out prompts that the engine answers at the end.")
    ] = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Train a drafter for a model, on the model's own answers.

    The model answers the prompts, its hidden states are kept, the drafter is trained on them, and
    the engine measures what is accepted. Run the same command again after an interruption, and it
    goes on. Several GPUs: torchrun --nproc-per-node N -m foresay.cli train ...
    """
    plugins: PluginManager = context.obj
    spec = _trainable(proposer, plugins)
    assert spec.training is not None
    if (prompts is None) == (replies is None):
        raise ConfigError("give either --prompts (the model answers them) or --replies")
    if out is None:
        raise ConfigError("--out is missing: a folder for the drafter")
    for name, number in (("--epochs", epochs), ("--learning-rate", learning_rate)):
        if not 0 < number < float("inf"):
            raise ConfigError(f"{name} {number}: expected a number above 0")
    config = build_settings(
        spec.training.config_type,
        options.parse_settings(settings, spec.name),
        f"training of {spec.name!r}",
    )
    also = _layers(layers_also)
    from foresay_train import job, running
    from foresay_train.training import Recipe

    recipe = Recipe(
        epochs=epochs,
        max_tokens_per_batch=batch_tokens,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        seed=seed,
        save_steps=save_steps,
        eval_steps=eval_steps,
        max_steps=-1 if max_steps is None else max_steps,
    )
    asked = job.Job(
        spec=spec,
        config=config,
        model=model,
        out=out.expanduser(),
        prompts=prompts,
        replies=replies,
        recipe=recipe,
        num_held_out=held_out,
        max_tokens=max_tokens,
        temperature=temperature,
        states=states,
        begin=begin,
        layers_also=also,
        num_measured=measure,
        dtype=dtype,
        device=device,
    )
    outcome = running.run(asked, plugins)
    if outcome is not None:
        for line in outcome.lines():
            print(line)


def _trainable(name: str | None, plugins: PluginManager) -> ProposerSpec:
    """Return a proposer that can be trained; else say which can."""
    able = [other for other, spec in plugins.proposers.items() if spec.training is not None]
    listed = f"can be trained: {', '.join(able) or 'none'}"
    if name is None:
        raise ConfigError(f"foresay train PROPOSER: which one? {listed}{plugins.unavailable()}")
    try:
        spec = plugins.proposer(name)
    except PluginError as error:
        raise PluginError(f"{error}; {listed}") from error
    if spec.training is None:
        raise ConfigError(
            f"proposer {name!r} ({plugins.proposer_owner(name)}) has no training; {listed}"
        )
    return spec


def _layers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (text or "").split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--layers-also {text!r}: expected numbers, e.g. 2,15,27") from None
