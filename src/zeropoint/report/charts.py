"""SVG charts of a page, in its colors; marks' titles have numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from ..shown import Picture
from .nodes import COLORS

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 280, 56, 28, 10


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of a treemap: label, area, color number, and title."""

    label: str
    size: float
    color: int
    title: str


Line = Sequence[tuple[int, float]]
"""Depth and value, in order of depth."""


def depth_chart(
    series: Mapping[str, Line], dashed: Mapping[str, Line] | None = None, *, label: str
) -> Picture:
    """Return lines over a model's depth, one for each layer kind.

    series: kind to line. dashed: a second line of some kinds. label: what the values are.
    """
    second = dashed or {}
    points = [point for lines in (series, second) for line in lines.values() for point in line]
    deepest, most = max((x for x, _ in points), default=0), max((y for _, y in points), default=0.0) or 1.0
    right, bottom = _WIDTH - 10, _HEIGHT - _BOTTOM

    def place(x: int, y: float) -> tuple[float, float]:
        return _LEFT + x / max(1, deepest) * (right - _LEFT), bottom - y / most * (bottom - _TOP)

    def drawn(kind: str, line: Line, style: str) -> str:
        spots = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        circles = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(kind)}, {depth}: {value:.4g}</title></circle>"
            for (x, y), (depth, value) in zip(spots, line, strict=True)
        )
        return f'<polyline points="{path}"{style}/>{"".join(circles)}'

    parts = []
    for value in _steps(0.0, most):
        _, y = place(0, value)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for depth in sorted({round(deepest * tick / 5) for tick in range(6)}):
        x, _ = place(depth, 0)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{depth}</text>')
    for number, (kind, line) in enumerate(series.items()):
        dashes = drawn(kind, second[kind], ' stroke-dasharray="5 4"') if kind in second else ""
        parts.append(f'<g class="c{number % COLORS}">{drawn(kind, line, "")}{dashes}</g>')
    return _picture(f'viewBox="0 0 {_WIDTH} {_HEIGHT}"', parts, f"{label} by depth")


def share_bars(rows: Sequence[tuple[str, float, str]], *, label: str) -> Picture:
    """Return bars of shares; rows: name, share, and text behind."""
    height, left, row, most = 30 + 20 * len(rows), 400, 20, 1.1  # some shares are a little above one
    scale = (_WIDTH - left - 60) / most
    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + tick * scale
        parts.append(f'<path class="grid" d="M{x:.1f} 20V{height}"/>')
        parts.append(f'<text x="{x:.1f}" y="14" text-anchor="middle">{tick:g}</text>')
    for number, (name, share, text) in enumerate(rows):
        y, width = 24 + row * number, min(share, most) * scale
        parts.append(
            f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
            f'<g class="c0"><rect x="{left}" y="{y + 1}" width="{width:.1f}" height="{row - 6}"/></g>'
            f'<text x="{left + width + 5:.1f}" y="{y + 12}">{escape(text)}</text>'
        )
    return _picture(f'viewBox="0 0 {_WIDTH} {height}"', parts, label)


def _picture(box: str, parts: Iterable[str], label: str) -> Picture:
    inner = "".join(parts)
    return Picture(inline=f'<svg {box} role="img" aria-label="{escape(label)}">{inner}</svg>', label=label)


def treemap(areas: Sequence[Area], *, scale: float, label: str) -> Picture:
    """Return rectangles whose areas are sizes, the largest first.

    scale: of both sides, at most 1, so that the areas of two treemaps can be compared.
    """
    width, height = 600 * scale, 300 * scale
    order = sorted((area for area in areas if area.size > 0), key=lambda area: -area.size)
    box = f'viewBox="0 0 {width:.1f} {height:.1f}" style="width:{scale:.2%}"'
    parts = []
    for area, (x, y, w, h) in _placed(order, (0.0, 0.0, width, height)):
        text = ""
        if w > 7 * len(area.label) and h > 18:
            text = f'<text x="{x + 5:.1f}" y="{y + 15:.1f}">{escape(area.label)}</text>'
        parts.append(
            f'<g class="c{area.color % COLORS}"><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" '
            f'height="{h:.1f}"><title>{escape(area.title)}</title></rect>{text}</g>'
        )
    return _picture(box, parts, label)


_Box = tuple[float, float, float, float]


def _placed(areas: Sequence[Area], box: _Box) -> list[tuple[Area, _Box]]:
    """Return the box of each area, cutting the longer side at half."""
    if len(areas) < 2:
        return [(area, box) for area in areas]
    sums = list(accumulate(area.size for area in areas))
    cut = min(range(1, len(areas)), key=lambda n: abs(2 * sums[n - 1] - sums[-1]))
    share, (x, y, w, h) = sums[cut - 1] / sums[-1], box
    first = (x, y, w * share, h) if w > h else (x, y, w, h * share)
    second = (x + w * share, y, w - w * share, h) if w > h else (x, y + h * share, w, h - h * share)
    return _placed(areas[:cut], first) + _placed(areas[cut:], second)


def histogram(shares: Sequence[float], *, label: str) -> Picture:
    """Return a histogram for a cell of a table."""
    return _picture('class="bars" viewBox="0 0 96 24"', [_bars(shares, 96, 24)], label)


