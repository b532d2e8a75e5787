"""One prompt while it is continued: what the scheduler knows of its samples, their texts, figures.

Knows how to turn these into chunks and into the output. Does not know steps or other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foresay.core.config import SamplingParams
from foresay.core.messages import SamplingData
from foresay.core.outputs import CompletionOutput, RequestOutput, StreamChunk
from foresay.core.scheduling.request import Request
from foresay.core.stats import RequestStats
from foresay.core.text import OutputText, TokenDecoder


@dataclass(slots=True)
class Sample:
    """One of a prompt's outputs: a request of its own to the scheduler and the worker."""

    request: Request
    text: OutputText | None  # the request's own sink; None without a tokenizer

    def finish(self, index: int) -> CompletionOutput:
        """Flush the text and make the output. The scheduler has finished the request."""
        request = self.request
        if self.text is not None:
            self.text.finish()
        reason = request.status.finish_reason
        assert reason is not None
        return CompletionOutput(
            index=index,
            text=self.text.text if self.text is not None else "",
            token_ids=request.output_token_ids,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            logprobs=request.output_logprobs(),
        )


@dataclass(slots=True)
class Generation:
    """A prompt and its `n` samples, from the call that made it to its output."""

    request_id: str  # what chunks, outputs and `LLM.abort` use
    samples: list[Sample]
    stats: RequestStats = field(default_factory=RequestStats)  # of all samples together
    output: RequestOutput | None = None  # set when all of them are finished
    queued: float = 0.0  # time.perf_counter() when the engine took it
    num_taken: int = 0  # output tokens that `take_chunk` has returned

    @property
    def first(self) -> Request:
        """The request that computes the prompt; the other samples may share what it computed."""
        return self.samples[0].request

    @property
    def is_finished(self) -> bool:
        """Whether no sample will get another token."""
        return all(sample.request.status.is_finished for sample in self.samples)

    def take_chunk(self) -> StreamChunk | None:
        """Return what came since the last call; None if nothing did. For a single sample."""
        (sample,) = self.samples
        start = self.num_taken
        new_token_ids = sample.request.token_ids[sample.request.num_prompt_tokens + start :]
        if not new_token_ids and self.output is None:
            return None
        self.num_taken += len(new_token_ids)
        return StreamChunk(
            request_id=self.request_id,
            text=sample.text.take() if sample.text is not None else "",
            token_ids=new_token_ids,
            stats=self.stats,
            finish_reason=self.output.outputs[0].finish_reason if self.output else None,
            output=self.output,
            logprobs=sample.request.output_logprobs(start),
        )

    def finish(self) -> RequestOutput:
        """Make the output. Every sample is finished."""
        self.output = RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.first.token_ids[: self.first.num_prompt_tokens],
            outputs=[sample.finish(index) for index, sample in enumerate(self.samples)],
            stats=self.stats,
        )
        return self.output


def make_generation(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    sampling: SamplingData,
    *,
    prediction_ids: Sequence[int] = (),
    decoder: TokenDecoder | None,
) -> Generation:
    """Make the `params.n` samples of a prompt; they share a seed and differ in `sample_index`.

    `decoder` None: there is no tokenizer, and no text.
    """
    samples = []
    for index in range(params.n):
        text = None
        if decoder is not None:
            text = OutputText(decoder, prompt_token_ids, params.stop)
        request = Request(
            # The scheduler's id; a single sample goes by the id that its caller knows.
            req_id=request_id if params.n == 1 else f"{request_id}.{index}",
            prompt_token_ids=prompt_token_ids,
            sampling=replace(sampling, sample_index=index),
            max_tokens=params.max_tokens,
            text=text,
            num_speculative_tokens=params.num_speculative_tokens,
            prediction_ids=prediction_ids,
        )
        samples.append(Sample(request, text))
    return Generation(request_id, samples)
