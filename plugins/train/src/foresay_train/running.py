"""From prompts to a drafter that loads: the stages of `foresay train`, one after another.

Each stage keeps what it made, and finds it again when the same command runs once more. With several
processes the first one prepares, saves and measures; training is everybody's.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foresay import LLM
from foresay.core.errors import ConfigError, EngineError, PluginError
from foresay.core.plugins import PluginManager
from foresay.core.proposer import Needs
from foresay.core.training import MeasuredDrafter, TrainableDrafter
from foresay.core.worker.target import load_target, outline, read_config
from foresay_train import card, curves, generating, prompts, vocabulary
from foresay_train.job import Data, Job, Outcome, claim, prepare_folder
from foresay_train.measuring import Measured, measure
from foresay_train.processes import Processes
from foresay_train.progress import bar, say
from foresay_train.replies import Reply, digest, read_replies
from foresay_train.states import LAST_HIDDEN, About, Compute, HiddenStates, prepare_states
from foresay_train.training import held_out_batches, train

_LEAST_REPLY_TOKENS = 2  # a chain begins at the first, and predicts the second
_MOST_HELD_OUT = 5  # of so many texts, one is


def run(job: Job, plugins: PluginManager) -> Outcome | None:
    """Do everything; return what came of it, or None in any process but the first."""
    plugins.model(job.model)  # a name that two plugins claim is an error
    target_config = read_config(job.model, plugins.models)
    aux_layers = _aux_layers(job, target_config)
    name = f"{job.model_name} ({_config_digest(target_config)})"
    processes = Processes(job.device)
    if processes.is_first:
        prepare_folder(job)
        with _target(job, plugins) as target:
            path = _replies_file(job, target, name, plugins)
            replies, data = _texts(job, path, target_config, plugins)
            claim(job, name, data)
            states = _states(job, replies, name, aux_layers, target.states)
        for line in _in_words(data):
            say(line)
    processes.wait()
    if not processes.is_first:
        path = job.replies or job.work / generating.REPLIES
        replies, data = _texts(job, path, target_config, plugins)
        states = _states(job, replies, name, aux_layers, _missing)
    held_out = _held_out(len(replies), data.num_held_out, job.recipe.seed)
    apart = set(held_out)
    learned = [reply for text, reply in enumerate(replies) if text not in apart]
    vocab_size = int(target_config.get_text_config(decoder=True).vocab_size)
    drafted = vocabulary.choose(learned, job.config.draft_vocab_size, vocab_size)
    drafter, num_parameters = _build(job, plugins, processes.device, replies, drafted.ids)
    if processes.is_first:
        say(
            f"{num_parameters:,} parameters; {drafted.size} of {vocab_size} tokens are drafted, "
            f"{drafted.coverage:.1%} of the replies'"
        )
    # What transformers prints is no result.
    with contextlib.redirect_stdout(sys.stderr):
        trained = train(
            drafter, replies, held_out, states, aux_layers, job.recipe, job.work, job.begin_work
        )
    if not processes.is_first:
        processes.end()
        return None
    drafter.save(job.out)
    if isinstance(drafter, MeasuredDrafter):
        batches = held_out_batches(drafter, replies, held_out, states, aux_layers, job.recipe)
        drafter.save_measured(job.out, batches)
    del drafter, states
    gc.collect()
    asked = [replies[text].prompt_ids for text in held_out[: job.num_measured]]
    measured = _measure(job, asked, plugins)
    outcome = Outcome(job, data, drafted, num_parameters, trained, measured)
    (job.out / "README.md").write_text(card.write(outcome), encoding="utf-8")
    picture = curves.draw({job.spec.name: trained.curve})
    (job.out / "curve.svg").write_text(picture, encoding="utf-8")
    processes.end()
    return outcome


class _Target:
    """The target in an engine without a proposer, loaded when it is first needed."""

    def __init__(self, job: Job, plugins: PluginManager) -> None:
        self._job = job
        self._plugins = plugins
        self._llm: LLM | None = None

    def llm(self) -> LLM:
        """Return the engine."""
        if self._llm is None:
            job = self._job
            self._llm = LLM(
                job.model,
                None,
                plugins=self._plugins,
                dtype=job.dtype,
                device=job.device,
                quantization="none",  # faster where rows are many, as of whole texts
            )
        return self._llm

    def states(self) -> Compute:
        """Return what computes hidden states."""
        llm = self.llm()

        def compute(texts: list[list[int]], layers: tuple[int, ...]) -> Sequence[torch.Tensor]:
            states = llm.hidden_states(texts, layers)
            assert isinstance(states, list), "of several texts"
            return states

        return compute

    def close(self) -> None:
        """Let go of it."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None


@contextlib.contextmanager
def _target(job: Job, plugins: PluginManager) -> Iterator[_Target]:
    target = _Target(job, plugins)
    try:
        yield target
    finally:
        target.close()
        gc.collect()


def _missing() -> Compute:
    raise EngineError("the first process's hidden states are not here: do all share the folder?")


def _aux_layers(job: Job, target_config: Any) -> tuple[int, ...]:
    """Ask the proposer which layers' states it takes; check all that are asked for."""
    training = job.spec.training
    assert training is not None
    needs: object = training.needs(job.config, target_config)
    if not isinstance(needs, Needs):
        raise PluginError(f"proposer {job.spec.name!r}: training.needs returned {needs!r}")
    num_layers = int(target_config.get_text_config(decoder=True).num_hidden_layers)
    for layer in (*needs.aux_layers, *job.layers_also):
        if not 0 <= layer <= num_layers:
            raise ConfigError(f"layer {layer}: the model has {num_layers} (0 to {num_layers})")
    return needs.aux_layers