def _bars(shares: Sequence[float], width: float, height: float) -> str:
    most, step = max(shares, default=0.0) or 1.0, width / max(1, len(shares))
    path = "".join(
        f"M{n * step:.4g} {height:g}v-{height * share / most:.3g}h{step * 0.8:.3g}V{height:g}z"
        for n, share in enumerate(shares)
    )
    return f'<path d="{path}"/>'


@dataclass(frozen=True, slots=True)
class Spot:
    """A named point of a chart. color: number of its color."""

    x: float
    y: float
    label: str
    color: int = 0


def scatter(
    spots: Sequence[Spot], *, axes: tuple[str, str], label: str, line: Sequence[tuple[float, float]] = ()
) -> Picture:
    """Return named points, and a line, over a logarithmic axis.

    Points of zero, which no logarithm has, stand at its lower end. axes: what is measured along each.
    """
    points = [*((spot.x, spot.y) for spot in spots), *line]
    heights = [y for _, y in points if y > 0 and math.isfinite(y)] or [1.0]
    low, high = math.log10(min(heights)), math.log10(max(heights))
    low, high = low - 0.05 * max(high - low, 1), high + 0.05 * max(high - low, 1)
    left, right = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    margin = 0.08 * max(right - left, 0.5)
    left, right = left - margin, right + margin
    end, bottom, top = _WIDTH - 30, _TALL - 2 * _BOTTOM, 3 * _TOP

    def place(x: float, y: float) -> tuple[float, float]:
        height = (math.log10(y) - low) / (high - low) if 0 < y < math.inf else 0.0
        return _LEFT + (x - left) / (right - left) * (end - _LEFT), bottom - height * (bottom - top)

    parts = [
        f'<text x="{_WIDTH / 2}" y="{_TALL - 8}" text-anchor="middle">{escape(axes[0])}</text>',
        f'<text x="{_LEFT - 48}" y="{_TOP + 4}">{escape(axes[1])}</text>',
    ]
    for value in _decades(10**low, 10**high):
        _, y = place(left, value)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{end}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for value in _steps(left, right):
        x, _ = place(value, 1.0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    if line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<g class="c0"><polyline points="{path}"/></g>')
    taken: list[tuple[float, float]] = []
    for spot in sorted(spots, key=lambda spot: spot.x):
        x, y = place(spot.x, spot.y)
        parts.append(
            f'<g class="c{spot.color % COLORS}"><circle cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{escape(spot.label)}: {spot.x:.4g}, {spot.y:.4g}</title></circle>"
            f"{_named(spot, (x, y), taken)}</g>"
        )
    return _picture(f'viewBox="0 0 {_WIDTH} {_TALL}"', parts, label)


_TALL = 380


def _decades(low: float, high: float) -> list[float]:
    """Return axis ticks between two numbers: 1, 2, 5 by decade."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(decades) <= 4 else (1,)
    found = [n * 10.0**power for power in decades for n in factors if low <= n * 10.0**power <= high]
    return found if len(found) > 2 else _steps(low, high)


def _steps(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    least = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(least))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _named(spot: Spot, place: tuple[float, float], taken: list[tuple[float, float]]) -> str:
    """Return a point's name, clear of ``taken`` places, which it joins."""
    x, y = place
    width, at = 7.0 * len(spot.label), y - 8
    while any(abs(at - y2) < 13 and x - width < x2 < x + width for x2, y2 in taken):
        at += 14
    taken.append((x, at))
    anchor = "end" if x + width > _WIDTH - 10 else "start"
    shift = -7 if anchor == "end" else 7
    return f'<text x="{x + shift:.1f}" y="{at:.1f}" text-anchor="{anchor}">{escape(spot.label)}</text>'


def codes_chart(shares: Sequence[float], ends: tuple[str, str], *, label: str) -> Picture:
    """Return bars over a format's values, between the ``ends``."""
    width, height = _WIDTH - 20, 160
    low, high = (
        f'<text x="{x}" y="{height + 28}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, anchor, text in ((0, "start", ends[0]), (width, "end", ends[1]))
    )
    parts = [f'<g class="bars" transform="translate(10 10)">{_bars(shares, width, height)}{low}{high}</g>']
    return _picture(f'viewBox="0 0 {_WIDTH} {height + 46}"', parts, label)


def number_line(values: Sequence[float], *, label: str) -> Picture:
    """Return a number line with a mark for each value."""
    low, high = min(values), max(values)

    def place(value: float) -> float:
        return 10 + (value - low) / ((high - low) or 1.0) * (_WIDTH - 20)

    marks = "".join(f"M{place(value):.1f} 12v26h1.2v-26z" for value in values)
    anchors = {low: "start", **({0.0: "middle"} if low < 0 < high else {}), high: "end"}
    names = (
        f'<text x="{place(value):.1f}" y="58" text-anchor="{anchor}">{value:g}</text>'
        for value, anchor in anchors.items()
    )
    line = f'<g class="bars"><path d="{marks}"/></g><path class="grid" d="M10 38H{_WIDTH - 10}"/>'
    return _picture(f'viewBox="0 0 {_WIDTH} 66"', [line, *names], label)
