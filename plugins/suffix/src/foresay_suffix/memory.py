"""The outputs of earlier requests: a bounded number of tokens, the least recently used go first.

It knows token ids and the ids of requests, nothing of drafts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from foresay_suffix.contexts import LONGEST, Contexts, number_of


@dataclass(slots=True)
class _Output:
    """An output after the end of its prompt, by which its first tokens are found."""

    text: array[int]
    num_prompt: int  # tokens of the prompt in `text`
    count: int  # how many requests had it
    owner: str | None  # the last of them, if its id was not used again

    @property
    def beginning(self) -> bytes:
        """What any two outputs have in common of which one begins with the other."""
        return self.text[: self.num_prompt + 1].tobytes()

    def agrees_with(self, text: array[int]) -> bool:
        """Return whether one of the two begins with the other."""
        length = min(len(self.text), len(text))
        return self.text[:length] == text[:length]


class Memory:
    """Outputs by content, `max_tokens` tokens at most, with up to `LONGEST` of each prompt's end.

    An output that is known is counted, not kept twice. The end of an output may be missing, since a
    request's last step is shown to no proposer: if one output begins with the other, the two are
    the same one, and the longer is kept. All is a function of the calls and their order.
    """

    __slots__ = (
        "_by_beginning",
        "_by_owner",
        "_last_number",
        "_max_tokens",
        "_outputs",
        "contexts",
        "num_tokens",
    )

    def __init__(self, max_tokens: int) -> None:
        self.contexts = Contexts()  # of the outputs' tokens
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._outputs: OrderedDict[int, _Output] = OrderedDict()  # least recently used first
        self._by_beginning: dict[bytes, list[int]] = {}
        self._by_owner: dict[str, int] = {}
        self._last_number = 0

    def __len__(self) -> int:
        """Return the number of different outputs."""
        return len(self._outputs)

    def count(self, place: int) -> int:
        """Return how many requests had the output that a place of `contexts` lies in."""
        return self._outputs[number_of(place)].count

    def use(self, places: Iterable[int]) -> None:
        """Take note that the outputs of these places were of use; the first one most recently."""
        for number in reversed([number_of(place) for place in places]):
            self._outputs.move_to_end(number)

    def remember(self, req_id: str, text: array[int], num_prompt: int) -> None:
        """Take in a request's tokens, of which the first `num_prompt` are its prompt."""
        if len(text) <= num_prompt or self._max_tokens == 0:
            return
        self._disown(self._by_owner.get(req_id))
        start = max(0, num_prompt - LONGEST, len(text) - self._max_tokens)
        output = _Output(text[start:], max(0, num_prompt - start), 1, req_id)
        known = self._known(output)
        if known is not None:
            old = self._outputs[known]
            if len(output.text) <= len(old.text):
                self._disown(known)
                old.count += 1
                old.owner = req_id
                self._by_owner[req_id] = known
                self._outputs.move_to_end(known)
                return
            output.count += old.count
            self._drop(known)
        self._add(output)
        while self.num_tokens > self._max_tokens:
            self._drop(next(iter(self._outputs)))

    def take_back(self, req_id: str, text: array[int], num_prompt: int) -> None:
        """A request is there again: it had been preempted, so it is not to be counted twice.

        Nothing happens if no request of this id is known, or another one: ids may be used again.
        """
        number = self._by_owner.get(req_id)
        if number is None:
            return
        output = self._outputs[number]
        if not output.agrees_with(text[max(0, num_prompt - output.num_prompt) :]):
            return
        if output.count == 1:
            self._drop(number)
        else:
            self._disown(number)
            output.count -= 1

    def _known(self, output: _Output) -> int | None:
        """Return the number of the most recent output that is the same one."""
        for number in reversed(self._by_beginning.get(output.beginning, ())):
            if self._outputs[number].agrees_with(output.text):
                return number
        return None

    def _add(self, output: _Output) -> None:
        self._last_number = number = self._last_number + 1
        self._outputs[number] = output
        self._by_beginning.setdefault(output.beginning, []).append(number)
        if output.owner is not None:
            self._by_owner[output.owner] = number
        self.num_tokens += len(output.text)
        self.contexts.texts[number] = output.text
        for end in range(max(1, output.num_prompt), len(output.text)):
            self.contexts.add(number, end)

    def _drop(self, number: int) -> None:
        self._disown(number)
        output = self._outputs.pop(number)
        for end in range(max(1, output.num_prompt), len(output.text)):
            self.contexts.remove(number, end)
        del self.contexts.texts[number]
        self.num_tokens -= len(output.text)
        same = self._by_beginning[output.beginning]
        same.remove(number)
        if not same:
            del self._by_beginning[output.beginning]

    def _disown(self, number: int | None) -> None:
        """Forget whose an output is, not the output."""
        if number is not None:
            output = self._outputs[number]
            if output.owner is not None:
                del self._by_owner[output.owner]
                output.owner = None
