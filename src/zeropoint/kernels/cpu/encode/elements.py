"""Values to codes, tile by tile: integers, small float formats, codebooks.

Float formats: for a magnitude ``a`` with exponent ``e = max(exponent(a), emin)``, adding ``c = 2 ** (e + 23 -
m)`` rounds ``a`` to m mantissa bits, half to even, and leaves the integer significand ``n`` in the low bits
of the sum's bits. The code is ``((e - emin) << m) + n``: a carry in ``n`` moves into the exponent field by
itself, and subnormals need no case. Only the low byte is kept, so bits(c), a multiple of 2 ** 23, need not be
subtracted; and ``-(emin << m)`` rides along in c's own low mantissa bits, which keeps ties right because it
is even (except for m = 0, which is put right after).
"""

from typing import Any

import numpy as np

from ..machine import descriptor as k
from ..machine.intrinsics import bits32, count_above, device, float32_of, shl32, shr32, to_bfloat16

MAGIC = np.float32(12582912.0)
"""1.5 * 2 ** 23: adding it rounds to an integer, half to even.

Its low byte is 0, so the sum's low byte is the code.
"""
EXPONENT = np.uint32(0x7F800000)
PAST_FLOAT16, INFINITE = np.float32(2.0**16), np.float32(np.inf)
SIGN = np.uint32(0x80000000)


@device
def scale_tile(tile: Any, factors: Any, count: Any, scaling: Any) -> None:
    """Bring a tile to units of its scale.

    By IEEE division, an exact multiplication, or one by a rounded reciprocal.
    """
    if scaling == k.MULTIPLY:
        for i in range(count):
            tile[i] = tile[i] * factors[i]
    elif scaling == k.RECIPROCAL:
        for i in range(count):
            tile[i] = tile[i] * (np.float32(1) / factors[i])
    else:
        for i in range(count):
            tile[i] = tile[i] / factors[i]


@device
def round_tile(tile: Any, count: Any, to: Any) -> None:
    """Round a tile to a dialect's quotient dtype, bfloat16 or float16."""
    if to == k.NO_ROUNDING:
        return
    if to == k.TO_BFLOAT16:
        for i in range(count):
            tile[i] = to_bfloat16(tile[i])
    else:
        for i in range(count):
            a = abs(tile[i])
            e = max(np.uint32(bits32(a) & EXPONENT), np.uint32((127 - 14) << 23))
            c = float32_of(np.uint32(e + np.uint32(13 << 23)))
            t = (a + c) - c
            t = INFINITE if t >= PAST_FLOAT16 else t
            tile[i] = float32_of(np.uint32(bits32(t) | (bits32(tile[i]) & SIGN)))


_GROW, _KEEP = np.float32(0), np.float32(2)
_TIE = np.float32(0.5 - 2.0**-25)
"""Distances from the nearest step past which a magnitude moves on: any, none, and a half."""
_STEPS = np.float32(2.0**23)
"""Steps that a float32 holds: adding this rounds to whole ones, half to even."""
_MOST = np.float32(2.0**22)
_TINY = np.float32(2.0**-140)


@device
def moves(mode: Any, negative: Any) -> Any:
    """Distances from the nearest step past which magnitudes go up, and down."""
    up, down = (k.CEIL, k.FLOOR) if not negative else (k.FLOOR, k.CEIL)
    tie_up, tie_down = (k.HALF_UP, k.HALF_DOWN) if not negative else (k.HALF_DOWN, k.HALF_UP)
    if mode == up:
        return _GROW, _KEEP
    if mode in (down, k.TOWARD_ZERO):
        return _KEEP, _GROW
    if mode in (tie_up, k.HALF_AWAY):
        return _TIE, _KEEP
    return _KEEP, _TIE if mode == tie_down else _KEEP


@device
def round_by_mode(tile: Any, count: Any, element: Any) -> None:
    """Round a tile by another mode than half to even.

    Half to even leaves the results, which have codes, as they are. Numbers past the largest code stay past
    it, and those that round to zero keep a sign.
    """
    mode, whole = element.rounding, element.kind == k.INTEGER
    if mode == k.SUMS:
        lift = np.float32(0.5) - element.low
        for i in range(count):
            tile[i] = np.floor(tile[i] + lift) + element.low
        return
    above, below = moves(mode, False)
    above_negative, below_negative = moves(mode, True)
    mask = np.uint32(0) if whole else EXPONENT
    low = shl32(np.uint32(127) if whole else element.emin, np.uint32(23))
    most = _MOST if whole else element.maximum * np.float32(2)
    mantissa = shl32(element.mantissa, np.uint32(23))
    for i in range(count):
        t = tile[i]
        a = abs(t)
        a = most if a > most else a
        step = np.uint32(max(np.uint32(bits32(a) & mask), low) - mantissa)
        scaled = a * float32_of(np.uint32(np.uint32(254 << 23) - step))
        n = (scaled + _STEPS) - _STEPS
        off = scaled - n
        n += np.float32(1) if off > (above_negative if t < np.float32(0) else above) else np.float32(0)
        n -= np.float32(1) if -off > (below_negative if t < np.float32(0) else below) else np.float32(0)
        r = n * float32_of(step)
        r = _TINY if (r == np.float32(0)) & (a > np.float32(0)) else r
        tile[i] = float32_of(np.uint32(bits32(r) | (bits32(t) & SIGN)))