def _config_digest(target_config: Any) -> str:
    fields = target_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        fields.pop(volatile, None)
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _replies_file(job: Job, target: _Target, name: str, plugins: PluginManager) -> Path:
    """Return the file of replies; let the model answer the prompts first, if they are given."""
    if job.replies is not None:
        return job.replies
    assert job.prompts is not None
    asked = prompts.read_prompts(job.prompts)
    say(f"the model answers the {len(asked)} prompts of {job.data_name}")
    how = generating.Asked(
        model=name,
        prompts=prompts.digest_of(asked),
        max_tokens=job.max_tokens,
        temperature=job.temperature,
        seed=job.recipe.seed,
    )
    return generating.answer(job.work, asked, how, target.llm, plugins).path


def _texts(
    job: Job, path: Path, target_config: Any, plugins: PluginManager
) -> tuple[list[Reply], Data]:
    """Read replies; leave out what cannot be trained on."""
    found = read_replies(path)
    vocab_size = int(target_config.get_text_config(decoder=True).vocab_size)
    highest = max(max(reply.token_ids) for reply in found)
    if highest >= vocab_size:
        raise ConfigError(
            f"replies {str(path)!r} hold token id {highest}, and {job.model!r} has {vocab_size} "
            "tokens: were they another model's?"
        )
    limit = outline(job.model, plugins.models).max_model_len
    enough = [reply for reply in found if len(reply.reply_ids) >= _LEAST_REPLY_TOKENS]
    kept = [reply for reply in enough if limit is None or len(reply) <= limit]
    if len(kept) < 2:
        raise ConfigError(
            f"{len(kept)} of the {len(found)} replies of {job.data_name!r} can be trained on: two "
            f"or more are needed, of at least {_LEAST_REPLY_TOKENS} tokens, that fit the model"
        )
    num_held_out = min(job.num_held_out, max(1, len(kept) // _MOST_HELD_OUT))
    apart = set(_held_out(len(kept), num_held_out, job.recipe.seed))
    data = Data(
        name=job.data_name,
        digest=digest(reply.token_ids for reply in kept),
        num_texts=len(kept),
        num_held_out=num_held_out,
        num_reply_tokens=sum(
            len(reply.reply_ids) for text, reply in enumerate(kept) if text not in apart
        ),
        num_too_short=len(found) - len(enough),
        num_too_long=len(enough) - len(kept),
    )
    return kept, data


def _held_out(num_texts: int, num_held_out: int, seed: int) -> list[int]:
    """Return the last texts of a shuffle."""
    order = list(range(num_texts))
    random.Random(seed).shuffle(order)
    return order[num_texts - num_held_out :]


def _in_words(data: Data) -> list[str]:
    lines = [
        f"{data.num_texts} texts, {data.num_held_out} of them held out; "
        f"{data.num_reply_tokens} reply tokens to train on"
    ]
    if data.num_too_short:
        lines.append(f"{data.num_too_short} replies of a single token are left out")
    if data.num_too_long:
        lines.append(f"{data.num_too_long} texts are left out: the model takes none so long")
    return lines


def _states(
    job: Job,
    replies: Sequence[Reply],
    name: str,
    aux_layers: Sequence[int],
    compute: Any,
) -> HiddenStates:
    layers = [*sorted({*aux_layers, *job.layers_also}), LAST_HIDDEN]
    about = About.of(name, replies, layers)
    total = sum(map(len, replies))
    began, computed = 0.0, 0

    def begin() -> Compute:
        nonlocal began, computed
        run_target: Compute = compute()
        say(f"hidden states of {total} tokens")
        began = time.monotonic()

        def counted(texts: list[list[int]], layers: tuple[int, ...]) -> Sequence[torch.Tensor]:
            nonlocal computed
            computed += sum(map(len, texts))
            return run_target(texts, layers)

        return counted

    with bar("hidden states", total) as update:
        states = prepare_states(
            job.states_folder, replies, about, begin, lambda done, _total: update(done)
        )
    if computed:
        seconds = max(time.monotonic() - began, 1e-9)
        say(f"{computed} tokens in {seconds:.0f} s, {computed / seconds:.0f} tokens/s")
    return states


def _build(
    job: Job,
    plugins: PluginManager,
    device: str,
    replies: Sequence[Reply],
    draft_ids: list[int] | None,
) -> tuple[TrainableDrafter, int]:
    """Build what is trained; return how many parameters it has, too."""
    training = job.spec.training
    assert training is not None
    target = load_target(
        job.model, dtype=job.dtype, device=device, quantization="none", aliases=plugins.models
    )
    longest = max(map(len, replies))
    view = target.view(longest, embeddings=True, lm_head=True)
    ids = None if draft_ids is None else torch.tensor(draft_ids, device=target.device)
    torch.manual_seed(job.recipe.seed)
    drafter: object = training.build(job.config, view, ids)
    if not (isinstance(drafter, nn.Module) and isinstance(drafter, TrainableDrafter)):
        raise PluginError(
            f"proposer {job.spec.name!r}: training.build returned a {type(drafter).__name__}, not "
            "a torch.nn.Module with save(folder)"
        )
    num_parameters = sum(one.numel() for one in drafter.parameters() if one.requires_grad)
    return drafter, num_parameters


def _measure(job: Job, asked: list[list[int]], plugins: PluginManager) -> Measured | None:
    if not asked:
        return None
    say(f"the engine answers {len(asked)} held-out prompts with the drafter")
    return measure(
        job.model,
        job.spec.name,
        job.out,
        asked,
        plugins,
        dtype=job.dtype,
        device=job.device,
    )
