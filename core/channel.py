"""Frames of bytes over a socket, between the engine and a worker in another process.

The engine may be interrupted anywhere, by Ctrl-C or by whatever its user's signal handlers raise:
in the middle of a frame that it sends or receives, too. So no end relies on where the other's frame
began. Frames begin with a marker that occurs nowhere else, and carry the number of the call. The
engine looks for the answer to its newest call and drops what lies before; the worker takes every
call that was sent whole, in order, and drops beginnings that another call follows. What is dropped
belongs to calls that were abandoned.

Knows bytes only.
"""

from __future__ import annotations

import select
import socket
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

from foresay.core.errors import EngineError

MARKER_BYTES = 16
_FIELDS = struct.Struct("<QQI")  # after the marker: the call's number, the data's size and CRC
_HEADER_BYTES = MARKER_BYTES + _FIELDS.size
_CHUNK = 1 << 16
_PATIENCE_MS = 1000  # between two looks at whether the other end still lives


class ChannelClosedError(EngineError):
    """The other end is gone."""


class Channel:
    """One end of a connection between an engine and its worker."""

    def __init__(
        self,
        end: socket.socket,
        marker: bytes,
        other_lives: Callable[[], bool] | None = None,
    ) -> None:
        """`marker`: random, the same at both ends.

        `other_lives` is asked once a second while nothing comes: a process that ends closes its
        end, but one that it forked may hold it open. None: wait without asking.
        """
        self._end = end
        self._marker = marker
        self._other_lives = other_lives
        self._rest = bytearray()  # the worker's: received, and not looked at yet
        self._poll = select.poll() if other_lives is not None else None

    def send(self, number: int, data: bytes) -> None:
        """Send a frame. Raises `ChannelClosedError` if the other end is gone."""
        fields = _FIELDS.pack(number, len(data), zlib.crc32(data))
        frame = memoryview(self._marker + fields + data)
        flags = socket.MSG_DONTWAIT if self._poll is not None else 0
        while frame:
            try:
                frame = frame[self._end.send(frame, flags) :]
            except BlockingIOError:
                # The worker is at work on, or sends the answer to, a call that was abandoned.
                self._wait(select.POLLIN | select.POLLOUT)
                with suppress(BlockingIOError):
                    self._read(socket.MSG_DONTWAIT)
            except ConnectionError as error:
                raise ChannelClosedError("the other end is closed") from error

    def receive(self, number: int) -> bytes:
        """Return the frame of that number, which is the last one the other end was asked for."""
        head = self._marker + number.to_bytes(8, "little")
        data = bytearray()
        found = False
        while True:
            self._wait(select.POLLIN)
            data += self._read()
            if not found:
                start = data.find(head)
                if start < 0:
                    del data[: 1 - len(head)]  # its beginning may be the last thing that came
                    continue
                del data[:start]
                found = True
            end = _end_of_frame(data)
            if len(data) >= end:
                return bytes(data[_HEADER_BYTES:end])

    def receive_next(self) -> tuple[int, bytes]:
        """Wait for the next frame that was sent whole; return its number and data."""
        rest = self._rest
        looked = 1  # no other frame begins within the first, before here
        while True:
            start = rest.find(self._marker)
            if start >= 0:
                del rest[:start]
                end = _end_of_frame(rest)
                inner = rest.find(self._marker, looked, end + MARKER_BYTES - 1)
                if inner < 0 and len(rest) >= end:
                    number, _, checksum = _FIELDS.unpack_from(rest, MARKER_BYTES)
                    data = bytes(rest[_HEADER_BYTES:end])
                    if zlib.crc32(data) == checksum:
                        del rest[:end]
                        return number, data
                    inner = 1  # another one does begin within it, and half its marker has come
                if inner > 0:
                    del rest[:inner]
                    looked = 1
                    continue
                looked = max(1, len(rest) - MARKER_BYTES + 1)
            rest += self._read()

    def close(self) -> None:
        """Close this end: the other one finds nothing more to receive."""
        self._end.close()

    def _read(self, flags: int = 0) -> bytes:
        try:
            chunk = self._end.recv(_CHUNK, flags)
        except ConnectionError as error:
            raise ChannelClosedError("the other end is closed") from error
        if not chunk:
            raise ChannelClosedError("the other end is closed")
        return chunk

    def _wait(self, events: int) -> None:
        if self._poll is None or self._other_lives is None:
            return
        self._poll.register(self._end, events)
        while not self._poll.poll(_PATIENCE_MS):
            if not self._other_lives():
                raise ChannelClosedError("the other end's process is gone")


def _end_of_frame(data: bytearray) -> int:
    """Return how many bytes the frame at the start of `data` has, or must at least have."""
    if len(data) < _HEADER_BYTES:
        return _HEADER_BYTES
    size: int = _FIELDS.unpack_from(data, MARKER_BYTES)[1]
    return _HEADER_BYTES + size