@device
def encode_int(tile: Any, zeros: Any, count: Any, element: Any, codes: Any) -> None:
    """Codes ``clamp(rint(tile[i]) + zero)``, the zero point before or after rounding.

    Clamping first is exact because bounds and zero points are integers and rounding is monotone; it keeps
    MAGIC in range.
    """
    low, high = element.low, element.high
    if element.zero_place == k.ZERO_NONE:
        for i in range(count):
            t = tile[i]
            t = t if t > low else low
            t = t if t < high else high
            codes[i] = np.uint8(bits32(t + MAGIC))
    elif element.zero_place == k.ZERO_AFTER:
        for i in range(count):
            z = zeros[i]
            a = low - z
            b = high - z
            t = tile[i]
            t = t if t > a else a
            t = t if t < b else b
            codes[i] = np.uint8(bits32((t + MAGIC) + z))
    else:
        for i in range(count):
            tile[i] = tile[i] + zeros[i]
        round_tile(tile, count, element.quotient)
        if element.rounding != k.HALF_EVEN:
            round_by_mode(tile, count, element)
        for i in range(count):
            t = tile[i]
            t = t if t > low else low
            t = t if t < high else high
            codes[i] = np.uint8(bits32(t + MAGIC))


@device
def encode_float(tile: Any, count: Any, element: Any, codes: Any) -> None:
    """Round a tile to a small float format, saturating, as codes."""
    emin, mantissa, maximum, sign_shift = element.emin, element.mantissa, element.maximum, element.sign_shift
    low, lift, drop = (
        shl32(emin, np.uint32(23)),
        float_lift(emin, mantissa),
        np.uint32(np.uint32(23) - mantissa),
    )
    unsigned_below = element.unsigned_below
    for i in range(count):
        t = tile[i]
        a = abs(t)
        sign = np.uint32(bits32(t) & SIGN) if a > unsigned_below else np.uint32(0)
        a = a if a < maximum else maximum
        e = max(np.uint32(bits32(a) & EXPONENT), low)
        rounded = bits32(a + float32_of(np.uint32(e + lift)))
        codes[i] = np.uint8(np.uint32(np.uint32(rounded + shr32(e, drop)) + shr32(sign, sign_shift)))
    finish_float(count, element, codes)


@device
def float_lift(emin: Any, mantissa: Any) -> Any:
    """Bits that turn ``2 ** e`` into the constant rounding a mantissa."""
    even = np.uint32(shl32(emin, mantissa) & np.uint32(0xFE))
    return np.uint32(
        shl32(np.uint32(np.uint32(23) - mantissa), np.uint32(23)) + np.uint32(np.uint32(256) - even)
    )


@device
def finish_float(count: Any, element: Any, codes: Any) -> None:
    """Fix formats without mantissa and zeros without sign after the loop."""
    if shl32(element.emin, element.mantissa) & np.uint32(1):
        for i in range(count):
            codes[i] = np.uint8(codes[i] - np.uint8(1))
    if element.negative_nan:
        negative_zero = np.uint8(element.magnitude + np.uint32(1))
        for i in range(count):
            codes[i] = np.uint8(0) if codes[i] == negative_zero else codes[i]


@device
def encode_codebook(tile: Any, count: Any, thresholds: Any, codes: Any) -> None:
    """Count thresholds strictly below ``tile[i]``; a tie takes the lower code.

    The compiler makes vectors of 15 compares, and none of a search by halves, as :mod:`.steps` has it.
    """
    for i in range(count):
        codes[i] = np.uint8(bits32(count_above(tile[i], thresholds) + MAGIC))


@device
def is_identity(order: Any) -> Any:
    """Whether the code of each codebook rank is the rank."""
    same = True
    for i in range(len(order)):
        same &= order[i] == i
    return same


@device
def encode(tile: Any, factors: Any, zeros: Any, count: Any, element: Any, order: Any, codes: Any) -> None:
    """Turn a tile of values into codes; the tile is scratch afterwards.

    order: (16,) uint8, the code of each rank of a codebook.
    """
    simple = (
        element.scaling == k.DIVIDE
        and element.quotient == k.NO_ROUNDING
        and element.zero_place == k.ZERO_NONE
    )
    even = element.rounding == k.HALF_EVEN
    if element.kind == k.INTEGER and simple and even:
        divide_encode_int(tile, factors, count, element.low, element.high, codes)
        return
    scale_tile(tile, factors, count, element.scaling)
    round_tile(tile, count, element.quotient)
    if not even and element.zero_place != k.ZERO_INSIDE:
        round_by_mode(tile, count, element)
    if element.kind == k.INTEGER:
        encode_int(tile, zeros, count, element, codes)
    elif element.kind == k.FLOAT:
        encode_float(tile, count, element, codes)
    else:
        encode_codebook(tile, count, element.thresholds, codes)
        if not is_identity(order):
            for i in range(count):
                codes[i] = order[codes[i]]


@device
def divide_encode_int(tile: Any, factors: Any, count: Any, low: Any, high: Any, codes: Any) -> None:
    """Set ``codes[i] = clamp(rint(tile[i] / factors[i]))`` as a byte, in one loop."""
    for i in range(count):
        t = tile[i] / factors[i]
        t = t if t > low else low
        t = t if t < high else high
        codes[i] = np.uint8(bits32(t + MAGIC))
