"""A conversation: its system prompt and its turns, and what of it fits the model. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foresay.core.errors import PromptTooLongError

Messages = list[dict[str, str]]  # {"role": ..., "content": ...}, as chat templates take it


@dataclass(slots=True)
class Conversation:
    """Questions with their answers, oldest first."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> Messages:
        """Return everything, with a question that is to be answered."""
        return self._messages(self.turns, question)

    def fit(
        self,
        question: str,
        tokenize: Callable[[Messages], Sequence[int]],
        *,
        max_model_len: int,
        max_tokens: int,
    ) -> tuple[list[int], int]:
        """Return the prompt's token ids, and how many of the oldest turns were dropped for it.

        Turns are dropped, never the system prompt, when less room is left than the answer may
        take, or than a quarter of the model's length. Then a whole quarter is made free: a prompt
        with another beginning is computed anew, so that should happen seldom. Raises
        `PromptTooLongError`, with nothing dropped, if the question does not fit without any turns.
        """
        quarter = max_model_len // 4
        room = min(max_tokens, quarter)
        for num_dropped in range(len(self.turns) + 1):
            turns = self.turns[num_dropped:]
            try:
                token_ids = list(tokenize(self._messages(turns, question)))
            except PromptTooLongError:
                if not turns:
                    raise
            else:
                if max_model_len - len(token_ids) >= room or not turns:
                    self.turns = turns
                    return token_ids, num_dropped
            room = quarter
        raise AssertionError("the last round returns or raises")

    def _messages(self, turns: Sequence[tuple[str, str]], question: str) -> Messages:
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for asked, answered in turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        return [*messages, {"role": "user", "content": question}]
