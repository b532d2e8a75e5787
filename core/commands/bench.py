"""`foresay bench`: how fast proposers are, task by task; `core.stats` defines the figures.

Every proposer has an engine of its own, all loaded before the first measurement. They take turns,
batch by batch, and who begins changes with every batch and every repeat, so that a machine that
slows down, or a cache that is warm, favours nobody. Only the first turn of a prompt is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.core.commands import options
from foresay.core.commands.bench_report import HEADINGS, PLAIN, Call, Measurements, Row
from foresay.core.commands.fitting import fit_prompts
from foresay.core.commands.prompts import BenchPrompt, read_prompts, select, shipped
from foresay.core.commands.report import judge_differences, note
from foresay.core.commands.table import print_table, progress
from foresay.core.config import SamplingParams, build_settings
from foresay.core.errors import ConfigError, EngineError
from foresay.core.plugins import PluginManager

if TYPE_CHECKING:
    from foresay.core.llm import LLM

_WARM_UP_TOKENS = 16
_ROWS_PER_PROMPT = 32  # of a step: room for many more draft tokens than anyone uses


@dataclass(frozen=True, slots=True)
class _Batch:
    """Prompts of one task that go into one call, and what each is sampled with."""

    task: str
    prompts: list[BenchPrompt]
    token_ids: list[list[int]]


def bench(
    context: typer.Context,
    model: options.Model = "smollm2",
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Rows {"id", "task", "turns": [...]}. Default: 24 prompts that come with foresay.',
        ),
    ] = None,
    proposers: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="Who is compared: names, 'none' (plain decoding, which speedups are over), "
            "'auto', module:Class; a chain is written with '+': none,ngram,ngram+custom_example.",
        ),
    ] = "none,auto",
    drafter: options.Drafter = None,
    k: options.NumDraftTokens = None,
    adaptive: options.Adaptive = True,
    by_batch: options.DraftTokensByBatch = None,
    settings: options.Settings = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="Only this task. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many prompts of each task.")
    ] = None,
    max_tokens: options.MaxTokens = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts of a task that are answered together.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds over all prompts.")] = 3,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "auto",
    drafter_quantization: options.DrafterQuantization = "auto",
    enforce_eager: options.EnforceEager = False,
    predictions: Annotated[
        bool,
        typer.Option(
            "--predictions/--no-predictions",
            help="Give a row's 'prediction' to the proposers that take one.",
        ),
    ] = True,
    out: Annotated[
        str | None,
        typer.Option("--json", metavar="OUT", help="Write the rows to a file; '-': to stdout."),
    ] = None,
) -> None:
    """Measure proposers against plain decoding, task by task.

    Each proposer has a copy of the model in memory. Where the token ids of two proposers differ
    though they may not, that is an error, after the table. Ctrl-C prints what was measured so far.
    """
    plugins: PluginManager = context.obj
    names = _names(proposers)
    for member in "+".join(names).split("+"):
        if member not in (PLAIN, "auto"):
            plugins.resolve_proposer(member)  # a misspelt name is found before a model is loaded
    params = build_settings(
        SamplingParams,
        {"temperature": temperature, "max_tokens": max_tokens, "seed": seed},
    )
    prompts = select(read_prompts(data or shipped("prompts.jsonl")), tasks, limit)
    if out not in (None, "-"):
        _check_writable(Path(str(out)))
    each_settings = _share_out(settings, names, "--set", ".")
    each_drafter = _share_out(drafter, names, "--drafter", "=")
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for name in names:
            limits: dict[str, Any] = {}
            if engines:  # an engine with less room would cut texts that others do not
                limits["max_model_len"] = next(iter(engines.values())).max_model_len
            engines[name] = stack.enter_context(
                options.open_llm(
                    model,
                    plugins=plugins,
                    proposer=name.replace("+", ","),
                    drafter=each_drafter[name],
                    k=None if name == PLAIN else k,
                    adaptive=adaptive,
                    by_batch=None if name == PLAIN else by_batch,
                    settings=each_settings[name],
                    dtype=dtype,
                    device=device,
                    quantization=quantization,
                    drafter_quantization="auto" if name == PLAIN else drafter_quantization,
                    enforce_eager=enforce_eager,
                    max_num_seqs=batch_size,
                    max_num_batched_tokens=max(2048, _ROWS_PER_PROMPT * batch_size),
                    enable_prefix_caching=False,  # every round computes its prompts
                    **limits,
                )
            )
        batches = _batches(prompts, next(iter(engines.values())), batch_size)
        if predictions:
            _tell_who_takes_no_prediction(prompts, engines)
        measured = Measurements(
            names, [(batch.task, [prompt.id for prompt in batch.prompts]) for batch in batches]
        )
        complete = _measure(engines, batches, params, repeats, measured, predictions=predictions)
        comparable = params.greedy or seed is not None
        invariant = all(llm.stats.row_invariant for llm in engines.values())
    rows = measured.rows(compared=comparable)
    if not complete:
        if not rows:
            note("interrupted before anything was measured")
            raise typer.Exit(options.INTERRUPTED)
        part = ", and not of all prompts" if measured.is_partial else ""
        note(f"interrupted: the figures are of {measured.num_repeats} of {repeats} repeats{part}")
    _print(rows, out)
    if comparable:
        judge_differences(measured.different(), invariant=invariant)
    if not complete:
        raise typer.Exit(options.INTERRUPTED)


def _names(proposers: str) -> list[str]:
    """Split the list; a chain keeps its '+'."""
    names = [name.strip() for name in proposers.split(",")]
    for index, name in enumerate(names):
        if not name:
            raise ConfigError(f"--proposers {proposers!r}: expected names with commas between")
        if name in names[:index]:
            raise ConfigError(f"--proposers {proposers!r}: {name!r} is given twice")
    return names


def _share_out(
    given: Sequence[str] | None, names: Sequence[str], option: str, separator: str
) -> dict[str, list[str]]:
    """Give each proposer what is for it: what begins with its name, or with one of its chain's.

    Without a name it can only be for the one proposer there is besides plain decoding.
    """
    shares: dict[str, list[str]] = {name: [] for name in names}
    drafting = [name for name in names if name != PLAIN]
    for text in given or ():
        members = {member for name in drafting for member in name.split("+")}
        # By the longest name: that of a class has dots of its own.
        member = max((m for m in members if text.startswith(m + separator)), key=len, default=None)
        owners = [name for name in drafting if member in name.split("+")]
        if not owners and len(drafting) != 1:
            raise ConfigError(
                f"{option} {text!r}: say which proposer it is for, e.g. "
                f"{option} {(drafting or ['NAME'])[0].split('+')[0]}{separator}{text} "
                f"(--proposers {','.join(names)})"
            )
        for name in owners or drafting:
            shares[name].append(text)
    return shares


def _check_writable(path: Path) -> None:
    """Find out before the run that its result could not be written."""
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json {str(path)!r}: {error.strerror}") from None


def _batches(prompts: Sequence[BenchPrompt], llm: LLM, batch_size: int) -> list[_Batch]:
    """Tokenize, leave out what is too long, and put prompts of one task together."""
    batches: list[_Batch] = []
    for prompt, token_ids in fit_prompts(prompts, llm):
        last = batches[-1] if batches else None
        if last is None or last.task != prompt.task or len(last.prompts) == batch_size:
            last = _Batch(prompt.task, [], [])
            batches.append(last)
        last.prompts.append(prompt)
        last.token_ids.append(token_ids)
    return batches


def _tell_who_takes_no_prediction(prompts: Sequence[BenchPrompt], engines: dict[str, LLM]) -> None:
    num_predictions = sum(prompt.prediction is not None for prompt in prompts)
    ignoring = [n for n, llm in engines.items() if n != PLAIN and not llm.takes_prediction]
    if num_predictions and ignoring:
        note(
            f"no predictions for {', '.join(ignoring)}, which cannot take them: those of "
            f"{num_predictions} prompts are for other proposers"
        )


def _measure(
    engines: dict[str, LLM],
    batches: Sequence[_Batch],
    params: SamplingParams,
    repeats: int,
    measured: Measurements,
    *,
    predictions: bool,
) -> bool:
    """Run everything, and return whether it came to its end: Ctrl-C leaves what is measured."""
    names = list(engines)
    total = repeats * len(batches) * len(names)
    try:
        num_prompts = sum(len(batch.prompts) for batch in batches)
        note(f"measuring {', '.join(names)} on {num_prompts} prompts; repeats: {repeats}")
        with progress(total) as advance:
            for llm in engines.values():  # the first run of a kernel is slower than all others
                few = params.model_copy(
                    update={"max_tokens": min(_WARM_UP_TOKENS, params.max_tokens)}
                )
                llm.generate(batches[0].token_ids, few)
            for repeat in range(repeats):
                for index, batch in enumerate(batches):
                    calls = {}
                    first = (repeat + index) % len(names)
                    for name in names[first:] + names[:first]:
                        advance(f"{batch.task}, {name}, repeat {repeat + 1} of {repeats}", 0)
                        calls[name] = _call(name, engines[name], batch, params, predictions)
                        advance("", 1)
                    measured.add(repeat, index, calls)
    except KeyboardInterrupt:
        return False
    return True


def _call(name: str, llm: LLM, batch: _Batch, params: SamplingParams, predictions: bool) -> Call:
    each = [
        params.model_copy(update={"prediction": prompt.prediction})
        if predictions and prompt.prediction is not None and llm.takes_prediction
        else params
        for prompt in batch.prompts
    ]
    start = time.perf_counter()
    outputs = llm.generate(batch.token_ids, each)
    seconds = time.perf_counter() - start
    for prompt, output in zip(batch.prompts, outputs, strict=True):
        if output.outputs[0].finish_reason == "error":
            raise EngineError(
                f"proposer {name!r}, prompt {prompt.id!r}: the answer ended early: "
                f"{output.outputs[0].stop_reason}"
            )
    return Call(
        seconds,
        [output.outputs[0].token_ids for output in outputs],
        [output.stats for output in outputs],
    )


def _print(rows: Sequence[Row], out: str | None) -> None:
    text = json.dumps([row.as_dict() for row in rows], indent=2)
    if out == "-":
        print(text)
        return
    if rows:
        print_table(HEADINGS, [row.cells() for row in rows])
    if out is not None:
        try:
            Path(out).write_text(text + "\n", encoding="utf-8")
        except OSError as error:  # it could be written at the start; the table is printed
            raise ConfigError(f"--json {out!r}: {error.strerror}") from None
