"""The chart of the README: KL divergence over bits a weight, made from figures that are checked in.

    python docs/make_divergence_chart.py

reads docs/images/divergence.json and writes docs/images/divergence.svg. The figures are those of two tables:
without data, "Measured" of docs/evaluation.md (`benchmarks/quality.py`); with a text, "Other tools" of
docs/methods.md (`benchmarks/methods.py`). Bits are those of weights with scales of 16 bits; of llama.cpp's
mixtures those of all weights, the embedding too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "images"
FIGURES, CHART = FOLDER / "divergence.json", FOLDER / "divergence.svg"
COLORS = {
    "zeropoint": "#c8102e", "auto-round": "#1f77b4", "llm-compressor": "#2ca02c", "ModelOpt": "#9467bd",
    "llama.cpp": "#8c564b", "round to nearest": "#888888", "GPTQModel": "#e67e00",
}  # fmt: skip
LEFT, RIGHT, TOP, BOTTOM = 60, 500, 62, 330
LOW, HIGH = math.log10(0.02), math.log10(2.5)
FIRST, LAST = 3.0, 6.5
BARS, MOST = (710, 890), 0.36


class Figure(NamedTuple):
    """One measurement. data: what was learned from. error: standard error of kl."""

    data: str
    tool: str
    scheme: str
    bits: float
    kl: float
    error: float


def figures() -> list[Figure]:
    """Return the figures of the file."""
    return [Figure(**row) for row in json.loads(FIGURES.read_text(encoding="utf-8"))]


def color(tool: str) -> str:
    """Return the color of a tool, whose name a row begins with."""
    return next(found for name, found in COLORS.items() if tool.startswith(name))


def place(bits: float, kl: float) -> tuple[float, float]:
    """Return where a figure is."""
    x = LEFT + (bits - FIRST) / (LAST - FIRST) * (RIGHT - LEFT)
    return x, BOTTOM - (math.log10(kl) - LOW) / (HIGH - LOW) * (BOTTOM - TOP)


def lines(found: Sequence[Figure]) -> list[str]:
    """Return the left half: a line for each tool."""
    parts = [f"<text class='h' x='{LEFT}' y='24'>Without data</text>"]
    parts.append(f"<text x='{LEFT}' y='42'>KL divergence from the unquantized model, by bits a weight</text>")
    for kl in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2):
        _, y = place(FIRST, kl)
        parts.append(f"<path class='g' d='M{LEFT} {y:.1f}H{RIGHT}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{kl:g}</text>")
    for bits in (3, 4, 5, 6):
        x, _ = place(bits, 1)
        parts.append(f"<text x='{x:.1f}' y='{BOTTOM + 18}' text-anchor='middle'>{bits}</text>")
    parts.append(
        f"<text x='{(LEFT + RIGHT) / 2}' y='{BOTTOM + 36}' text-anchor='middle'>bits a weight</text>"
    )
    for tool in dict.fromkeys(f.tool for f in found):
        own = [f for f in found if f.tool == tool]
        wide = 3 if tool == "zeropoint" else 1.6
        for group in ([f for f in own if f.bits < 5], [f for f in own if f.bits > 5]):
            points = " ".join("{:.1f},{:.1f}".format(*place(f.bits, f.kl)) for f in group)
            parts.append(
                f"<polyline points='{points}' fill='none' stroke='{color(tool)}' stroke-width='{wide}'/>"
            )
        for f in own:
            x, y = place(f.bits, f.kl)
            title = f"<title>{escape(tool)}, {f.scheme}: {f.kl:g} ± {f.error:g}</title>"
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{color(tool)}'>{title}</circle>")
    return parts + legend([f.tool for f in found])


def legend(tools: Sequence[str]) -> list[str]:
    """Return the names of the tools in their colors."""
    parts = []
    for number, tool in enumerate(dict.fromkeys(tools)):
        y = TOP + 12 + 17 * number
        parts.append(f"<path d='M360 {y}h18' stroke='{color(tool)}' stroke-width='3'/>")
        parts.append(f"<text x='384' y='{y + 4}'>{escape(tool)}</text>")
    return parts


def bars(found: Sequence[Figure]) -> list[str]:
    """Return the right half: a bar for each tool."""
    left, right = BARS
    parts = ["<text class='h' x='545' y='24'>With 64 windows of text</text>"]
    parts.append("<text x='545' y='42'>KL divergence at 4.25 bits (int4, groups of 64)</text>")
    for number, f in enumerate(found):
        y, width = TOP + 16 + 40 * number, f.kl / MOST * (right - left)
        title = f"<title>{f.kl:g} ± {f.error:g}</title>"
        parts.append(f"<text x='{left - 8}' y='{y + 15}' text-anchor='end'>{escape(f.tool)}</text>")
        parts.append(
            f"<rect x='{left}' y='{y}' width='{width:.1f}' height='22' fill='{color(f.tool)}'>{title}</rect>"
        )
        parts.append(f"<text x='{left + width + 5:.1f}' y='{y + 15}'>{f.kl:.3f}</text>")
    return parts


def chart(found: Sequence[Figure]) -> str:
    """Return the picture."""
    label = "KL divergence of SmolLM2-135M over bits a weight, zeropoint and other tools"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 940 380' role='img' aria-label='{label}'>",
        "<style>text{font:13px sans-serif;fill:#222}.h{font-weight:bold}.g{stroke:#ddd}</style>",
        "<rect width='940' height='380' fill='white'/>",
        *lines([f for f in found if f.data == "none"]),
        *bars([f for f in found if f.data == "text"]),
    ]
    return "\n".join((*parts, "</svg>", ""))


if __name__ == "__main__":
    CHART.write_text(chart(figures()), encoding="utf-8")
