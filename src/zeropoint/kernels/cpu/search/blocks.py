"""Blocks into columns and their weights, and what is written of a super-block: what all types need."""

from typing import Any

import numpy as np

from ..machine.emit import emit_packed
from ..machine.intrinsics import device, narrow_half, widen_half
from ..machine.vector import floats_of, load_lanes, store_lanes
from .lanes import LANES, ONE, SUPER, scalar_root, sum_of_squares, transpose

ZERO = np.uint64(0)


@device
def load_group(x: Any, at: Any, count: Any, size: Any, own: Any, values: Any) -> None:
    """Load 16 blocks from ``x[at:]`` as columns of ``values``; past ``count`` numbers there are zeros.

    own: room for the numbers.
    """
    total = size * LANES
    for i in range(ZERO, min(total, count), LANES):
        store_lanes(own, i, load_lanes(x, at + i))
    for i in range(min(total, count), total, LANES):
        store_lanes(own, i, floats_of(np.float32(0)))
    for i in range(ZERO, size, LANES):
        transpose(own, i, size, values, i * LANES)


@device
def important_weights(
    values: Any, own: Any, importance: Any, column: Any, size: Any, run: Any, factor: Any, columns: Any,
    weights: Any,
) -> None:  # fmt: skip
    """Write ``i * sqrt(m + x^2)`` to ``weights``, m from runs of ``run`` neighbors of ``own``.

    column: of the first number; the next row begins after ``columns``.
    """
    count = run // size
    for first in range(ZERO, LANES, count):
        total = sum_of_squares(own, first * size, run)
        mean = np.float32(np.float32(factor * total) / np.float32(run))
        at = (column + first * size) % columns
        for block in range(first, first + count):
            for i in range(size):
                value = values[i * LANES + block]
                spread = scalar_root(np.float32(mean + np.float32(value * value)))
                weights[i * LANES + block] = np.float32(importance[at + i] * spread)
            at += size


@device
def sums_of(weights: Any, size: Any, sums: Any) -> None:
    """Write the sum of each column."""
    total = floats_of(np.float32(0))
    for i in range(size):
        total = total + load_lanes(weights, i * LANES)
    store_lanes(sums, ZERO, total)


@device
def write_level(codes: Any, count: Any, block: Any, scale: Any, out: Any, halves: Any, flip: Any) -> Any:
    """Write the codes of a super-block's scales and their float16, and return that as float32."""
    half = narrow_half(scale)
    for i in range(count):
        out[block * count + i] = np.uint8(codes[i])
    halves[block] = half ^ flip
    return widen_half(half)


@device
def write_codes(
    columns: Any, size: Any, count: Any, bits: Any, codes: Any, room: Any, packed: Any, at: Any
) -> None:
    """Pack ``count`` codes of 16 blocks, which are columns of floats, into ``packed[at:]``.

    codes, room: room for 512 bytes, and for those of a super-block.
    """
    mask = (np.int32(1) << np.int32(bits)) - np.int32(1)
    for block in range(LANES):
        for i in range(size):
            codes[block * size + i] = np.uint8(np.int32(columns[i * LANES + block]) & mask)
    nbytes = SUPER * bits // np.uint64(8)
    for part in range(count // SUPER):
        emit_packed(codes[part * SUPER : (part + ONE) * SUPER], SUPER, bits, room, packed, at + part * nbytes)
