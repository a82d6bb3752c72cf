"""Q4_0 to Q8_0, TQ1_0, TQ2_0 without importance: scales from extremes.

16 blocks at a time, widened to float32 as they are read. Extremes have no order of sums, so that vectors run
along the blocks; where a minimum is zero, or two magnitudes are equal, the first number counts, which is
looked for one by one.
"""

from typing import Any

import numpy as np

from ..machine.bit_moves import emit_digits
from ..machine.descriptor import BAD_VALUE, OK
from ..machine.emit import emit_packed
from ..machine.intrinsics import device, inlined, scratch
from ..machine.tile import fetch_ahead, load
from ..machine.vector import (
    WHOLE,
    above,
    any_lane,
    float16_of_floats,
    floats_of,
    floats_of_integers,
    larger,
    load_lanes,
    low_octets,
    smaller,
    smaller_bits,
    store_lanes,
    words_of,
)
from .lanes import (
    LANES,
    SUPER,
    divided,
    integers,
    is_bad,
    is_zero,
    least_lane,
    magnitudes,
    most_lane,
    negative,
    where,
    worse,
)
from .plain import AFFINE, SYMMETRIC, TERNARY
from .super_block import ZERO

_LOW, _VALUE, _SCALE, _INVERSE = ZERO, LANES, LANES + LANES, LANES + LANES + LANES
_TAME = np.float32(2.0**100)
"""Inverse scales below this are of scales that are no subnormal numbers: products with them are codes."""
_AHEAD = np.uint64(2048)
"""How far ahead numbers are asked for: a group and its codes take less time than memory."""
"""Where 16 numbers lie: minima, numbers of largest magnitude or maxima, scales, inverse scales."""
DIGIT_BYTES = np.uint64(52)
"""Bytes of 256 ternary digits, five to a byte."""


@inlined
def _held(x: Any) -> Any:
    """Zero for NaN and past int32: x86-64's low byte of that."""
    held = above(floats_of(np.float32(2147483648.0)), magnitudes(x))
    return where(held, x, floats_of(np.float32(0)))


@inlined
def _rounded_down(x: Any, most: Any, wild: Any) -> Any:
    """Truncate to words up to ``most``; wild: any number may come."""
    if wild:
        return smaller_bits(integers(_held(x)) & words_of(np.uint32(0xFF)), most)
    return smaller_bits(integers(x), most)


@inlined
def _half_away(x: Any) -> Any:
    """Return ``x`` rounded half away from zero, as words."""
    held = _held(x)
    whole = integers(held)
    off = held - floats_of_integers(whole)
    below_half = floats_of(np.float32(0.49999997))
    up = above(off, below_half) & words_of(np.uint32(1))
    down = above(floats_of(np.float32(-0.49999997)), off) & words_of(np.uint32(1))
    return whole + up - down


