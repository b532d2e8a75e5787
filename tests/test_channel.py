"""The connection to a worker: whatever was cut off, the next call gets through."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from foresay.core.channel import MARKER_BYTES, Channel, ChannelClosedError

MARKER = bytes(range(100, 100 + MARKER_BYTES))
HEADER_BYTES = MARKER_BYTES + 8 + 8 + 4
BIG = 3_000_000  # more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def frame(number: int, data: bytes) -> bytes:
    """What a channel sends."""
    here, there = socket.socketpair()
    with here, there:
        Channel(here, MARKER).send(number, data)
        return there.recv(1 << 16)


def test_calls_arrive_in_order_and_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    engine, worker = Channel(ends[0], MARKER, lambda: True), Channel(ends[1], MARKER)
    calls = [(1, b"one"), (2, b""), (3, bytes(50_000))]
    for call in calls:
        engine.send(*call)
    assert [worker.receive_next() for _ in calls] == calls


def test_an_answer_is_found_behind_those_that_nobody_waited_for(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    engine, worker = Channel(ends[0], MARKER, lambda: True), Channel(ends[1], MARKER)
    worker.send(6, b"late")
    worker.send(7, b"now")
    assert engine.receive(7) == b"now"


@pytest.mark.parametrize("lost", range(HEADER_BYTES + len(b"late") + 1))
def test_an_answer_is_found_behind_the_rest_of_one_whose_beginning_was_lost(
    lost: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[1].sendall(frame(6, b"late")[lost:] + frame(7, b"now"))
    assert Channel(ends[0], MARKER, lambda: True).receive(7) == b"now"


@pytest.mark.parametrize("step", [1, 7, 1000], ids="{} bytes at once".format)
@pytest.mark.parametrize("sent", range(HEADER_BYTES + len(b"a call cut off")))
def test_a_call_gets_through_after_one_that_was_cut_off(
    sent: int, step: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    worker = Channel(ends[1], MARKER)
    stream = frame(1, b"whole") + frame(2, b"a call cut off")[:sent] + frame(3, b"next")

    class Dribbling:
        """Gives `step` bytes a read, as a busy machine may."""

        def __init__(self) -> None:
            self.rest = stream

        def recv(self, size: int, flags: int = 0) -> bytes:
            chunk, self.rest = self.rest[:step], self.rest[step:]
            return chunk

    worker._end = Dribbling()  # type: ignore[assignment]
    assert worker.receive_next() == (1, b"whole")
    assert worker.receive_next() == (3, b"next")
    with pytest.raises(ChannelClosedError):
        worker.receive_next()


def test_a_call_that_is_cut_off_and_longer_than_the_next_ones_does_not_swallow_them(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].sendall(frame(1, bytes(50_000))[:100] + frame(2, b"x") + frame(3, b"y"))
    worker = Channel(ends[1], MARKER)
    assert [worker.receive_next() for _ in range(2)] == [(2, b"x"), (3, b"y")]


def test_two_big_frames_pass_each_other(ends: tuple[socket.socket, socket.socket]) -> None:
    """The worker sends a late answer, which nobody reads, while the engine sends its next call."""
    received: list[tuple[int, bytes]] = []

    def work() -> None:
        worker = Channel(ends[1], MARKER)
        worker.send(1, b"l" * BIG)
        received.append(worker.receive_next())
        worker.send(2, b"a" * BIG)

    thread = threading.Thread(target=work)
    thread.start()
    engine = Channel(ends[0], MARKER, lambda: True)
    engine.send(2, b"c" * BIG)
    assert engine.receive(2) == b"a" * BIG
    thread.join()
    assert received == [(2, b"c" * BIG)]


def test_the_other_ends_close_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    engine = Channel(ends[0], MARKER, lambda: True)
    ends[1].sendall(frame(1, b"half")[:-1])
    ends[1].close()
    with pytest.raises(ChannelClosedError):
        engine.receive(1)
    with pytest.raises(ChannelClosedError):
        engine.send(2, b"x")


def test_an_end_that_somebody_else_holds_open_is_not_waited_for(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foresay.core.channel._PATIENCE_MS", 1)
    answers = iter([True, True, False])
    with pytest.raises(ChannelClosedError):
        Channel(ends[0], MARKER, lambda: next(answers)).receive(1)
    assert list(answers) == []
