"""The common cases straight from the source to codes: widen, scale, round and clamp in one loop.

The stages of :mod:`.encode` do the same in several loops over a tile and serve everything else; both give the
same codes.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .encode import EXPONENT, MAGIC, SIGN, finish_float, float_lift
from .intrinsics import add32, and32, bits32, device, float32_of, shl32, shr32
from .layout import DIVIDE, FLOAT, INTEGER, MULTIPLY, NO_ROUNDING, TO_BFLOAT16, ZERO_NONE
from .tile import FLOAT16


def _widen(v: Any) -> Any:
    """Return a float32, or bfloat16 bits as the float32 of the same value."""


@overload(_widen, inline="always")
def _widen_overload(v: Any) -> Any:
    if v == types.float32:

        def same(v: Any) -> Any:
            return v

        return same

    def shifted(v: Any) -> Any:
        return float32_of(shl32(np.uint32(v), np.uint32(16)))

    return shifted


@device
def nearest_bfloat16(x: Any) -> Any:
    """Return a finite float32 rounded to bfloat16, half to even, and widened again."""
    u = bits32(x)
    odd = and32(shr32(u, np.uint32(16)), np.uint32(1))
    return float32_of(and32(add32(add32(u, np.uint32(0x7FFF)), odd), np.uint32(0xFFFF0000)))


@device
def can_encode_directly(element: Any, kind: Any) -> Any:
    """Return whether :func:`encode_directly` knows the case."""
    plain = kind != FLOAT16 and element.zero_place == ZERO_NONE
    scaled = element.scaling == DIVIDE or element.scaling == MULTIPLY
    signed = element.unsigned_below < np.float32(0)
    narrow = element.quotient == TO_BFLOAT16 and element.scaling == DIVIDE and signed
    known = (element.kind == INTEGER and element.scaling == DIVIDE) or element.kind == FLOAT
    return plain and scaled and known and (narrow or element.quotient == NO_ROUNDING)


@device
def encode_directly(x: Any, at: Any, count: Any, factors: Any, element: Any, codes: Any) -> None:
    """Set ``codes[:count]`` to the codes of ``x[at : at + count]``."""
    if element.kind == INTEGER:
        if element.quotient == NO_ROUNDING:
            int_codes(x, at, count, factors, element.low, element.high, codes)
        else:
            int_codes_bfloat16(x, at, count, factors, element.low, element.high, codes)
        return
    if element.unsigned_below >= np.float32(0):
        float_codes_unsigned(x, at, count, factors, element, codes)
    elif element.scaling == MULTIPLY:
        float_codes_multiplied(x, at, count, factors, element, codes)
    elif element.quotient == NO_ROUNDING:
        float_codes_divided(x, at, count, factors, element, codes)
    else:
        float_codes_bfloat16(x, at, count, factors, element, codes)
    finish_float(count, element, codes)


@device
def int_codes(x: Any, at: Any, count: Any, factors: Any, low: Any, high: Any, codes: Any) -> None:
    """Round quotients to integers."""
    for i in range(count):
        t = _widen(x[at + i]) / factors[i]
        t = t if t > low else low
        t = t if t < high else high
        codes[i] = np.uint8(bits32(t + MAGIC))


@device
def int_codes_bfloat16(x: Any, at: Any, count: Any, factors: Any, low: Any, high: Any, codes: Any) -> None:
    """Round quotients to bfloat16, then to integers."""
    for i in range(count):
        t = nearest_bfloat16(_widen(x[at + i]) / factors[i])
        t = t if t > low else low
        t = t if t < high else high
        codes[i] = np.uint8(bits32(t + MAGIC))


@device
def float_code(t: Any, low: Any, lift: Any, drop: Any, maximum: Any, sign_shift: Any) -> Any:
    """Return the code of a scaled value; see :mod:`.encode` for the arithmetic."""
    a = abs(t)
    a = a if a < maximum else maximum
    e = max(and32(bits32(a), EXPONENT), low)
    code = add32(bits32(a + float32_of(add32(e, lift))), shr32(e, drop))
    return np.uint8(add32(code, shr32(and32(bits32(t), SIGN), sign_shift)))


@device
def float_codes_multiplied(x: Any, at: Any, count: Any, factors: Any, element: Any, codes: Any) -> None:
    """Round exact products to a small float format."""
    low, lift = shl32(element.emin, np.uint32(23)), float_lift(element.emin, element.mantissa)
    drop = np.uint32(np.uint32(23) - element.mantissa)
    maximum, sign_shift = element.maximum, element.sign_shift
    for i in range(count):
        codes[i] = float_code(_widen(x[at + i]) * factors[i], low, lift, drop, maximum, sign_shift)


@device
def float_codes_divided(x: Any, at: Any, count: Any, factors: Any, element: Any, codes: Any) -> None:
    """Round quotients to a small float format."""
    low, lift = shl32(element.emin, np.uint32(23)), float_lift(element.emin, element.mantissa)
    drop = np.uint32(np.uint32(23) - element.mantissa)
    maximum, sign_shift = element.maximum, element.sign_shift
    for i in range(count):
        codes[i] = float_code(_widen(x[at + i]) / factors[i], low, lift, drop, maximum, sign_shift)


@device
def float_codes_bfloat16(x: Any, at: Any, count: Any, factors: Any, element: Any, codes: Any) -> None:
    """Round quotients to bfloat16, then to a small float format."""
    low, lift = shl32(element.emin, np.uint32(23)), float_lift(element.emin, element.mantissa)
    drop = np.uint32(np.uint32(23) - element.mantissa)
    maximum, sign_shift = element.maximum, element.sign_shift
    for i in range(count):
        codes[i] = float_code(
            nearest_bfloat16(_widen(x[at + i]) / factors[i]), low, lift, drop, maximum, sign_shift
        )


@device
def float_codes_unsigned(x: Any, at: Any, count: Any, factors: Any, element: Any, codes: Any) -> None:
    """Round products or quotients to a small float format whose zeros from zero have no sign."""
    low, lift = shl32(element.emin, np.uint32(23)), float_lift(element.emin, element.mantissa)
    drop = np.uint32(np.uint32(23) - element.mantissa)
    maximum, sign_shift, below = element.maximum, element.sign_shift, element.unsigned_below
    if element.scaling == MULTIPLY:
        for i in range(count):
            t = _widen(x[at + i]) * factors[i]
            t = t if abs(t) > below else np.float32(0)
            codes[i] = float_code(t, low, lift, drop, maximum, sign_shift)
    else:
        for i in range(count):
            t = _widen(x[at + i]) / factors[i]
            t = t if abs(t) > below else np.float32(0)
            codes[i] = float_code(t, low, lift, drop, maximum, sign_shift)
