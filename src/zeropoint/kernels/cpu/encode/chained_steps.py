"""Whole steps of 32 numbers under levels that follow from each other.

Codes equal :mod:`.steps`', with offsets subtracted on the way. For integers, products with reciprocals
take the place of quotients: a product is off by less than 2 ** -22 of a quotient, which is rounded to another
code only where it lies so near to the middle of two; a strip with such a number is divided. Quotients of
codebooks of up to four values are compared with all thresholds.

Gain that keeps it, with :mod:`.group_extremes`: 1.5 times the speed of q4_k.
"""

from typing import Any

import numpy as np

from ..machine import vector as v
from ..machine.descriptor import CODEBOOK, DIVIDE, INTEGER, MULTIPLY, NO_ROUNDING, RECIPROCAL, ZERO_NONE
from ..machine.emit import emit_packed
from ..machine.intrinsics import bits32, device, inlined, shr32
from ..machine.reductions import any_below, multiply_add
from ..machine.tile import TILE
from .elements import INFINITE, MAGIC
from .step_access import Elements, StepTarget, factors_at, is_stored, octets_in_order, put_words, values_at
from .steps import LEAST_FIELD, MOST_FIELD, STRIP, StepFactors

MODERATE = np.uint32(0x7E800000)
"""Bits of 2 ** 126: the difference of two numbers below is finite."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_OFF = np.float32(2.0**-22)
"""More than three roundings of a float32: of a reciprocal, a product and a quotient."""


@device
def largest_bits(numbers: Any, count: Any) -> Any:
    """Return the bits of the largest magnitude."""
    most = np.uint32(0)
    for b in range(count):
        most = max(most, np.uint32(bits32(numbers[b]) & _MAGNITUDE))
    return most


@device
def block_shift(block: Any, element: Any) -> Any:
    """Find n with element i in block ``i >> n``, else 0."""
    exact = element.quotient == NO_ROUNDING and element.zero_place == ZERO_NONE
    n = np.uint64(4)
    while (np.uint64(1) << n) < block:
        n += np.uint64(1)
    integer = element.kind == INTEGER and element.scaling == DIVIDE
    few = element.kind == CODEBOOK and element.thresholds[3] == INFINITE and element.scaling != MULTIPLY
    known = exact and (integer or few)
    return n if known and (np.uint64(1) << n) == block else np.uint64(0)


@device
def _reciprocals(scales: Any, count: Any, out: Any) -> Any:
    """Write reciprocals; whether all are normal numbers, or zero for Inf."""
    unfit = np.uint32(0)
    for b in range(count):
        field = shr32(np.uint32(bits32(scales[b]) & _MAGNITUDE), np.uint32(23))
        fits = (field >= LEAST_FIELD and field <= MOST_FIELD) or abs(scales[b]) == INFINITE
        unfit |= np.uint32(0) if fits else np.uint32(1)
        out[b] = np.float32(1) / scales[b]
    return unfit == np.uint32(0)


@inlined
def _of_blocks(x: Any, numbers: Any, shift: Any, i: Any) -> Any:
    """Numbers of a step's blocks, in the order of ``x``."""
    if shift > np.uint64(4):
        one = v.floats_of(numbers[i >> shift])
        return one, one
    return factors_at(x, numbers, shift, i)


@inlined
def _strip(source: Any, strip: Any, blocks: Any, element: Any, moves: Any, target: Any) -> None:
    """Write codes of ``strip``, of quotients; moves: whether there are offsets."""
    x, at = source.x, source.at
    factors, offsets, shift, _inverted = blocks
    low, high, magic = v.floats_of(element.low), v.floats_of(element.high), v.floats_of(MAGIC)
    for i in range(strip[0], strip[1], v.WHOLE):
        a, b = values_at(x, at + i)
        f, g = _of_blocks(x, factors, shift, i)
        if moves:
            y, z = _of_blocks(x, offsets, shift, i)
            a, b = a - y, b - z
        a, b = v.smaller(v.larger(a / f, low), high), v.smaller(v.larger(b / g, low), high)
        put_words(x, v.bits_of(a + magic), v.bits_of(b + magic), i, target)