@device
def _extremes(values: Any, count: Any, size: Any, ends: Any) -> Any:
    """Write the extremes of ``count`` blocks; BAD_VALUE unless all are finite."""
    worst = words_of(np.uint32(0))
    for block in range(count):
        begin = block * size
        low = high = load_lanes(values, begin)
        worst = worse(worst, low)
        for n in range(np.uint64(1), size // LANES):
            number = load_lanes(values, begin + n * LANES)
            worst = worse(worst, number)
            low, high = smaller(number, low), larger(number, high)
        ends[_LOW + block], ends[_VALUE + block] = least_lane(low), most_lane(high)
    return BAD_VALUE if is_bad(worst) else OK


@device
def _first_zeros(values: Any, count: Any, size: Any, ends: Any) -> None:
    """Give zero minima, and their maxima, their block's first zero's sign."""
    for block in range(count):
        if ends[_LOW + block] != 0:
            continue
        i = block * size
        while values[i] != 0:
            i += np.uint64(1)
        ends[_LOW + block] = values[i]
        if ends[_VALUE + block] == 0:
            ends[_VALUE + block] = values[i]


@device
def _first_largest(values: Any, count: Any, size: Any, ends: Any) -> None:
    """Write a block's first number of two largest magnitudes, 0 for zeros."""
    for block in range(count):
        high = ends[_VALUE + block]
        if high != -ends[_LOW + block]:
            continue
        value = np.float32(0)
        for i in range(block * size, block * size + size):
            if abs(values[i]) > abs(value):
                value = values[i]
        ends[_INVERSE + block] = value


@device
def _scales(values: Any, count: Any, kind: Any, ends: Any) -> None:
    """Write scales and their inverses."""
    zero, low, high = floats_of(np.float32(0)), load_lanes(ends, _LOW), load_lanes(ends, _VALUE)
    if kind.kind == AFFINE:
        if any_lane(is_zero(low)):
            _first_zeros(values, count, kind.size, ends)
            low, high = load_lanes(ends, _LOW), load_lanes(ends, _VALUE)
        scale = (high - low) / floats_of(kind.top)
    elif kind.kind == SYMMETRIC:
        store_lanes(ends, _INVERSE, where(above(high, negative(low)), high, low))
        if any_lane(is_zero(high + low)):
            _first_largest(values, count, kind.size, ends)
        scale = load_lanes(ends, _INVERSE) / floats_of(np.float32(-kind.top))
    else:
        scale = larger(magnitudes(low), magnitudes(high)) / floats_of(kind.top)
    store_lanes(ends, _SCALE, scale)
    store_lanes(ends, _INVERSE, where(is_zero(scale), zero, divided(np.float32(1), scale)))


@device
def _codes(values: Any, place: Any, kind: Any, low: Any, inverse: Any, codes: Any) -> None:
    """Write the codes of the block at ``place``, bytes.

    A range with a step would divide, as long as that.
    """
    times, top, wild = floats_of(inverse), words_of(np.uint32(kind.top)), not abs(inverse) < _TAME
    if kind.kind == AFFINE:
        least, half = floats_of(low), floats_of(np.float32(0.5))
        for n in range(kind.size // WHOLE):
            i = n * WHOLE
            first = _rounded_down((load_lanes(values, place + i) - least) * times + half, top, wild)
            second = _rounded_down((load_lanes(values, place + i + LANES) - least) * times + half, top, wild)
            store_lanes(codes, place + i, low_octets(first, second))
    elif kind.kind == SYMMETRIC:
        most, offset = top + top - words_of(np.uint32(1)), floats_of(np.float32(kind.top + np.float32(0.5)))
        for n in range(kind.size // WHOLE):
            i = n * WHOLE
            first = _rounded_down(load_lanes(values, place + i) * times + offset, most, wild)
            second = _rounded_down(load_lanes(values, place + i + LANES) * times + offset, most, wild)
            store_lanes(codes, place + i, low_octets(first ^ top, second ^ top))
    else:
        one = words_of(np.uint32(1) if kind.kind == TERNARY else np.uint32(0))
        for n in range(kind.size // WHOLE):
            i = n * WHOLE
            first = _half_away(load_lanes(values, place + i) * times) + one
            second = _half_away(load_lanes(values, place + i + LANES) * times) + one
            store_lanes(codes, place + i, low_octets(first, second))


@device
def rounded_rows(x: Any, source: Any, kind: Any, packed: Any, numbers: Any, first: Any, last: Any) -> Any:
    """Quantize blocks ``first`` to ``last`` of ``x``; source: its dtype, of :mod:`..machine.tile`.

    packed: takes codes, as bytes.
    """
    ends, halves = scratch(64, np.float32), scratch(32, np.uint16)
    codes, room = scratch(4096 + 8, np.uint8), scratch(4096 + 8, np.uint8)
    values = scratch(4096, np.float32)
    bits, state = np.uint64(kind.bits), OK
    for start in range(first, last, LANES):
        count, at = min(LANES, last - start), start * kind.size
        total, target = count * kind.size, at * bits // np.uint64(8)
        load(x, at, total, source, values)
        fetch_ahead(x, at + _AHEAD, total)
        state = max(state, _extremes(values, count, kind.size, ends))
        _scales(values, count, kind, ends)
        for block in range(count):
            _codes(values, block * kind.size, kind, ends[_LOW + block], ends[_INVERSE + block], codes)
        if bits == np.uint64(8) and kind.kind == TERNARY:
            # Zeros are ones as codes.
            emit_digits(codes, count, SUPER, np.uint64(1), packed, start * DIGIT_BYTES)
        elif bits == np.uint64(8):
            for i in range(total):
                packed[target + i] = codes[i]
        else:
            emit_packed(codes, total, bits, room, packed, target)
        store_lanes(halves, ZERO, float16_of_floats(load_lanes(ends, _SCALE), load_lanes(ends, _LOW)))
        for block in range(count):
            numbers.halves[start + block] = halves[block]
            if kind.kind == AFFINE:
                numbers.half_minima[start + block] = halves[LANES + block]
    return state
