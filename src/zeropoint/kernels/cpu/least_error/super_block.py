"""Block columns, weights, and super-block outputs, for all types."""

from typing import Any

import numpy as np

from ..machine.descriptor import BAD_VALUE, OK
from ..machine.emit import emit_packed
from ..machine.intrinsics import device, narrow_half, scratch, widen_half
from ..machine.reductions import integers, root
from ..machine.vector import WHOLE, floats_of, load_lanes, low_octets, store_lanes, words_of
from .lanes import LANES, ONE, SUPER, is_nonfinite, larger_magnitude, sum_of_squares, transpose

ZERO = np.uint64(0)
_LONG = 32 * 16


@device
def load_group(x: Any, at: Any, count: Any, size: Any, own: Any, values: Any) -> Any:
    """Load 16 blocks as columns of ``values``; zeros past ``count``.

    own: room for the numbers. Returns BAD_VALUE where one is not finite, else OK.
    """
    total, worst = size * LANES, words_of(np.uint32(0))
    for i in range(ZERO, min(total, count), LANES):
        number = load_lanes(x, at + i)
        worst = larger_magnitude(worst, number)
        store_lanes(own, i, number)
    for i in range(min(total, count), total, LANES):
        store_lanes(own, i, floats_of(np.float32(0)))
    for i in range(ZERO, size, LANES):
        transpose(own, i, size, values, i * LANES, LANES)
    return BAD_VALUE if is_nonfinite(worst) else OK


@device
def load_importance(importance: Any, column: Any, size: Any, columns: Any, weights: Any) -> None:
    """Load importance of 16 blocks from ``column``, wrapping at ``columns``."""
    own = scratch(_LONG, np.float32)
    at = column
    for block in range(LANES):
        at = ZERO if at >= columns else at
        for i in range(ZERO, size, LANES):
            store_lanes(own, block * size + i, load_lanes(importance, at + i))
        at += size
    for i in range(ZERO, size, LANES):
        transpose(own, i, size, weights, i * LANES, LANES)


@device
def important_weights(
    values: Any, own: Any, row: Any, size: Any, run: Any, factor: Any, weights: Any
) -> None:
    """Write ``i * sqrt(m + x^2)``; m from runs of ``own``.

    row: importance of columns, the column of the first number, and the columns after which the next row
    begins.
    """
    importance, column, columns = row
    load_importance(importance, column, size, columns, weights)
    means, count = scratch(16, np.float32), run // size
    for first in range(ZERO, LANES, count):
        total = sum_of_squares(own, first * size, run)
        for block in range(first, first + count):
            means[block] = np.float32(np.float32(factor * total) / np.float32(run))
    mean = load_lanes(means, ZERO)
    for i in range(size):
        value = load_lanes(values, i * LANES)
        store_lanes(weights, i * LANES, load_lanes(weights, i * LANES) * root(mean + value * value))


@device
def sums_of(weights: Any, size: Any, sums: Any) -> None:
    """Write the sum of each column."""
    total = floats_of(np.float32(0))
    for i in range(size):
        total = total + load_lanes(weights, i * LANES)
    store_lanes(sums, ZERO, total)


@device
def write_level(codes: Any, count: Any, block: Any, scale: Any, out: Any, halves: Any, flip: Any) -> Any:
    """Write scale codes and float16 of a super-block; return float32."""
    half = narrow_half(scale)
    for i in range(count):
        out[block * count + i] = np.uint8(codes[i])
    halves[block] = half ^ flip
    return widen_half(half)


@device
def write_codes(
    columns: Any, size: Any, count: Any, bits: Any, codes: Any, room: Any, packed: Any, at: Any
) -> None:
    """Pack ``count`` codes, float columns of 16 blocks, into ``packed[at:]``.

    codes, room: room for 512 bytes, and for a super-block.
    """
    mask = words_of((np.uint32(1) << np.uint32(bits)) - np.uint32(1))
    rows = scratch(_LONG, np.float32)
    for i in range(ZERO, size, LANES):
        transpose(columns, i * LANES, LANES, rows, i, size)
    for i in range(ZERO, size * LANES, WHOLE):
        first, second = integers(load_lanes(rows, i)), integers(load_lanes(rows, i + LANES))
        store_lanes(codes, i, low_octets(first & mask, second & mask))
    nbytes = SUPER * bits // np.uint64(8)
    for part in range(count // SUPER):
        emit_packed(codes[part * SUPER : (part + ONE) * SUPER], SUPER, bits, room, packed, at + part * nbytes)
