"""Draw the pictures of the concepts: ``python -m docs.make_pictures`` writes docs/images/*.svg.

Values come from the library: the codes of formats, the error of a block over its scale. Colors are legible on
light and dark pages, since each picture has a background of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

import zeropoint as zp

FOLDER = Path(__file__).parent / "images"
INK, SOFT, BLUE, ORANGE, GREEN = "#1f2933", "#7b8794", "#2563eb", "#c2410c", "#15803d"
FILL = {BLUE: "#dbeafe", ORANGE: "#ffedd5", GREEN: "#dcfce7", SOFT: "#f1f5f9"}
Point = tuple[float, float]


class Picture:
    """An SVG picture of 720 units in width, drawn from lines, boxes and text."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def text(self, at: Point, words: str, color: str = INK, size: int = 14, anchor: str = "middle") -> None:
        """Write words; ``at`` is on their baseline."""
        self.parts.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" fill="{color}" font-size="{size}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, points: Sequence[Point], color: str = INK, width: float = 1.5, dash: str = "") -> None:
        """Draw a line through points."""
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{shape}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
        )

    def arrow(self, start: Point, end: Point, words: str = "") -> None:
        """Draw an arrow, with words at its middle."""
        self.parts.append(
            f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{SOFT}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )
        if words:
            aside = 0 if start[1] == end[1] else 26 if end[0] > start[0] else -26
            self.text(((start[0] + end[0]) / 2 + aside, (start[1] + end[1]) / 2 - 4), words, SOFT, 12)

    def box(self, at: Point, size: Point, lines: Sequence[str], color: str = SOFT) -> None:
        """Draw a box with centered lines of text, the first of them strong."""
        (x, y), (width, height) = at, size
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{FILL[color]}" stroke="{color}"/>'
        )
        first = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, words in enumerate(lines):
            self.text(
                (x + width / 2, first + 18 * number),
                words,
                INK if number == 0 else SOFT,
                14 if number == 0 else 12,
            )

    def svg(self) -> str:
        """Return the picture as text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {self.height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(self.title)}</title>'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/></marker></defs>'
            f'<rect width="720" height="{self.height}" rx="8" fill="#ffffff"/>'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def formats() -> Picture:
    """Draw the values of three formats on one line each."""
    picture = Picture(220, "Values of int4, e2m1 and nf4, scaled to the range from -1 to 1")
    for row, (name, color) in enumerate((("int4", BLUE), ("float4_e2m1fn", ORANGE), ("nf4", GREEN))):
        y = 50 + 62 * row
        values = sorted(set(zp.get_format(name).all_values()))
        largest = max(map(abs, values))
        picture.text((20, y - 16), name, color, anchor="start")
        picture.line([(140, y), (700, y)], SOFT, 1)
        for place, value in enumerate(values):
            x = 420 + 270 * value / largest
            picture.line([(x, y - 9), (x, y + 9)], color, 2.5)
            if name != "nf4" or place % 2 == 1:
                picture.text((x, y + 24), f"{value:.2g}", SOFT, 10)
    return picture


def scheme() -> Picture:
    """Draw a scheme with the meaning of each word."""
    picture = Picture(170, "The scheme int4:g128:asym:scale=float16, word by word")
    words = (
        ("int4", "element format", "4-bit codes", BLUE),
        ("g128", "granularity", "128 values share a scale", ORANGE),
        ("asym", "zero point", "range need not be symmetric", GREEN),
        ("scale=float16", "scale", "rule and format of scales", SOFT),
    )
    for number, (word, title, meaning, color) in enumerate(words):
        x = 20 + 174 * number
        picture.box((x, 24), (158, 44), [word], color)
        picture.line([(x + 79, 68), (x + 79, 92)], color)
        picture.text((x + 79, 112), title, color)
        picture.text((x + 79, 134), meaning, SOFT, 11)
        if number:
            picture.text((x - 8, 52), ":", INK, 20)
    return picture


def parameters() -> Picture:
    """Draw a row of blocks under two levels of scales."""
    picture = Picture(230, "A tensor in blocks of 16, each with an 8-bit scale, under one float32 scale")
    picture.box((290, 16), (140, 40), ["scale 2: float32"], GREEN)
    for block in range(4):
        x = 30 + 170 * block
        picture.arrow((360, 56), (x + 75, 86))
        picture.box((x, 88), (150, 40), ["scale: e4m3"], ORANGE)
        picture.arrow((x + 75, 128), (x + 75, 152))
        for cell in range(8):
            picture.box((x + 19 * cell, 154), (17, 30), [], BLUE)
    picture.text((360, 212), "16 codes of 4 bits in each block: value = code * scale * scale 2", SOFT, 13)
    return picture


def method() -> Picture:
    """Draw the squared error of a block over the scale, from a block of normal values."""
    picture = Picture(280, "Squared error of a block over its scale")
    block = torch.randn(128, generator=torch.Generator().manual_seed(5))
    usual = float(block.abs().max()) / 7.5
    ratios = [0.6 + 0.01 * step for step in range(66)]
    errors = []
    for ratio in ratios:
        scale = usual * ratio
        decoded = (block / scale).round().clamp(-8, 7) * scale
        errors.append(float((decoded - block).square().sum() / block.square().sum()))
    low, high = 0.5 * min(errors), max(errors)
    points = [
        (80 + 600 * (r - 0.6) / 0.65, 230 - 190 * (e - low) / (high - low))
        for r, e in zip(ratios, errors, strict=True)
    ]
    picture.line([(80, 30), (80, 230), (690, 230)], SOFT, 1)
    picture.line(points, BLUE, 2.5)
    best = errors.index(min(errors))
    nearest = ratios.index(min(ratios, key=lambda ratio: abs(ratio - 1)))
    for index, name, color in ((best, "mse", GREEN), (nearest, "nearest", ORANGE)):
        x, y = points[index]
        picture.line([(x, y), (x, 230)], color, 1.5, "4 3")
        picture.text((x, y - 12), f"{name}: {1000 * errors[index]:.1f}", color)
    picture.text(
        (385, 262),
        "scale of an int4 block of 128 normal values, relative to largest magnitude / 7.5",
        SOFT,
        13,
    )
    picture.text((20, 22), "squared error / squares, times 1000", SOFT, 12, "start")
    for ratio in (0.6, 0.8, 1.0, 1.2):
        picture.text((80 + 600 * (ratio - 0.6) / 0.65, 246), f"{ratio:g}", SOFT, 11)
    return picture


def codec() -> Picture:
    """Draw one weight in two layouts."""
    picture = Picture(264, "Codes and scales of one weight in two layouts")
    picture.box((20, 85), (170, 70), ["codes, scales", "int4:g128 of a weight"], BLUE)
    for row, (name, about, tensors) in enumerate(
        (
            (
                "compressed-tensors",
                "words along the inputs",
                ("weight_packed", "weight_scale", "weight_shape"),
            ),
            ("gptq", "transposed", ("qweight", "qzeros", "scales", "g_idx")),
        )
    ):
        y = 20 + 120 * row
        picture.arrow((190, 120), (258, y + 45))
        picture.box((260, y + 10), (210, 66), [name, about], ORANGE)
        for place, tensor in enumerate(tensors):
            picture.arrow((470, y + 43), (538, y + 4 + 27 * place + 11))
            picture.box((540, y + 4 + 27 * place), (160, 23), [tensor], SOFT)
    return picture


def checkpoint() -> Picture:
    """Draw the stream of a checkpoint."""
    picture = Picture(150, "The stream of a checkpoint")
    steps = (
        ("headers", "of all shards", SOFT), ("plan", "every byte placed", BLUE),
        ("units", "rows, all cores", ORANGE), ("journal", "SHA-256 of each", GREEN),
        ("publish", "read back, named", BLUE),
    )  # fmt: skip
    for number, (name, about, color) in enumerate(steps):
        x = 14 + 142 * number
        picture.box((x, 30), (118, 62), [name, about], color)
        if number:
            picture.arrow((x - 24, 61), (x - 2, 61))
    picture.line([(475, 92), (475, 122), (357, 122), (357, 96)], SOFT, 1.5, "4 3")
    picture.text((416, 140), "interrupted: the same command resumes here", SOFT, 12)
    return picture


def error_bound() -> Picture:
    """Draw the error of int4 over the value, between the bounds."""
    picture = Picture(230, "The error of int4 over the value, between plus and minus half a step")
    picture.line([(60, 110), (700, 110)], SOFT, 1)
    for y, words in ((30, "bound"), (190, "-bound")):
        picture.line([(60, y), (700, y)], ORANGE, 1.5, "5 4")
        picture.text((52, y + 5), words, ORANGE, 12, "end")
    points: list[Point] = []
    for step in range(801):
        value = -4 + step / 100
        points.append((380 + 80 * value, 110 + 160 * (value - round(value))))
    picture.line(points, BLUE, 2)
    for value in range(-4, 5):
        picture.text((380 + 80 * value, 216), str(value), SOFT, 12)
    return picture


def dialects() -> Picture:
    """Draw two ways to divide that give two codes."""
    picture = Picture(190, "Division and multiplication by the reciprocal give two codes for one value")
    scale, value = _next_to_a_tie()
    divided, multiplied = float(value / scale), float(value * (1 / scale))
    picture.box((20, 60), (190, 66), [f"x = {float(value):.9g}", f"scale = {float(scale):.9g}"], SOFT)
    for row, (words, found, color) in enumerate(
        (("x / scale", divided, BLUE), ("x * (1 / scale)", multiplied, ORANGE))
    ):
        y = 16 + 88 * row
        picture.arrow((210, 93), (278, y + 33))
        picture.box((280, y), (240, 66), [words, f"= {found:.9g} in float32"], color)
        picture.arrow((520, y + 33), (588, y + 33), "round")
        picture.box((590, y), (110, 66), [f"code {round(found)}"], color)
    return picture


def _next_to_a_tie() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a scale and a value whose two quotients round to different codes."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(200_000, generator=generator) + 0.01
    values = (torch.randint(-7, 7, (200_000,), generator=generator) + 0.5) * scales
    differ = ((values / scales).round() != (values * (1 / scales)).round()).nonzero()[0]
    return scales[differ][0], values[differ][0]


def determinism() -> Picture:
    """Draw several ways to run that give one hash."""
    picture = Picture(220, "One thread, eight threads, a GPU and a cluster give one SHA-256")
    for row, name in enumerate(
        ("1 thread", "8 threads, --max-memory 512M", "tensors on a GPU", "a Ray cluster, resumed twice")
    ):
        picture.box((150, 14 + 50 * row), (230, 38), [name], BLUE)
        picture.arrow((380, 33 + 50 * row), (468, 108))
        picture.arrow((100, 108), (148, 33 + 50 * row))
    picture.box((14, 76), (86, 64), ["source"], SOFT)
    picture.box((470, 76), (230, 64), ["the same bytes", "one SHA-256"], GREEN)
    return picture


def which_scheme() -> Picture:
    """Draw the decision between schemes."""
    picture = Picture(420, "Which scheme: by engine, hardware and bits")
    picture.box((270, 12), (180, 44), ["Which engine?"], BLUE)
    engines = (
        (14, "llama.cpp", "gguf, q4_k_m", 150), (172, "mlx-lm", "mlx_int4", 118),
        (298, "vLLM, transformers", "compressed-tensors", 164), (470, "onnxruntime", "int4:g32, int8", 118),
        (596, "none: torch", "w8a8", 112),
    )  # fmt: skip
    for x, name, about, width in engines:
        picture.arrow((360, 56), (x + width / 2, 92))
        picture.box((x, 94), (width, 54), [name, about], ORANGE if name.startswith("vLLM") else SOFT)
    picture.arrow((380, 148), (380, 176))
    picture.box((270, 178), (220, 44), ["Is memory or speed short?"], BLUE)
    picture.arrow((300, 222), (180, 260), "memory")
    picture.arrow((460, 222), (560, 260), "speed")
    picture.box((60, 262), (240, 44), ["Do you have sample text?"], BLUE)
    picture.box((440, 262), (240, 44), ["Which GPU?"], BLUE)
    picture.arrow((120, 306), (95, 346), "yes")
    picture.arrow((240, 306), (270, 346), "no")
    picture.box((14, 348), (166, 58), ["w4a16, nvfp4a16", "--quality good"], GREEN)
    picture.box((190, 348), (166, 58), ["mse_weighted", "--calibration random"], GREEN)
    for number, (gpu, name) in enumerate(
        (("Ampere", "w8a8"), ("Ada, Hopper", "fp8_dynamic"), ("Blackwell", "nvfp4"))
    ):
        x = 380 + 112 * number
        picture.arrow((560, 306), (x + 52, 346))
        picture.box((x, 348), (104, 58), [name, gpu], GREEN)
    return picture


PICTURES = (
    formats, scheme, parameters, method, codec, checkpoint, error_bound, dialects, determinism, which_scheme,
)  # fmt: skip


def pictures() -> dict[str, str]:
    """Return the text of each picture by its file."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in PICTURES}


if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
