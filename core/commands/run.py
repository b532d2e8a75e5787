"""`foresay run`: one prompt, one answer, as it comes; the figures afterwards on stderr."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from foresay.core.commands import options
from foresay.core.commands.answer import Answer
from foresay.core.commands.report import report
from foresay.core.config import SamplingParams, build_settings
from foresay.core.errors import RequestError
from foresay.core.inputs import check_text


def run(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from stdin.")],
    model: options.Model = "smollm2",
    proposer: options.ProposerName = "auto",
    drafter: options.Drafter = None,
    k: options.NumDraftTokens = None,
    adaptive: options.Adaptive = True,
    by_batch: options.DraftTokensByBatch = None,
    settings: options.Settings = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = -1,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    max_tokens: options.MaxTokens = 256,
    seed: options.Seed = None,
    stop: options.Stop = None,
    prediction: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A text much like the answer, for proposers that draft from it; '-': stdin.",
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantization: options.Quantization = "auto",
    drafter_quantization: options.DrafterQuantization = "auto",
    enforce_eager: options.EnforceEager = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text: no chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead.")
    ] = False,
    stats: options.Stats = True,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, everything else to stderr."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("the prompt is empty")
    check_text(text, "the prompt")
    if prediction == "-" and prompt == "-":
        raise RequestError("--prediction -: the prompt was read from stdin; give a file")
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
            "prediction": None if prediction is None else _read_text(prediction),
        },
    )
    with options.open_llm(
        model,
        plugins=context.obj,
        proposer=proposer,
        drafter=drafter,
        k=k,
        adaptive=adaptive,
        by_batch=by_batch,
        settings=settings,
        max_num_seqs=1,
        dtype=dtype,
        device=device,
        quantization=quantization,
        drafter_quantization=drafter_quantization,
        enforce_eager=enforce_eager,
    ) as llm:
        if llm.tokenizer is None:
            raise RequestError(f"model {model!r} has no tokenizer: text cannot go in or come out")
        if raw or llm.tokenizer.chat_template is None:
            if not raw:
                print("no chat template: the prompt is continued as it is", file=sys.stderr)
            tokens: Any = text
        else:
            tokens = llm.chat_prompt([{"role": "user", "content": text}])
        answer = Answer(shown=not as_json)
        code = 0
        try:
            answer.follow(llm.stream(tokens, params))
        except KeyboardInterrupt:
            code = options.INTERRUPTED
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


def _read_text(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    try:
        with open(source, encoding="utf-8", newline="") as file:  # line ends as they are
            return file.read()
    except OSError as error:
        raise RequestError(f"--prediction {source!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RequestError(f"--prediction {source!r} is no UTF-8 text") from None
