"""What a prediction gains the ngram proposer where a given text is edited, and what it costs.

usage: python tests/bench_prediction.py [--model smollm2] [-k 5 10] [--max-tokens 320]
           [--no-model] [--repeats 1]

1. Cost: one new token taken, five drafted, at outputs of 1,000 and 100,000 tokens along a
   prediction as long; the ratio of the medians should be at most 2, else it exits 1.
2. Replay: greedy decodes whose output is known, the edited text (only the tokenizer is needed, so
   this is exact): tokens per step with history alone and with the prediction. Three times: the
   text is in the prompt, it is not, and the prediction is another task's text.
3. The model itself, plain and with both, in turns; a small model edits badly, its output is what
   it is. Tokens per second with prefill. `--no-model` leaves this out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from foresay.core.plugins import PluginManager
from foresay.core.proposer import DraftInput, DraftRequest
from foresay_ngram import NgramConfig
from foresay_ngram.proposer import NgramProposer

LENGTHS = (1_000, 100_000)
LIMIT = 2.0

LETTER = """\
Dear Ms Okafor,

Thank you for your interest in our spring workshop. It takes place on Friday 14 March at the town
library, from ten in the morning until four in the afternoon. Lunch is included in the fee of 35
euros, which you can pay at the door. Please bring a notebook and, if you have one, a laptop.

Should you be unable to come on 14 March, tell us by the end of February and we will offer your
seat to someone on the waiting list. There is a second workshop in autumn.

With kind regards,
Jonas Lindqvist
"""

CODE = '''\
def merge_intervals(data):
    """Merge overlapping intervals; `data` is a list of (start, end) pairs."""
    if not data:
        return []
    data = sorted(data, key=lambda pair: pair[0])
    merged = [data[0]]
    for start, end in data[1:]:
        last_start, last_end = merged[-1]
        if start <= last_end:
            merged[-1] = (last_start, max(last_end, end))
        else:
            merged.append((start, end))
    return merged


def total_length(data):
    """Return how much the intervals in `data` cover together."""
    return sum(end - start for start, end in merge_intervals(data))
'''

ESSAY = """\
The first lighthouses were hills on which a fire was kept. A fire burns what it is given, so
somebody had to carry wood up the hill every evening, in winter most of all. Later the fire moved
into a tower, then behind glass, and the wood became coal, oil and gas. What did not change is that
somebody had to recieve the ships: the keeper lived where he worked, wound the clockwork that
turned the lens, and wrote the weather into a book. Electric light made the keeper's evenings
shorter, and the automatic switch ended them. Today most of the towers are empty, and the lamps
are watched from an office that is far from the sea.
"""

SETTINGS = """\
# Settings of the backup job
source = /home/anna/documents
target = /mnt/backup/documents
schedule = daily
hour = 3
keep_daily = 7
keep_weekly = 4
keep_monthly = 12
compress = yes
encrypt = no
notify = anna@example.org
log_file = /var/log/backup.log
log_level = info
"""

STORY = """\
Mira found the key under the third flowerpot, where her aunt had said it would be. The house was
cold and smelled of apples. She put her bag on the kitchen table and opened all the windows. A cat
that did not belong to anyone walked in and lay down on the chair by the stove. Outside the tide
was going out, and the boats in the harbour settled on the mud one after the other. She made tea,
found the letters in the drawer, and began to read. The oldest was from the year the bridge was
built. By the time the light came on across the water she had reached the last of them, and the
tea was cold.
"""

SHOPPING = """\
Buy flour, sugar and butter for the cake
Ask Tom whether he brings the drinks
Book the small hall until eleven
Print the invitations in green
Call the band about the loudspeakers
Borrow folding chairs from the school
Find out who does not eat meat
Pick up the key on Thursday evening
"""

TABLE = """\
{
  "name": "Station Road",
  "zone": 2,
  "platforms": 4,
  "lifts": ["north", "south"],
  "open": {"from": "05:10", "to": "00:40"},
  "toilets": true,
  "parking": {"cars": 120, "bicycles": 340},
  "operator": "Regional Lines",
  "rebuilt": 1987
}
"""

MINUTES = """\
Present: Ada, Bruno, Chen, Dilara. Bruno takes the minutes.

Roof: The firm has looked at the roof and asks 8,200 for new tiles on the north side. Chen gets a
second offer before the next meeting.

Garden: The hedge is cut on the first Saturday in October. Everyone brings gloves; Ada brings the
long ladder from the cellar.

Heating: The new pump runs without a fault since May. The bill for the summer is a third lower
than last year's, and the reserve grows by 640.

