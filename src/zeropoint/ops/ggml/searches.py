"""llama.cpp's search for block scales and minima, by least squares.

    make_qx_quants     signed_scale        scale of least weighted error, codes of both signs
    make_q3_quants     three_bit_scale     the same by moving one code at a time
    make_qp_quants     positive_scale      scale of numbers that are not negative
    make_qkx2_quants   scale_and_minimum   scale and minimum of least weighted error
    make_qkx3_quants   scale_and_minimum   the same with other steps

``x`` and ``w``, the weights of squared errors, are (values, blocks) float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...formats.division import over
from .float_steps import LEAST, extremes, largest, nearest, ratio, single, stepped, total

_PASSES = 5
"""Most passes in which one code after the other is moved; a pass without a move is the last."""


class Scaled(NamedTuple):
    """A scale for each block, float32, and codes of its values, int32."""

    scale: torch.Tensor
    codes: torch.Tensor


def signed_scale(x: torch.Tensor, w: torch.Tensor, top: int) -> Scaled:
    """Return scales and codes from ``-top`` to ``top - 1``; zeros: ``-top``."""
    amax, value = largest(x)

    def tried(numerator: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes = nearest(over(numerator, value) * x).clamp(-top, top - 1)
        return codes, total(w * x * codes), total(w * codes * codes)

    codes, products, squares = tried(-float(top))
    scale = torch.where(squares != 0, products / squares, 0.0)
    best = scale * products
    for step in (*range(-9, 0), *range(1, 10)):
        moved, products, squares = tried(-stepped(top, 0.1, step))
        better = (squares > 0) & (products * products > best * squares)
        codes = torch.where(better, moved, codes)
        scale = torch.where(better, products / squares, scale)
        best = torch.where(better, scale * products, best)
    zeros = amax < LEAST
    return Scaled(torch.where(zeros, 0.0, scale), torch.where(zeros, -top, codes))


def three_bit_scale(x: torch.Tensor) -> Scaled:
    """Return Q3_K's scales and codes from -4 to 3, weighted by squares."""
    amax, value = largest(x)
    w = x * x
    found = _moved(x, w, nearest(over(-4.0, value) * x).clamp(-4, 3), -4, 3)
    zeros = amax < LEAST
    return Scaled(torch.where(zeros, 0.0, found.scale), torch.where(zeros, -4, found.codes))


def positive_scale(x: torch.Tensor, w: torch.Tensor, top: int) -> Scaled:
    """Return scales and codes from 0 to ``top`` of nonnegative numbers."""
    high = x.amax(0).clamp(min=0)

    def error(inverse: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        off = x - over(1.0, inverse) * codes
        return total(w * off * off)

    inverse = over(top, high)
    best = error(inverse, nearest(inverse * x) & 0xFF)
    for step in (*range(-4, 0), *range(1, 5)):
        near = over(stepped(top, 0.1, step), high)
        tried = error(near, nearest(near * x).clamp(max=top))
        inverse = torch.where(tried < best, near, inverse)
        best = torch.where(tried < best, tried, best)
    found = _moved(x, w, nearest(inverse * x).clamp(max=top), None, top)
    zeros = high < LEAST
    return Scaled(torch.where(zeros, 0.0, found.scale), torch.where(zeros, 0, found.codes))


def _moved(x: torch.Tensor, w: torch.Tensor, codes: torch.Tensor, low: int | None, top: int) -> Scaled:
    """Move one code after the other while that gains.

    low, top: ends of the codes; without ``low``, a byte keeps them.
    """
    products, squares = total(w * x * codes), total(w * codes * codes)
    kept = 0xFF if low is None else -1
    codes &= kept
    for _ in range(_PASSES):
        for i in range(len(x)):
            left = products - w[i] * x[i] * codes[i]
            rest = squares - w[i] * codes[i] * codes[i]
            moved = nearest(x[i] * rest / left).clamp(low, top)
            with_moved = left + w[i] * x[i] * moved
            squares_moved = rest + w[i] * moved * moved
            better = (left > 0) & (moved != codes[i]) & ((rest if low is None else squares_moved) > 0)
            better &= with_moved * with_moved * squares > products * products * squares_moved
            codes[i] = torch.where(better, moved & kept, codes[i])
            products = torch.where(better, with_moved, products)
            squares = torch.where(better, squares_moved, squares)
    return Scaled(ratio(products, squares), codes)


class Line(NamedTuple):
    """Inverse scales that :func:`scale_and_minimum` tries.

    They are ``(first + step * n + top) / range``. top: the largest code. first, step: coefficients of the
    summand to it. steps: the last ``n``. magnitudes: whether errors count by their magnitudes, not their
    squares.
    """

    top: int
    first: float
    step: float
    steps: int
    magnitudes: bool = False


IMPORTANT = Line(top=15, first=-0.9, step=0.05, steps=36)
"""The search of all types with importance."""


class ScaledMinimum(NamedTuple):
    """Each block's scale and negated minimum, float32, and int32 codes."""

    scale: torch.Tensor
    minimum: torch.Tensor
    codes: torch.Tensor


def scale_and_minimum(x: torch.Tensor, w: torch.Tensor, line: Line) -> ScaledMinimum:
    """Return scales, nonpositive minima, and codes from 0 to ``line.top``."""
    low, high = extremes(x)
    low = torch.where(low > 0, 0.0, low)
    flat = high <= low
    sum_w, sum_x = total(w[1:], w[0]), total(w[1:] * x[1:], w[0] * x[0])

    def codes_of(inverse: torch.Tensor) -> torch.Tensor:
        return nearest(inverse * (x - low)).clamp(0, line.top)

    def error(scale: torch.Tensor, minimum: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        off = scale * codes + minimum - x
        return total(w * (off.abs() if line.magnitudes else off * off))

    inverse = over(line.top, high - low)
    codes, scale = codes_of(inverse), over(1.0, inverse)
    best = error(scale, low, codes)
    start = low
    for n in range(line.steps + 1):
        numerator = single(stepped(single(line.first), line.step, n) + line.top)
        tried = codes_of(over(numerator, high - low))
        weighted = w * tried
        sum_l, sum_l2, sum_xl = total(weighted), total(weighted * tried), total(weighted * x)
        det = sum_w * sum_l2 - sum_l * sum_l
        near = (sum_w * sum_xl - sum_x * sum_l) / det
        minimum = (sum_l2 * sum_x - sum_l * sum_xl) / det
        above = minimum > 0
        minimum, near = torch.where(above, 0.0, minimum), torch.where(above, sum_xl / sum_l2, near)
        found = error(near, minimum, tried)
        better = (det > 0) & (found < best)
        codes, best = torch.where(better, tried, codes), torch.where(better, found, best)
        scale, low = torch.where(better, near, scale), torch.where(better, minimum, low)
    return ScaledMinimum(
        torch.where(flat, 0.0, scale), -torch.where(flat, start, low), torch.where(flat, 0, codes)
    )
