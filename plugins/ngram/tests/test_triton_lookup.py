"""The ngram plugin's lookup in Triton against its index, in the interpreter; and who takes it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ngram_lookups
import pytest
import torch
from interpreted import HAS_TRITON, interpreted
from ngram_lookups import Ask, Step, random_steps, replay, search

from foresay.core.config import build_settings
from foresay.core.errors import ConfigError
from foresay.core.proposer import DraftInput
from foresay_ngram import NgramConfig
from foresay_ngram import proposer as proposer_module
from foresay_ngram.index import SuffixIndex
from foresay_ngram.proposer import NgramProposer

TESTS = Path(ngram_lookups.__file__).parent
LOOKUP = "foresay_ngram.triton_lookup"
BLOCK = 16
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="there is no triton")


@pytest.fixture(params=["interpreter", "gpu"] if torch.cuda.is_available() else ["interpreter"])
def on_device(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function that calls another one where the kernels run: with its arguments and a device."""
    if request.param == "interpreter":
        return interpreted
    return lambda function, *arguments: function(*arguments, "cuda")


def by_index(texts: Sequence[Sequence[int]], k: int, bounds: tuple[int, int]) -> list[list[int]]:
    drafts = []
    for text in texts:
        index = SuffixIndex(*bounds)
        index.extend(text)
        drafts.append(index.continuation(k))
    return drafts


# --- the same drafts as the index


def random_texts() -> list[list[int]]:
    """Of lengths around the block's, and of few tokens or many."""
    rng = random.Random(7)
    sizes = [1, 2, 3, 16, 17, 18, 33, 34, 100]
    return [[rng.randrange(2 + size % 5) for _ in range(size)] for size in sizes]


END = [91, 92, 93, 94, 95]
LONG_AGO = [*END, 1, *range(100, 180)]  # the only match lies in the first of many blocks
TEXTS = {
    "random": random_texts(),
    "one token": [[3] * size for size in (1, 2, 17, 50)],
    "periods": [[i % period for i in range(60)] for period in (2, 15, 16, 17, 59)],
    "nothing occurs twice": [list(range(size)) for size in (5, 33)],
    "a match long ago": [[*LONG_AGO, *END[-n:]] for n in (1, 2, 5)],
    "a longer match long ago": [[*LONG_AGO, *END[-2:], 2, *range(500, 510), *END]],
    "equal matches in several blocks": [END * 5, [*END, *range(20)] * 2 + END],
    "the beginning matches": [[*END[-2:], *range(40), *END]],
    "the largest ids": [[0, 2**31, 2**32 - 1, 5, 2**31 - 1, 9, 2**31, 2**32 - 1]],
}


@needs_triton
@pytest.mark.parametrize(("bounds", "k"), [((1, 5), 40), ((2, 3), 1), ((4, 20), 20)], ids=str)
@pytest.mark.parametrize("kind", TEXTS)
def test_the_kernels_draft_what_the_index_drafts(
    kind: str, bounds: tuple[int, int], k: int, on_device: Callable[..., Any]
) -> None:
    texts = TEXTS[kind]
    assert on_device(search, texts, k, bounds, BLOCK) == by_index(texts, k, bounds)


@needs_triton
def test_a_history_of_more_blocks_than_programs_is_searched_to_its_beginning(
    on_device: Callable[..., Any],
) -> None:
    noise = list(range(10, 10 + 20 * BLOCK))
    starts = [0, 150, 300]  # in blocks that a program takes first, second and last
    texts = [[*noise[:start], 1, 2, *noise[start:], 1, 2] for start in starts]
    drafts = on_device(search, texts, 2, (1, 5), BLOCK)
    assert drafts == [noise[start : start + 2] for start in starts]


@needs_triton
def test_nothing_lies_to_the_left_of_a_beginning(on_device: Callable[..., Any]) -> None:
    """A request's row follows another's, which ends with what would make a longer match."""
    other = [*range(1000, 1000 + 1021), *END[:3]]  # as long as a row
    text = [*END[3:], 7, *END[2:], 8, *END]
    assert len(other) == 1024
    drafts = on_device(search, [other, text], 1, (1, 5), 1024)
    assert drafts == [[], [8]]


