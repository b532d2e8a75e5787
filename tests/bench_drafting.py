"""What drafting costs: its share of a step, for heads with random weights in smollm2's shapes.

usage: python tests/bench_drafting.py [--model M] [--max-tokens 48] [--prompts 4] [-k 5]

Random weights draft nothing that is accepted, and cost what trained ones cost. A share is drafting
over the whole step (schedule, execute, commit, draft), at batch 1, greedy, summed over all steps
of a prompt but those of the prompt itself; printed are the median over prompts and the spread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig

from foresay import LLM, SamplingParams, hookimpl
from foresay.core.commands.prompts import read_prompts, shipped
from foresay.core.plugins import PluginManager
from foresay.core.stats import StepStats

sys.path.insert(0, str(Path(__file__).parent))
import eagle_heads
import medusa_heads
import mtp_checkpoints

DRAFT_VOCAB = 8192
LIMITS = {"eagle": 0.22, "eagle3": 0.22, "medusa": 0.10, "mtp": 0.22}


def heads(config: Any, folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Write a random drafter of each kind; yields its label, its proposer and its folder."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    head = eagle_heads.reduced(eagle_heads.eagle(**sizes), DRAFT_VOCAB)
    yield "eagle", "eagle", head.without("embed_tokens.weight").save(folder / "eagle")
    last = config.num_hidden_layers
    taps = (2, last // 2, last - 3)
    head = eagle_heads.eagle3(taps=taps, draft_vocab=DRAFT_VOCAB, **sizes)
    yield "eagle3", "eagle", head.save(folder / "eagle3")
    four = medusa_heads.random_heads(
        4, size=config.hidden_size, num_rows=DRAFT_VOCAB, shared=True, vocab_size=config.vocab_size
    )
    yield "medusa", "medusa", medusa_heads.as_reduced(four).save(folder / "medusa")
    modules = mtp_checkpoints.module_tensors("mimo", config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(config.vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values
    modules["lm_head.weight"] = torch.randn(DRAFT_VOCAB, config.hidden_size, generator=generator)
    modules["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    mtp = mtp_checkpoints.save_drafter(
        folder / "mtp", modules, config, draft_vocab_size=DRAFT_VOCAB,
        max_position_embeddings=config.max_position_embeddings,
    )  # fmt: skip
    yield "mtp", "mtp", mtp


class Shares:
    """Adds up the times of the steps that verify or decode."""

    def __init__(self) -> None:
        self.drafting = self.whole = 0.0
        self.num_steps = 0

    @hookimpl
    def foresay_step_end(self, stats: StepStats) -> None:
        if stats.num_scheduled_tokens > 16:  # a prompt
            return
        self.drafting += stats.draft_seconds
        self.whole += (
            stats.schedule_seconds
            + stats.execute_seconds
            + stats.commit_seconds
            + stats.draft_seconds
        )
        self.num_steps += 1


def main() -> int:
    """Print the table; the exit code says whether every share is within its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("-k", type=int, default=5)
    options = parser.parse_args()
    alias = PluginManager.load().model(options.model)
    config = AutoConfig.from_pretrained(alias.resolve() if alias is not None else options.model)
    texts = [row.text for row in read_prompts(shipped("prompts.jsonl"))]
    with LLM(model=options.model, proposer=None, max_num_seqs=1) as llm:
        prompts = [
            llm.chat_prompt([{"role": "user", "content": text}])
            for text in texts[:: len(texts) // options.prompts][: options.prompts]
        ]
    within = True
    print(f"{'drafter':<8} {'k':>2} {'steps':>5} {'ms/step':>8} {'share':>6} {'spread':>13}  limit")
    with tempfile.TemporaryDirectory() as temporary:
        for label, proposer, folder in heads(config, Path(temporary)):
            k = min(options.k, 4) if label == "medusa" else options.k
            plugins = PluginManager.load()
            shares = Shares()
            plugins.register(SimpleNamespace(foresay_step_end=shares.foresay_step_end), "shares")
            found, num_steps, seconds = [], 0, 0.0
            with LLM(
                model=options.model, proposer=proposer, drafter=str(folder), plugins=plugins,
                num_speculative_tokens=k, max_num_seqs=1, enable_prefix_caching=False,
                adaptive=False,
            ) as llm:  # fmt: skip
                params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
                llm.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=8))
                for prompt in prompts:
                    shares.drafting = shares.whole = 0.0
                    shares.num_steps = 0
                    llm.generate(prompt, params)
                    found.append(shares.drafting / shares.whole)
                    num_steps += shares.num_steps
                    seconds += shares.whole
            share, limit = median(found), LIMITS[label]
            within &= share <= limit
            spread = f"{min(found):.1%}-{max(found):.1%}"
            ms = 1000 * seconds / num_steps
            print(
                f"{label:<8} {k:>2} {num_steps:>5} {ms:>8.1f} {share:>6.1%} {spread:>13}  "
                f"{limit:.0%}",
                flush=True,
            )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
