"""One request while it is generated: what the scheduler knows of it, its text, its figures.

Knows how to turn these into chunks and into the output. Does not know steps or other requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from foresay.core.outputs import CompletionOutput, RequestOutput, StreamChunk
from foresay.core.scheduling.request import Request
from foresay.core.stats import RequestStats
from foresay.core.text import OutputText


@dataclass(slots=True)
class Generation:
    """A request from the call that made it to its output."""

    request: Request
    text: OutputText | None  # the request's own sink; None without a tokenizer
    stats: RequestStats = field(default_factory=RequestStats)
    output: RequestOutput | None = None  # set when it is finished
    queued: float = 0.0  # time.perf_counter() when the engine took it
    num_taken: int = 0  # output tokens that `take_chunk` has returned

    @property
    def request_id(self) -> str:
        """The id that chunks, outputs and `LLM.abort` use."""
        return self.request.req_id

    def take_chunk(self) -> StreamChunk | None:
        """Return what came since the last call; None if nothing did."""
        new_token_ids = self.request.token_ids[self.request.num_prompt_tokens + self.num_taken :]
        if not new_token_ids and self.output is None:
            return None
        self.num_taken += len(new_token_ids)
        return StreamChunk(
            request_id=self.request_id,
            text=self.text.take() if self.text is not None else "",
            token_ids=new_token_ids,
            stats=self.stats,
            finish_reason=self.output.outputs[0].finish_reason if self.output else None,
            output=self.output,
        )

    def finish(self) -> RequestOutput:
        """Flush the text and make the output. The scheduler has finished the request."""
        if self.text is not None:
            self.text.finish()
        reason = self.request.status.finish_reason
        assert reason is not None
        completion = CompletionOutput(
            index=0,
            text=self.text.text if self.text is not None else "",
            token_ids=self.request.output_token_ids,
            finish_reason=reason,
            stop_reason=self.request.stop_reason,
        )
        self.output = RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.request.token_ids[: self.request.num_prompt_tokens],
            outputs=[completion],
            stats=self.stats,
        )
        return self.output