@needs_triton
def test_many_requests_at_once_get_what_each_gets_alone(on_device: Callable[..., Any]) -> None:
    rng = random.Random(2)
    texts = [[rng.randrange(6) for _ in range(rng.randrange(1, 40))] for _ in range(70)]
    assert on_device(search, texts, 5, (1, 5), 64) == by_index(texts, 5, (1, 5))


@needs_triton
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_get_the_drafts_of_the_index(
    seed: int, on_device: Callable[..., Any]
) -> None:
    steps = random_steps(seed, 20)
    assert any(ask.k == 0 for step in steps for ask in step.asks)
    assert any(ask.prediction for step in steps for ask in step.asks)
    bounds = {"prompt_lookup_min": 1 + seed, "prompt_lookup_max": 3 + seed}
    expected = replay(steps, {"lookup": "index", **bounds})
    assert sum(len(draft) for drafts in expected for draft in drafts) > 100
    assert on_device(replay, steps, {"lookup": "triton", **bounds}) == expected


# --- what is sent and kept


@needs_triton
def test_a_step_reads_only_the_new_tokens_of_a_long_history() -> None:
    read = interpreted(ngram_lookups.tokens_read_by_a_second_step, 5000)
    assert read == [5000, 5001]


@needs_triton
def test_the_histories_tensor_grows_and_shrinks_with_what_is_held() -> None:
    counts = [(2, 9), (3, 9), (3, 17), (2, 18), (1, 65), (5, 66), (4, 67), (1, 68), (2, 69)]
    assert interpreted(ngram_lookups.sizes_over_time, counts) == [
        (2, 16),
        (4, 16),  # rows double
        (4, 32),
        (4, 32),  # half as many rows would do: that is not worth a move
        (2, 128),
        (8, 128),
        (8, 128),
        (2, 128),  # it was four times what is needed
        (2, 128),
    ]


@needs_triton
@pytest.mark.parametrize("num_kept", [0, 2, 3, 10])  # in the move, at its end, behind it
def test_an_interruption_mixes_up_no_histories(num_kept: int) -> None:
    drafts = interpreted(ngram_lookups.drafts_around_an_interruption, num_kept)
    assert drafts == [[i, i] for i in range(70)]


# --- who takes it


