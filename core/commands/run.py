"""`foresay run`: one prompt, one answer, as it comes; the figures afterwards on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from foresay.core.commands import options
from foresay.core.commands.report import report
from foresay.core.config import SamplingParams, build_settings
from foresay.core.errors import RequestError
from foresay.core.inputs import check_text
from foresay.core.stats import RequestStats

_INTERRUPTED = 130


def run(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from stdin.")],
    model: options.Model = "smollm2",
    proposer: options.ProposerName = "auto",
    drafter: options.Drafter = None,
    k: options.NumDraftTokens = None,
    settings: options.Settings = None,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token always.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; -1: all.")] = -1,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this times the best.")] = 0.0,
    max_tokens: options.MaxTokens = 256,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the answer. Repeatable.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text: no chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print the figures to stderr.")
    ] = True,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, everything else to stderr."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("the prompt is empty")
    check_text(text, "the prompt")
    params = build_settings(
        SamplingParams,
        {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop": stop or (),
        },
    )
    with options.open_llm(
        model,
        plugins=context.obj,
        proposer=proposer,
        drafter=drafter,
        k=k,
        settings=settings,
        max_num_seqs=1,
        dtype=dtype,
        device=device,
    ) as llm:
        if llm.tokenizer is None:
            raise RequestError(f"model {model!r} has no tokenizer: text cannot go in or come out")
        if raw or llm.tokenizer.chat_template is None:
            if not raw:
                print("no chat template: the prompt is continued as it is", file=sys.stderr)
            tokens: Any = text
        else:
            tokens = llm.chat_prompt([{"role": "user", "content": text}])
        answer = _Answer(shown=not as_json)
        code = 0
        try:
            answer.follow(llm.stream(tokens, params))
        except KeyboardInterrupt:
            code = _INTERRUPTED
        answer.end()
    if as_json:
        print(json.dumps(answer.row()))
    if stats and not as_json:
        for line in report(answer.stats, answer.seconds):
            print(line, file=sys.stderr)
    if answer.finish_reason == "error":
        raise RequestError(f"the answer ended early: {answer.stop_reason}")
    if code:
        raise typer.Exit(code)


class _Answer:
    """What has come of an answer so far; it is complete in that at every moment."""

    def __init__(self, *, shown: bool) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason = "abort"
        self.stop_reason: str | int | None = None
        self.stats = RequestStats()
        self.seconds = 0.0
        self._shown = shown

    def follow(self, stream: Any) -> None:
        """Take the chunks of a stream until it ends."""
        start = time.perf_counter()
        try:
            for chunk in stream:
                self.text += chunk.text
                self.token_ids += chunk.token_ids
                self.seconds = time.perf_counter() - start
                self.stats = chunk.stats
                if self._shown:
                    print(chunk.text, end="", flush=True)
                if chunk.output is not None:
                    self.finish_reason = chunk.output.outputs[0].finish_reason
                    self.stop_reason = chunk.output.outputs[0].stop_reason
        finally:
            stream.close()

    def end(self) -> None:
        """End the last line of the text."""
        if self._shown and not self.text.endswith("\n"):
            print(flush=True)

    def row(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stats": {**self.stats.as_dict(), "seconds": self.seconds},
        }
