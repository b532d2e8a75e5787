"""A worker in another process, with a fake model: same output, Ctrl-C, deaths, beginnings, ends.

Nothing hangs, and no process is left.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
from fake_engine import ALPHABET, CharTokenizer, fake_llm, observer, params
from remote_llm import RemoteLLM, ends_within, is_alive, order, text, worker_pids
from remote_workers import absent_worker, fake_worker

from foresay.core.border import Facts
from foresay.core.errors import ConfigError, EngineError, ForesayError, ProposerError
from foresay.core.outputs import RequestOutput
from foresay.core.remote import RemoteRunner
from foresay.core.runner import Runner
from foresay.core.stats import StepStats


@pytest.fixture(scope="module")
def shared() -> Iterator[RemoteLLM]:
    with RemoteLLM() as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(shared: RemoteLLM) -> Iterator[None]:
    """No test leaves a worker behind, but the one that several tests share."""
    yield
    gc.collect()
    assert worker_pids() == [shared.pid]


class Interrupted(BaseException):
    """What Ctrl-C raises here: pytest would take KeyboardInterrupt personally."""


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    def handler(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGINT, handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- the same as inline --------------------------------------------------------------------------


def test_outputs_are_those_of_the_inline_worker(shared: RemoteLLM) -> None:
    prompts = ["x", "fail", "z"]
    given = [params(), params(), params(5, stop="d", logprobs=2)]
    remote = shared.generate(prompts, given)
    inline = fake_llm(ALPHABET, k=2).generate(prompts, given)
    for ours, theirs in zip(remote, inline, strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.stats.num_accepted_tokens == theirs.stats.num_accepted_tokens
    assert [output.outputs[0].finish_reason for output in remote] == ["stop", "error", "stop"]
    assert "".join(chunk.text for chunk in shared.stream("x", params())) == ALPHABET
    shared.check_empty()


def test_the_facts_are_those_that_the_protocol_promises() -> None:
    properties = {n for n, value in vars(Runner).items() if isinstance(value, property)}
    assert {field.name for field in dataclasses.fields(Facts)} == properties


def test_the_runner_has_what_the_protocol_promises(shared: RemoteLLM) -> None:
    fake = fake_llm(k=2, max_model_len=2000, num_blocks=1000).runner
    for field in dataclasses.fields(Facts):
        ours, theirs = getattr(shared.runner, field.name), getattr(fake, field.name)
        if field.name == "tokenizer":
            assert isinstance(ours, CharTokenizer)
        elif field.name == "summary":
            assert ours == f"{theirs}; worker: process {shared.pid}"
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize(
    ("accident", "kind", "message"),
    [
        ("raise execute 2", EngineError, "the worker raised RuntimeError: no more"),
        ("raise draft 1", EngineError, "the worker raised RuntimeError: no more"),
        ("leave execute 1", EngineError, "the worker raised SystemExit: enough"),
        ("fault draft 2", ProposerError, "proposer 'script': not again"),
    ],
)
def test_an_error_of_the_worker_is_raised_here_and_the_engine_goes_on(
    accident: str, kind: type[ForesayError], message: str, shared: RemoteLLM
) -> None:
    with pytest.raises(kind) as raised:
        shared.generate([accident, "y"], params())
    assert type(raised.value) is kind
    assert str(raised.value) == message
    (note,) = raised.value.__notes__
    assert "in the worker's process" in note
    assert 'remote_workers.py", line' in note
    assert text(shared.generate("x", params())[0]) == ALPHABET
    shared.check_empty()


# -- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["execute", "draft"])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_ctrl_c_while_the_worker_works_leaves_nothing_behind(
    place: str, after: int, shared: RemoteLLM, ctrl_c: None
) -> None:
    with pytest.raises(Interrupted):
        shared.generate([f"interrupt {place} {after}", "y", "z"], [params(), params(3), params()])
    again = shared.generate(["x", "y", "z"], params())
    assert [text(output) for output in again] == [ALPHABET] * 3
    shared.check_empty()


@pytest.mark.parametrize("place", ["execute", "draft"])
def test_an_open_stream_survives_ctrl_c_in_another_call(
    place: str, shared: RemoteLLM, ctrl_c: None
) -> None:
    stream = shared.stream("x", params())
    beginning = next(stream).text
    with pytest.raises(Interrupted):
        shared.generate(f"interrupt {place} 2", params())
    assert beginning + "".join(chunk.text for chunk in stream) == ALPHABET
    shared.check_empty()


def test_an_interruption_anywhere_at_the_border_is_survived(shared: RemoteLLM) -> None:
    """In the middle of a frame, too. Elsewhere in the engine is not what is tested here."""
    places: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None and not caller.f_code.co_filename.endswith(
            ("core/remote.py", "core/channel.py")
        ):
            caller = caller.f_back
        if frame is None or caller is None:
            signal.setitimer(signal.ITIMER_REAL, 1e-4)  # not yet
            return
        places.append(frame.f_lineno)
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    chance = random.Random(0)
    try:
        for _ in range(100):
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 5e-3))
            with suppress(Interrupted):
                shared.generate(["x", "y" * 1500], params())
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert [text(o) for o in shared.generate(["x", "y"], params())] == [ALPHABET] * 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    shared.check_empty()
    assert len(places) > 50
    assert len(set(places)) > 2


def test_news_after_ctrl_c_does_not_wait_for_a_worker_that_hangs(ctrl_c: None) -> None:
    llm = RemoteLLM()
    with pytest.raises(Interrupted):
        llm.generate("hang execute 2", params())
    llm.close()
    assert not is_alive(llm.pid)


# -- a worker that dies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accident", "how"),
    [
        ("kill execute 3", "killed by SIGKILL: out of memory?"),
        ("segfault execute 2", "killed by SIGSEGV"),
        ("exit draft 2", "it ended with exit code 3"),
        ("fork execute 2", "it ended with exit code 4"),
    ],
)
def test_a_worker_that_dies_ends_its_requests_with_an_error(accident: str, how: str) -> None:
    ended: list[RequestOutput] = []
    llm = RemoteLLM(observer(on_request=ended.append))
    stream = llm.stream("x", params())
    beginning = next(stream).text
    short, dying, other = llm.generate(["s", accident, "y"], [params(1), params(), params(n=2)])

    reason = f"the worker's process died ({how})"
    assert text(short) == "a"
    assert short.outputs[0].finish_reason == "length"
    for output in (*dying.outputs, *other.outputs):
        assert (output.finish_reason, output.stop_reason) == ("error", reason)
        assert output.text
        assert ALPHABET.startswith(output.text)
    chunks = list(stream)
    assert chunks[-1].finish_reason == "error"
    assert chunks[-1].output is not None
    assert chunks[-1].output.outputs[0].stop_reason == reason
    assert chunks[-1].output.outputs[0].text == beginning + "".join(c.text for c in chunks)
    assert len(ended) == 4
    assert not is_alive(llm.pid)
    for call in (
        lambda: llm.generate("x", params()),
        lambda: llm.stream("x", params()),
        lambda: llm.generate(["x", "y"], params(n=2)),
    ):
        with pytest.raises(EngineError, match=r"process died \(.*\); make a new LLM"):
            call()
    llm.close()


def test_a_worker_that_dies_between_two_calls_is_noticed() -> None:
    llm = RemoteLLM()
    stream = llm.stream("x", params())
    next(stream)
    os.kill(llm.pid, signal.SIGKILL)
    (last,) = list(stream)
    assert last.finish_reason == "error"
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        llm.generate("x", params())


def test_a_death_in_what_comes_after_the_last_token_spoils_no_output() -> None:
    llm = RemoteLLM(observer(on_request=lambda output: os.kill(llm.pid, signal.SIGKILL)))
    assert text(llm.generate("x", params(3))[0]) == "abc"
    with pytest.raises(EngineError, match="make a new LLM"):
        llm.generate("x", params())


# -- beginnings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("setting", ConfigError, r"proposer 'ngram': no setting 'reach' \(known: "),
        ("own error", ConfigError, "not here"),
        ("broken", EngineError, "the worker raised RuntimeError: broken"),
        ("unpicklable", ConfigError, "the model's tokenizer cannot be sent"),
        ("kill", EngineError, r"died while it loaded 'kill' \(killed by SIGKILL: out of memory"),
        ("exit", EngineError, r"died while it loaded 'exit' \(it ended with exit code 3\)"),
    ],
)
def test_a_worker_that_cannot_be_built_says_why(
    model: str, kind: type[ForesayError], message: str
) -> None:
    with pytest.raises(kind, match=message) as raised:
        RemoteRunner(order(model), fake_worker)
    assert type(raised.value) is kind


def test_ctrl_c_while_the_worker_loads_ends_it(ctrl_c: None) -> None:
    with pytest.raises(Interrupted):
        RemoteRunner(order("hang"), fake_worker)


def test_a_worker_that_never_begins_is_not_waited_for() -> None:
    with pytest.raises(EngineError, match=r"ended before it began \(it ended with exit code 5\)"):
        RemoteRunner(order(), absent_worker)


def test_a_tokenizer_given_as_an_object_stays_the_callers() -> None:
    tokenizer = CharTokenizer()
    runner = RemoteRunner(order(tokenizer=tokenizer), fake_worker)
    assert runner.tokenizer is tokenizer
    runner.close()
    runner.close()
    with pytest.raises(EngineError, match="closed"):
        runner.draft([])


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "context", "collected", "abandoned stream"])
def test_the_process_ends_with_the_llm(how: str) -> None:
    llm = RemoteLLM()
    pid = llm.pid
    if how == "close":
        llm.close()
        llm.close()
    elif how == "context":
        with llm:
            llm.generate("x", params())
    elif how == "collected":
        llm.generate("x", params())
        del llm
        gc.collect()
    else:
        stream = llm.stream("x", params())
        next(stream)
        del llm, stream
        gc.collect()
    assert not is_alive(pid)


def test_an_observer_may_close_the_llm_in_the_middle_of_a_step() -> None:
    def close(stats: StepStats) -> None:
        llm.close()

    llm = RemoteLLM(observer(close))
    assert llm.generate("x", params())[0].outputs[0].finish_reason == "abort"
    assert not is_alive(llm.pid)


def test_a_process_that_forked_cannot_use_the_llm_nor_end_it(shared: RemoteLLM) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        words = b"no error"
        try:
            shared.generate("x", params())
        except EngineError as error:
            words = str(error).encode()
        finally:
            shared.runner.close()
            os.write(writer, words)
            os._exit(0)
    os.waitpid(child, 0)
    assert b"belongs to process" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    assert text(shared.generate("x", params())[0]) == ALPHABET


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from remote_workers import fake_worker
from foresay.core.config import EngineConfig
from foresay.core.plugins import PluginManager
from foresay.core.remote import RemoteRunner, make_order

order = make_order(EngineConfig(model="fake"), PluginManager())
runners = [RemoteRunner(order, fake_worker) for _ in range(2)]
print(*(runner._process.pid for runner in runners), flush=True)
time.sleep(100)
"""


def test_workers_end_when_the_engine_is_killed() -> None:
    """The script comes from stdin: there is no file that the workers could import."""
    with subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdin is not None
        assert script.stdout is not None
        script.stdin.write(SCRIPT.format(folder=str(Path(__file__).parent)))
        script.stdin.close()
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        script.kill()
    assert all(ends_within(pid, 20) for pid in pids)
