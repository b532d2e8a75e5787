"""The target answers prompts: each once, in their order, whatever interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_chat import save_chat_model

from foresay import LLM, SamplingParams
from foresay.core.errors import ConfigError
from foresay.core.plugins import PluginManager
from foresay_train.generating import REPLIES, Asked, answer
from foresay_train.prompts import Prompt, digest_of
from foresay_train.replies import read_replies


def prompts_of(*texts: str) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}], "a line") for text in texts]


PROMPTS = prompts_of("one", "two", "three " * 30, "four", "five", "six", "seven")
FITTING = [0, 1, 3, 4, 5, 6]  # the third is longer than the model's 64 tokens
ASKED = Asked("tiny", digest_of(PROMPTS), max_tokens=6, temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)


def opening(model: Path, plugins: PluginManager) -> Callable[[], LLM]:
    return lambda: LLM(model, None, plugins=plugins)


def closed() -> LLM:
    raise AssertionError("no model is needed")


def answer_all(folder: Path, model: Path, asked: Asked = ASKED, at_once: int = 2) -> int:
    plugins = PluginManager()
    found = answer(folder, PROMPTS, asked, opening(model, plugins), plugins, at_once)
    return found.num_too_long


def expected(model: Path, temperature: float = 0.0) -> list[tuple[list[int], list[int]]]:
    """Each prompt answered on its own, through the chat template."""
    with LLM(model, None) as llm:
        found = []
        for index, prompt in enumerate(FITTING):
            how = SamplingParams(temperature=temperature, max_tokens=6, seed=index)
            (output,) = llm.chat(PROMPTS[prompt].messages, how)
            found.append((output.prompt_token_ids, output.outputs[0].token_ids))
        return found


def pairs(folder: Path) -> list[tuple[list[int], list[int]]]:
    return [(reply.prompt_ids, reply.reply_ids) for reply in read_replies(folder / REPLIES)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_answers_each_prompt_that_it_has_room_for(
    temperature: float, tmp_path: Path, model: Path
) -> None:
    num_too_long = answer_all(tmp_path, model, replace(ASKED, temperature=temperature))

    assert num_too_long == 1
    assert pairs(tmp_path) == expected(model, temperature)


def test_what_is_answered_needs_no_model(tmp_path: Path, model: Path) -> None:
    answer_all(tmp_path, model)

    found = answer(tmp_path, PROMPTS, ASKED, closed, PluginManager())

    assert found.num_too_long == 1


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import test_train_generating as test
from foresay import LLM

generate, calls = LLM.generate, []
def killing(self, *arguments):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return generate(self, *arguments)
LLM.generate = killing
test.answer_all(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_run_goes_on_where_it_ended(tmp_path: Path, model: Path) -> None:
    here = Path(__file__).parent
    helpers = next(Path(path) for path in sys.path if (Path(path) / "tiny_chat.py").exists())
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, model, here, helpers],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = tmp_path / REPLIES
    assert len(path.read_text(encoding="utf-8").splitlines()) == 4
    with path.open("a", encoding="utf-8") as file:
        file.write('{"p": [1, 2')  # as if it had been killed while it wrote

    answer_all(tmp_path, model)

    assert pairs(tmp_path) == expected(model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": 7}, "max_tokens 6, now 7"),
        ({"temperature": 0.5}, "temperature 0.0, now 0.5"),
        ({"prompts": "other"}, "now 'other'"),
        ({"model": "huge"}, "model 'tiny', now 'huge'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_replies_made_otherwise_are_not_mixed(
    change: dict[str, object], says: str, tmp_path: Path, model: Path
) -> None:
    answer_all(tmp_path, model)

    with pytest.raises(ConfigError) as caught:
        answer(tmp_path, PROMPTS, replace(ASKED, **change), closed, PluginManager())  # type: ignore[arg-type]

    assert says in str(caught.value)


def test_a_file_of_other_replies_is_not_gone_on_with(tmp_path: Path, model: Path) -> None:
    (tmp_path / REPLIES).write_text(json.dumps({"p": [9], "o": [8]}) + "\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="does not hold replies to these prompts"):
        answer_all(tmp_path, model)


def test_without_a_chat_template_a_prompt_is_continued_and_a_conversation_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_chat_model(folder, template=None)
    plugins = PluginManager()
    talk = [Prompt([{"role": "user", "content": "a"}] * 3, "--prompts 'x', line 7")]

    answer(tmp_path / "a", PROMPTS[:1], ASKED, opening(folder, plugins), plugins)
    [(prompt, reply)] = pairs(tmp_path / "a")
    assert (len(prompt), len(reply)) == (len("one"), 6)
    with pytest.raises(ConfigError, match="line 7: a conversation needs a chat template"):
        answer(tmp_path / "b", talk, ASKED, opening(folder, plugins), plugins)
