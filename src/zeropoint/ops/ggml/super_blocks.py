"""Q2_K to Q6_K: few-bit block scales and minima under float16.

A float16 number is shared by 256 values. Codes of elements are chosen last, under the scales as they are
stored; where such a scale is zero, the codes of the search of the block's own scale stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...formats.division import divided, over
from .block_columns import SUPER, Importance, Stored, columns, halves, patterns, rounded, weighted
from .float_steps import LEAST, largest, nearest, root, total
from .searches import (
    IMPORTANT,
    Line,
    Scaled,
    positive_scale,
    scale_and_minimum,
    signed_scale,
    three_bit_scale,
)

SHORT = 16
"""Values under one scale of Q3_K and Q6_K."""


class Minima(NamedTuple):
    """What differs between the types that have minima.

    size: values under one scale. line: the search without importance. top: the largest code of a scale.
    factor: of the mean square in the weights that importance gives. stored: what the file holds of codes of
    scales and minima, (blocks, super-blocks): they are past ``top`` where the search found a negative scale.
    """

    size: int
    line: Line
    top: int
    factor: float
    stored: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _in_nibbles(scales: torch.Tensor, minima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scales & 15, (minima | scales >> 4) & 15


def _overlapping(scales: torch.Tensor, minima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _overlaid(scales), _overlaid(minima)


def _overlaid(codes: torch.Tensor) -> torch.Tensor:
    """Return 6-bit codes: the last four's high bits overlay the first four."""
    first, last = codes[:4], codes[4:]
    return torch.cat([first & 63, (last | (first >> 6 << 4)) & 63])


def _clamped(scales: torch.Tensor, minima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scales.clamp(max=63), minima.clamp(max=63)


Q2_K = Minima(16, Line(3, -0.5, 0.1, 15, magnitudes=True), 15, 1.0, _in_nibbles)
Q4_K = Minima(32, Line(15, -1.0, 0.1, 20), 63, 2.0, _overlapping)
Q5_K = Minima(32, Line(31, -0.5, 0.1, 15), 63, 2.0, _clamped)


def with_minima(x: torch.Tensor, importance: Importance, kind: Minima) -> Stored:
    """Q2_K, Q4_K and Q5_K."""
    size, line, top = kind.size, kind.line, kind.top
    blocks, count, rows = columns(x, size), SUPER // size, len(x)
    if importance is None:
        found = scale_and_minimum(blocks, _plain_weights(blocks, line), line)
        scales, minima = (_by_largest(columns(v, count), top) for v in (found.scale, found.minimum))
    else:
        weights = weighted(x, importance, size, SUPER, kind.factor)
        found = scale_and_minimum(blocks, weights, IMPORTANT._replace(top=line.top))
        sums = columns(total(weights), count)
        scales, minima = (positive_scale(columns(v, count), sums, top) for v in (found.scale, found.minimum))
        fine, fine_minima = kind.stored(scales.codes, minima.codes)
        scales, minima = Scaled(scales.scale, fine), Scaled(minima.scale, fine_minima)
    scale, minimum = _each(scales), _each(minima)
    codes = nearest((blocks + minimum) / scale).clamp(0, line.top)
    codes = torch.where(scale != 0, codes, found.codes)
    levels = [patterns(scales.codes, rows, top), halves(scales.scale, rows)]
    # Offsets are added, minima subtracted.
    levels += [patterns(minima.codes, rows, top), -halves(minima.scale, rows)]
    return patterns(codes, rows, line.top), levels


def _plain_weights(blocks: torch.Tensor, line: Line) -> torch.Tensor:
    if line.magnitudes:
        return blocks.abs()
    return root(divided(total(blocks * blocks), len(blocks))) + blocks.abs()


def _by_largest(numbers: torch.Tensor, top: int) -> Scaled:
    """Return scales that give the largest number ``top``, and codes."""
    high = torch.where(numbers.amax(0) > 0, numbers.amax(0), 0.0)  # not -0
    factor = torch.where(high > 0, over(top, high), 0.0)
    return Scaled(divided(high, top), nearest(factor * numbers).clamp(max=top))


def _each(found: Scaled) -> torch.Tensor:
    """Return block numbers from codes and stored super-block scales."""
    return (rounded(found.scale) * found.codes).T.flatten()


def three_bits(x: torch.Tensor, importance: Importance) -> Stored:
    """Q3_K."""
    blocks, count = columns(x, SHORT), SUPER // SHORT
    if importance is None:
        found = three_bit_scale(blocks)
        scales = _by_signed_largest(columns(found.scale, count), -32, 0.0)
        scales = Scaled(scales.scale, torch.where(scales.scale != 0, scales.codes.clamp(-32, 31), -32))
    else:
        weights = weighted(x, importance, SHORT, SUPER, 2.0)
        found = signed_scale(blocks, weights, 4)
        scales = signed_scale(columns(found.scale, count), columns(total(weights), count), 32)
    return _signed(x, scales, found.codes, 4, 6)


def six_bits(x: torch.Tensor, importance: Importance) -> Stored:
    """Q6_K: weights are the importance itself, or squares of values."""
    blocks, count = columns(x, SHORT), SUPER // SHORT
    weights = blocks * blocks if importance is None else columns(importance.expand(x.shape), SHORT)
    found = signed_scale(blocks, weights, 32)
    scales = _by_signed_largest(columns(found.scale, count), -128, LEAST)
    zeros = (scales.scale == 0).repeat_interleave(count)
    return _signed(x, scales, torch.where(zeros, -32, found.codes), 32, 8)


def _by_signed_largest(numbers: torch.Tensor, code: int, least: float) -> Scaled:
    """Return scales that give the largest magnitude ``code``; zeros below ``least``.

    Codes are int8, and at most 127.
    """
    amax, value = largest(numbers)
    factor = over(code, value)
    codes = nearest(factor * numbers).clamp(max=127).to(torch.int8).to(torch.int32)
    zeros = (amax < least) | (value == 0)
    return Scaled(torch.where(zeros, 0.0, over(1.0, factor)), torch.where(zeros, 0, codes))


def _signed(x: torch.Tensor, scales: Scaled, codes: torch.Tensor, top: int, bits: int) -> Stored:
    """Return codes from ``-top`` to ``top - 1`` under stored ``bits``-bit scales."""
    scale, rows = _each(scales), len(x)
    again = nearest(columns(x, SHORT) / scale).clamp(-top, top - 1)
    codes = torch.where(scale != 0, again, codes)
    levels = [patterns(scales.codes, rows, (1 << bits) - 1), halves(scales.scale, rows)]
    return patterns(codes, rows, 2 * top - 1), levels
