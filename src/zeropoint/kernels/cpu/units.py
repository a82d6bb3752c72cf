"""Whole units of 16 values from the source to codes, on explicit vectors: the way of the common cases.

Gives the codes of :mod:`.encode`, which serves everything else, by the same arithmetic.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .encode import EXPONENT, MAGIC, SIGN, float_lift
from .intrinsics import device, inlined, prefetch, shl32
from .layout import CODEBOOK, DIVIDE, FLOAT, INTEGER, MULTIPLY, NO_ROUNDING, TO_BFLOAT16, ZERO_NONE
from .vector import (
    UNIT,
    above,
    bits_of,
    floats_of,
    floats_of_float16,
    larger,
    larger_bits,
    load_lanes,
    octets_of,
    octets_of_words,
    smaller,
    smaller_bits,
    store_lanes,
    store_nibbles,
    unequal,
    values_of,
    words_of,
    words_of_halves,
)

def _values_at(x: Any, at: Any) -> Any:
    """Load a unit and widen it exactly."""


@overload(_values_at, inline="always")
def _values_at_overload(x: Any, at: Any) -> Any:
    if x.dtype == types.float32:

        def load(x: Any, at: Any) -> Any:
            return load_lanes(x, at)

    elif x.dtype == types.uint16:

        def load(x: Any, at: Any) -> Any:
            return values_of(words_of_halves(load_lanes(x, at)) << words_of(np.uint32(16)))

    else:

        def load(x: Any, at: Any) -> Any:
            return floats_of_float16(load_lanes(x, at))

    return load


@inlined
def values_at(x: Any, at: Any) -> Any:
    """Return ``x[at : at + 16]`` as floats: of float32, uint16 bits of bfloat16, or int16 bits of float16."""
    return _values_at(x, at)


@device
def can_encode_units(element: Any) -> Any:
    """Return whether :func:`encode_units` knows the element."""
    known = element.kind != CODEBOOK and element.zero_place == ZERO_NONE
    exact = element.quotient == NO_ROUNDING and (element.scaling == DIVIDE or element.scaling == MULTIPLY)
    narrow = element.quotient == TO_BFLOAT16 and element.scaling == DIVIDE
    return known and (exact or narrow) and (element.kind == FLOAT or element.scaling == DIVIDE)


@device
def factor_shift(block: Any, count: Any) -> Any:
    """Return the n for which element i of ``count`` lies in block ``i >> n``, or 0 when there is none.

    Blocks are powers of two of at least a unit, or one block is all there is.
    """
    if block >= count:
        return np.uint64(63)
    n = np.uint64(4)
    while (np.uint64(1) << n) < block:
        n += np.uint64(1)
    return n if (np.uint64(1) << n) == block else np.uint64(0)


@inlined
def put(codes: Any, i: Any, bits: Any, scratch: Any, out: Any, byte_at: Any) -> None:
    """Write unit ``i``'s codes: bytes and nibbles where they belong, other widths to ``scratch``."""
    if bits == np.uint64(8):
        store_lanes(out, byte_at + i, codes)
    elif bits == np.uint64(4):
        store_nibbles(out, byte_at + i // np.uint64(2), codes & octets_of(np.uint8(15)))
    else:
        store_lanes(scratch, i, codes)


@inlined
def nearest_bfloat16(t: Any) -> Any:
    """Round finite floats to bfloat16, half to even."""
    u = bits_of(t)
    odd = (u >> words_of(np.uint32(16))) & words_of(np.uint32(1))
    return values_of((u + words_of(np.uint32(0x7FFF)) + odd) & words_of(np.uint32(0xFFFF0000)))


@device
def int_units(
    x: Any, at: Any, count: Any, factors: Any, shift: Any, element: Any, ahead: Any, bits: Any,
    scratch: Any, out: Any, byte_at: Any,
) -> None:  # fmt: skip
    """Write integer codes."""
    low, high = floats_of(element.low), floats_of(element.high)
    narrow = element.quotient == TO_BFLOAT16
    for i in range(np.uint64(0), count, np.uint64(UNIT)):
        prefetch(x, at + i + ahead)
        t = values_at(x, at + i) / floats_of(factors[i >> shift])
        if narrow:
            t = nearest_bfloat16(t)
        t = smaller(larger(t, low), high)
        put(octets_of_words(bits_of(t + floats_of(MAGIC))), i, bits, scratch, out, byte_at)


@device
def float_units(
    x: Any, at: Any, count: Any, factors: Any, shift: Any, element: Any, ahead: Any, bits: Any,
    scratch: Any, out: Any, byte_at: Any,
) -> None:  # fmt: skip
    """Write codes of a small float format; see :mod:`.encode` for the arithmetic."""
    low = words_of(shl32(element.emin, np.uint32(23)))
    lift, drop = (
        words_of(float_lift(element.emin, element.mantissa)),
        words_of(np.uint32(np.uint32(23) - element.mantissa)),
    )
    maximum, sign_shift = floats_of(element.maximum), words_of(element.sign_shift)
    below = floats_of(element.unsigned_below)
    odd = shl32(element.emin, element.mantissa) & np.uint32(1)
    for i in range(np.uint64(0), count, np.uint64(UNIT)):
        prefetch(x, at + i + ahead)
        t, f = values_at(x, at + i), floats_of(factors[i >> shift])
        if element.scaling == MULTIPLY:
            t = t * f
        else:
            t = t / f
            if element.quotient == TO_BFLOAT16:
                t = nearest_bfloat16(t)
        sign = bits_of(t) & words_of(SIGN)
        a = values_of(bits_of(t) & words_of(np.uint32(0x7FFFFFFF)))
        if element.unsigned_below >= np.float32(0):
            sign = sign & above(a, below)
        a = smaller(a, maximum)
        e = larger_bits(bits_of(a) & words_of(EXPONENT), low)
        code = bits_of(a + values_of(e + lift)) + (e >> drop) + (sign >> sign_shift)
        codes = octets_of_words(code)
        if odd:
            codes = codes - octets_of(np.uint8(1))
        if element.negative_nan:
            codes = codes & unequal(codes, octets_of(np.uint8(element.magnitude + np.uint32(1))))
        put(codes, i, bits, scratch, out, byte_at)


@device
def encode_units(
    x: Any, at: Any, count: Any, factors: Any, shift: Any, element: Any, ahead: Any, bits: Any,
    scratch: Any, out: Any, byte_at: Any,
) -> None:  # fmt: skip
    """Write the codes of ``x[at : at + count]``, whole units; ``factors[i >> shift]`` is that of element i.

    ahead: how far to prefetch, in elements. Codes of 8 and 4 bits go to ``out[byte_at:]``, others as bytes to
    ``scratch``.
    """
    if element.kind == INTEGER:
        int_units(x, at, count, factors, shift, element, ahead, bits, scratch, out, byte_at)
    else:
        float_units(x, at, count, factors, shift, element, ahead, bits, scratch, out, byte_at)
