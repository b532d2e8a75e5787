"""Curves of trainings as a picture, in SVG: what is accepted, against reply tokens seen.

Left the mean acceptance length, a line for each training; right what is accepted by draft position,
among the chains that reached it, the later the fainter. Knows points only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from foresay_train.training import CurvePoint

# Told apart also by those who do not tell red from green (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDTH, _HEIGHT = 380, 240  # of a panel's inside
_LEFT, _TOP, _BETWEEN, _BOTTOM, _RIGHT = 56, 36, 72, 52, 24
_LINE_HEIGHT = 18
_TICKS = 5

_Line = tuple[list[tuple[float, float]], str, float]  # points, colour, opacity


def draw(curves: Mapping[str, Sequence[CurvePoint]]) -> str:
    """Return an SVG picture of curves by name."""
    lengths: list[_Line] = []
    rates: list[_Line] = []
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(curves)}
    for name, points in curves.items():
        seen = [float(point.reply_tokens) for point in points]
        lengths.append(
            (_paired(seen, [p.mean_acceptance_length for p in points]), colours[name], 1.0)
        )
        num_steps = min((len(point.acceptance) for point in points), default=0)
        for step in range(num_steps):
            opacity = 1 - 0.75 * step / max(1, num_steps - 1)
            rates.append(
                (_paired(seen, [p.acceptance[step] for p in points]), colours[name], opacity)
            )
    width = _LEFT + _WIDTH + _BETWEEN + _WIDTH + _RIGHT
    legend_top = _TOP + _HEIGHT + _BOTTOM
    height = legend_top + _LINE_HEIGHT * max(1, len(colours)) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_panel(_LEFT, "mean acceptance length", lengths, least=1.0),
        *_panel(
            _LEFT + _WIDTH + _BETWEEN,
            "accepted if reached, by draft position (the first darkest)",
            rates,
            least=0.0,
        ),
    ]
    for row, (name, colour) in enumerate(colours.items()):
        y = legend_top + _LINE_HEIGHT * row + 8
        parts.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + 24}" y2="{y}" stroke="{colour}" '
            'stroke-width="2"/>'
            f'<text x="{_LEFT + 32}" y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Return round numbers, at most `most` + 1, from at or below `low` to at or above `high`."""
    span = high - low if high > low else 1.0
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first = math.floor(low / step + 1e-9)
        last = max(first + 1, math.ceil(high / step - 1e-9))
        if last - first <= most:
            break
    return [round(number * step, 10) for number in range(first, last + 1)]


def _panel(left: int, title: str, lines: Sequence[_Line], least: float) -> list[str]:
    """Return a panel: axes, ticks, and lines; the y axis begins at `least` or below."""
    points = [point for line, _, _ in lines for point in line]
    across = ticks(0.0, max((x for x, _ in points), default=1.0))
    up = ticks(min([least, *(y for _, y in points)]), max([least, *(y for _, y in points)]))

    def place(x: float, y: float) -> tuple[float, float]:
        at_x = left + _WIDTH * (x - across[0]) / (across[-1] - across[0])
        at_y = _TOP + _HEIGHT * (1 - (y - up[0]) / (up[-1] - up[0]))
        return round(at_x, 1), round(at_y, 1)

    bottom, right = _TOP + _HEIGHT, left + _WIDTH
    parts = [f'<text x="{left}" y="{_TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for tick in up:
        _, y = place(across[0], tick)
        parts.append(
            f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#dddddd"/>'
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>'
        )
    for tick in across:
        x, _ = place(tick, up[0])
        parts.append(
            f'<line x1="{x}" y1="{bottom}" x2="{x}" y2="{bottom + 4}" stroke="black"/>'
            f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{_short(tick)}</text>'
        )
    parts.append(
        f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>'
        f'<text x="{(left + right) / 2:g}" y="{bottom + 34}" text-anchor="middle">reply tokens '
        "seen</text>"
    )
    for line, colour, opacity in lines:
        if line:
            where = " ".join(f"{x:g},{y:g}" for x, y in (place(*point) for point in line))
            parts.append(
                f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-opacity="{opacity:g}"/>'
            )
    return parts


def _paired(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(xs, ys, strict=True))


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"
