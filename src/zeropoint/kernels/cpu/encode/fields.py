"""Bfloat16 to small floats by fields: mantissa lookup, exponent addition.

A bfloat16 has 128 mantissas. Divided by one scale, each rounds to the same code at every exponent, but for
the exponents' difference: so a long block needs one table of 128 codes, which is built by the general way.
It has at most one step in 8 neighbors when codes have up to 3 mantissa bits, so it is kept as 16 pairs: the
code of the first of the eight, and the last mantissa that has it.

Gain that keeps it: 1.2 times the speed of :mod:`.steps` on float8 per channel (numbers in the cache, one
AVX-512 thread).
"""

from typing import Any

import numpy as np

from ..machine import vector as v
from ..machine.descriptor import DIVIDE, FLOAT
from ..machine.intrinsics import bits32, device, inlined, load64, scratch, shl32, shr32
from ..machine.lookup import pick_octets
from ..machine.reductions import any_lane
from ..machine.tile import halves_at
from .step_access import StepSource, StepTarget, fetch_step, is_bfloat16, put
from .steps import STRIP, StepFactors, encode_steps, finished, is_wide

MANTISSAS = np.uint64(128)
MANTISSA_BITS = np.uint32(3)
"""Most mantissa bits of codes whose table has no two steps in 8 neighbors."""
PAIRS = 32
BUCKETS = np.uint64(PAIRS // 2)
LONG_BLOCK = np.uint64(2048)
"""Elements of a block for which a table of its own costs less than it saves."""
REFERENCE = np.uint32(3)
"""A code's exponent field, from which the table is built: its quotients are normal in every wide format."""
NO_ORIGIN = np.uint8(0)
LEAST_ORIGIN, MOST_ORIGIN = 8, 250
EACH = np.uint64(0x0101010101010101)
ZERO, ONE_BLOCK = np.uint64(0), np.uint64(63)
"""The latter is the shift with which all elements are of one block."""


@device
def can_encode_fields(x: Any, element: Any) -> Any:
    """Return whether :func:`encode_fields` knows source and element, one that :mod:`.steps` knows."""
    small = element.kind == FLOAT and element.mantissa <= MANTISSA_BITS and element.scaling == DIVIDE
    return is_bfloat16(x) and small and is_wide(element)


@device
def origin_of(factor: Any, element: Any) -> Any:
    """Bfloat16 exponent field of code fields 0 and 1, or NO_ORIGIN.

    In range, bfloat16 with field 0, zero and subnormals, lie below half the smallest value of the format.
    """
    field = np.int64(shr32(bits32(factor), np.uint32(23)) & np.uint32(0xFF))
    origin = field + np.int64(element.emin) - np.int64(127)
    normal = field > 0 and field < 255
    return np.uint8(origin) if normal and origin > LEAST_ORIGIN and origin < MOST_ORIGIN else NO_ORIGIN


@device
def build_pairs(element: Any, factors: Any, pairs: Any) -> Any:
    """Fill first code and last mantissa of every 8; whether ``factors[0]`` fits.

    pairs: two of (32,) uint8, 16 numbers each, twice, as :func:`pick_octets` wants them. Codes are those at
    :func:`origin_of` the factor, were they normal.
    """
    firsts, lasts = pairs
    origin = origin_of(factors[0], element)
    if origin == NO_ORIGIN:
        return False
    values, codes, unused = scratch(128, np.uint16), scratch(128, np.uint8), scratch(1, np.uint8)
    field = np.uint16((np.uint32(origin) + REFERENCE) << np.uint32(7))
    for m in range(MANTISSAS):
        values[m] = np.uint16(field | np.uint16(m))
    source, blocks = (
        StepSource(values, ZERO, MANTISSAS, ZERO),
        StepFactors(factors, factors, ONE_BLOCK, False),
    )
    encode_steps(source, blocks, element, unused, StepTarget(np.uint64(8), unused, codes, ZERO))
    base = np.uint8(shl32(REFERENCE, element.mantissa))
    for b in range(BUCKETS):
        eight = load64(codes, b * np.uint64(8))
        first = np.uint64(eight & np.uint64(255))
        # The others are as large or larger by one: the product's upper byte counts the larger ones.
        larger = np.uint64((eight - first * EACH) * EACH) >> np.uint64(56)
        last = np.uint8(b * np.uint64(8) + np.uint64(7) - larger)
        firsts[b] = firsts[b + BUCKETS] = np.uint8(first) - base
        lasts[b] = lasts[b + BUCKETS] = last
    return True


@inlined
def fields_strip(source: Any, start: Any, stop: Any, table: Any, element: Any, target: Any) -> Any:
    """Write codes and return whether all of them are normal or zero."""
    firsts, lasts, origin = table
    drop = v.octets_of(np.uint8(element.mantissa))
    cap = v.octets_of(np.uint8(shr32(np.uint32(128), element.mantissa)))
    most = v.octets_of(np.uint8(element.max_code))
    sign_bit = v.octets_of(np.uint8(element.magnitude + np.uint32(1)))
    zero, one, low = v.octets_of(np.uint8(0)), v.octets_of(np.uint8(1)), v.octets_of(np.uint8(127))
    subnormal = zero
    unsigned = element.unsigned_below >= np.float32(0)
    for i in range(start, stop, v.WHOLE):
        fetch_step(source.x, source.at + i + source.ahead)
        u = halves_at(source.x, source.at + i)
        upper, lower = v.octets_of_halves(u >> v.halves_of(np.uint16(8))), v.octets_of_halves(u)
        field = (upper + upper) | (lower >> v.octets_of(np.uint8(7)))
        bucket = (lower >> v.octets_of(np.uint8(3))) & v.octets_of(np.uint8(15))
        code = pick_octets(firsts, bucket) - v.above_octets(lower & low, pick_octets(lasts, bucket))
        power = v.smaller_bits(v.larger_bits(field, origin) - origin, cap)
        code = v.smaller_bits(code + (power << drop), most) & v.unequal(field, zero)
        subnormal = subnormal | v.above_octets(origin, field - one)
        sign = v.unequal(upper & v.octets_of(np.uint8(128)), zero) & sign_bit
        if unsigned:
            # Of numbers with field 0 only zeros lose their sign; the others go the general way.
            normal = v.unequal(field, zero)
            sign = sign & normal
            subnormal = subnormal | (v.unequal(lower & low, zero) & (normal ^ v.octets_of(np.uint8(255))))
        put(finished(code | sign, element), i, target)
    return not any_lane(subnormal)


@device
def encode_fields(source: Any, factors: Any, element: Any, pairs: Any, target: Any) -> None:
    """Write the codes of :func:`encode_steps` for ``factors[0]``, whose ``pairs`` have been built.

    Strips with subnormal codes go the general way.
    """
    firsts, lasts = v.load_lanes(pairs[0], np.uint64(0)), v.load_lanes(pairs[1], np.uint64(0))
    table = firsts, lasts, v.octets_of(origin_of(factors[0], element))
    x, at, count, ahead = source
    bits, scratch, out, byte_at = target
    blocks = StepFactors(factors, factors, ONE_BLOCK, False)
    for start in range(ZERO, count, STRIP):
        stop = min(start + STRIP, count)
        if not fields_strip(source, start, stop, table, element, target):
            strip = StepSource(x, at + start, stop - start, ahead)
            encode_steps(
                strip, blocks, element, scratch, StepTarget(bits, scratch[start:], out, byte_at + start)
            )
