"""The history of `regression`: a file of runs, what has changed in them, and a picture.

Knows records, not how they are measured. Runs are compared only where machine and workload are the
same: ratios differ between machines. The file is one JSON document; it is replaced as a whole, so
that an interrupted run leaves the old one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from foresay.core.errors import ConfigError
from foresay_train.curves import ticks

FORMAT, VERSION = "foresay-regression", 1
LEAST_SPREAD = 0.01  # of a figure: a smaller change is none
SHOWN = 5  # runs in the table
DRAWN = 40  # and in the picture


class Kind(NamedTuple):
    """What is measured, for each of several names."""

    title: str
    more_is_better: bool


KINDS = {
    "batch1": Kind("speed over plain, batch 1", True),
    "batch8": Kind("speed over plain, batch 8", True),
    "acceptance": Kind("mean acceptance length, batch 1", True),
    "step": Kind("forward over its products", False),
    "outside": Kind("part of a step outside the model", False),
}


class Figure(NamedTuple):
    """A median, and the least and the most of the rounds."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How far the rounds are apart."""
        return self.high - self.low


Figures = Mapping[str, Mapping[str, Figure]]  # by kind, then by name


@dataclass(frozen=True)
class Record:
    """One run."""

    commit: str  # "-dirty" at its end: with changes that were not committed
    date: str  # UTC, ISO 8601
    machine: Mapping[str, Any]
    workload: Mapping[str, Any]
    figures: Figures

    def is_like(self, other: Record) -> bool:
        """Whether the two may be compared."""
        return (self.machine, self.workload) == (other.machine, other.workload)


# --- the file


def read(path: Path) -> list[Record]:
    """Return the runs of a file, the oldest first; none if there is no file.

    Raises `ConfigError` if it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: {error.strerror}") from None
    except ValueError as error:  # of UTF-8, too
        raise _foreign(path, f"it is no JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _foreign(path, f"its 'format' is not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise _foreign(path, f"its version is {content.get('version')!r}, not {VERSION}")
    try:
        return [_record(row) for row in content["records"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(path, f"a record is damaged ({type(error).__name__}: {error})") from None


def append(path: Path, record: Record) -> list[Record]:
    """Add a run to a file, and return all that it then has. Raises `ConfigError`, as `read`."""
    records = [*read(path), record]
    content = {"format": FORMAT, "version": VERSION, "records": [asdict(each) for each in records]}
    write(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return records


def write(path: Path, text: str) -> None:
    """Replace a file's content, all or nothing."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)


def _record(row: Any) -> Record:
    figures = {
        kind: {name: Figure(*map(float, values)) for name, values in named.items()}
        for kind, named in row["figures"].items()
    }
    machine, workload = dict(row["machine"]), dict(row["workload"])
    return Record(str(row["commit"]), str(row["date"]), machine, workload, figures)


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is no history of this script: {why}; it is left as it is. Move it away, or "
        "give another file with --history"
    )


# --- what has changed


@dataclass(frozen=True)
class Change:
    """A figure beside the runs before it."""

    kind: str
    name: str
    now: Figure
    before: float | None  # the median of the earlier runs' figures; None: there are none
    spread: float  # a change for the worse that is larger is one

    @property
    def relative(self) -> float | None:
        """How much more it is than before, of what it was; None: there is nothing to compare."""
        return None if not self.before else self.now.median / self.before - 1

    @property
    def is_worse(self) -> bool:
        """Whether it has got worse by more than its spread."""
        if self.before is None:
            return False
        gained = self.now.median - self.before
        return (-gained if KINDS[self.kind].more_is_better else gained) > self.spread


def changes(now: Record, earlier: Sequence[Record]) -> list[Change]:
    """Compare a run's figures with those of earlier runs that are like it.

    The spread is the run's own, or what earlier runs had in the middle if that is more: few rounds
    may be close to each other by chance.
    """
    found = []
    for kind in KINDS:
        for name, own in now.figures.get(kind, {}).items():
            known = [
                record.figures[kind][name]
                for record in earlier
                if name in record.figures.get(kind, {})
            ]
            before = median(figure.median for figure in known) if known else None
            usual = median(figure.spread for figure in known) if known else 0.0
            spread = max(own.spread, usual, LEAST_SPREAD * abs(before or 0.0))
            found.append(Change(kind, name, own, before, spread))
    return found


