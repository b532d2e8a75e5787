"""`foresay check`: is this drafter right for that model? Compared by their files, then run.

The comparison needs no weights and is printed first, so that it is there too if the drafter cannot
be loaded. A drafter that does not load for its target gets a bad verdict; what is wrong with the
request itself (no such model, a misspelt setting) is an error as everywhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.core.commands import options
from foresay.core.commands.comparison import Comparison
from foresay.core.commands.fitting import fit_prompts
from foresay.core.commands.prompts import BenchPrompt, read_prompts, select, shipped
from foresay.core.commands.report import note, report
from foresay.core.commands.table import print_table, progress
from foresay.core.commands.verdict import Verdict, drafting_share, in_words, judge, unusable
from foresay.core.commands.whose_drafter import find_proposer, lies_inside
from foresay.core.config import SamplingParams, build_settings
from foresay.core.errors import ConfigError, EngineError, ForesayError, UnknownModelError
from foresay.core.plugins import PluginManager
from foresay.core.stats import RunStats, show

if TYPE_CHECKING:
    from foresay.core.llm import LLM
    from foresay.core.worker.choosing import Choice

BAD = 1  # the exit code of a bad verdict


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is checked, and how."""

    drafter: str  # as the user wrote it
    proposer: str
    what: str  # what the proposer recognised; "" if it was not asked
    is_inside: bool  # the drafter is part of the target's own checkpoint
    model: str
    k: int | None
    settings: Sequence[str] | None
    engine: dict[str, Any]
    plugins: PluginManager

    @property
    def given(self) -> str | None:
        """What the proposer gets as its drafter; None: it looks in the target's checkpoint."""
        return None if self.is_inside else self.drafter


@dataclass(slots=True)
class _Run:
    """What came of running the drafter."""

    num_prompts: int
    num_answered: int = 0
    interrupted: bool = False
    seconds: float = 0.0
    stats: RunStats = field(default_factory=RunStats)


