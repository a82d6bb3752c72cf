"""Steps of 32 values under shared microexponents: pairs in blocks of 16.

Even elements are one vector, odd ones another, and pairs of both blocks a third: its magnitudes give the
exponents of pairs and blocks, these the codes, in one pass. Elements are fixed-point numbers with a sign bit.

Gain that keeps it, over :mod:`.power_levels`: 2 times the speed of mx9 from float16.
"""

from typing import Any

import numpy as np

from ..machine.byte_vectors import store_bytes
from ..machine.emit import emit_packed
from ..machine.intrinsics import device, inlined, scratch
from ..machine.reductions import any_below, first_lane, ninth_lane, swapped_by_1, swapped_by_2, swapped_by_4
from ..machine.tile import TILE, fetch_ahead
from ..machine.vector import (
    HALF,
    WHOLE,
    bits_of,
    floats_of,
    halves_of_pairs,
    larger_bits,
    larger_signed,
    octets_of_halves,
    smaller_bits,
    values_of,
    words_of,
)
from .elements import MAGIC
from .step_access import StepTarget, is_stored, put, values_of_pairs

_ZERO, _ONE = np.uint64(0), np.uint64(1)
_FIELD, _MAGNITUDE = np.uint32(23), np.uint32(0x7FFFFFFF)
_BIAS = np.int32(127)
_ROOM = TILE + 8
"""Bytes of the codes of a tile, and slack for a whole word."""
_BLOCKS = TILE // 16


@inlined
def _codes(x: Any, inverse: Any, powers: Any) -> Any:
    """Codes of elements times the inverses of their steps."""
    magnitude = values_of(bits_of(x) & words_of(_MAGNITUDE))
    found = bits_of(magnitude * values_of(inverse) + floats_of(MAGIC))
    # Sums are positive, so that their bits are in their order.
    found = smaller_bits(found, bits_of(floats_of(MAGIC)) + words_of(powers.top_code))
    sign = bits_of(x) >> words_of(np.uint32(31) - powers.sign_place)
    return (found & words_of(np.uint32(0xFF))) | (sign & words_of(np.uint32(1) << powers.sign_place))


@inlined
def _pairs(a: Any, b: Any, powers: Any) -> Any:
    """Codes of pairs, inverse steps, exponents of their blocks, and room.

    The room is the distance from the least exponent that is taken. Exponents of blocks are distances from the
    first of their level; a block of zeros has that, and 0 for an inverse.
    """
    shift, sign = words_of(_FIELD), words_of(_MAGNITUDE)
    pair = larger_bits(bits_of(a) & sign, bits_of(b) & sign)
    two = larger_bits(pair, swapped_by_1(pair))
    four = larger_bits(two, swapped_by_2(two))
    block = larger_bits(four, swapped_by_4(four))
    low, bottom = words_of(np.uint32(powers.inner_first)), words_of(np.uint32(powers.outer_first + _BIAS))
    outer = (block + words_of(powers.outer_addend)) >> shift
    inner = larger_signed(((pair + words_of(powers.inner_addend)) >> shift) - outer, low)
    far = outer - words_of(np.uint32(powers.calm + _BIAS))
    some = words_of(np.uint32(0)) - smaller_bits(block, words_of(np.uint32(1)))
    inverse = (words_of(np.uint32(powers.places + _BIAS + _BIAS)) - inner - outer) << shift
    code = (inner + words_of(powers.pair_base)) ^ words_of(powers.pair_flip)
    zeros = words_of(powers.zero_pair)
    return zeros ^ ((code ^ zeros) & some), inverse & some, (outer - bottom) & some, far & some


@device
def power_steps(source: Any, powers: Any, fine: Any, coarse: Any, bits: Any, out: Any) -> Any:
    """Write codes of whole steps and both levels; return whether they hold.

    source: :class:`.step_access.Elements`. fine, coarse, out: bytes, the first for the first value;
    ``out`` may be empty. Codes do not hold where a block has an exponent below ``powers.calm``, or too large.
    """
    x, at, count = source
    codes, packed = scratch(_ROOM, np.uint8), scratch(_ROOM, np.uint8)
    exponents = scratch(_BLOCKS, np.uint32)
    worst, byte_at = words_of(np.uint32(0)), _ZERO
    for begin in range(_ZERO, count, np.uint64(TILE)):
        span = min(np.uint64(TILE), count - begin)
        fetch_ahead(x, at + begin + span, span)
        target = StepTarget(bits, codes, out, byte_at)
        for i in range(_ZERO, span, WHOLE):
            place = begin + i
            a, b = values_of_pairs(x, at + place)
            pairs, inverse, outer, far = _pairs(a, b, powers)
            worst = larger_bits(worst, far)
            store_bytes(fine, place // np.uint64(2), pairs)
            exponents[i // HALF], exponents[i // HALF + _ONE] = first_lane(outer), ninth_lane(outer)
            if len(out):
                both = _codes(a, inverse, powers) | (_codes(b, inverse, powers) << words_of(np.uint32(16)))
                put(octets_of_halves(halves_of_pairs(both)), i, target)
        first = begin // HALF
        for c in range(span // HALF):
            coarse[first + c] = np.uint8(powers.outer_code + np.uint8(exponents[c]) * powers.outer_step)
        if len(out):
            if not is_stored(bits):
                emit_packed(codes, span, bits, packed, out, byte_at)
            byte_at += span * bits // np.uint64(8)
    return not any_below(words_of(np.uint32(powers.outer_last - powers.calm)), worst)
