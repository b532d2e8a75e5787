"""One answer as it comes: printed, collected, complete at every moment, also after Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from foresay.core.stats import RequestStats

if TYPE_CHECKING:
    from foresay.core.outputs import StreamChunk


class Answer:
    """What has come of an answer so far. `seconds` is wall time, prefill included."""

    def __init__(self, *, shown: bool) -> None:
        """`shown`: the text goes to stdout as it comes."""
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason = "abort"
        self.stop_reason: str | int | None = None
        self.stats = RequestStats()
        self.seconds = 0.0
        self._shown = shown

    def follow(self, stream: Generator[StreamChunk, None, None]) -> None:
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
        """Return the object that `foresay run --json` prints."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stats": {**self.stats.as_dict(), "seconds": self.seconds},
        }