def check(
    context: typer.Context,
    drafter: Annotated[
        str, typer.Argument(help="The drafter: a folder, a file, or a registered name.")
    ],
    model: options.Model = "smollm2",
    proposer: Annotated[
        str | None,
        typer.Option(
            "--proposer", "-p", help="Who loads the drafter. Default: whoever recognises it."
        ),
    ] = None,
    k: options.NumDraftTokens = None,
    settings: options.Settings = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Rows {"id", "task", "turns": [...]}. Default: 24 prompts that come with foresay.',
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many prompts of each task.")] = 1,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "auto",
    drafter_quantization: options.DrafterQuantization = "auto",
    enforce_eager: options.EnforceEager = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say whether a drafter is right for a model: compare the two, run it, and judge.

    Vocabularies, sizes and layer taps are compared; then it drafts for a few prompts, and what is
    accepted is counted. Exit code 0: good; 1: bad; 2: a mistake in what was asked for.
    """
    if k is not None and k < 1:
        raise ConfigError(f"-k {k}: without draft tokens there is nothing to check")
    params = build_settings(
        SamplingParams, {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    )
    prompts = select(read_prompts(data or shipped("prompts.jsonl")), None, limit)
    plugins: PluginManager = context.obj
    name, what = find_proposer(drafter, proposer, plugins)
    is_inside = lies_inside(drafter, name, model, plugins)
    engine = {
        "dtype": dtype,
        "device": device,
        "quantization": quantization,
        "drafter_quantization": drafter_quantization,
        "enforce_eager": enforce_eager,
    }
    own = _in_chains(settings, name, plugins)
    subject = _Subject(drafter, name, what, is_inside, model, k, own, engine, plugins)
    choice = _choose(subject)
    comparison, refusal = _compare(subject, choice)
    if not as_json:
        _print_comparison(subject, choice, comparison)
    run = None
    if not refusal:
        run, refusal = _load_and_run(subject, prompts, params)
    verdict = None
    if run is None:
        verdict = unusable(refusal, comparison)
    elif run.stats.num_verify_steps or not run.interrupted:
        verdict = judge(run.stats, comparison)
    if as_json:
        print(json.dumps(_row(subject, comparison, run, verdict), indent=2))
    else:
        _print_result(run, verdict)
    if run is not None and run.interrupted:
        raise typer.Exit(options.INTERRUPTED)
    if verdict is not None and not verdict.good:
        raise typer.Exit(BAD)


def _in_chains(
    settings: Sequence[str] | None, proposer: str, plugins: PluginManager
) -> Sequence[str] | None:
    """Have a proposer draft chains, if it is not told otherwise.

    What is good or bad is known of the likeliest tokens, not of the best of several.
    """
    has_trees = "tree" in plugins.resolve_proposer(proposer).config_type.model_fields
    given = options.parse_settings(settings, proposer)
    return [*(settings or []), "tree=false"] if has_trees and "tree" not in given else settings


def _choose(subject: _Subject) -> Choice:
    """Settle the proposer's settings, the drafter's path among them."""
    from foresay.core.inputs import engine_config
    from foresay.core.worker.choosing import choose

    own = {
        "drafter": subject.given,
        "num_speculative_tokens": subject.k,
        "proposer_settings": options.parse_settings(subject.settings, subject.proposer),
    }
    config = engine_config(subject.model, subject.proposer, {**own, **subject.engine})
    (choice,) = choose(config, subject.plugins)
    return choice


def _compare(subject: _Subject, choice: Choice) -> tuple[Comparison, str]:
    """Compare the files, and ask the proposer what it needs; also return why it refuses, or ""."""
    from foresay.core.commands.drafter_files import compare, read_drafter, read_model
    from foresay.core.proposer import Needs
    from foresay.core.worker.loading import load_config
    from foresay.core.worker.sources import find_source

    plugins = subject.plugins
    plugins.model(subject.model)  # a name that two plugins claim is an error
    try:
        source = find_source(subject.model, plugins.models)
    except UnknownModelError as error:
        raise UnknownModelError(f"{error}{plugins.unavailable()}") from error
    config = load_config(source)
    needs, refusal = None, ""
    try:
        declared = choice.declared(config)
        needs = declared if isinstance(declared, Needs) else None
        choice.checked(declared, config, "needs")
    except ForesayError as error:
        if isinstance(error, ConfigError) and needs is None:
            raise  # a setting asks for what there is not
        refusal = str(error)
    path = choice.config.drafter or subject.drafter
    own, is_model = None, choice.spec.drafter_is_model
    if is_model:
        try:
            its_source = find_source(path, {})
            own = read_model(its_source, load_config(its_source))
        except ForesayError as error:
            refusal = refusal or str(error)
    registered = plugins.drafter(subject.drafter)
    comparison = compare(
        own or read_drafter(Path(path)),
        read_model(source, config),
        needs,
        is_model=is_model,
        made_for=None if registered is None else registered.model,
    )
    return comparison, refusal


def _load_and_run(
    subject: _Subject, prompts: Sequence[BenchPrompt], params: SamplingParams
) -> tuple[_Run | None, str]:
    """Run the drafter; or return None and why it cannot be loaded."""
    try:
        llm = _open(subject, proposer=subject.proposer)
    except (ConfigError, EngineError):
        raise
    except ForesayError as error:
        refusal = str(error)
    else:
        with llm:
            return _run(llm, prompts, params), ""
    # If the model cannot be loaded either, it is not the drafter's fault: that is raised.
    _open(subject, proposer="none").close()
    return None, refusal


def _open(subject: _Subject, *, proposer: str) -> LLM:
    engine = dict(subject.engine)
    if proposer == "none":
        engine["drafter_quantization"] = "auto"
    else:
        drafter = None if subject.given is None else [subject.given]
        engine |= {"drafter": drafter, "k": subject.k, "settings": subject.settings}
    return options.open_llm(
        subject.model,
        plugins=subject.plugins,
        proposer=proposer,
        max_num_seqs=1,
        adaptive=False,  # it is to be seen all the time
        **engine,
    )


def _run(llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams) -> _Run:
    fitting = fit_prompts(prompts, llm)
    run = _Run(num_prompts=len(fitting))
    start = time.perf_counter()
    try:
        note(f"drafting for {run.num_prompts} prompts, {params.max_tokens} tokens each at most")
        with progress(run.num_prompts) as advance:
            for prompt, token_ids in fitting:
                advance(prompt.task, 0)
                (output,) = llm.generate(token_ids, params)
                if output.outputs[0].finish_reason == "error":
                    raise EngineError(
                        f"prompt {prompt.id!r}: the answer ended early: "
                        f"{output.outputs[0].stop_reason}"
                    )
                run.num_answered += 1
                advance("", 1)
    except KeyboardInterrupt:
        run.interrupted = True
    run.seconds = time.perf_counter() - start
    run.stats = llm.stats
    return run


def _print_comparison(subject: _Subject, choice: Choice, comparison: Comparison) -> None:
    what = f"{subject.what}, " if subject.what else ""
    what += "inside the model's own checkpoint, " if subject.is_inside else ""
    print(f"drafter {subject.drafter} ({what}proposer {subject.proposer} of {choice.owner})")
    made_for = f" (the drafter names {comparison.made_for})" if comparison.made_for else ""
    print(f"for the model {subject.model}{made_for}")
    print()
    print_table(["", "drafter", "target"], comparison.rows())
    print()
    print(comparison.vocabularies(), flush=True)


def _print_result(run: _Run | None, verdict: Verdict | None) -> None:
    if run is not None:
        print()
        for line in report(run.stats, run.seconds):
            print(line)
        print(f"drafting takes {show(drafting_share(run.stats), '.0%')} of the decoding time")
        print(f"faults: {in_words(run.stats.faults)}")
    print()
    if run is not None and run.interrupted:
        note(f"interrupted: the figures are of {run.num_answered} of {run.num_prompts} prompts")
    if verdict is not None:
        print(f"verdict: {verdict.text}")
        for line in verdict.notes:
            print(f"  - {line}")


def _row(
    subject: _Subject, comparison: Comparison, run: _Run | None, verdict: Verdict | None
) -> dict[str, Any]:
    """Return the object that `--json` prints; its keys are stable."""
    row: dict[str, Any] = {
        "drafter": subject.drafter,
        "proposer": subject.proposer,
        "model": subject.model,
        "good": None if verdict is None else verdict.good,
        "verdict": None if verdict is None else verdict.text,
        "notes": [] if verdict is None else list(verdict.notes),
        "comparison": comparison.as_dict(),
        "run": None,
    }
    if run is not None:
        row["run"] = {
            "prompts": run.num_answered,
            "interrupted": run.interrupted,
            "seconds": run.seconds,
            "drafting_share": drafting_share(run.stats),
            "faults": dict(run.stats.faults),
            "stats": run.stats.as_dict(),
        }
    return row
