"""`foresay showcase`: three prompts, plain and with a proposer: the same text, and how much sooner.

Both models are loaded once; the two take turns, prompt by prompt, so that a machine that slows
down slows both.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foresay.core.commands import options
from foresay.core.commands.prompts import read_prompts, shipped
from foresay.core.commands.report import judge_differences, pooled
from foresay.core.commands.table import print_table
from foresay.core.config import SamplingParams
from foresay.core.errors import EngineError
from foresay.core.plugins import PluginManager
from foresay.core.stats import RequestStats, show

if TYPE_CHECKING:
    from foresay.core.llm import LLM


@dataclass(slots=True)
class _Timed:
    """One answer and the wall seconds it took, prefill included."""

    token_ids: list[int]
    seconds: float
    stats: RequestStats


def showcase(
    context: typer.Context,
    model: options.Model = "smollm2",
    proposer: options.ProposerName = "auto",
    k: options.NumDraftTokens = None,
    adaptive: options.Adaptive = True,
    max_tokens: options.MaxTokens = 128,
    dtype: options.Dtype = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 3,
) -> None:
    """Answer three prompts without and with a proposer, and compare: equal ids, and the speed."""
    plugins: PluginManager = context.obj
    common: dict[str, Any] = {
        "plugins": plugins,
        "dtype": dtype,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # every round computes its prompt
    }
    plain = options.open_llm(model, proposer="none", **common)
    drafting = options.open_llm(model, proposer=proposer, k=k, adaptive=adaptive, **common)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    rows: list[list[str]] = []
    all_plain: list[_Timed] = []
    all_drafting: list[_Timed] = []
    different: list[str] = []
    with plain, drafting:
        for llm in (plain, drafting):  # the first run of a kernel is slower than all others
            llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=8))
        for prompt in read_prompts(shipped("showcase.jsonl")):
            print(f"\n--- {prompt.id}: {prompt.text.splitlines()[0]}\n", flush=True)
            tokens = plain.chat_prompt([{"role": "user", "content": prompt.text}])
            rounds = []
            for number in range(repeats):
                rounds.append(
                    (
                        _answer(plain, tokens, params, shown=False),
                        _answer(drafting, tokens, params, shown=number == 0),
                    )
                )
            first, second = (_median([pair[i] for pair in rounds]) for i in (0, 1))
            if any(a.token_ids != b.token_ids for a, b in rounds):
                different.append(prompt.id)
            all_plain.append(first)
            all_drafting.append(second)
            rows.append(_row(prompt.id, [first], [second], prompt.id not in different))
        rows.append(_row("ALL", all_plain, all_drafting, not different))
        invariant = plain.stats.row_invariant and drafting.stats.row_invariant
    print(flush=True)
    print_table(
        ["prompt", "tokens", "plain tokens/s", f"{drafting.proposer_name or 'none'} tokens/s",
         "speedup", "mean acceptance length", "tokens per step", "ids equal"],
        rows,
    )  # fmt: skip
    judge_differences(different, invariant=invariant)


def _answer(llm: LLM, tokens: list[int], params: SamplingParams, *, shown: bool) -> _Timed:
    """Answer one prompt; the text goes to stdout as it comes if it is to be shown."""
    start = time.perf_counter()
    for chunk in llm.stream(tokens, params):
        if shown:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        if chunk.output is not None:
            seconds = time.perf_counter() - start
            if shown:
                print()
            return _Timed(chunk.output.outputs[0].token_ids, seconds, chunk.output.stats)
    raise EngineError("the stream ended without an output")


def _median(runs: list[_Timed]) -> _Timed:
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def _row(name: str, plain: list[_Timed], drafting: list[_Timed], equal: bool) -> list[str]:
    tokens = [sum(len(run.token_ids) for run in runs) for runs in (plain, drafting)]
    seconds = [sum(run.seconds for run in runs) for runs in (plain, drafting)]
    speeds = [n / s for n, s in zip(tokens, seconds, strict=True)]
    figures = pooled(run.stats for run in drafting)
    return [
        name,
        str(tokens[0]),
        f"{speeds[0]:.1f}",
        f"{speeds[1]:.1f}",
        f"{speeds[1] / speeds[0]:.2f}x",
        show(figures.mean_acceptance_length),
        show(figures.tokens_per_step),
        "yes" if equal else "NO",
    ]
