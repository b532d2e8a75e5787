"""Prompts as a model takes them: through its chat template, less those that are too long for it.

Knows an `LLM` and prompts; not what is measured on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foresay.core.commands.prompts import BenchPrompt
from foresay.core.commands.report import note
from foresay.core.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from foresay.core.llm import LLM


def fit_prompts(prompts: Sequence[BenchPrompt], llm: LLM) -> list[tuple[BenchPrompt, list[int]]]:
    """Return the prompts with their token ids; what is left out is told on stderr.

    Raises `RequestError` if no prompt is left, or if the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise RequestError("the model has no tokenizer: text cannot go in or come out")
    if llm.tokenizer.chat_template is None:
        note("no chat template: the prompts are continued as they are")
    fitting = []
    too_long = []
    for prompt in prompts:
        try:
            fitting.append((prompt, _tokenize(prompt.text, llm)))
        except PromptTooLongError:
            too_long.append(prompt.id)
    if too_long:
        text = (
            f"{len(too_long)} of {len(prompts)} prompts do not fit max_model_len "
            f"{llm.max_model_len}: {', '.join(too_long[:8])}{', ...' if too_long[8:] else ''}"
        )
        if not fitting:
            raise RequestError(f"no prompt is left: {text}")
        note(f"left out, {text}")
    return fitting


def _tokenize(text: str, llm: LLM) -> list[int]:
    if llm.tokenizer.chat_template is not None:
        return llm.chat_prompt([{"role": "user", "content": text}])
    token_ids = list(llm.tokenizer(text)["input_ids"])
    if len(token_ids) >= llm.max_model_len:
        raise PromptTooLongError(f"the prompt has {len(token_ids)} tokens")
    return token_ids
