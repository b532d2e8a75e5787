"""Correctness of the whole engine against transformers' `generate`, over a grid of conditions.

usage: python tests/grid.py --data FILE.jsonl [--model DIR] [--dtype float32|bfloat16]
                            [--per-task 4] [--max-tokens 64] [--seeded 24] [--runs N] [--from N]

float32: every run must give generate's ids, and at temperature 1 with seeds the plain run's text.
The runs cover, pairwise: proposer; one batch or one by one; block size; chunked prefill; an ample
pool or one so small that requests are preempted; prefix cache cold, warm or off.

bfloat16: speculative runs must equal the plain one, bit for bit where rows are invariant. Against
generate every row is compared along generate's ids: an argmax may differ only where the margin in
generate's row is at most twice the largest difference of that row's logits.

A row of the data is {"id", "task", "turns": [...]}; the first turn is asked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foresay import LLM, SamplingParams
from foresay.core.worker.attention import AttentionMetadata
from foresay.core.worker.kv_cache import KVCache
from foresay.core.worker.target import TargetModel, load_target

sys.path.insert(0, str(Path(__file__).parent))
from adversaries import ADVERSARIES

CHAIN = "ngram,adversaries:Drawing"
FACTORS: dict[str, tuple[Any, ...]] = {
    "proposer": ("none", "ngram", CHAIN, *ADVERSARIES),
    "batch": ("one", "each"),
    "block_size": (1, 4, 16),
    "chunk": (8, None),
    "pool": ("ample", "small"),
    "prefix": ("cold", "warm", "off"),
    "adaptive": (False, True),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """One run's setting of every factor."""

    proposer: str
    batch: str
    block_size: int
    chunk: int | None
    pool: str
    prefix: str
    adaptive: bool = False

    @property
    def possible(self) -> bool:
        """A small pool preempts only if requests share it."""
        return self.pool == "ample" or self.batch == "one"


@dataclass(slots=True)
class Result:
    """What a run gave, per prompt: greedy ids first, then seeded ids; and how it went."""

    greedy: list[list[int]]
    seeded: list[list[int]]
    num_preemptions: int
    num_cached_tokens: int
    row_invariant: bool