Next meeting: Tuesday 4 November, seven o'clock, at Dilara's.
"""


class Task(NamedTuple):
    """An edit of a given text."""

    name: str
    instruction: str
    given: str
    edited: str


def _tasks() -> list[Task]:
    roof, garden, heating = (f"\n{part}\n" for part in MINUTES.split("\n\n")[1:4])
    tasks = [
        Task(
            "date", "The workshop is on 21 April.", LETTER, LETTER.replace("14 March", "21 April")
        ),
        Task(
            "name",
            "Address the letter to Mr Papadopoulos and let Helga Brandt sign it.",
            LETTER,
            LETTER.replace("Ms Okafor", "Mr Papadopoulos").replace(
                "Jonas Lindqvist", "Helga Brandt"
            ),
        ),
        Task("rename", "Rename data to intervals.", CODE, CODE.replace("data", "intervals")),
        Task(
            "new code",
            "Return early in total_length if there is nothing.",
            CODE,
            CODE.replace("    return sum(", "    if not data:\n        return 0\n    return sum("),
        ),
        Task("typo", "Fix the spelling.", ESSAY, ESSAY.replace("recieve", "receive")),
        Task(
            "tense",
            "Write about one keeper, a woman.",
            ESSAY,
            ESSAY.replace("where he worked", "where she worked").replace(
                "the keeper lived", "the keeper, Anna, lived"
            ),
        ),
        Task(
            "insert",
            "Add the line keep_yearly = 3 after keep_monthly.",
            SETTINGS,
            SETTINGS.replace("keep_monthly = 12\n", "keep_monthly = 12\nkeep_yearly = 3\n"),
        ),
        Task(
            "delete",
            "Leave the cat out.",
            STORY,
            STORY.replace(
                " A cat\nthat did not belong to anyone walked in and lay down on the chair by the "
                "stove.",
                "",
            ),
        ),
        Task(
            "bullets",
            "Make it a list with bullets.",
            SHOPPING,
            "".join(f"- {line}\n" for line in SHOPPING.splitlines()),
        ),
        Task(
            "indent",
            "Indent by four spaces more.",
            TABLE,
            "".join(f"    {line}\n" for line in TABLE.splitlines()),
        ),
        Task(
            "move",
            "Put the heating before the roof.",
            MINUTES,
            MINUTES.replace(roof + garden + heating, heating + roof + garden),
        ),
        Task(
            "chatty",
            "Correct the price to 8,900, and say what you did.",
            MINUTES,
            "Sure! Here are the minutes, with the price corrected:\n\n"
            + MINUTES.replace("8,200", "8,900")
            + "\nI changed the price of the tiles from 8,200 to 8,900.",
        ),
    ]
    for task in tasks:
        assert task.given != task.edited, task.name
    return tasks


# --- 1. cost


def cost(rounds: int) -> float:
    """Time steps along predictions of both lengths, in turns; return the ratio of the medians."""
    proposer = NgramProposer(NgramConfig(tree=False))
    rng = random.Random(0)
    outputs: dict[int, list[int]] = {}
    predictions: dict[int, list[int]] = {}
    seconds: dict[int, list[float]] = {n: [] for n in LENGTHS}
    for n in LENGTHS:
        prediction = [int(rng.paretovariate(0.8)) % 49152 for _ in range(n + rounds)]
        output: list[int] = []  # one token in twenty is dropped, replaced or preceded by another
        for token in prediction:
            edit = rng.randrange(60)
            if edit in (0, 1):
                output.append(int(rng.paretovariate(0.8)) % 49152)
            if edit not in (1, 2):
                output.append(token)
        predictions[n], outputs[n] = prediction, output
        num_first = len(output) - rounds
        start = time.perf_counter()
        batch = DraftInput([DraftRequest(str(n), output[:num_first], 1, 5, prediction)])
        proposer.propose(batch)
        took = time.perf_counter() - start
        print(f"{n:>7} tokens along a prediction as long: {took / n * 1e6:5.2f} us a token at once")
    for new in range(1, rounds + 1):
        for n in LENGTHS:
            output = outputs[n][: len(outputs[n]) - rounds + new]
            batch = DraftInput([DraftRequest(str(n), output, 1, 5, predictions[n])])
            start = time.perf_counter()
            proposer.propose(batch)
            seconds[n].append(time.perf_counter() - start)
    medians = [statistics.median(seconds[n]) for n in LENGTHS]
    for n, median in zip(LENGTHS, medians, strict=True):
        worst = max(seconds[n])
        print(f"{n:>7} tokens: {median * 1e6:6.2f} us a step (median), worst {worst * 1e6:.0f} us")
    ratio = medians[1] / medians[0]
    print(f"ratio {ratio:.2f} (limit {LIMIT})")
    return ratio


# --- 2. replay


def num_steps(
    prompt: Sequence[int], output: Sequence[int], prediction: Sequence[int], k: int
) -> int:
    """Steps after the first token until a known greedy output is committed."""
    proposer = NgramProposer(NgramConfig(tree=False))
    steps, done = 0, 1
    while done < len(output):
        wanted = min(k, len(output) - done - 1)
        history = [*prompt, *output[:done]]
        request = DraftRequest("replay", history, 1, wanted, prediction, len(prompt))
        drafted = proposer.propose(DraftInput([request])).token_ids[0]
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == output[done + accepted]:
            accepted += 1
        done += accepted + 1
        steps += 1
    return steps


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the prompt of a chat's first turn."""
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def replay(tokenizer: Any, tasks: Sequence[Task], ks: Sequence[int]) -> None:
    """Print tokens per step by task, with history alone (h) and with the prediction (p)."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    settings = ["in the prompt", "not in the prompt", "another text"]
    print("\ntokens per step, replayed: history alone -> with the prediction")
    print(f"{'task':9} {'tokens':>6}", *(f"{f'k={k}, {s}':>23}" for k in ks for s in settings))
    totals: dict[tuple[int, str], list[int]] = {(k, s): [0, 0] for k in ks for s in settings}
    total_tokens = 0
    for index, task in enumerate(tasks):
        output = [*ids(task.edited), tokenizer.eos_token_id]
        full = chat_ids(tokenizer, f"{task.instruction}\n\n{task.given}")
        short = chat_ids(tokenizer, task.instruction)
        # Two tasks may share a text: take the next with another one.
        others = [*tasks[index:], *tasks[:index]]
        other = next(one.given for one in others if one.given != task.given)
        num_new = len(output) - 1
        total_tokens += num_new
        cells = []
        for k in ks:
            for setting, prompt, prediction in (
                (settings[0], full, ids(task.given)),
                (settings[1], short, ids(task.given)),
                (settings[2], full, ids(other)),
            ):
                steps = num_steps(prompt, output, (), k), num_steps(prompt, output, prediction, k)
                for i in (0, 1):
                    totals[k, setting][i] += steps[i]
                cells.append(f"{num_new / steps[0]:14.2f} ->{num_new / steps[1]:6.2f}")
        print(f"{task.name:9} {len(output):6}", *cells, flush=True)
    cells = [
        f"{total_tokens / without:14.2f} ->{total_tokens / with_one:6.2f}"
        for without, with_one in totals.values()
    ]
    print(f"{'ALL':9} {total_tokens + len(tasks):6}", *cells)


# --- 3. the model


def decode(model: str, tasks: Sequence[Task], k: int, max_tokens: int, repeats: int) -> None:
    """Decode each task plain, from history alone, and with the prediction; print speeds."""
    from foresay import LLM, SamplingParams

    common: dict[str, Any] = {"model": model, "enable_prefix_caching": False}
    plain = LLM(proposer=None, **common)
    drafting = LLM(proposer="ngram", num_speculative_tokens=k, **common, adaptive=False)
    names = ["plain", "ngram", "+prediction"]
    print(f"\n{model}, k={k}: tokens per second, and tokens per step")
    print(f"{'task':9} {'tokens':>6}", *(f"{name:>12}" for name in names), "  steps: ngram -> +")
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for llm in (plain, drafting):
        llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=16))
    seconds_in_all = [0.0] * len(names)
    steps_in_all = [0, 0]
    tokens_in_all = num_equal = 0
    for task in tasks:
        prompt = chat_ids(plain.tokenizer, f"{task.instruction}\n\n{task.given}")
        predicting = SamplingParams(temperature=0.0, max_tokens=max_tokens, prediction=task.given)
        seconds: list[list[float]] = [[] for _ in names]
        outputs: list[Any] = []
        for _ in range(repeats):
            outputs = []
            for which, (llm, params) in enumerate(
                [(plain, greedy), (drafting, greedy), (drafting, predicting)]
            ):
                start = time.perf_counter()
                outputs.append(llm.generate([prompt], params)[0])
                seconds[which].append(time.perf_counter() - start)
        ids = [output.outputs[0].token_ids for output in outputs]
        num_equal += ids[0] == ids[1] == ids[2]
        medians = [statistics.median(times) for times in seconds]
        tokens_in_all += len(ids[0])
        for which, median in enumerate(medians):
            seconds_in_all[which] += median
        for i in (0, 1):
            steps_in_all[i] += outputs[i + 1].stats.num_steps
        print(
            f"{task.name:9} {len(ids[0]):6}",
            *(f"{len(ids[0]) / median:12.1f}" for median in medians),
            f"{outputs[1].stats.tokens_per_step:14.2f} ->{outputs[2].stats.tokens_per_step:6.2f}",
            flush=True,
        )
    print(
        f"{'ALL':9} {tokens_in_all:6}",
        *(f"{tokens_in_all / total:12.1f}" for total in seconds_in_all),
        f"{tokens_in_all / steps_in_all[0]:14.2f} ->{tokens_in_all / steps_in_all[1]:6.2f}",
        f"   ids equal: {num_equal} of {len(tasks)}",
    )


def main() -> int:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("-k", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--rounds", type=int, default=500, help="steps timed at each length")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-model", action="store_true")
    options = parser.parse_args()

    ratio = cost(options.rounds)
    tasks = _tasks()
    alias = PluginManager.load().model(options.model)
    folder = options.model if alias is None else alias.resolve()
    from transformers import AutoTokenizer

    replay(AutoTokenizer.from_pretrained(folder), tasks, options.k)
    if not options.no_model:
        for k in options.k:
            decode(options.model, tasks, k, options.max_tokens, options.repeats)
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
