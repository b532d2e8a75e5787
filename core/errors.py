"""The kinds of error foresay raises, and helpers that word them. Knows nothing else.

Every message is a sentence: what is wrong (in `repr`), what was expected, what exists, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForesayError(Exception):
    """Base of every error a user can cause; the command line prints it as one line, exit code 2."""


class ConfigError(ForesayError, ValueError):
    """A setting is unknown, has a wrong value, or asks for what this machine or model cannot do."""


class RequestError(ForesayError, ValueError):
    """One request cannot be accepted: an empty or over-long prompt, a wrong token id, ..."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for an output within the engine's `max_model_len`."""


class ModelError(ForesayError):
    """A target model cannot be found, loaded, or run exactly."""


class UnknownModelError(ModelError):
    """No model of that name was found anywhere."""


class PluginError(ForesayError):
    """A plugin is missing, failed to load, or clashes with another."""


class ProposerError(ForesayError):
    """A proposer broke its contract. Raised in strict mode only; otherwise counted and survived."""


class EngineError(ForesayError):
    """The engine cannot go on: nothing can be scheduled though requests exist, a worker died."""


class WorkerDiedError(EngineError):
    """The worker's process is gone; no call to it will be answered any more."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest of `choices`, or `""` if none is close."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def one_line(error: BaseException) -> str:
    """Word somebody else's exception as "Type: text", on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