@inlined
def _near_strip(source: Any, strip: Any, blocks: Any, element: Any, moves: Any, target: Any) -> Any:
    """Write codes of ``strip``, of products with reciprocals.

    Returns the bits of the largest distance from a whole number. Sums with MAGIC order like their bits, as
    signed integers; past 2 ** 22 they are past the ends of an element, too.
    """
    x, at = source.x, source.at
    factors, offsets, shift, _inverted = blocks
    magic, magnitude, worst = v.floats_of(MAGIC), v.words_of(_MAGNITUDE), v.words_of(np.uint32(0))
    low, high = v.bits_of(magic + v.floats_of(element.low)), v.bits_of(magic + v.floats_of(element.high))
    for i in range(strip[0], strip[1], v.WHOLE):
        a, b = values_at(x, at + i)
        f, g = _of_blocks(x, factors, shift, i)
        if moves:
            y, z = _of_blocks(x, offsets, shift, i)
            a, b = a - y, b - z
        p, q = multiply_add(a, f, magic), multiply_add(b, g, magic)
        off = v.larger_bits(
            v.bits_of(multiply_add(a, f, magic - p)) & magnitude,
            v.bits_of(multiply_add(b, g, magic - q)) & magnitude,
        )
        worst = v.larger_bits(worst, off)
        p, q = v.larger_signed(v.bits_of(p), low), v.larger_signed(v.bits_of(q), low)
        put_words(x, v.smaller_signed(p, high), v.smaller_signed(q, high), i, target)
    return worst


@inlined
def _counted(x: Any, thresholds: Any) -> Any:
    """Minus the count of three thresholds below each lane, as words."""
    a, b, c = thresholds
    return v.above(x, a) + v.above(x, b) + v.above(x, c)


@device
def _few_values(source: Any, blocks: Any, element: Any, codes: Any) -> None:
    """Write codes of up to four values as bytes, dividing or multiplying."""
    x, at = source.x, source.at
    factors, offsets, shift, _inverted = blocks
    t, none = element.thresholds, v.words_of(np.uint32(0))
    thresholds = v.floats_of(t[0]), v.floats_of(t[1]), v.floats_of(t[2])
    for i in range(np.uint64(0), source.count, v.WHOLE):
        a, b = values_at(x, at + i)
        f, g = _of_blocks(x, factors, shift, i)
        y, z = _of_blocks(x, offsets, shift, i)
        a, b = a - y, b - z
        if element.scaling == RECIPROCAL:
            a, b = a * f, b * g
        else:
            a, b = a / f, b / g
        a, b = none - _counted(a, thresholds), none - _counted(b, thresholds)
        v.store_lanes(codes, i, octets_in_order(x, a, b))


@device
def encode_blocks(
    source: Any, scales: Any, offsets: Any, blocks: Any, element: Any, room: Any, target: Any
) -> None:
    """Write codes of ``(x - offset) / scale``.

    source: :class:`.step_access.Elements`, whose differences must be finite. blocks: the shift n of
    element i in block ``i >> n``, and whether there are offsets. room: floats for reciprocals, bytes for the
    codes of a tile and for these packed. target: their width, array and place.
    """
    (x, at, span), (bits, out, byte_at), (shift, moves) = source, target, blocks
    reciprocals, codes, packed = room
    inverted = _reciprocals(scales, (span + (np.uint64(1) << shift) - np.uint64(1)) >> shift, reciprocals)
    most = max(abs(element.low), abs(element.high)) + np.float32(1)
    middle = v.bits_of(v.floats_of(np.float32(0.5) - most * _OFF))
    for begin in range(np.uint64(0), span, np.uint64(TILE)):
        n, first = min(np.uint64(TILE), span - begin), begin >> shift
        tile, moved = Elements(x, at + begin, n), offsets[first:]
        exact = StepFactors(scales[first:], moved, shift, False)
        near = StepFactors(reciprocals[first:], moved, shift, True)
        if element.kind == CODEBOOK:
            _few_values(tile, near if element.scaling == RECIPROCAL else exact, element, codes)
            emit_packed(codes, n, bits, packed, out, byte_at)
            byte_at += n * bits // np.uint64(8)
            continue
        place = StepTarget(bits, codes, out, byte_at)
        for start in range(np.uint64(0), n, STRIP):
            strip = start, min(start + STRIP, n)
            if inverted and moves:
                if not any_below(middle, _near_strip(tile, strip, near, element, True, place)):
                    continue
            elif inverted and not any_below(middle, _near_strip(tile, strip, near, element, False, place)):
                continue
            _strip(tile, strip, exact, element, moves, place)
        if not is_stored(bits):
            emit_packed(codes, n, bits, packed, out, byte_at)
        byte_at += n * bits // np.uint64(8)