class FakeLookup:
    """Drafts 7s, and notes whom it was asked for."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.asked: list[list[str]] = []
        self.error: Exception | None = None

    def __contains__(self, req_id: str) -> bool:
        return req_id in self.held

    def release(self, req_id: str) -> None:
        self.held.discard(req_id)

    def drafts(self, requests: Sequence[Any]) -> list[list[int]]:
        if self.error is not None:
            raise self.error
        self.held |= {request.req_id for request in requests}
        self.asked.append([request.req_id for request in requests])
        return [[7] * request.k for request in requests]


def with_fake(monkeypatch: pytest.MonkeyPatch, lookup: str, least: int) -> Any:
    """A proposer of chains on a GPU that is none, and its lookup there."""
    fake = FakeLookup()
    module = SimpleNamespace(tried_lookup=lambda *arguments: fake, LONGEST_HISTORY=4)
    monkeypatch.setitem(sys.modules, LOOKUP, module)  # type: ignore[arg-type]
    monkeypatch.setattr(proposer_module, "_LEAST_ON_DEVICE", least)
    proposer = NgramProposer(NgramConfig(tree=False, lookup=lookup))
    proposer.load(SimpleNamespace(device=torch.device("cuda")))  # type: ignore[arg-type]
    return proposer, fake


def propose(proposer: NgramProposer, *asks: Ask) -> list[list[int]]:
    return proposer.propose(DraftInput([ask.request() for ask in asks])).token_ids


A, B, C = (Ask(name, [1, 2, 1], 2) for name in "abc")


def test_auto_takes_the_device_for_large_batches_and_a_request_stays_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer, fake = with_fake(monkeypatch, "auto", 2)
    assert propose(proposer, A) == [[2, 1]]
    assert fake.asked == []
    assert propose(proposer, C, B) == [[7, 7], [7, 7]]
    assert propose(proposer, A, Ask("d", [1, 1], 0)) == [[2, 1], []]  # one wants a draft
    assert propose(proposer, B) == [[7, 7]]  # it is there already
    proposer.release("b")
    assert propose(proposer, B) == [[2, 1]]
    assert propose(proposer, B, A) == [[7, 7], [7, 7]]
    assert fake.asked == [["c", "b"], ["b"], ["b", "a"]]
    assert proposer._states == {}  # the device has them


def test_requests_with_a_prediction_and_those_that_want_no_draft_are_left_to_the_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer, fake = with_fake(monkeypatch, "triton", 2)
    predicted = Ask("p", [9, 5], 2, prediction=[5, 6, 8])
    assert propose(proposer, predicted, A, Ask("z", [1, 1], 0)) == [[6, 8], [7, 7], []]
    assert propose(proposer, predicted) == [[6, 8]]
    assert fake.asked == [["a"]]


def test_what_grows_too_long_is_left_to_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, fake = with_fake(monkeypatch, "triton", 1)
    assert propose(proposer, Ask("a", [1, 2, 1, 2], 2), B) == [[7, 7], [7, 7]]
    assert propose(proposer, Ask("a", [1, 2, 1, 2, 1], 2), B) == [[2, 1], [7, 7]]
    assert fake.asked == [["a", "b"], ["b"]]


def test_with_auto_what_fails_on_the_device_is_found_by_the_index(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proposer, fake = with_fake(monkeypatch, "auto", 1)
    assert propose(proposer, A) == [[7, 7]]
    fake.error = RuntimeError("out of memory")
    assert propose(proposer, A, B) == [[2, 1], [2, 1]]
    assert propose(proposer, A, B) == [[2, 1], [2, 1]]
    assert [record.message for record in caplog.records] == [
        "ngram drafts from its index, not by the Triton kernels: RuntimeError: out of memory"
    ]


def test_with_triton_what_fails_on_the_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer, fake = with_fake(monkeypatch, "triton", 1)
    fake.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        propose(proposer, A)


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({"lookup": "auto", "tree": False}, "cpu"),
        ({"lookup": "index", "tree": False}, "cuda"),
        ({"lookup": "auto", "tree": True}, "cuda"),
    ],
    ids=str,
)
def test_without_a_use_for_it_triton_is_not_imported(
    settings: dict[str, Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_triton(monkeypatch)
    proposer = NgramProposer(NgramConfig(**settings))
    proposer.load(SimpleNamespace(device=torch.device(device)))  # type: ignore[arg-type]
    assert caplog.records == []  # it would have failed
    assert propose(proposer, A)[0][0] == 2


def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]
    for name in (LOOKUP, "foresay_ngram.triton_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_auto_without_triton_takes_the_index_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_triton(monkeypatch)
    many = Step([], [Ask(str(i), [1, 2, 1], 2) for i in range(200)])
    assert replay([many], {"lookup": "auto"}, "cuda") == [[[2, 1]] * 200]
    assert "ModuleNotFoundError: import of triton halted" in caplog.text


def test_triton_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    no_triton(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        replay([], {"lookup": "triton"}, "cuda")
    assert str(caught.value) == (
        "ngram: lookup='triton' cannot be had on 'cuda': ModuleNotFoundError: import of triton "
        "halted; None in sys.modules; lookup='auto' takes it where it can be had, else the index"
    )


def test_triton_with_trees_is_an_error() -> None:
    with pytest.raises(ConfigError, match="set tree=False as well"):
        build_settings(NgramConfig, {"lookup": "triton"}, "ngram")


@needs_triton
def test_kernels_that_find_something_else_are_an_error() -> None:
    with pytest.raises(ConfigError, match="find other drafts than the index"):
        interpreted(ngram_lookups.load_with_wrong_kernels)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
def test_triton_on_a_cpu_without_the_interpreter_is_an_error() -> None:
    code = """
import ngram_lookups
from foresay.core.errors import ConfigError
try:
    ngram_lookups.replay([], {"lookup": "triton"})
except ConfigError as error:
    print(error)
"""
    assert "need a GPU, and the target is on the CPU" in run_python(code)


@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="triton compiles on Linux")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    code = "import ngram_lookups; print(ngram_lookups.compile_kernels())"
    assert int(run_python(code, TRITON_CACHE_DIR=str(tmp_path))) == 3
