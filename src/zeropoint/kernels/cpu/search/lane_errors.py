"""Errors of 16 blocks at once under scales and zero points, as the reference adds them: float64, pairwise."""

from typing import Any

import numpy as np

from ..encode.elements import MAGIC
from ..machine.descriptor import NO_ROUNDING, RECIPROCAL, TO_BFLOAT16, ZERO_INSIDE
from ..machine.intrinsics import device, inlined
from ..machine.vector import (
    bits_of,
    first_float16,
    float16_of_floats,
    floats_of,
    larger,
    load_lanes,
    smaller,
    store_lanes,
    values_of,
    wide_floats,
    words_of,
)
from .lanes import LANES, add_pairwise


@inlined
def narrowed(t: Any, element: Any) -> Any:
    """Return numbers rounded as the element's quotients are."""
    if element.quotient == TO_BFLOAT16:
        bits = bits_of(t)
        odd = (bits >> words_of(np.uint32(16))) & words_of(np.uint32(1))
        return values_of((bits + words_of(np.uint32(0x7FFF)) + odd) & words_of(np.uint32(0xFFFF0000)))
    if element.quotient != NO_ROUNDING:
        return first_float16(float16_of_floats(t, t))
    return t


@inlined
def _affine_value(x: Any, by: Any, inverse: Any, zero: Any, element: Any) -> Any:
    """Return what the codes of integers with a zero point decode to."""
    low, high, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    t = narrowed(x * inverse if element.scaling == RECIPROCAL else x / by, element)
    if element.zero_place == ZERO_INSIDE:
        t = narrowed(t + zero, element)
        return (((smaller(larger(t, low), high) + magic) - magic) - zero) * by
    return ((smaller(larger(t, low - zero), high - zero) + magic) - magic) * by


@device
def affine_errors(
    columns: Any, weights: Any, size: Any, scales: Any, zeros: Any, element: Any, weighted: Any, sums: Any
) -> None:
    """Write the squared errors of 16 blocks to the first lanes of ``sums``, float64.

    columns: float32 numbers, weights: those of their errors, float64, if ``weighted``.
    """
    by, zero = load_lanes(scales, np.uint64(0)), load_lanes(zeros, np.uint64(0))
    inverse = floats_of(np.float32(1)) / by
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        off = wide_floats(_affine_value(x, by, inverse, zero, element)) - wide_floats(x)
        error = off * off
        if weighted:
            error = error * load_lanes(weights, i * LANES)
        store_lanes(sums, i * LANES, error)
    add_pairwise(sums, size)


@device
def affine_differences(
    columns: Any, weights: Any, size: Any, scales: Any, zeros: Any, element: Any, weighted: Any, sums: Any
) -> None:
    """Write the sums of numbers less what their codes decode to; arguments as of :func:`affine_errors`."""
    by, zero = load_lanes(scales, np.uint64(0)), load_lanes(zeros, np.uint64(0))
    inverse = floats_of(np.float32(1)) / by
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        off = wide_floats(x) - wide_floats(_affine_value(x, by, inverse, zero, element))
        if weighted:
            off = off * load_lanes(weights, i * LANES)
        store_lanes(sums, i * LANES, off)
    add_pairwise(sums, size)
