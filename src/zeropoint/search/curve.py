"""The curve of the best losses of a search over bits, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..own_files import FileKind
from .searching import CurvePoint, SearchResult

_WIDTH, _HEIGHT, _MARGIN = 720, 440, 64
_TICKS = 5
_STYLE = "font-family='sans-serif' font-size='12'"
_MARK = "zeropoint search"
SVG = FileKind("plot", _MARK.encode())


def curve_svg(result: SearchResult) -> str:
    """Return the curve of the best losses over bits, with the candidates and the choice, as an SVG picture.

    Losses have a logarithmic axis; points without loss are at its lower end.
    """
    values = max(1, result.choices.values)
    chosen = CurvePoint(nbytes=result.allocation.size, loss=result.allocation.loss, name="mixture")
    every = (*result.curve, *result.uniform, chosen)
    bits = [8 * point.nbytes / values for point in every]
    losses = [point.loss for point in every if point.loss > 0] or [1.0]
    low, high = math.log10(min(losses)), math.log10(max(losses))
    low, high = math.floor(low * 10) / 10, max(math.ceil(high * 10) / 10, math.floor(low * 10) / 10 + 0.1)
    left, right = min(bits), max(*bits, min(bits) + 0.1)

    def place(point: CurvePoint) -> tuple[float, float]:
        x = (8 * point.nbytes / values - left) / (right - left)
        y = (math.log10(point.loss) - low) / (high - low) if point.loss > 0 else 0.0
        return _MARGIN + x * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - y * (_HEIGHT - 2 * _MARGIN)

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, result.curve))
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' {_STYLE}>",
        f"<!-- {_MARK} -->",
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='white'/>",
        *_axes((left, right), (low, high)),
        f"<polyline points='{path}' fill='none' stroke='steelblue' stroke-width='2'/>",
    ]
    for point, color in (*((p, "dimgray") for p in result.uniform), (chosen, "crimson")):
        x, y = place(point)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{color}'/>")
        parts.append(f"<text x='{x + 6:.1f}' y='{y - 6:.1f}' fill='{color}'>{escape(point.name)}</text>")
    return "\n".join((*parts, "</svg>", ""))


def _axes(bits: tuple[float, float], losses: tuple[float, float]) -> Sequence[str]:
    """Return both axes with their marks."""
    bottom, end = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    parts = [
        f"<path d='M{_MARGIN},{_MARGIN} V{bottom} H{end}' fill='none' stroke='black'/>",
        f"<text x='{_WIDTH / 2}' y='{_HEIGHT - 16}' text-anchor='middle'>bits for each number</text>",
        f"<text x='{_MARGIN}' y='{_MARGIN - 12}' text-anchor='middle'>loss</text>",
    ]
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        x, y = _MARGIN + share * (end - _MARGIN), bottom - share * (bottom - _MARGIN)
        bit = bits[0] + share * (bits[1] - bits[0])
        loss = 10 ** (losses[0] + share * (losses[1] - losses[0]))
        parts.append(f"<text x='{x:.1f}' y='{bottom + 18}' text-anchor='middle'>{bit:.2f}</text>")
        parts.append(f"<text x='{_MARGIN - 6}' y='{y + 4:.1f}' text-anchor='end'>{loss:.2g}</text>")
        parts.append(f"<path d='M{_MARGIN},{y:.1f} H{end}' stroke='gainsboro'/>")
    return parts
