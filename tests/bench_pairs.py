"""Whether speculation is ever slower than plain decoding: pairs of runs, in turns, on one machine.

usage: python tests/bench_pairs.py --proposers ngram,suffix,eagle,ngram+eagle [--model smollm2]
           [--data FILE.jsonl] [--drafter NAME=PATH]... [--set NAME.KEY=VALUE]... [-k K]
           [--conditions batch1,ttft,poor,batch8,batch32,sampled,random] [--limit 4 per task]
           [--max-tokens 64] [--prompt-cap N] [--pairs 9] [--no-adaptive] [--json OUT]

Every proposer has an engine of its own, all loaded at once, with the same limits and no prefix
cache. In a round each of them, plain decoding among them, answers all prompts of a condition,
taking turns call by call in an order that changes with every call. A pair is a proposer and the
plain run of the same round:

    batch1   greedy, one prompt after another: a row for each task, and one for all
    batch8   greedy, 8 prompts of all tasks together; batch32 likewise
    sampled  temperature 1, one prompt after another, each with a seed
    random   greedy; prompts of uniformly random token ids, new ones in every round
    ttft     the time to the first token, in the runs of batch1: medians over all prompts
    poor     an EAGLE head of random weights, in the runs of batch1

A row has the median over the pairs, of plain seconds / the proposer's (speed; at least 0.97), or
for ttft of the proposer's seconds / plain ones (time; at most 1.05); the 95 % bound of that median
on the bad side, which assumes nothing of how times are distributed; and the range of the pairs.
Verdicts: "shown" (the bound is within the limit too), "met" (the median is), "missed".

What a proposer has learnt of speed and acceptance stays with it from round to round. Finished
outputs do not: the same prompts come again, and `suffix` would know the answers (`--set
suffix.max_remembered_tokens=N` lets it). Exits 1 if a limit is missed, or if token ids differ from
plain decoding's though rows are invariant.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from foresay import LLM, SamplingParams
from foresay.core.commands.fitting import fit_prompts
from foresay.core.commands.options import parse_settings
from foresay.core.commands.prompts import read_prompts, select, shipped
from foresay.core.commands.report import judge_differences, note
from foresay.core.errors import EngineError, ForesayError
from foresay.core.plugins import PluginManager

sys.path.insert(0, str(Path(__file__).parent))
import eagle_heads

PLAIN = "none"
POOR = "poor"
ALL = "ALL"
ONE_BY_ONE = ("batch1", "ttft", POOR)  # conditions that share their runs
BATCHES = {"batch8": 8, "batch32": 32}
CONDITIONS = (*ONE_BY_ONE, *BATCHES, "sampled", "random")
SPEED, TIME = 0.97, 1.05  # limits: at least, and at most
CONFIDENCE = 0.95
RANDOM_LENGTH = 128  # token ids of a random prompt
POOR_VOCABULARY = 8192
WARM_UP_TOKENS = 8
ROW_COST = 0.08  # of a row more in a forward pass, beside the first; for the estimate only
FORGETFUL: dict[str, dict[str, Any]] = {"suffix": {"max_remembered_tokens": 0}}


# --- statistics


def rank_of_bound(num_pairs: int) -> int:
    """Return the j for which the j-th smallest value is a lower bound of the median; 0: none is.

    The largest j with P(Binomial(num_pairs, 1/2) < j) <= 1 - CONFIDENCE (the sign test, inverted).
    """
    tail = 0
    for j in range(num_pairs + 1):
        tail += comb(num_pairs, j)
        if tail > (1 - CONFIDENCE) * 2**num_pairs:
            return j
    raise AssertionError("unreachable: the whole distribution is above any tail")


def lower_bound(values: Sequence[float]) -> float | None:
    """Return what the median is at least, one-sided; None: too few values to say."""
    rank = rank_of_bound(len(values))
    return sorted(values)[rank - 1] if rank else None


def upper_bound(values: Sequence[float]) -> float | None:
    """Return what the median is at most, one-sided; None: too few values to say."""
    bound = lower_bound([-value for value in values])
    return None if bound is None else -bound


@dataclass(frozen=True)
class Row:
    """One line of the table: a proposer against plain decoding."""

    condition: str
    task: str
    proposer: str
    pairs: int
    plain_seconds: float  # median
    median: float
    bound: float | None
    lowest: float
    highest: float
    verdict: str

    def __str__(self) -> str:
        bound = "n/a" if self.bound is None else f"{self.bound:.3f}"
        spread = f"{self.lowest:.3f}..{self.highest:.3f}"
        return (
            f"{self.condition:<8} {self.task:<15} {self.proposer:<20} {self.pairs:>5} "
            f"{self.plain_seconds:>8.3f} {self.median:>7.3f} {bound:>7} {spread:>15}  "
            f"{self.verdict}"
        )


HEADING = (
    f"{'':<8} {'task':<15} {'proposer':<20} {'pairs':>5} {'plain s':>8} {'median':>7} "
    f"{'bound':>7} {'spread':>15}  verdict"
)


def judge(
    condition: str,
    task: str,
    proposer: str,
    pairs: Sequence[tuple[float, float]],
) -> Row:
    """Make a row of pairs (plain seconds, the proposer's seconds)."""
    is_time = condition == "ttft"
    ratios = [own / plain if is_time else plain / own for plain, own in pairs]
    bound = upper_bound(ratios) if is_time else lower_bound(ratios)

    def is_within(value: float) -> bool:
        return value <= TIME if is_time else value >= SPEED

    verdict = "missed"
    if is_within(median(ratios)):
        verdict = "shown" if bound is not None and is_within(bound) else "met"
    return Row(
        condition, task, proposer, len(pairs), median(plain for plain, _ in pairs),
        median(ratios), bound, min(ratios), max(ratios), verdict,
    )  # fmt: skip


# --- what is answered


class Prompt(NamedTuple):
    """A prompt and how it is continued."""

    id: str
    token_ids: list[int]
    params: SamplingParams


class Workload(NamedTuple):
    """Prompts that are timed as one; each call answers some of them together."""

    name: str
    calls: list[list[Prompt]]


class Answers(NamedTuple):
    """What one engine made of a workload."""

    seconds: float
    first_tokens: list[float]  # seconds, of each prompt
    token_ids: dict[str, list[int]]  # by prompt

    def joined(self, other: Answers) -> Answers:
        """Return these and others."""
        return Answers(
            self.seconds + other.seconds,
            self.first_tokens + other.first_tokens,
            self.token_ids | other.token_ids,
        )


Round = dict[str, dict[str, Answers]]  # by workload, then by proposer


class Source:
    """The prompts of all conditions. Knows tokens, and no engine."""

    def __init__(self, by_task: Mapping[str, Sequence[tuple[str, list[int]]]], num_ids: int, *,
                 limit: int, max_tokens: int, prompt_cap: int | None) -> None:  # fmt: skip
        """`by_task`: ids and token ids; `num_ids`: the vocabulary that random prompts are from."""
        self.by_task = {
            task: [(name, ids[-prompt_cap:] if prompt_cap else ids) for name, ids in rows]
            for task, rows in by_task.items()
        }
        self.num_ids, self.limit, self.prompt_cap = num_ids, limit, prompt_cap
        self.greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def workloads(self, condition: str, round_number: int) -> list[Workload]:
        """Return what every engine answers in a round."""
        if condition in ONE_BY_ONE:
            return [
                Workload(task, [[Prompt(*row, self.greedy)] for row in rows[: self.limit]])
                for task, rows in self.by_task.items()
            ]
        if condition == "random":
            draw = random.Random(round_number)
            length = min(RANDOM_LENGTH, self.prompt_cap or RANDOM_LENGTH)
            texts = [draw.choices(range(self.num_ids), k=length) for _ in range(2 * self.limit)]
            prompts = [
                Prompt(f"{round_number}.{number}", ids, self.greedy)
                for number, ids in enumerate(texts)
            ]
            return [Workload("random", [[prompt] for prompt in prompts])]
        size = BATCHES.get(condition, 1)
        rows = self._mixed(size)
        if condition == "sampled":
            prompts = [
                Prompt(*row, self.greedy.model_copy(update={"temperature": 1.0, "seed": seed}))
                for seed, row in enumerate(rows)
            ]
        else:
            prompts = [Prompt(*row, self.greedy) for row in rows]
        calls = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return [Workload("mixed", calls)]

    def _mixed(self, size: int) -> list[tuple[str, list[int]]]:
        """Take from the tasks in turns: `limit` of each, and what fills the last batch."""
        turns = zip_longest(*self.by_task.values())
        rows = [row for turn in turns for row in turn if row is not None]
        count = sum(len(rows[: self.limit]) for rows in self.by_task.values())
        return rows[: -(-count // size) * size]


# --- engines


def random_head(model: str, source: Path | None, folder: Path) -> Path:
    """Write an EAGLE head that knows nothing: noise in the shapes of `source`, or of EAGLE-3."""
    if source is None:
        alias = PluginManager.load().model(model)
        config = AutoConfig.from_pretrained(alias.resolve() if alias is not None else model)
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "vocab_size", "max_position_embeddings")  # fmt: skip
        last = config.num_hidden_layers
        return eagle_heads.eagle3(
            taps=(2, last // 2, last - 3),
            draft_vocab=POOR_VOCABULARY,
            **{name: getattr(config, name) for name in names},
        ).save(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.is_floating_point() and tensor.numel() > 1:
            values = tensor.float()
            noise = torch.randn(tensor.shape, generator=generator)
            tensor = (values.mean() + values.std() * noise).to(tensor.dtype)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def owners(text: str, separator: str, names: Sequence[str]) -> list[str]:
    """Return the names that an option's text begins with: whose it is."""
    return [name for name in names if text.startswith(name + separator)]


def open_engine(
    options: argparse.Namespace, chain: str, drafters: Mapping[str, str], k: int | None
) -> LLM:
    """Load the model with a chain of proposers ('a+b'), or with none."""
    limits = {
        "num_blocks": options.num_blocks,
        "max_num_seqs": max(BATCHES.values()),
        "enable_prefix_caching": False,
    }
    if chain == PLAIN:
        return LLM(options.model, None, **limits)
    members = chain.split("+")
    pairs = [text for text in options.set if owners(text, ".", members)]
    settings = {name: dict(FORGETFUL[name]) for name in members if name in FORGETFUL}
    # As for a chain even where there is one: it gives the settings by proposer.
    for name, own in parse_settings(pairs, f"{chain.replace('+', ',')},").items():
        settings.setdefault(name, {}).update(own)
    own_drafters = {name: drafters[name] for name in members if name in drafters}
    is_chain = len(members) > 1
    return LLM(
        options.model,
        ",".join(members),
        drafter=own_drafters or None if is_chain else own_drafters.get(chain),
        proposer_settings=settings if is_chain else settings.get(chain, {}),
        num_speculative_tokens=k,
        adaptive=options.adaptive,
        **limits,
    )


def answer(llm: LLM, call: Sequence[Prompt], name: str) -> Answers:
    """Answer prompts together."""
    first_tokens, token_ids = [], {}
    start = time.perf_counter()
    outputs = llm.generate(
        [prompt.token_ids for prompt in call], [prompt.params for prompt in call]
    )
    seconds = time.perf_counter() - start
    for prompt, output in zip(call, outputs, strict=True):
        (only,) = output.outputs
        if only.finish_reason == "error":
            raise EngineError(f"{name}, prompt {prompt.id!r}: {only.stop_reason}")
        assert output.stats.time_to_first_token is not None
        first_tokens.append(output.stats.time_to_first_token)
        token_ids[prompt.id] = only.token_ids
    return Answers(seconds, first_tokens, token_ids)


def answer_in_turn(engines: Mapping[str, LLM], workload: Workload, turn: int) -> dict[str, Answers]:
    """Have every engine answer a workload, taking turns call by call.

    So what the machine does meanwhile, for longer than a few calls, is shared by all.
    """
    done = {name: Answers(0.0, [], {}) for name in engines}
    for number, call in enumerate(workload.calls):
        for name in in_turn(list(engines), turn + number):
            done[name] = done[name].joined(answer(engines[name], call, name))
    return done


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a turn: rotated by one every other turn, and backwards in between."""
    first = turn // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if turn % 2 else order


def measure(
    engines: Mapping[str, LLM],
    workloads: Callable[[int], list[Workload]],
    num_rounds: int,
    condition: str,
) -> list[Round]:
    """Let the engines take turns for so many rounds, after a warm-up of each."""
    first = workloads(0)[0]
    for name, llm in engines.items():
        call = [
            prompt._replace(params=prompt.params.model_copy(update={"max_tokens": WARM_UP_TOKENS}))
            for prompt in first.calls[0]
        ]
        answer(llm, call, name)
    rounds = []
    start = time.perf_counter()
    for number in range(num_rounds):
        done: Round = {}
        for index, workload in enumerate(workloads(number)):
            done[workload.name] = answer_in_turn(engines, workload, number + index)
        rounds.append(done)
        left = (time.perf_counter() - start) / len(rounds) * (num_rounds - len(rounds))
        note(f"{condition}: round {number + 1} of {num_rounds}, {left / 60:.1f} min left of it")
    return rounds


def differences(rounds: Sequence[Round], condition: str) -> list[str]:
    """Name the prompts whose token ids were others than plain decoding's, and with whom."""
    found: dict[str, None] = {}
    for done in rounds:
        for workload, each in done.items():
            for name, answers in each.items():
                for prompt, ids in answers.token_ids.items():
                    if ids != each[PLAIN].token_ids[prompt]:
                        found[f"{condition} {workload} {prompt} with {name}"] = None
    return list(found)


# --- rows


def pairs_of(
    rounds: Sequence[Round], name: str, figure: Callable[[list[Answers]], float], *tasks: str
) -> list[tuple[float, float]]:
    """Return a figure of these workloads together, or of all: (plain, the proposer's) by round."""
    return [
        (
            figure([done[task][PLAIN] for task in tasks or done]),
            figure([done[task][name] for task in tasks or done]),
        )
        for done in rounds
    ]


def total_seconds(each: list[Answers]) -> float:
    """Return the seconds of all."""
    return sum(answers.seconds for answers in each)


def first_token(each: list[Answers]) -> float:
    """Return the median time to the first token, over all prompts."""
    return median(seconds for answers in each for seconds in answers.first_tokens)


def make_rows(
    rounds: Sequence[Round], names: Sequence[str], conditions: Sequence[str]
) -> list[Row]:
    """Make the rows of conditions that share these rounds. `names`: without plain decoding."""
    rows = []
    for condition in conditions:
        for name in names:
            if (name == POOR) != (condition == POOR):
                continue
            figure = first_token if condition == "ttft" else total_seconds
            if condition == "batch1":
                for task in rounds[0]:
                    rows.append(judge(condition, task, name, pairs_of(rounds, name, figure, task)))
            rows.append(judge(condition, ALL, name, pairs_of(rounds, name, figure)))
    return rows


# --- the whole


class Phase(NamedTuple):
    """Conditions that are measured in the same runs, and by whom."""

    conditions: list[str]
    names: list[str]


def phases(conditions: Sequence[str], proposers: Sequence[str]) -> list[Phase]:
    """Put together what shares its runs."""
    found = []
    shared = [condition for condition in conditions if condition in ONE_BY_ONE]
    if shared:
        poor = [POOR] if POOR in shared else []
        found.append(Phase(shared, [*([] if shared == [POOR] else proposers), *poor]))
    others = [condition for condition in conditions if condition not in ONE_BY_ONE]
    return [*found, *(Phase([condition], list(proposers)) for condition in others)]


def estimate(llm: LLM, source: Source, todo: Sequence[Phase], num_rounds: int) -> float:
    """Return about how many seconds all will take, if no proposer gains or loses anything."""
    prompt = source.workloads("random", -1)[0].calls[0][0]
    spent = []
    for max_tokens in (1, 1, 17):  # the first run of a kernel is slower than all others
        params = prompt.params.model_copy(update={"max_tokens": max_tokens, "ignore_eos": True})
        spent.append(answer(llm, [prompt._replace(params=params)], PLAIN).seconds)
    prompt_token, step = spent[1] / len(prompt.token_ids), max(0.0, spent[2] - spent[1]) / 16
    total = 0.0
    for phase in todo:
        calls = [call for work in source.workloads(phase.conditions[0], 0) for call in work.calls]
        once = sum(len(one.token_ids) for call in calls for one in call) * prompt_token
        for call in calls:
            once += call[0].params.max_tokens * step * (1 + ROW_COST * (len(call) - 1))
        total += once * (1 + len(phase.names)) * num_rounds
    return total


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="rows {id, task, turns}; default: the shipped")
    parser.add_argument("--proposers", default="ngram", help="names; a chain is written with '+'")
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.KEY=VALUE")
    parser.add_argument("--poor-from", type=Path, help="an EAGLE folder, for the shapes of `poor`")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--limit", type=int, default=4, help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-cap", type=int, help="keep the last so many tokens of a prompt")
    parser.add_argument("--pairs", type=int, default=9, help="rounds")
    parser.add_argument("--num-blocks", type=int, default=2048, help="KV blocks of each engine")
    parser.add_argument("--adaptive", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="where the rows go too")
    parser.add_argument("-k", type=int, help="most drafted a step")
    options = parser.parse_args()
    options.proposers = options.proposers.split(",")
    options.conditions = options.conditions.split(",")
    unknown = [name for name in options.conditions if name not in CONDITIONS]
    if unknown:
        parser.error(f"--conditions: no {unknown}; known: {', '.join(CONDITIONS)}")
    if {PLAIN, POOR} & set(options.proposers):
        parser.error(f"--proposers: {PLAIN!r} and {POOR!r} are not for naming: they run anyway")
    members = "+".join(options.proposers).split("+")
    if POOR in options.conditions:
        members.append("eagle")
    for option, separator in (("drafter", "="), ("set", ".")):
        for text in getattr(options, option):
            if not owners(text, separator, members):
                parser.error(
                    f"--{option} {text!r}: expected NAME{separator}..., of {', '.join(members)}"
                )
    return options


def load_engines(
    options: argparse.Namespace, names: Sequence[str], stack: ExitStack
) -> dict[str, LLM]:
    """Load an engine for plain decoding and one for every other name; the stack closes them."""
    drafters = dict(text.split("=", 1) for text in options.drafter)
    engines = {PLAIN: stack.enter_context(open_engine(options, PLAIN, {}, None))}
    for name in names:
        if name == POOR:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            head = random_head(options.model, options.poor_from, folder / "head")
            llm = open_engine(options, "eagle", {"eagle": str(head)}, options.k)
        else:
            llm = open_engine(options, name, drafters, options.k)
        engines[name] = stack.enter_context(llm)
    return engines


def read_source(options: argparse.Namespace, llm: LLM) -> Source:
    """Tokenize the prompts that any condition needs."""
    prompts = read_prompts(options.data or shipped("prompts.jsonl"))
    num_tasks = len({prompt.task for prompt in prompts})
    enough = max(options.limit, -(-max(BATCHES.values()) // num_tasks))
    by_task: dict[str, list[tuple[str, list[int]]]] = {}
    for prompt, ids in fit_prompts(select(prompts, None, enough), llm):
        by_task.setdefault(prompt.task, []).append((prompt.id, ids))
    return Source(
        by_task, len(llm.tokenizer), limit=options.limit, max_tokens=options.max_tokens,
        prompt_cap=options.prompt_cap,
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; the exit code says whether all is well."""
    todo = phases(options.conditions, options.proposers)
    names = list(dict.fromkeys(name for phase in todo for name in phase.names))
    rows: list[Row] = []
    different: list[str] = []
    with ExitStack() as stack:
        engines = load_engines(options, names, stack)
        source = read_source(options, engines[PLAIN])
        seconds = estimate(engines[PLAIN], source, todo, options.pairs)
        note(f"about {seconds / 60:.0f} min, if a proposer takes as long as plain decoding")
        print(HEADING, flush=True)
        for phase in todo:
            condition = phase.conditions[0]
            taking_part = {name: engines[name] for name in (PLAIN, *phase.names)}
            rounds = measure(
                taking_part,
                partial(source.workloads, condition),
                options.pairs,
                "+".join(phase.conditions),
            )
            different += differences(rounds, condition)
            new = make_rows(rounds, phase.names, phase.conditions)
            print(*new, sep="\n", flush=True)
            rows += new
            if options.json is not None:
                content = {"options": vars(options), "rows": [asdict(row) for row in rows]}
                options.json.write_text(json.dumps(content, indent=2, default=str) + "\n")
        for name, llm in engines.items():
            if llm.stats.num_preemptions:
                note(f"{name}: {llm.stats.num_preemptions} preemptions; give more --num-blocks")
        invariant = all(llm.stats.row_invariant for llm in engines.values())
    judge_differences(different, invariant=invariant)
    missed = sum(row.verdict == "missed" for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} rows within their limits")
    return 1 if missed else 0


def main() -> int:
    """Run, and say in a sentence what stopped it."""
    try:
        return run(parse())
    except ForesayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