def table(record: Record, earlier: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: a row for each figure, a column for each of the last runs."""
    last = [*earlier, record][-SHOWN:]
    headings = ["figure", "", *(f"{each.commit} {each.date[:16]}" for each in last)]
    headings += ["spread", "before", "change", ""]
    rows = []
    for change in changes(record, earlier):
        cells = []
        for each in last:
            figure = each.figures.get(change.kind, {}).get(change.name)
            cells.append("" if figure is None else f"{figure.median:.3f}")
        before = "" if change.before is None else f"{change.before:.3f}"
        relative = "" if change.relative is None else f"{change.relative:+.1%}"
        rows.append(
            [
                KINDS[change.kind].title,
                change.name,
                *cells,
                f"{change.now.low:.3f}..{change.now.high:.3f}",
                before,
                relative,
                "WORSE" if change.is_worse else "",
            ]
        )
    return headings, rows


# --- the picture

# Told apart also by those who do not tell red from green (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDTH, _HEIGHT = 420, 170  # of a panel's inside
_LEFT, _TOP, _BOTTOM, _LEGEND = 52, 34, 66, 120
_STEP_X = _LEFT + _WIDTH + _LEGEND
_STEP_Y = _TOP + _HEIGHT + _BOTTOM
_COLUMNS = 2


def draw(records: Sequence[Record]) -> str:
    """Return an SVG of runs that are like each other: a panel for each kind, the oldest left.

    A line for each name; the bar at a point is the spread of that run.
    """
    shown = records[-DRAWN:]
    kinds = [kind for kind in KINDS if any(record.figures.get(kind) for record in shown)]
    width = _COLUMNS * _STEP_X
    height = _STEP_Y * max(1, -(-len(kinds) // _COLUMNS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, kind in enumerate(kinds):
        row, column = divmod(number, _COLUMNS)
        parts.append(f'<g transform="translate({column * _STEP_X},{row * _STEP_Y})">')
        parts += [*_panel(kind, shown), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(kind: str, records: Sequence[Record]) -> list[str]:
    names = list(dict.fromkeys(n for record in records for n in record.figures.get(kind, {})))
    each = [figure for record in records for figure in record.figures.get(kind, {}).values()]
    up = ticks(min(figure.low for figure in each), max(figure.high for figure in each))
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH

    def across(number: int) -> float:
        return round(_LEFT + _WIDTH * (number + 0.5) / len(records), 1)

    def above(value: float) -> float:
        return round(_TOP + _HEIGHT * (1 - (value - up[0]) / (up[-1] - up[0])), 1)

    title = KINDS[kind].title + ("" if KINDS[kind].more_is_better else " (less is better)")
    parts = [f'<text x="{_LEFT}" y="{_TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for tick in up:
        y = above(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for number, record in enumerate(records):
        x = across(number)
        parts.append(
            f'<text transform="translate({x},{bottom + 12}) rotate(25)" font-size="8">'
            f"{escape(record.commit)}</text>"
        )
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>')
    for row, name in enumerate(names):
        colour = _COLOURS[row % len(_COLOURS)]
        figures = [
            (across(number), record.figures[kind][name])
            for number, record in enumerate(records)
            if name in record.figures.get(kind, {})
        ]
        points = " ".join(f"{x},{above(figure.median)}" for x, figure in figures)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        for x, figure in figures:
            parts.append(
                f'<line x1="{x}" y1="{above(figure.low)}" x2="{x}" y2="{above(figure.high)}" '
                f'stroke="{colour}" stroke-opacity="0.4"/>'
                f'<circle cx="{x}" cy="{above(figure.median)}" r="2.5" fill="{colour}"/>'
            )
        parts.append(
            f'<text x="{right + 10}" y="{_TOP + 12 + 16 * row}" fill="{colour}">{escape(name)} '
            f"{figures[-1][1].median:.2f}</text>"
        )
    return parts
