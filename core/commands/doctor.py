"""`foresay doctor`: why speculation is faster here, or is not. It measures; `reasons` concludes.

First an engine that always drafts answers every prompt with each number of draft tokens, none
among them, in turns: so its control learns what rows and drafting cost and how far drafts get, and
each number is timed beside none. Then an engine as users have it, which drafts as much as pays, and
one without a proposer answer the prompts in turns: that is the speedup that was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.core.commands import options
from foresay.core.commands.diagnosis import Economy, Pair, Timed, by_task, lengths, speed
from foresay.core.commands.doctor_report import Report, check_writable, print_report
from foresay.core.commands.fitting import fit_prompts
from foresay.core.commands.prompts import BenchPrompt, read_prompts, select, shipped
from foresay.core.commands.reasons import Findings, counted, judge
from foresay.core.commands.report import judge_differences, note, pooled
from foresay.core.commands.table import progress
from foresay.core.commands.verdict import faults_of
from foresay.core.config import SamplingParams, build_settings
from foresay.core.errors import ConfigError, EngineError, RequestError
from foresay.core.plugins import PluginManager
from foresay.core.stats import RequestStats, RunStats, ratio

if TYPE_CHECKING:
    from foresay.core.llm import LLM
    from foresay.core.outputs import RequestOutput
    from foresay.core.scheduling.draft_control import DraftControl

_WARM_UP_TOKENS = 8
_LEAST_TOKENS = 8  # of an answer, for there to be something to measure
_ROWS_PER_PROMPT = 32  # of a step: room for many more draft tokens than proposers have by default

Advance = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Prompts that are answered together."""

    task: str  # "": of several
    prompts: Sequence[BenchPrompt]
    token_ids: Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an engine with a batch."""

    whole: Timed
    first: float  # seconds to the first token of whoever got it last
    stats: RunStats

    @property
    def after(self) -> Timed:
        """What came after the first tokens."""
        return Timed(
            self.whole.tokens - self.stats.num_requests, max(self.whole.seconds - self.first, 1e-9)
        )


@dataclass(slots=True)
class _Measured:
    """All that was measured so far."""

    is_complete: bool = False
    by_k: dict[int, list[Timed]] = field(default_factory=dict)  # of batches that had every k
    calls: list[RequestStats] = field(default_factory=list)  # of the requests with k of 1 or more
    first_visits: list[RequestStats] = field(
        default_factory=list
    )  # of these, prompts that were new
    later_visits: list[RequestStats] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    plain: list[_Call] = field(default_factory=list)
    texts: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)  # by a prompt's id
    faults: dict[str, int] = field(default_factory=dict)
    is_invariant: bool = True

    def take_engine(self, stats: RunStats) -> None:
        """Take what an engine says of itself when it is done."""
        for kind, count in faults_of(stats).items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        self.is_invariant = self.is_invariant and stats.row_invariant


def doctor(
    context: typer.Context,
    model: options.Model = "smollm2",
    proposer: options.ProposerName = "auto",
    drafter: options.Drafter = None,
    k: options.NumDraftTokens = None,
    settings: options.Settings = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Rows {"id", "task", "turns": [...]}. Default: 24 prompts that come with foresay.',
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--task", help="Only this task. Repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many prompts of each task.")] = 2,
    max_tokens: options.MaxTokens = 48,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Requests in a step: prompts are answered so many together.")
    ] = 1,
    pairs: Annotated[
        int, typer.Option(min=1, help="Rounds with and without speculation over all prompts.")
    ] = 3,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "auto",
    drafter_quantization: options.DrafterQuantization = "auto",
    enforce_eager: options.EnforceEager = False,
    out: Annotated[
        str | None,
        typer.Option("--json", metavar="OUT", help="Write all of it to a file; '-': to stdout."),
    ] = None,
) -> None:
    """Say why speculation is faster here than plain decoding, or is not.

    Measured are a step's time by its rows, the time of drafting, how many draft tokens are
    accepted, and the speedup. Printed are these, the acceptance from which drafting pays, the best
    number of draft tokens, and why it helps or does not. Ctrl-C prints what was measured so far.
    """
    if proposer == "none" or k == 0:
        what = "--proposer none" if proposer == "none" else "-k 0"
        raise ConfigError(f"{what}: that is plain decoding, there is no speculation to look at")
    if max_tokens < _LEAST_TOKENS:
        raise ConfigError(
            f"--max-tokens {max_tokens}: too short to measure, at least {_LEAST_TOKENS}"
        )
    params = build_settings(
        SamplingParams, {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    )
    prompts = select(read_prompts(data or shipped("prompts.jsonl")), tasks, limit)
    check_writable(out)
    plugins: PluginManager = context.obj
    open_engine = partial(
        options.open_llm,
        model,
        plugins=plugins,
        dtype=dtype,
        device=device,
        quantization=quantization,
        drafter_quantization=drafter_quantization,
        enforce_eager=enforce_eager,
        max_num_seqs=batch_size,
        max_num_batched_tokens=max(2048, (_ROWS_PER_PROMPT + (k or 0)) * batch_size),
        enable_prefix_caching=False,  # every call computes its prompts
    )
    own: dict[str, Any] = {"proposer": proposer, "drafter": drafter, "k": k, "settings": settings}
    measured = _Measured()
    with open_engine(**own, adaptive=False) as llm:
        control = llm.draft_control
        if control is None:
            raise ConfigError(f"--proposer {proposer}: nobody drafts for {model!r}")
        batches = _batches(fit_prompts(prompts, llm), batch_size)
        ks = lengths(max(own_k for _, own_k in control.members))
        max_model_len = llm.max_model_len
        try:
            _sweep(llm, batches, params, ks, measured)
            is_swept = True
        except KeyboardInterrupt:
            is_swept = False
        measured.take_engine(llm.stats)
    if not is_swept and not measured.by_k:
        note("interrupted before anything was measured")
        raise typer.Exit(options.INTERRUPTED)
    if control.cost.step(batch_size, batch_size) is None:
        raise RequestError(
            "the answers ended with their first token, so that there is no decoding to measure: "
            "give other prompts (--data)"
        )
    if is_swept:
        try:
            with ExitStack() as stack:
                own["max_model_len"] = max_model_len  # less room would cut some texts only
                engines = {
                    "plain": stack.enter_context(
                        open_engine(
                            proposer="none",
                            drafter_quantization="auto",
                            max_model_len=max_model_len,
                        )
                    ),
                    "own": stack.enter_context(open_engine(**own)),
                }
                try:
                    _pairs(engines, batches, params, pairs, measured)
                    measured.is_complete = True
                finally:
                    for engine in engines.values():
                        measured.take_engine(engine.stats)
        except KeyboardInterrupt:
            pass
    report = _report(control, measured, ks, batches, batch_size)
    if not measured.is_complete:
        note("interrupted: the figures are of what was measured so far")
    print_report(
        report, out, {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    )
    if params.greedy or seed is not None:
        different = [prompt_id for prompt_id, texts in measured.texts.items() if len(texts) > 1]
        judge_differences(different, invariant=measured.is_invariant)
    if not measured.is_complete:
        raise typer.Exit(options.INTERRUPTED)


def _batches(fitting: Sequence[tuple[BenchPrompt, list[int]]], batch_size: int) -> list[_Batch]:
    """Put prompts together: each by itself, or so many of all tasks, mixed; full batches only."""
    if batch_size == 1:
        return [_Batch(prompt.task, [prompt], [ids]) for prompt, ids in fitting]
    of_tasks: dict[str, list[tuple[BenchPrompt, list[int]]]] = {}
    for prompt, ids in fitting:
        of_tasks.setdefault(prompt.task, []).append((prompt, ids))
    mixed = [item for turn in zip_longest(*of_tasks.values()) for item in turn if item is not None]
    number = -(-len(mixed) // batch_size)
    if len(mixed) % batch_size:
        note(f"{len(mixed)} prompts do not fill batches of {batch_size}: some come more than once")
    filled = list(islice(cycle(mixed), number * batch_size))
    batches = []
    for start in range(0, len(filled), batch_size):
        each = filled[start : start + batch_size]
        batches.append(_Batch("", [prompt for prompt, _ in each], [ids for _, ids in each]))
    return batches


def _sweep(
    llm: LLM,
    batches: Sequence[_Batch],
    params: SamplingParams,
    ks: Sequence[int],
    measured: _Measured,
) -> None:
    """Answer each batch with each number of draft tokens; who begins changes with every batch."""
    note(f"drafting {', '.join(map(str, ks))} tokens for {_prompts(batches)}")
    few = params.model_copy(update={"max_tokens": _WARM_UP_TOKENS})
    for k in (0, ks[-1]):  # the first run of a kernel is slower than all others
        _call(llm, batches[0], few, k)
    with progress(len(batches) * len(ks)) as advance:
        for index, batch in enumerate(batches):
            first = index % len(ks)
            calls: dict[int, _Call] = {}
            for visit, k in enumerate([*ks[first:], *ks[:first]]):
                advance(f"{batch.task} {k} draft tokens".strip(), 0)
                calls[k], outputs = _call(llm, batch, params, k)
                _take_texts(measured, batch, outputs)
                if k:
                    stats = [output.stats for output in outputs]
                    measured.calls += stats
                    (measured.later_visits if visit else measured.first_visits).extend(stats)
                advance("", 1)
            for k, call in calls.items():
                measured.by_k.setdefault(k, []).append(call.after)


def _pairs(
    engines: dict[str, LLM],
    batches: Sequence[_Batch],
    params: SamplingParams,
    repeats: int,
    measured: _Measured,
) -> None:
    """Answer each batch with both engines, which begin in turns."""
    note(f"comparing with plain decoding on {_prompts(batches)}; pairs of runs: {repeats}")
    few = params.model_copy(update={"max_tokens": _WARM_UP_TOKENS})
    for llm in engines.values():
        _call(llm, batches[0], few)
    with progress(repeats * len(batches) * 2) as advance:
        for repeat in range(repeats):
            for index, batch in enumerate(batches):
                calls: dict[str, _Call] = {}
                names = list(engines) if (repeat + index) % 2 else list(reversed(engines))
                for name in names:
                    advance(f"{batch.task} pair {repeat + 1} of {repeats}".strip(), 0)
                    calls[name], outputs = _call(engines[name], batch, params)
                    _take_texts(measured, batch, outputs)
                    advance("", 1)
                own, plain = calls["own"], calls["plain"]
                measured.pairs.append(
                    Pair(repeat, batch.task, own.whole, plain.whole, own.stats.num_steps)
                )
                measured.plain.append(plain)


def _call(
    llm: LLM, batch: _Batch, params: SamplingParams, k: int | None = None
) -> tuple[_Call, list[RequestOutput]]:
    """Answer a batch with up to `k` draft tokens a step; None: as many as the engine likes."""
    each = []
    for prompt in batch.prompts:
        update: dict[str, Any] = {"num_speculative_tokens": k}
        if prompt.prediction is not None and llm.takes_prediction:
            update["prediction"] = prompt.prediction
        each.append(params.model_copy(update=update))
    start = time.perf_counter()
    outputs = llm.generate(batch.token_ids, each)
    seconds = time.perf_counter() - start
    for prompt, output in zip(batch.prompts, outputs, strict=True):
        if output.outputs[0].finish_reason == "error":
            raise EngineError(
                f"prompt {prompt.id!r}: the answer ended early: {output.outputs[0].stop_reason}"
            )
    stats = pooled(output.stats for output in outputs)
    first = max(output.stats.time_to_first_token or 0.0 for output in outputs)
    return _Call(Timed(stats.num_output_tokens, seconds), first, stats), outputs


def _take_texts(measured: _Measured, batch: _Batch, outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(batch.prompts, outputs, strict=True):
        measured.texts.setdefault(prompt.id, set()).add(tuple(output.outputs[0].token_ids))


def _report(
    control: DraftControl,
    measured: _Measured,
    ks: Sequence[int],
    batches: Sequence[_Batch],
    batch_size: int,
) -> Report:
    """Conclude from what was measured."""
    members = [(name, control.rates(name)) for name, _ in control.members]
    economy = Economy(members, control.cost, batch_size)
    stats = pooled(measured.calls)
    plain_seconds = sum(call.whole.seconds for call in measured.plain)
    findings = Findings(
        economy=economy,
        num_steps=stats.num_steps - stats.num_requests,  # the first has none to verify
        num_drafts=stats.num_verify_steps,
        was_asked=any(control.cost.drafting_points(name, batch_size) for name, _ in members),
        faults=measured.faults,
        measured=speed(measured.pairs),
        tasks=by_task(measured.pairs),
        prompt_share=ratio(sum(call.first for call in measured.plain), plain_seconds) or 0.0,
        first_and_again=_first_and_again(measured),
    )
    return Report(
        findings=findings,
        verdict=judge(findings),
        ks=ks,
        by_k=measured.by_k,
        stats=stats,
        num_prompts=len({prompt.id for batch in batches for prompt in batch.prompts}),
        num_tasks=len({prompt.task for batch in batches for prompt in batch.prompts}),
        num_pairs=len({pair.repeat for pair in measured.pairs}),
        is_complete=measured.is_complete,
    )


def _first_and_again(measured: _Measured) -> tuple[float, float] | None:
    """Return the first draft tokens accepted a step: of new prompts, of those that came again."""
    rates = []
    for visits in (measured.first_visits, measured.later_visits):
        stats = pooled(visits)
        rate = ratio(sum(stats.num_accepted_at[:1]), stats.num_steps - stats.num_requests)
        if rate is None:
            return None
        rates.append(rate)
    return rates[0], rates[1]


def _prompts(batches: Sequence[_Batch]) -> str:
    return counted(sum(len(batch.prompts) for batch in batches), "prompt")
