"""What crosses the border to a worker in another process besides the messages of each step.

Once, at the start: the `Order`, what to load; and the `Facts`, what the `Runner` protocol promises
about what was loaded. For those who train drafters, a `HiddenStatesCall`. And instead of an answer,
a `Failure`: an error, as plain data. Imports no torch; knows neither how these travel nor how a
worker is built.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, fields
from typing import Any

from foresay.core import errors
from foresay.core.config import EngineConfig
from foresay.core.errors import EngineError, ForesayError, one_line
from foresay.core.runner import Runner


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to load, and the surroundings it would have found in the engine's process.

    A proposer given as a class is "module:Class" in `config`.
    """

    config: EngineConfig
    tokenizer: Any  # an object, where to load one from, or None: the model's own
    entry_points: tuple[str, ...]  # the installed plugins that the engine's process uses
    folder: str  # the current one: paths may be relative to it
    log_level: int  # of the logger "foresay"


@dataclass(frozen=True, slots=True)
class Facts:
    """The properties of a `Runner`, by name."""

    tokenizer: Any  # None also if the engine has it already
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    num_blocks: int
    num_speculative_tokens: int
    max_context: int | None
    proposer_name: str | None
    proposer_members: tuple[tuple[str, int], ...]
    tree_members: tuple[str, ...]
    max_contexts: dict[str, int]
    takes_prediction: bool
    draft_slots: int
    has_proposer_kv: bool
    kv_reach: int
    row_invariant: bool
    summary: str

    @classmethod
    def of(cls, runner: Runner) -> Facts:
        """Ask a worker for its facts."""
        return cls(**{field.name: getattr(runner, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class HiddenStatesCall:
    """A call of `Runner.hidden_states`; the answer is its list of tensors."""

    texts: list[list[int]]
    layers: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An error raised in the worker. The exception itself may not be picklable elsewhere."""

    kind: str  # a class of `foresay.core.errors`
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error; one that is not foresay's own becomes an `EngineError`."""
        trace = "".join(traceback.format_exception(error))
        for kind in type(error).__mro__:  # a plugin may have derived kinds of its own
            if issubclass(kind, ForesayError) and getattr(errors, kind.__name__, None) is kind:
                return cls(kind.__name__, str(error), trace)
        return cls(EngineError.__name__, f"the worker raised {one_line(error)}", trace)

    def error(self) -> ForesayError:
        """Make the error anew, with the worker's traceback as a note."""
        error: ForesayError = getattr(errors, self.kind)(self.text)
        error.add_note(f"in the worker's process:\n{self.traceback.rstrip()}")
        return error
