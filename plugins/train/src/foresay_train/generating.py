"""The target answers prompts, through the engine; a run that was killed goes on where it ended.

Replies are appended to a file in the prompts' order, some hundred at a time, so the number of whole
lines says how far it came. Knows nothing of training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foresay import LLM, SamplingParams, hookimpl
from foresay.core.errors import ConfigError, EngineError, PromptTooLongError, RequestError
from foresay.core.plugins import PluginManager
from foresay_train.progress import bar, say
from foresay_train.prompts import Prompt
from foresay_train.replies import Reply, reply_line

REPLIES = "replies.jsonl"
_ABOUT = "replies.json"
_PROMPTS_AT_ONCE = 256  # several times what runs together: few wait for the last ones


@dataclass(frozen=True, slots=True)
class Asked:
    """What replies were asked for. Others of the same folder are not mixed with them."""

    model: str
    prompts: str  # a digest
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of it."""

    path: Path
    num_too_long: int  # prompts that the model has no room for


def answer(
    folder: Path,
    prompts: Sequence[Prompt],
    asked: Asked,
    open_llm: Callable[[], LLM],
    plugins: PluginManager,
    prompts_at_once: int = _PROMPTS_AT_ONCE,
) -> Answered:
    """Let the model answer all prompts that `folder` has no reply to.

    `open_llm()`, whose observers are those of `plugins`, is called only if there are any. Raises
    `ConfigError` if the folder holds replies of another model, to other prompts, or made otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, about = folder / REPLIES, folder / _ABOUT
    known = _read_about(about)
    if known is not None:
        _check_same(known, asked, folder)
        if "num_too_long" in known:  # it was written when all were answered
            return Answered(path, int(known["num_too_long"]))
    else:
        _write_about(about, asdict(asked))
    llm = open_llm()
    fitting = _fitting(prompts, llm)
    num_too_long = len(prompts) - len(fitting)
    num_done = _whole_lines(path)
    if num_done:
        say(f"{num_done} of {len(fitting)} prompts are answered already")
        _check_goes_on(path, fitting, num_done)
    _answer(path, fitting, num_done, asked, llm, plugins, prompts_at_once)
    _write_about(about, {**asdict(asked), "num_too_long": num_too_long})
    return Answered(path, num_too_long)


def _answer(
    path: Path,
    prompts: Sequence[list[int]],
    num_done: int,
    asked: Asked,
    llm: LLM,
    plugins: PluginManager,
    at_once: int,
) -> None:
    began = time.monotonic()
    num_tokens = 0
    with (
        bar("answering", len(prompts), num_done) as update,
        path.open("a", encoding="utf-8") as file,
    ):
        watch = _Watch(update, num_done)
        plugins.register(watch, f"foresay train {id(watch):x}")
        for start in range(num_done, len(prompts), at_once):
            batch = prompts[start : start + at_once]
            params = [
                SamplingParams(
                    temperature=asked.temperature,
                    max_tokens=asked.max_tokens,
                    seed=asked.seed + start + index,
                )
                for index in range(len(batch))
            ]
            lines = []
            for prompt, output in zip(batch, llm.generate(batch, params), strict=True):
                reply = output.outputs[0]
                if reply.finish_reason == "error":
                    raise EngineError(f"an answer ended early: {reply.stop_reason}")
                num_tokens += len(reply.token_ids)
                lines.append(reply_line(Reply(prompt, list(reply.token_ids))))
            file.write("".join(lines))
            file.flush()
    seconds = max(time.monotonic() - began, 1e-9)
    say(
        f"{len(prompts) - num_done} prompts answered: {num_tokens} tokens in {seconds:.0f} s, "
        f"{num_tokens / seconds:.0f} tokens/s"
    )


class _Watch:
    """Moves the bar when a reply ends; an observer of the engine."""

    def __init__(self, update: Callable[[int], None], num_done: int) -> None:
        self._update = update
        self._num_done = num_done

    @hookimpl
    def foresay_request_end(self, output: Any) -> None:  # noqa: ARG002  # the hook's signature
        """Count a reply."""
        self._num_done += 1
        self._update(self._num_done)


def _fitting(prompts: Sequence[Prompt], llm: LLM) -> list[list[int]]:
    """Return the token ids of all prompts that leave room for an answer."""
    if llm.tokenizer is None:
        raise RequestError("the model has no tokenizer: prompts are text")
    has_template = getattr(llm.tokenizer, "chat_template", None) is not None
    if not has_template:
        say("no chat template: the prompts are continued as they are")
    fitting = []
    for prompt in prompts:
        try:
            if has_template:
                fitting.append(llm.chat_prompt(prompt.messages))
            elif len(prompt.messages) > 1:
                raise RequestError("a conversation needs a chat template, and the model has none")
            else:
                token_ids = list(llm.tokenizer(prompt.messages[0]["content"])["input_ids"])
                if len(token_ids) < llm.max_model_len:
                    fitting.append(token_ids)
        except PromptTooLongError:
            continue
        except RequestError as error:
            raise ConfigError(f"{prompt.where}: {error}") from error
    if not fitting:
        raise ConfigError(
            f"none of the {len(prompts)} prompts leaves room for an answer in the model's "
            f"{llm.max_model_len} tokens"
        )
    if len(fitting) < len(prompts):
        say(f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are too long, left out")
    return fitting


def _whole_lines(path: Path) -> int:
    """Count the replies that are there; a last line written by half is cut off."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        count = end = 0
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        file.truncate(end)
    return count


def _check_goes_on(path: Path, prompts: Sequence[list[int]], num_done: int) -> None:
    with path.open(encoding="utf-8") as file:
        last = [json.loads(line) for line in file][-1]
    if num_done > len(prompts) or last["p"] != prompts[num_done - 1]:
        raise ConfigError(
            f"{str(path)!r} does not hold replies to these prompts, in their order: delete it, or "
            "give another --out"
        )


def _check_same(known: Mapping[str, Any], asked: Asked, folder: Path) -> None:
    changed = [
        f"{name} {known.get(name)!r}, now {value!r}"
        for name, value in asdict(asked).items()
        if known.get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"{str(folder)!r} holds replies that were made otherwise ({'; '.join(changed)}): give "
            "another --out, or delete it"
        )


def _read_about(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}; delete it") from error
    return dict(known)


def _write_about(path: Path, fields: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    part.replace(path)
