"""Measure how often the candidates of Medusa heads are right, and keep it beside their weights.

usage: python plugins/medusa/tools/measure_accuracies.py DRAFTER --model MODEL --replies FILE.jsonl

For heads that `foresay train` did not make, or not lately: it measures by itself. FILE has rows
`{"p": [prompt ids], "o": [reply ids]}`, the model's own answers to prompts that the heads were not
trained on, as `foresay train` keeps them in work/replies.jsonl. Some ten thousand reply tokens are
plenty; the model runs over them once. Writes DRAFTER/accuracies.json and prints it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from foresay import LLM
from foresay.core.plugins import PluginManager
from foresay.core.worker.target import load_target
from foresay_medusa.accuracies import FILE
from foresay_medusa.heads import MedusaHeads
from foresay_medusa.layout import read_layout
from foresay_medusa.measuring import Measuring
from foresay_medusa.weights import read_weights
from foresay_train.replies import Reply, read_replies


def main() -> None:
    """Read all, run the model, then the heads."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("drafter", type=Path, help="folder of the heads")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replies", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    replies = [reply for reply in read_replies(given.replies) if len(reply.reply_ids) > 1]
    plugins = PluginManager.load()
    with LLM(given.model, None, dtype=given.dtype, quantization="none", plugins=plugins) as llm:
        states = llm.hidden_states([reply.token_ids for reply in replies], [-1])
    target = load_target(
        given.model,
        dtype=given.dtype,
        device="cpu",
        quantization="none",
        aliases=plugins.models,
    )
    layout = read_layout(str(given.drafter))
    view = target.view(max(map(len, replies)), embeddings=False, lm_head=True)
    weights = read_weights(layout, hidden_size=view.hidden_size, vocab_size=view.vocab_size)
    heads = MedusaHeads(weights, layout.num_heads, view)
    measuring = Measuring(layout.num_heads)
    with torch.inference_mode():
        for reply, own in zip(replies, states, strict=True):
            add(measuring, heads, reply, own[:, -1].to(view.dtype))
    measuring.save(given.drafter)
    print((given.drafter / FILE).read_text(encoding="utf-8"), end="")


def add(measuring: Measuring, heads: MedusaHeads, reply: Reply, hidden: torch.Tensor) -> None:
    """Count one text; `hidden` [num_tokens, hidden_size]."""
    token_ids = torch.tensor(reply.token_ids)
    bases = torch.arange(len(reply.prompt_ids) - 1, len(token_ids) - 2)
    counts = torch.ones(len(bases), dtype=torch.bool)
    every = heads.logits(hidden[bases], [None] * heads.num_heads)
    for head, logits in enumerate(every):
        places = bases + head + 2
        reached = places < len(token_ids)
        labels = token_ids[places.clamp(max=len(token_ids) - 1)]
        counts = measuring.add(head, logits, labels, counts & reached, heads.draft_to_target)


if __name__ == "__main__":
    main()
