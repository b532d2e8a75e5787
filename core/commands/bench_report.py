"""What `foresay bench` measured, and the rows made of it: one for each task and proposer.

Knows calls, their seconds and their outputs' figures; not how they were made. A row is of one
repeat, the one in the middle by the seconds of all proposers together, so that nothing in it is
mixed from different moments; the spread of the speedup is over all repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foresay.core.commands.prompts import ALL
from foresay.core.commands.report import pooled
from foresay.core.stats import RequestStats, ratio, show

PLAIN = "none"  # the proposer that speedups are over

HEADINGS = (
    "task",
    "proposer",
    "prompts",
    "tokens",
    "tokens/s",
    "speedup",
    "spread",
    "mean acceptance length",
    "tokens per step",
    "accepted",
    "nodes per step",
    "first token (s)",
    "ids equal",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one proposer's engine: the prompts of a batch, all of one task."""

    seconds: float  # wall clock, prefill included
    token_ids: Sequence[Sequence[int]]
    stats: Sequence[RequestStats]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of `--json`, under the keys that scripts rely on; None: there is no such figure."""

    proposer: str
    task: str
    prompts: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    speedup: float | None
    mean_acceptance_length: float | None
    tokens_per_step: float | None
    acceptance_rate: float | None
    time_to_first_token: float | None
    speedup_spread: tuple[float, float] | None  # the least and the most of the repeats
    ids_equal: bool | None  # to those of the first proposer; None where texts may differ
    nodes_per_step: float | None  # draft tokens verified per step with a draft

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def cells(self) -> list[str]:
        """Return it for a person, in the order of `HEADINGS`."""
        spread = self.speedup_spread
        return [
            self.task,
            self.proposer,
            str(self.prompts),
            str(self.tokens),
            show(self.tokens_per_second, ".1f"),
            "n/a" if self.speedup is None else f"{self.speedup:.2f}x",
            "n/a" if spread is None else f"{spread[0]:.2f}-{spread[1]:.2f}",
            show(self.mean_acceptance_length),
            show(self.tokens_per_step),
            show(self.acceptance_rate, ".0%"),
            show(self.nodes_per_step, ".1f"),
            show(self.time_to_first_token, ".3f"),
            "n/a" if self.ids_equal is None else "yes" if self.ids_equal else "NO",
        ]


class Measurements:
    """The calls made so far, by repeat and batch; a batch counts once all proposers had it."""

    def __init__(
        self, proposers: Sequence[str], batches: Sequence[tuple[str, Sequence[str]]]
    ) -> None:
        """`batches`: each one's task and the ids of its prompts."""
        self._proposers = tuple(proposers)
        self._batches = tuple(batches)
        self._repeats: list[dict[int, Mapping[str, Call]]] = []

    def add(self, repeat: int, batch: int, calls: Mapping[str, Call]) -> None:
        """Take what every proposer made of a batch; repeats are counted from 0, in order."""
        if repeat == len(self._repeats):
            self._repeats.append({})
        self._repeats[repeat][batch] = calls

    @property
    def num_repeats(self) -> int:
        """How many repeats the rows are of; 0: nothing was measured."""
        return len(self._counted())

    @property
    def is_partial(self) -> bool:
        """Whether not even one repeat is complete: the rows are of some prompts only."""
        return all(len(repeat) < len(self._batches) for repeat in self._repeats)

    def different(self) -> list[str]:
        """Return the ids of the prompts whose token ids were not the same every time."""
        names = []
        for index, (_, prompt_ids) in enumerate(self._batches):
            calls = [
                c for repeat in self._repeats if index in repeat for c in repeat[index].values()
            ]
            for place, prompt_id in enumerate(prompt_ids):
                if len({tuple(call.token_ids[place]) for call in calls}) > 1:
                    names.append(prompt_id)
        return names

    def rows(self, *, compared: bool) -> list[Row]:
        """Return a row for each task and proposer, then those of all tasks pooled.

        `compared`: the token ids are meant to be equal, so say whether they are.
        """
        repeats = self._counted()
        if not repeats:
            return []
        by_seconds = sorted(repeats, key=_seconds)
        middle = by_seconds[(len(by_seconds) - 1) // 2]
        by_task: dict[str, list[int]] = defaultdict(list)
        for index in middle:
            by_task[self._batches[index][0]].append(index)
        rows = []
        for task, indices in [*by_task.items(), (ALL, list(middle))]:
            for proposer in self._proposers:
                rows.append(self._row(task, indices, proposer, middle, repeats, compared))
        return rows

    def _counted(self) -> list[dict[int, Mapping[str, Call]]]:
        """Return the complete repeats; without one, what there is of the first."""
        complete = [repeat for repeat in self._repeats if len(repeat) == len(self._batches)]
        return complete or [repeat for repeat in self._repeats[:1] if repeat]

    def _row(
        self,
        task: str,
        indices: Sequence[int],
        proposer: str,
        middle: Mapping[int, Mapping[str, Call]],
        repeats: Sequence[Mapping[int, Mapping[str, Call]]],
        compared: bool,
    ) -> Row:
        calls = [middle[index][proposer] for index in indices]
        stats = pooled(own for call in calls for own in call.stats)
        seconds = sum(call.seconds for call in calls)
        speedups = [_speedup(repeat, indices, proposer) for repeat in repeats]
        known = [speedup for speedup in speedups if speedup is not None]
        first = self._proposers[0]
        return Row(
            proposer=proposer,
            task=task,
            prompts=stats.num_requests,
            tokens=stats.num_output_tokens,
            seconds=seconds,
            tokens_per_second=ratio(stats.num_output_tokens, seconds),
            speedup=_speedup(middle, indices, proposer),
            mean_acceptance_length=stats.mean_acceptance_length,
            tokens_per_step=stats.tokens_per_step,
            acceptance_rate=stats.acceptance_rate,
            time_to_first_token=stats.time_to_first_token,
            speedup_spread=(min(known), max(known)) if known else None,
            ids_equal=all(
                repeat[index][proposer].token_ids == middle[index][first].token_ids
                for repeat in repeats
                for index in indices
            )
            if compared
            else None,
            nodes_per_step=stats.nodes_per_step,
        )


def _seconds(repeat: Mapping[int, Mapping[str, Call]]) -> float:
    return sum(call.seconds for calls in repeat.values() for call in calls.values())


def _speed(
    repeat: Mapping[int, Mapping[str, Call]], indices: Sequence[int], proposer: str
) -> float | None:
    calls = [repeat[index][proposer] for index in indices]
    return ratio(
        sum(len(ids) for call in calls for ids in call.token_ids),
        sum(call.seconds for call in calls),
    )


def _speedup(
    repeat: Mapping[int, Mapping[str, Call]], indices: Sequence[int], proposer: str
) -> float | None:
    """Return tokens per second over those of plain decoding in the same repeat."""
    if any(PLAIN not in repeat[index] for index in indices):
        return None
    own, plain = (_speed(repeat, indices, name) for name in (proposer, PLAIN))
    return own / plain if own is not None and plain else None
