"""Error feedback and coordinate descent, WIDE rows a panel, by column blocks.

A panel is transposed: a number of each of its rows, for one column after the other. Sums of a column take the
columns before it in order, whatever the blocks are. Of the matrix, a block of rows is packed at a time:
``packed[column / HIGH][k][column]``.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, UInt64
from ..machine.intrinsics import device, inlined, scratch
from ..machine.named_records import unpacker
from ..machine.team import bundled, over_rows
from ..machine.vector import doubles_of, load_lanes, store_lanes
from .register_tiles import HIGH, WIDE, add_products

BLOCK = 128
"""Columns that are processed before their errors are added to all others."""
GROUP = 8
"""Panels that read a part of the packed matrix while it is in the second cache."""
PART = 8
"""Tiles of columns in that part."""
STEPS, TABLE, VALUES = np.uint64(0), np.uint64(1), np.uint64(2)
"""How numbers are rounded: to consecutive integers, to a table, or not at all."""
_BLOCK, _HIGH, _WIDE = np.uint64(BLOCK), np.uint64(HIGH), np.uint64(WIDE)
_GROUP, _PART = np.uint64(GROUP), np.uint64(PART)
_MAGIC = 1.5 * 2.0**52
"""Added to a float64 and subtracted again, it rounds a number to an integer, half to even; -0 becomes 0."""
_ERRORS, _MOVES, _WANTED = GROUP * BLOCK * WIDE, BLOCK * WIDE, 2 * WIDE
ZERO, ONE = np.uint64(0), np.uint64(1)


NOTHING: Any = np.zeros(1)
"""In place of an array that is not read."""


class GridRounding(NamedTuple):
    """How numbers are rounded.

    kind: of those above. narrow: whether values are computed in float32. top: power of two, at most the
    number of bounds, or 0. blocks: of a row. levels, bounds: float64; a number takes the level after all
    bounds below it. scales, offsets, zeros: float64, ``[panel][block][row]``. block_of: of each column.
    """

    kind: UInt64
    narrow: Flag = False
    top: UInt64 = 0
    blocks: UInt64 = 0
    levels: Any = NOTHING
    bounds: Any = NOTHING
    scales: Any = NOTHING
    offsets: Any = NOTHING
    zeros: Any = NOTHING
    block_of: Any = NOTHING.astype(np.uint64)


class ColumnBlock(NamedTuple):
    """A block of columns.

    columns: of the matrix. begin, end: of the block. pitch: columns in whole tiles. skipped: tiles that are
    not packed.
    """

    columns: UInt64
    begin: UInt64
    end: UInt64
    pitch: UInt64
    skipped: UInt64 = 0


unpack_rounding, unpack_columns = unpacker(GridRounding), unpacker(ColumnBlock)


class FeedArrays(NamedTuple):
    """What :func:`feed_rows` reads and writes, all ``[panel][column][row]`` but for the last three.

    weight: from which errors are counted; zeros for a triangular system. numbers: what is rounded. values:
    results. losses: (panels * WIDE,). packed: rows of the matrix. d: of each column.
    """

    weight: Any
    numbers: Any
    values: Any
    losses: Any
    packed: Any
    d: Any


class MoveArrays(NamedTuple):
    """What :func:`move_rows` reads and writes.

    products: of the errors and the matrix. values: as they are. Both ``[panel][column][row]``. counts:
    (panels,) uint64, to which those that moved are added. packed, diagonal: of a symmetric matrix.
    """

    products: Any
    values: Any
    counts: Any
    packed: Any
    diagonal: Any


@inlined
def _level_of(u: Any, rounding: Any) -> Any:
    """Level of a number: bounds below it are counted by bisection."""
    bounds, found, step = rounding.bounds, ZERO, rounding.top
    count = np.uint64(len(bounds))
    while step > ZERO:
        tried = found + step
        if tried <= count and u > bounds[tried - ONE]:
            found = tried
        step = step // np.uint64(2)
    return rounding.levels[found]


@device
def _round(numbers: Any, at: Any, rounding: Any, panel: Any, column: Any, out: Any, to: Any) -> None:
    """Round WIDE numbers of a column at ``numbers[at]`` to ``out[to:]``."""
    if rounding.kind == VALUES:
        for i in range(_WIDE):
            out[to + i] = numbers[at + i]
        return
    levels = scratch(WIDE, np.float64)
    own = (panel * rounding.blocks + rounding.block_of[column]) * _WIDE
    scales, offsets, zeros = rounding.scales, rounding.offsets, rounding.zeros
    for i in range(_WIDE):
        near, scale = numbers[at + i] - offsets[own + i], scales[own + i]
        ratio = near / scale if scale != 0.0 else 0.0
        levels[i] = ratio + zeros[own + i]
    if rounding.kind == STEPS:
        low, high = rounding.levels[0], rounding.levels[len(rounding.levels) - 1]
        for i in range(_WIDE):
            levels[i] = min(max(levels[i], low), high) + _MAGIC - _MAGIC
    else:
        for i in range(_WIDE):
            levels[i] = _level_of(levels[i], rounding)
    if rounding.narrow:
        for i in range(_WIDE):
            steps = np.float32(levels[i] - zeros[own + i])
            product = np.float32(steps * np.float32(scales[own + i]))
            out[to + i] = np.float64(np.float32(product + np.float32(offsets[own + i])))
    else:
        for i in range(_WIDE):
            out[to + i] = (levels[i] - zeros[own + i]) * scales[own + i] + offsets[own + i]


@over_rows
def pack_rows(m: Any, sizes: Any, packed: Any, first: Any, last: Any) -> None:
    """Pack column tiles of a block of rows; zeros behind the last.

    m: float64, flat and square. sizes: packed :class:`ColumnBlock`; tiles count from the first that is
    packed.
    """
    columns, begin, end, _pitch, skipped = unpack_columns(sizes)
    for top in range(first + skipped, last + skipped, _PART):
        bottom = min(top + _PART, last + skipped)
        for k in range(end - begin):
            for tile in range(top, bottom):
                left, at = tile * _HIGH, (tile * _BLOCK + k) * _HIGH
                source = (begin + k) * columns + left
                if left + _HIGH <= columns:
                    for i in range(_HIGH):
                        packed[at + i] = m[source + i]
                else:
                    for i in range(_HIGH):
                        packed[at + i] = m[source + i] if left + i < columns else 0.0


@device
def _add_block(
    numbers: Any, panel: Any, pitch: Any, packed: Any, errors: Any, own: Any, tile: Any, steps: Any
) -> None:
    """Add the errors of ``steps`` columns to a tile of columns."""
    to = panel * pitch + tile * _HIGH * _WIDE
    add_products((numbers, to, _WIDE), (packed, tile * _BLOCK * _HIGH), (errors, own), steps)


@device
def _feed_panel(panel: Any, block: Any, arrays: Any, rounding: Any, errors: Any, own: Any) -> None:
    """Process the columns of a block of a panel."""
    weight, numbers, values, losses, packed, d = arrays
    begin, end, pitch = block.begin, block.end, block.pitch * _WIDE
    base = panel * pitch
    for left in range(begin, end, _HIGH):
        tile = left // _HIGH
        _add_block(numbers, panel, pitch, packed, errors, own, tile, left - begin)
        for column in range(left, min(left + _HIGH, end)):
            at = base + column * _WIDE
            _round(numbers, at, rounding, panel, column, values, at)
            found, target = load_lanes(values, at), load_lanes(numbers, at)
            error = load_lanes(weight, at) - found
            missed = target - found
            loss = load_lanes(losses, panel * _WIDE) + missed * missed * doubles_of(d[column])
            store_lanes(losses, panel * _WIDE, loss)
            store_lanes(errors, own + (column - begin) * _WIDE, error)
            row = (tile * _BLOCK + (column - begin)) * _HIGH
            for later in range(column + ONE, min(left + _HIGH, end)):
                to = base + later * _WIDE
                more = error * doubles_of(packed[row + later - left])
                store_lanes(numbers, to, load_lanes(numbers, to) + more)


@inlined
def _rounding_of(record: Any, tables: Any) -> Any:
    levels, bounds, scales, offsets, zeros, block_of = tables
    return unpack_rounding(
        record, levels=levels, bounds=bounds, scales=scales, offsets=offsets, zeros=zeros, block_of=block_of
    )


@bundled
def feed_rows(args: Any, first: Any, last: Any) -> None:
    """Process a column block of panels, and add errors to columns behind.

    args: :class:`ColumnBlock`, :class:`GridRounding` and its arrays, :class:`FeedArrays`.
    """
    block, rounding, arrays = unpack_columns(args[0]), _rounding_of(args[1], args[2]), FeedArrays(*args[3:])
    errors = scratch(_ERRORS, np.float64)
    pitch, steps, size = block.pitch * _WIDE, block.end - block.begin, _BLOCK * _WIDE
    behind, tiles = (block.end + _HIGH - ONE) // _HIGH, block.pitch // _HIGH
    for top in range(first, last, _GROUP):
        bottom = min(top + _GROUP, last)
        for p in range(top, bottom):
            own = (p - top) * size
            _feed_panel(p, block, arrays, rounding, errors, own)
        for part in range(behind, tiles, _PART):
            for p in range(top, bottom):
                for tile in range(part, min(part + _PART, tiles)):
                    _add_block(arrays.numbers, p, pitch, arrays.packed, errors, (p - top) * size, tile, steps)


@device
def _move_panel(panel: Any, block: Any, arrays: Any, rounding: Any, moves: Any, own: Any) -> Any:
    """Move the values of a panel's column block; return how many moved."""
    products, values, _counts, packed, diagonal = arrays
    begin, end, pitch = block.begin, block.end, block.pitch * _WIDE
    base, wanted, moved = panel * pitch, scratch(_WANTED, np.float64), ZERO
    for left in range(begin, end, _HIGH):
        tile, right = left // _HIGH, min(left + _HIGH, end)
        _add_block(products, panel, pitch, packed, moves, own, tile, left - begin)
        for column in range(left, right):
            at = base + column * _WIDE
            before = load_lanes(values, at)
            store_lanes(wanted, ZERO, before + load_lanes(products, at) / doubles_of(diagonal[column]))
            _round(wanted, ZERO, rounding, panel, column, wanted, _WIDE)
            after = load_lanes(wanted, _WIDE)
            move = before - after
            store_lanes(values, at, after)
            store_lanes(moves, own + (column - begin) * _WIDE, move)
            for i in range(_WIDE):
                moved += np.uint64(moves[own + (column - begin) * _WIDE + i] != 0.0)
            row = (tile * _BLOCK + (column - begin)) * _HIGH
            for other in range(left, right):
                to = base + other * _WIDE
                more = move * doubles_of(packed[row + other - left])
                store_lanes(products, to, load_lanes(products, to) + more)
    return moved


