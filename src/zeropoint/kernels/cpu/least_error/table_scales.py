"""IQ4_NL and IQ4_XS: codes of a table of 16 values; see :mod:`zeropoint.ops.ggml.table_blocks`.

A value is closest to the last one of the table whose boundary, the middle between it and the one below, it is
not below: one comparison a boundary, of all 16 blocks at once.

Gain that keeps it, over plain torch: 30 times the speed.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir

from ..machine.descriptor import OK
from ..machine.intrinsics import device, instruction, narrow_half, scratch
from ..machine.vector import FLOATS, WORDS, above, floats_of, floats_of_integers, load_lanes, store_lanes
from .lanes import LANES, LEAST, SUPER, divided, is_zero, magnitudes, nearest, where
from .super_block import ZERO, important_weights, load_group, write_codes, write_level

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the format iq4, repeated because compiled sources depend on no others."""
_SIZE, _BLOCKS = np.uint64(32), np.uint64(8)
_LONG, _ROOM = 32 * 16, 256 + 8
_FIRST = np.float32(LEVELS[0])
_TRIES = 15
FOUR, _TWO, _SCALE_CODES = np.uint64(4), np.float32(2), np.float32(32)


def _counter(kind: Any, start: float, steps: list[float]) -> Any:
    """Build ``start`` plus the steps whose boundaries are not above."""
    add = "fadd" if kind is FLOATS else "add"

    @instruction(kind, FLOATS)
    def count(builder: Any, x: Any) -> Any:
        total = ir.Constant(kind.lanes, [start] * kind.count)
        for (low, high), step in zip(pairwise(LEVELS), steps, strict=True):
            boundary = ir.Constant(FLOATS.lanes, [(low + high) / 2] * FLOATS.count)
            beyond = builder.fcmp_unordered(">=", x, boundary)
            more = getattr(builder, add)(total, ir.Constant(kind.lanes, [step] * kind.count))
            total = builder.select(beyond, more, total)
        return total

    return count


_closest_values = _counter(FLOATS, float(LEVELS[0]), [float(high - low) for low, high in pairwise(LEVELS)])
_closest_codes = _counter(WORDS, 0, [1] * (len(LEVELS) - 1))
"""Of floats; the last for NaN."""


@device
def _fit_table(x: Any, w: Any, found: Any) -> None:
    """Find the tried scales of least weighted error, (16,)."""
    zero = floats_of(np.float32(0))
    value = amax = scale = best = zero
    for i in range(_SIZE):
        number = load_lanes(x, i * LANES)
        beyond = above(magnitudes(number), amax)
        value, amax = where(beyond, number, value), where(beyond, magnitudes(number), amax)
    for n in range(_TRIES + 1):
        # The first try is the scale of the largest magnitude itself.
        if n == 0:
            factor = divided(np.float32(1), (zero - value) / floats_of(_FIRST))
        else:
            factor = divided(np.float32(np.float32(n - 8) + _FIRST), value)
        products, squares = zero, zero
        for i in range(_SIZE):
            number, weight = load_lanes(x, i * LANES), load_lanes(w, i * LANES)
            near = _closest_values(factor * number)
            weighted = weight * near
            products, squares = products + weighted * number, squares + weighted * near
        ratio = products / squares
        if n == 0:
            scale = where(above(squares, zero), ratio, zero)
            best = scale * products
        else:
            better = above(squares, zero) & above(products * products, best * squares)
            scale = where(better, ratio, scale)
            best = where(better, scale * products, best)
    store_lanes(found, ZERO, where(above(floats_of(LEAST), amax), zero, scale))


@device
def _choose_codes(values: Any, scales: Any, codes: Any) -> None:
    """Write the codes, as floats, that are closest under scales (16,)."""
    scale = load_lanes(scales, ZERO)
    inverse = where(is_zero(scale), floats_of(np.float32(0)), divided(np.float32(1), scale))
    for i in range(_SIZE):
        code = _closest_codes(inverse * load_lanes(values, i * LANES))
        store_lanes(codes, i * LANES, floats_of_integers(code))


@device
def _weights(
    values: Any, own: Any, importance: Any, at: Any, run: Any, columns: Any, weighted: Any, weights: Any
) -> None:
    """Write weights of 16 blocks: squares, or importance over run means."""
    if weighted:
        important_weights(values, own, (importance, at % columns, columns), _SIZE, run, _TWO, weights)
        return
    for i in range(_SIZE):
        value = load_lanes(values, i * LANES)
        store_lanes(weights, i * LANES, value * value)


@device
def table_rows(
    x: Any, importance: Any, columns: Any, weighted: Any, packed: Any, halves: Any, first: Any, last: Any
) -> Any:
    """Quantize float32 blocks to IQ4_NL; packed: takes codes, as bytes."""
    own, values, weights = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(_LONG, np.float32)
    found, tried = scratch(16, np.float32), scratch(_LONG, np.float32)
    codes, room = scratch(_LONG, np.uint8), scratch(_ROOM, np.uint8)
    rest, state = scratch(_ROOM, np.uint8), OK
    for start in range(first, last, LANES):
        at, count = start * _SIZE, min(LANES, last - start)
        state = max(state, load_group(x, at, count * _SIZE, _SIZE, own, values))
        _weights(values, own, importance, at, _SIZE, columns, weighted, weights)
        _fit_table(values, weights, found)
        _choose_codes(values, found, tried)
        for block in range(count):
            halves[start + block] = narrow_half(found[block])
        nbytes = _SIZE * FOUR // np.uint64(8)
        target, place = (packed, start * nbytes) if count == LANES else (rest, ZERO)
        write_codes(tried, _SIZE, LANES * _SIZE, FOUR, codes, room, target, place)
        if count < LANES:
            for i in range(count * nbytes):
                packed[start * nbytes + i] = rest[i]
    return state


@device
def table_super_rows(
    x: Any, importance: Any, kind: Any, packed: Any, scales: Any, halves: Any, first: Any, last: Any
) -> Any:
    """Quantize super-blocks ``first`` to ``last`` of ``x``, float32, to IQ4_XS.

    scales: takes their codes, 8 bytes a super-block.
    """
    own, values, weights = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(_LONG, np.float32)
    found, tried, fine = scratch(16, np.float32), scratch(_LONG, np.float32), scratch(16, np.int32)
    codes, room, state = scratch(_LONG, np.uint8), scratch(_ROOM, np.uint8), OK
    group = LANES // _BLOCKS
    for start in range(first, last, group):
        at, count = start * SUPER, min(group, last - start)
        state = max(state, load_group(x, at, count * SUPER, _SIZE, own, values))
        _weights(values, own, importance, at, SUPER, kind.columns, kind.weighted, weights)
        _fit_table(values, weights, found)
        for n in range(count):
            begin = n * _BLOCKS
            value = np.float32(0)
            for i in range(begin, begin + _BLOCKS):
                if abs(found[i]) > abs(value):
                    value = found[i]
            whole = np.float32(np.float32(-value) / _SCALE_CODES)
            inverse = np.float32(np.float32(1) / whole) if whole != 0 else np.float32(0)
            for i in range(_BLOCKS):
                code = max(min(nearest(np.float32(inverse * found[begin + i])), np.int32(31)), np.int32(-32))
                found[begin + i] = np.float32(whole * np.float32(code))
                fine[i] = code & np.int32(63)
            write_level(fine, _BLOCKS, start + n, whole, scales, halves, np.uint16(0))
        _choose_codes(values, found, tried)
        write_codes(tried, _SIZE, count * SUPER, FOUR, codes, room, packed, at * FOUR // np.uint64(8))
    return state
