"""A tiny real model in another process, and what crosses the border to it."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from adversaries import Raising
from fake_engine import observer
from remote_llm import is_alive, worker_pids

from foresay import LLM, SamplingParams
from foresay.core import messages
from foresay.core.errors import ModelError
from foresay.core.messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from foresay.core.plugins import PluginManager
from foresay.core.runner import Runner


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert worker_pids() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_models.llama().save_pretrained(path)
    return path


PROMPTS = [[5, 6, 7, 8] * 5, [9, 10], [11], list(range(20, 60)), [5, 6, 7, 8] * 4]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(seed=1, max_tokens=30, logprobs=2),
    SamplingParams(seed=2, max_tokens=20, top_k=5, n=2),
    SamplingParams(temperature=0.0, max_tokens=25, repetition_penalty=1.1),
    SamplingParams(seed=3, temperature=0.4, max_tokens=40, min_tokens=35),
]


def completions(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [completion for output in outputs for completion in output.outputs]


def test_a_real_worker_gives_the_inline_workers_outputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    ended: list[int] = []
    manager = PluginManager.load()
    manager.register(observer(on_request=lambda output: ended.append(os.getpid())), "observing")
    settings: dict[str, Any] = {"proposer": "ngram", "chunked_prefill_size": 16, "adaptive": False}
    with (
        LLM(folder, **settings) as inline,
        LLM(folder.name, worker="process", plugins=manager, **settings) as remote,
    ):
        assert completions(remote) == completions(inline)
        assert ended == [os.getpid()] * len(PROMPTS)
        ours, theirs = remote.stats, inline.stats
        assert ours.num_accepted_tokens == theirs.num_accepted_tokens > 0
        assert remote.max_model_len == inline.max_model_len
        assert remote.proposer_name == inline.proposer_name == "ngram"


def test_a_faulty_class_is_counted_and_its_fault_is_logged_once_on_stderr(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(folder, proposer=None) as plain:
        expected = completions(plain)
    with LLM(
        folder, proposer=Raising, num_speculative_tokens=3, adaptive=False, worker="process"
    ) as llm:
        found = completions(llm)
        assert found == expected
        assert llm.stats.faults["raised"] > 1
    assert capfd.readouterr().err.count("no draft today") == 1


def test_an_error_at_load_is_the_inline_workers() -> None:
    raised = []
    for worker in ("inline", "process"):
        with pytest.raises(ModelError) as error:
            LLM("no/such/folder", worker=worker)
        raised.append((type(error.value), str(error.value)))
    assert raised[0] == raised[1]


SCRIPT = """
import sys
from foresay import LLM, SamplingParams
from foresay.core.proposer import Draft

class Mine:
    def __init__(self, config):
        pass

    def propose(self, batch):
        return Draft([[7] * request.k for request in batch.requests])

if __name__ == "__main__":
    llm = LLM({folder!r}, proposer=Mine, worker="process", max_num_seqs=2)
    output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8))[0]
    print(llm.proposer_name, output.outputs[0].token_ids, llm.stats.num_draft_tokens > 0)
    print("torch" in sys.modules, llm._engine._runner._process.pid, flush=True)
"""


def test_a_script_may_define_the_proposer_and_end_without_closing(
    folder: Path, tmp_path: Path
) -> None:
    """And torch is not imported by the engine's process: only plain data crosses the border."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder)))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    with LLM(folder, proposer=None) as plain:
        (output,) = plain.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8))
    assert first == f"__main__:Mine {output.outputs[0].token_ids} True"
    has_torch, pid = second.split()
    assert has_torch == "False"
    assert not is_alive(int(pid))
    assert "Traceback" not in done.stderr


# -- messages ------------------------------------------------------------------------------------

PLAIN = (int, float, str, bool, type(None))
MESSAGES = tuple(
    kind
    for kind in vars(messages).values()
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
)


def not_plain(value: object, where: str) -> Iterator[str]:
    """Everything in a message that is neither built in nor a message; subclasses do not pass."""
    if type(value) in PLAIN:
        return
    if type(value) in (list, tuple):
        for item in value:  # type: ignore[attr-defined]
            yield from not_plain(item, f"{where}[]")
    elif type(value) is dict:
        for key, item in value.items():
            yield from not_plain(key, f"{where} key")
            yield from not_plain(item, f"{where}[]")
    elif type(value) in MESSAGES:
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from not_plain(getattr(value, field.name), f"{where}.{field.name}")
    else:
        yield f"{where}: {type(value).__name__}"


class RecordingRunner:
    """Pickles everything that crosses, and keeps it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.calls: list[tuple[str, bytes, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        answer: ModelRunnerOutput = self._cross("execute", step, self._runner.execute)
        return answer

    def draft(self, finished_req_ids: Sequence[str]) -> DraftTokenIds | None:
        answer: DraftTokenIds | None = self._cross(
            "draft", list(finished_req_ids), self._runner.draft
        )
        return answer

    def _cross(self, name: str, call: object, function: Callable[[Any], Any]) -> Any:
        down = pickle.dumps(call)
        up = pickle.dumps(function(pickle.loads(down)))  # noqa: S301
        self.calls.append((name, down, up))
        return pickle.loads(up)  # noqa: S301


class RecordedLLM(LLM):
    recorder: RecordingRunner

    def _build_runner(self, *arguments: Any) -> Runner:
        self.recorder = RecordingRunner(super()._build_runner(*arguments))
        return self.recorder


@pytest.mark.parametrize("proposer", ["ngram", "adversaries:TooLong", "ngram,adversaries:Drawing"])
def test_a_runs_messages_are_plain_and_give_the_same_answers_to_a_new_worker(
    proposer: str, folder: Path
) -> None:
    settings: dict[str, Any] = {
        "proposer": proposer,
        "num_speculative_tokens": 3,
        "block_size": 4,
        "num_blocks": 32,  # requests are preempted
        "max_model_len": 100,
        "chunked_prefill_size": 16,
    }
    with LLM(folder, **settings) as llm:
        expected = completions(llm)
    with RecordedLLM(folder, **settings) as llm, LLM(folder, **settings) as new:
        assert completions(llm) == expected
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        stream.close()
        assert llm.stats.num_preemptions > 0
        runner = new._running_engine()._runner
        faults = set()
        for name, down, up in llm.recorder.calls:
            call, answer = pickle.loads(down), pickle.loads(up)  # noqa: S301
            faults |= {*not_plain(call, name), *not_plain(answer, f"{name}'s answer")}
            assert getattr(runner, name)(call) == answer
        assert faults == set()
        assert len(llm.recorder.calls) > 40


def test_what_is_not_plain_is_found() -> None:
    step = SchedulerOutput(1, {"a": 1}, {}, {"a": True}, {}, finished_req_ids=[object()])  # type: ignore[list-item]
    assert list(not_plain(step, "step")) == ["step.finished_req_ids[]: object"]
    assert MESSAGES
