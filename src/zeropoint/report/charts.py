"""Charts of a page, as SVG in the colors of its style sheet. Every mark has its numbers as a title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

COLORS = 8
"""Series of which each has a color of its own."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900, 280, 56, 28, 10


@dataclass(frozen=True, slots=True)
class Area:
    """A rectangle of a treemap. size: its area. color: number of its color."""

    label: str
    size: float
    color: int
    title: str


Line = Sequence[tuple[int, float]]
"""Depth and value, in order of depth."""


def depth_chart(series: Mapping[str, Line], dashed: Mapping[str, Line] | None = None, *, label: str) -> str:
    """Return lines over the depth of a model, one for each kind of layer, in the color of its number.

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

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)} by depth">']
    for tick in range(5):
        _, y = place(0, most * tick / 4)
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{most * tick / 4:.3g}</text>'
        )
    for depth in sorted({round(deepest * tick / 5) for tick in range(6)}):
        x, _ = place(depth, 0)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{depth}</text>')
    for number, (kind, line) in enumerate(series.items()):
        dashes = drawn(kind, second[kind], ' stroke-dasharray="5 4"') if kind in second else ""
        parts.append(f'<g class="c{number % COLORS}">{drawn(kind, line, "")}{dashes}</g>')
    return "".join((*parts, "</svg>"))


def treemap(areas: Sequence[Area], *, scale: float, label: str) -> str:
    """Return rectangles whose areas are sizes, the largest first.

    scale: of both sides, at most 1, so that the areas of two treemaps can be compared.
    """
    width, height = 600 * scale, 300 * scale
    order = sorted((area for area in areas if area.size > 0), key=lambda area: -area.size)
    box = f'viewBox="0 0 {width:.1f} {height:.1f}" style="width:{scale:.2%}"'
    parts = [f'<svg {box} role="img" aria-label="{escape(label)}">']
    for area, (x, y, w, h) in _placed(order, (0.0, 0.0, width, height)):
        text = ""
        if w > 7 * len(area.label) and h > 18:
            text = f'<text x="{x + 5:.1f}" y="{y + 15:.1f}">{escape(area.label)}</text>'
        parts.append(
            f'<g class="c{area.color % COLORS}"><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" '
            f'height="{h:.1f}"><title>{escape(area.title)}</title></rect>{text}</g>'
        )
    return "".join((*parts, "</svg>"))


_Box = tuple[float, float, float, float]


def _placed(areas: Sequence[Area], box: _Box) -> list[tuple[Area, _Box]]:
    """Return the place of each area: the longer side of the box is cut where the sizes are halved."""
    if len(areas) < 2:
        return [(area, box) for area in areas]
    sums = list(accumulate(area.size for area in areas))
    cut = min(range(1, len(areas)), key=lambda n: abs(2 * sums[n - 1] - sums[-1]))
    share, (x, y, w, h) = sums[cut - 1] / sums[-1], box
    first = (x, y, w * share, h) if w > h else (x, y, w, h * share)
    second = (x + w * share, y, w - w * share, h) if w > h else (x, y + h * share, w, h - h * share)
    return _placed(areas[:cut], first) + _placed(areas[cut:], second)


def histogram(shares: Sequence[float], *, label: str) -> str:
    """Return bars of equal width, small enough for a cell of a table."""
    most, width = max(shares, default=0.0) or 1.0, 96 / max(1, len(shares))
    path = "".join(
        f"M{n * width:.4g} 24v-{24 * share / most:.3g}h{width * 0.8:.3g}V24z"
        for n, share in enumerate(shares)
    )
    box = 'class="bars" viewBox="0 0 96 24" role="img"'
    return f'<svg {box} aria-label="{escape(label)}"><path d="{path}"/></svg>'
