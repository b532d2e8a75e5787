"""`prediction`: how a text that the caller expects reaches the worker, and when it is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ALPHABET, VOCAB_SIZE, FakeLLM, fake_llm, ids, params

from foresay.cli import main
from foresay.core.commands import options
from foresay.core.errors import RequestError

# -- on its way ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("cab", ids("cab")),  # no BOS: it is no beginning of a text
        ([5, 6, 7], [5, 6, 7]),
        ("", []),
        ([], []),
        (None, []),
    ],
    ids=["text", "token-ids", "empty-text", "no-ids", "none"],
)
def test_the_worker_gets_the_prediction_as_token_ids(prediction: Any, expected: list[int]) -> None:
    llm = fake_llm(k=2, takes_prediction=True)
    (output,) = llm.generate("x", params(prediction=prediction))
    assert output.outputs[0].text == "abcdefgh"
    assert [request.prediction_ids for request in llm.runner.received] == [expected]


def test_each_request_has_its_own_and_so_has_each_sample() -> None:
    llm = fake_llm(k=2, takes_prediction=True)
    llm.generate(["x", "y", "z"], [params(prediction="p", n=2), params(), params(prediction="q")])
    assert {request.req_id: request.prediction_ids for request in llm.runner.received} == {
        "0.0": ids("p"), "0.1": ids("p"), "1": [], "2": ids("q"),
    }  # fmt: skip


def test_a_request_that_was_preempted_brings_its_prediction_again() -> None:
    llm = fake_llm(
        ALPHABET, k=2, takes_prediction=True, max_model_len=40, num_blocks=12,
        enable_prefix_caching=False,
    )  # fmt: skip
    llm.generate(["x", "y", "z"], [params(prediction=text) for text in "pqr"])
    assert llm.stats.num_preemptions > 0
    assert len(llm.runner.received) == 3 + llm.stats.num_preemptions
    for request in llm.runner.received:
        assert request.prediction_ids == ids("pqr"[int(request.req_id)])


def test_a_stream_and_a_chat_take_one_too() -> None:
    llm = fake_llm(k=2, takes_prediction=True)
    list(llm.stream("x", params(prediction="p")))
    llm.chat([{"role": "user", "content": "hi"}], params(prediction="q"))
    assert [request.prediction_ids for request in llm.runner.received] == [ids("p"), ids("q")]


def test_a_request_without_drafts_may_have_one() -> None:
    llm = fake_llm(k=2, takes_prediction=True)
    (output,) = llm.generate("x", params(prediction="p", num_speculative_tokens=0))
    assert output.stats.num_draft_tokens == 0
    assert llm.takes_prediction is True


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"k": 2},
            r"prediction='abc' would have no effect: proposer 'script' takes none; leave it",
        ),
        ({}, r"prediction='abc' would have no effect: there is no proposer; leave it out, or use"),
    ],
    ids=["another-proposer", "no-proposer"],
)
def test_a_prediction_that_nobody_takes_is_refused(settings: dict[str, int], message: str) -> None:
    llm = fake_llm(**settings)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        llm.generate(["x", "y"], [params(), params(prediction="abc")])
    with pytest.raises(RequestError, match=message):
        llm.stream("x", params(prediction="abc", num_speculative_tokens=0))
    assert llm.takes_prediction is False
    assert llm.stats.num_requests == 0
    (output,) = llm.generate("x", params(prediction=""))  # predicts nothing
    assert output.outputs[0].text == "abcdefgh"


@pytest.mark.parametrize(
    ("prediction", "has_tokenizer", "message"),
    [
        ([5, VOCAB_SIZE], True, r"prediction: token id 300 at index 1 is not in the vocabulary"),
        ([-1], True, r"prediction: token id -1 at index 0 is not in the vocabulary, range\(300\)"),
        ("a\udcff", True, r"prediction is no valid text: character 1 is"),
        ("abc", False, r"prediction='abc' is text, and this LLM has no tokenizer: give token ids"),
    ],
    ids=["id-too-large", "negative-id", "surrogate", "no-tokenizer"],
)
def test_a_wrong_prediction_is_refused(prediction: Any, has_tokenizer: bool, message: str) -> None:
    llm = fake_llm(k=2, takes_prediction=True, has_tokenizer=has_tokenizer)
    with pytest.raises(RequestError, match=message):
        llm.generate([[5], [6]], [params(), params(prediction=prediction)])
    assert llm.stats.num_requests == 0


# -- from the command line -----------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The engines that `foresay run` opens, each a fake."""
    opened: list[FakeLLM] = []

    def open_llm(*arguments: object, **settings: object) -> FakeLLM:
        opened.append(fake_llm(k=2, takes_prediction=True))
        return opened[-1]

    monkeypatch.setattr(options, "open_llm", open_llm)
    return opened


def test_run_reads_a_prediction_from_a_file_or_from_stdin(
    opened: list[FakeLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "old.txt").write_bytes(b"abc\r\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("defg"))
    for source in (str(tmp_path / "old.txt"), "-"):
        assert main(["run", "x", "--prediction", source]) == 0
        assert capsys.readouterr().out == "abcdefgh\n"
    predictions = [request.prediction_ids for llm in opened for request in llm.runner.received]
    assert predictions == [ids("abc\r\n"), ids("defg")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--prediction", "no/such"], "--prediction 'no/such': No such file or directory"),
        (["x", "--prediction", "binary"], "--prediction 'binary' is no UTF-8 text"),
        (["-", "--prediction", "-"], "--prediction -: the prompt was read from stdin"),
    ],
    ids=["missing", "binary", "twice-stdin"],
)
def test_run_says_what_is_wrong_with_a_prediction(
    arguments: list[str],
    message: str,
    opened: list[FakeLLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert opened == []