@bundled
def move_rows(args: Any, first: Any, last: Any) -> None:
    """Move values of a column block of panels towards less error.

    args: :class:`ColumnBlock`, :class:`GridRounding` and its arrays, :class:`MoveArrays`.
    """
    block, rounding, arrays = unpack_columns(args[0]), _rounding_of(args[1], args[2]), MoveArrays(*args[3:])
    products, packed = arrays.products, arrays.packed
    moves = scratch(_MOVES, np.float64)
    begin, end, pitch = block.begin // _HIGH, (block.end + _HIGH - ONE) // _HIGH, block.pitch * _WIDE
    steps, tiles = block.end - block.begin, block.pitch // _HIGH
    for p in range(first, last):
        arrays.counts[p] += _move_panel(p, block, arrays, rounding, moves, ZERO)
        for tile in range(begin, end):
            done = min((tile - begin + ONE) * _HIGH, steps)
            to, at = p * pitch + tile * _HIGH * _WIDE, (tile * _BLOCK + done) * _HIGH
            add_products((products, to, _WIDE), (packed, at), (moves, done * _WIDE), steps - done)
        for tile in range(tiles):
            if tile < begin or tile >= end:
                _add_block(products, p, pitch, packed, moves, ZERO, tile, steps)


@over_rows
def add_errors(
    weight: Any, values: Any, packed: Any, sizes: Any, products: Any, first: Any, last: Any
) -> None:
    """Add products of a column block's errors and the matrix."""
    errors = scratch(_MOVES, np.float64)
    block = unpack_columns(sizes)
    begin, end, pitch = block.begin, block.end, block.pitch * _WIDE
    for p in range(first, last):
        for column in range(begin, end):
            at = p * pitch + column * _WIDE
            error = load_lanes(weight, at) - load_lanes(values, at)
            store_lanes(errors, (column - begin) * _WIDE, error)
        for tile in range(block.pitch // _HIGH):
            _add_block(products, p, pitch, packed, errors, ZERO, tile, end - begin)
