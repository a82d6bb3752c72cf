"""Squared errors of columns under scales of a window."""

from typing import Any

import numpy as np

from ..encode.elements import EXPONENT, MAGIC
from ..machine.descriptor import FLOAT
from ..machine.intrinsics import device, inlined, shl32
from ..machine.reductions import integers, multiply_add
from ..machine.vector import bits_of, floats_of, larger, larger_bits, load_lanes, smaller, values_of, words_of
from .lanes import LANES, closest_quarters, picks_from_tables


@inlined
def float_errors(columns: Any, size: Any, first: Any, second: Any, element: Any) -> Any:
    """Errors of magnitudes under two reciprocal scales, in scale units."""
    total = other = floats_of(np.float32(0))
    most, exponent = floats_of(element.maximum), words_of(EXPONENT)
    low = words_of(shl32(element.emin, np.uint32(23)))
    lift = words_of(shl32(np.uint32(np.uint32(23) - element.mantissa), np.uint32(23)))
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        r, s = x * first, x * second
        a, b = smaller(r, most), smaller(s, most)
        c = values_of(larger_bits(bits_of(a) & exponent, low) + lift)
        d = values_of(larger_bits(bits_of(b) & exponent, low) + lift)
        u, v = r - ((a + c) - c), s - ((b + d) - d)
        total, other = multiply_add(u, u, total), multiply_add(v, v, other)
    return total, other


@inlined
def integer_errors(columns: Any, size: Any, first: Any, second: Any, element: Any) -> Any:
    """Return the same of integers."""
    total = other = floats_of(np.float32(0))
    low, high, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        r, s = x * first, x * second
        a, b = smaller(larger(r, low), high), smaller(larger(s, low), high)
        u, v = r - ((a + magic) - magic), s - ((b + magic) - magic)
        total, other = multiply_add(u, u, total), multiply_add(v, v, other)
    return total, other


@inlined
def quarter_errors(columns: Any, size: Any, first: Any, second: Any) -> Any:
    """Errors of e2m1 magnitudes below 8 scales, in quarter units.

    Gain: nvfp4 is searched in two thirds of the time.
    """
    total = other = floats_of(np.float32(0))
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        r, s = x * first, x * second
        u, v = r - closest_quarters(integers(r)), s - closest_quarters(integers(s))
        total, other = multiply_add(u, u, total), multiply_add(v, v, other)
    return total, other


@device
def takes_quarters(element: Any, window: Any) -> Any:
    """Whether :func:`quarter_errors` suits element and all plausible scales."""
    e2m1 = element.kind == FLOAT and element.mantissa == 1 and element.emin == 127
    return picks_from_tables() and e2m1 and element.maximum == 6 and window.doubling < 8