def pairwise(seed: int = 0) -> list[Condition]:
    """Return conditions that cover every possible pair of two factors' values."""
    names = list(FACTORS)
    every = [Condition(*values) for values in itertools.product(*FACTORS.values())]
    every = [condition for condition in every if condition.possible]

    def pairs(condition: Condition) -> set[tuple[str, Any, str, Any]]:
        return {
            (a, getattr(condition, a), b, getattr(condition, b))
            for a, b in itertools.combinations(names, 2)
        }

    missing = set().union(*map(pairs, every))
    random.Random(seed).shuffle(every)
    chosen: list[Condition] = []
    while missing:
        best = max(every, key=lambda condition: len(pairs(condition) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return sorted(
        chosen, key=lambda condition: names and FACTORS["proposer"].index(condition.proposer)
    )


def read_prompts(path: Path, per_task: int, tokenizer: Any) -> list[list[int]]:
    """Return the first prompts of each task as token ids, in the file's order."""
    seen: Counter[str] = Counter()
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if seen[row["task"]] == per_task:
            continue
        seen[row["task"]] += 1
        messages = [{"role": "user", "content": row["turns"][0]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompts.append(list(ids if isinstance(ids, list) else ids["input_ids"]))
    return prompts


def generate(
    model: Any, prompts: Sequence[list[int]], max_tokens: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield transformers' greedy ids and logits [num_tokens, vocab_size] of each prompt."""
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        yield out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def run(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    condition: Condition,
    *,
    max_tokens: int,
    num_seeded: int,
    **settings: Any,
) -> Result:
    """Decode all prompts greedily, and the first `num_seeded` at temperature 1 with seeds."""
    longest = max(map(len, prompts)) + max_tokens
    num_blocks = None
    if condition.pool == "small":  # one request fits, and a bit
        num_blocks = -(-longest // condition.block_size) + max(2, 64 // condition.block_size)
    proposer: Any = ADVERSARIES.get(condition.proposer, condition.proposer)
    llm = LLM(
        model=model,
        tokenizer=tokenizer,
        proposer=None if proposer == "none" else proposer,
        block_size=condition.block_size,
        chunked_prefill_size=condition.chunk,
        num_blocks=num_blocks,
        max_model_len=longest + 1,
        enable_prefix_caching=condition.prefix != "off",
        adaptive=condition.adaptive,
        **settings,
    )
    asked = [*prompts, *prompts[:num_seeded]]
    params = [SamplingParams(temperature=0.0, max_tokens=max_tokens)] * len(prompts)
    params += [
        SamplingParams(temperature=1.0, seed=1000 + i, max_tokens=max_tokens)
        for i in range(num_seeded)
    ]
    with llm:
        for _ in range(2 if condition.prefix == "warm" else 1):
            if condition.batch == "one":
                outputs = llm.generate(asked, params)
            else:
                outputs = [llm.generate([p], s)[0] for p, s in zip(asked, params, strict=True)]
        stats = llm.stats
    ids = [output.outputs[0].token_ids for output in outputs]
    return Result(
        ids[: len(prompts)],
        ids[len(prompts) :],
        stats.num_preemptions,
        stats.num_cached_tokens,
        stats.row_invariant,
    )


def forced_logits(target: TargetModel, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Return foresay's logits [len(ids), vocab_size] of the rows that predict `ids`."""
    tokens = [*prompt, *ids[:-1]]
    cache = KVCache(target.kv_layout, -(-len(tokens) // 16), 16, target.dtype, target.device)
    positions = np.arange(len(tokens))
    metadata = AttentionMetadata.build(
        [positions], [positions], positions, cache.null_slot, target.attention_rules, target.device
    )
    rows = torch.arange(len(prompt) - 1, len(tokens))
    with torch.inference_mode():
        return target.forward(torch.tensor(tokens), rows, cache, metadata)


@dataclass(frozen=True, slots=True)
class Margins:
    """How foresay's argmax compares with generate's, row by row along generate's ids."""

    num_rows: int
    num_different: int
    num_unexplained: int
    worst: tuple[float, float]  # of the differing rows: margin, and twice the largest difference


def compare_rows(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> Margins:
    """Apply the margin rule to all rows."""
    num_rows = num_different = num_unexplained = 0
    worst = (0.0, 0.0)
    for our, their in zip(ours, theirs, strict=True):
        our, their = our.float(), their.float()
        top = their.topk(2).values
        margin = top[:, 0] - top[:, 1]
        bound = 2 * (our - their).abs().amax(-1)
        different = our.argmax(-1) != their.argmax(-1)
        num_rows += len(our)
        num_different += int(different.sum())
        num_unexplained += int((different & (margin > bound)).sum())
        for i in different.nonzero().flatten().tolist():
            if float(margin[i]) > worst[0]:
                worst = (float(margin[i]), float(bound[i]))
    return Margins(num_rows, num_different, num_unexplained, worst)


def count_equal(some: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    """Return how many of the lists are equal."""
    return sum(a == b for a, b in zip(some, others, strict=True))


def main() -> int:
    """Run the grid and print its table; the exit code says whether everything was equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", help="a folder; default: the smollm2 alias")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seeded", type=int, default=24)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first run to do")
    parser.add_argument("--runs", type=int, help="how many runs to do")
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = options.model
    if folder is None:
        from foresay.core.plugins import PluginManager

        alias = PluginManager.load().model("smollm2")
        if alias is None:
            parser.error("foresay-smollm2 is not installed; give --model")
        folder = alias.resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).eval()
    prompts = read_prompts(options.data, options.per_task, tokenizer)
    num_seeded = min(options.seeded, len(prompts))
    print(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens", flush=True)

    start = time.perf_counter()
    references = list(generate(model, prompts, options.max_tokens))
    print(f"transformers' generate: {time.perf_counter() - start:.0f} s", flush=True)
    expected = [ids for ids, _ in references]
    target = load_target(model, tokenizer=tokenizer)
    ours = [forced_logits(target, p, ids) for p, ids in zip(prompts, expected, strict=True)]
    margins = compare_rows(ours, [logits for _, logits in references])
    print(
        f"rows along generate's ids: {margins.num_rows}; another argmax in "
        f"{margins.num_different}, unexplained by the margin rule {margins.num_unexplained} "
        f"(largest margin of such a row {margins.worst[0]:.4f}, its bound {margins.worst[1]:.4f})",
        flush=True,
    )
    del target, ours, references

    failures = margins.num_unexplained
    plain = Condition("none", "one", 16, None, "ample", "off")
    conditions = pairwise() if options.dtype == "float32" else [
        Condition(name, batch, 16, None, "ample", "cold")
        for name in FACTORS["proposer"]
        for batch in (("one", "each") if name in ("none", "ngram") else ("one",))
    ]  # fmt: skip
    conditions = conditions[options.first :][: options.runs]

    def do(condition: Condition) -> Result:
        return run(
            model, tokenizer, prompts, condition,
            max_tokens=options.max_tokens, num_seeded=num_seeded,
        )  # fmt: skip

    nums_preempted: list[int] = []
    base = do(plain)
    if options.dtype == "bfloat16":
        print(f"plain against generate: {count_equal(base.greedy, expected)} of {len(prompts)}")
        expected = base.greedy
    print(f"rows invariant: {'yes' if base.row_invariant else 'no'}")
    heading = ["run", *FACTORS, "greedy", "seeded", "preempted", "cached", "seconds"]
    widths = [4, 27, 6, 11, 6, 7, 7, 8, 8, 10, 8, 8]
    print(" ".join(f"{cell:<{width}}" for cell, width in zip(heading, widths, strict=True)))
    for number, condition in enumerate(conditions, start=options.first):
        start = time.perf_counter()
        result = do(condition)
        greedy = count_equal(result.greedy, expected)
        seeded = count_equal(result.seeded, base.seeded)
        failures += len(prompts) - greedy + num_seeded - seeded
        if condition.pool == "small":
            nums_preempted.append(result.num_preemptions)
        cells = [
            number, *(getattr(condition, name) for name in FACTORS),
            f"{greedy}/{len(prompts)}", f"{seeded}/{num_seeded}", result.num_preemptions,
            result.num_cached_tokens, f"{time.perf_counter() - start:.0f}",
        ]  # fmt: skip
        print(
            " ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)),
            flush=True,
        )
    if nums_preempted and not any(nums_preempted):
        print("no request was preempted: the data are too few for the smallest pool")
    print("all equal" if not failures else f"{failures} FAILURES")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
