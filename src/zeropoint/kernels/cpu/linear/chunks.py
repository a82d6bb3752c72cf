"""Products of input and weight codes, by chunks of output."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, UInt64
from ..machine import vector as v
from ..machine.intrinsics import bits32, by_dtype, device, float32_of, inlined, scratch
from ..machine.named_records import unpacker
from .panels import PANEL, multiply_panel, multiply_panel_groups, pack_block
from .products import (
    HIGH,
    PAIRS,
    QUADS,
    chunk_of,
    first_of,
    lanes_of,
    multiply_groups,
    multiply_rows,
    wide_of,
)

QUAD_ROWS, PAIR_ROWS = QUADS.rows, PAIRS.rows


SUMS = HIGH * QUADS.wide


START = np.uint64(QUADS.sums)
"""Numbers that the sums of a group of 8-bit codes begin with."""


MANY = np.uint64(16)
"""Rows of 8-bit codes from which a panel of the weight pays."""


WIDE = np.uint64(PANEL)


LANES = 16
"""Floats of a vector."""


ZERO, ONE, TWO, THREE, FOUR = (np.uint64(n) for n in range(5))


class Matrix(NamedTuple):
    """A packed weight: rows, columns, bits of codes, scales per ``group``.

    grouped: whether sums are scaled group by group: for several groups, and for floats.
    """

    rows: UInt64
    cols: UInt64
    row_bytes: UInt64
    bits: UInt64
    group: UInt64
    groups: UInt64
    signed: Flag
    grouped: Flag


class Slots(NamedTuple):
    """Partition of a layer into thread slots; along: by rows of input."""

    input_rows: UInt64
    weight_rows: UInt64
    along: Flag
    height: UInt64
    slots: UInt64


unpack_matrix, unpack_slots = unpacker(Matrix), unpacker(Slots)


class Weights(NamedTuple):
    """Packed weight: bytes, (rows * groups,) scales, (rows,) bias or empty; float32."""

    codes: Any
    matrix: Any
    scales: Any
    bias: Any


class RowCodes(NamedTuple):
    """Codes of rows of the input.

    starts: what sums begin with. moves: (rows,) uint32, what is missing in every code of a row, the codes of
    a row of ones then following the others; empty where nothing is. factors: float32 scales of the rows, or
    one of all.
    """

    codes: Any
    starts: Any
    moves: Any
    factors: Any


@device
def unpack_rows(packed: Any, matrix: Any, first: Any, last: Any, target: Any) -> None:
    """Bring rows ``first`` to ``last`` of 4-bit codes to bytes, two's complement."""
    sign = np.uint8(8) if matrix.signed else np.uint8(0)
    whole = matrix.cols - matrix.cols % np.uint64(v.STEP)
    for n in range(first, last):
        begin, to = n * matrix.row_bytes, (n - first) * matrix.cols
        for i in range(ZERO, whole, np.uint64(v.STEP)):
            codes = v.load_nibbles(packed, begin + i // TWO)
            v.store_lanes(target, to + i, (codes ^ v.octets_of(sign)) - v.octets_of(sign))
        for i in range(whole, matrix.cols):
            byte = packed[begin + i // TWO]
            code = np.uint8(byte >> np.uint8(4)) if i % TWO > ZERO else np.uint8(byte & np.uint8(15))
            target[to + i] = np.uint8(np.uint8(code ^ sign) - sign)


@device
def add_rest(
    codes: Any, row: Any, weight: Any, column: Any, first: Any, last: Any, out: Any, at: Any
) -> None:
    """Add products ``first`` to ``last``, no whole step, to int32 in ``out``."""
    total = np.int32(bits32(out[at]))
    for i in range(first, last):
        total += np.int32(codes[row + i]) * np.int32(np.int8(weight[column + i]))
    out[at] = float32_of(np.uint32(total))


class Operands(NamedTuple):
    """Tile operands: input codes and initial sums, weight and its scales."""

    codes: Any
    starts: Any
    weight: Any
    matrix: Any
    scales: Any


@inlined
def multiply_tile(operands: Any, rows: Any, high: Any, columns: Any, out: Any, places: Any) -> None:
    """Multiply one row or four by some of the weight.

    rows: where they begin, and their starts. columns: where the weight's begin, and their scales.
    """
    codes, starts, weight, matrix, scales = operands
    at, start = rows
    begin, scale_at = first_of(codes, columns[0]), first_of(codes, columns[1])
    lanes, groups = lanes_of(codes), matrix.groups
    if matrix.grouped:
        steps = matrix.group // lanes
        columns_of, own = (weight, begin), (scales, scale_at)
        if high == ONE:
            one, begun = (codes, at[:1]), (starts, start[:1])
            multiply_groups(one, columns_of, steps, begun, (out, places[:1]), own, groups)
        else:
            multiply_groups((codes, at), columns_of, steps, (starts, start), (out, places), own, groups)
        return
    steps = matrix.cols // lanes
    if high == ONE:
        multiply_rows((codes, at[:1]), (weight, begin), steps, (starts, start[:1]), (out, places[:1]))
    else:
        multiply_rows((codes, at), (weight, begin), steps, (starts, start), (out, places))
    done = steps * lanes
    if done < matrix.cols:
        for r in range(high):
            for c in range(wide_of(codes)):
                add_rest(
                    codes, at[r], weight, columns[0][c], done, matrix.cols, out, places[r] + np.uint64(c)
                )


@inlined
def four_places(at: Any, high: Any, pitch: Any) -> Any:
    """Places of ``high`` rows, the last repeated up to four."""
    last = at + (high - ONE) * pitch
    return at, min(at + pitch, last), min(at + TWO * pitch, last), last


@device
def multiply_block(
    operands: Any, rows: Any, columns: Any, base: Any, out: Any, begin: Any, pitch: Any
) -> None:
    """Multiply ``rows`` of codes by rows ``columns`` of the weight, from ``base``.

    Results of the first row begin at ``out[begin]``, the next row's ``pitch`` further.
    """
    alone = scratch(SUMS, np.float32)
    codes, matrix = operands.codes, operands.matrix
    (row, end), (first, last), wide = rows, columns, wide_of(codes)
    while row < end:
        left = end - row
        high = min(left, np.uint64(HIGH)) if left > TWO else ONE
        sources = (
            four_places(row * matrix.cols, high, matrix.cols),
            four_places(row * matrix.groups * START, high, matrix.groups * START),
        )
        at = begin + (row - rows[0]) * pitch
        for n in range(first, last, wide):
            across = min(wide, last - n)
            targets = (
                four_places(base + (n - first) * matrix.cols, across, matrix.cols),
                four_places(n * matrix.groups, across, matrix.groups),
            )
            if across == wide:
                multiply_tile(operands, sources, high, targets, out, four_places(at + n - first, high, pitch))
            else:
                multiply_tile(operands, sources, high, targets, alone, four_places(ZERO, high, FOUR))
                for r in range(high):
                    for c in range(across):
                        out[at + r * pitch + n - first + c] = alone[r * FOUR + c]
        row += high


@device
def multiply_panels(
    operands: Any, count: Any, columns: Any, base: Any, out: Any, begin: Any, pitch: Any, space: Any
) -> None:
    """Multiply 8-bit codes like :func:`multiply_block`, by fours and whole panels.

    space: bytes for a panel and its scales.
    """
    if count == ZERO:
        return
    codes, starts, weight, matrix, scales = operands
    cols, groups, step = matrix.cols, matrix.groups, lanes_of(codes)
    panel, own_scales = space[: WIDE * cols], space[WIDE * cols :].view(np.float32)
    steps = cols // groups // FOUR
    for n in range(columns[0], columns[1], WIDE):
        source = base + (n - columns[0]) * cols
        for lane in range(ZERO, WIDE, np.uint64(LANES)):
            for i in range(ZERO, cols, step):
                pack_block(weight, source + lane * cols + i, cols, panel, i * WIDE + lane * FOUR)
        if matrix.grouped:
            for c in range(WIDE):
                for g in range(groups):
                    own_scales[g * WIDE + c] = scales[(n + c) * groups + g]
        for row in range(ZERO, count, FOUR):
            four, begun = (codes, row * cols, cols), (starts, row)
            target = out, begin + row * pitch + n - columns[0], pitch
            if matrix.grouped:
                multiply_panel_groups(four, panel, begun, steps, target, own_scales, groups)
            else:
                multiply_panel(four, panel, begun, steps, target)


@device
def finish_row(
    out: Any, at: Any, count: Any, weights: Any, first: Any, scale: Any, move: Any, sums: Any
) -> None:
    """Turn ``count`` sums, with or without their weight's scale, into results.

    move: times ``sums``, what is to be added to sums of integers; none where ``sums`` is empty.
    """
    matrix, scales, bias = weights.matrix, weights.scales, weights.bias
    whole, lanes = count - count % np.uint64(LANES), np.uint64(LANES)
    biased, raw, moved = len(bias) > 0, not matrix.grouped, len(sums) > 0
    factor = v.floats_of(scale)
    for i in range(ZERO, whole, lanes):
        y = v.load_lanes(out, at + i)
        if raw:
            total = v.bits_of(y)
            if moved:
                total = total + v.words_of(move) * v.bits_of(v.load_lanes(sums, i))
            y = v.floats_of_integers(total) * v.load_lanes(scales, first + i)
        y = y * factor
        if biased:
            y = y + v.load_lanes(bias, first + i)
        v.store_lanes(out, at + i, y)
    for i in range(whole, count):
        t = out[at + i]
        if raw:
            bits = bits32(t)
            if moved:
                bits += move * bits32(sums[i])
            t = np.float32(np.int32(bits)) * scales[first + i]
        t = t * scale
        out[at + i] = t + bias[first + i] if biased else t


@inlined
def _multiply_plainly(codes: Any, operands: Any, count: Any, columns: Any, base: Any, target: Any) -> None:
    """Multiply ``count`` rows like :func:`multiply_block`, in panels for 8-bit codes.

    target: the output, where in it results begin, the pitch of its rows; bytes for a panel.
    """
    out, begin, pitch, _ = target
    multiply_block(operands, (ZERO, count), columns, base, out, begin, pitch)


@inlined
def _multiply_in_panels(codes: Any, operands: Any, count: Any, columns: Any, base: Any, target: Any) -> None:
    out, begin, pitch, space = target
    high, whole = count - count % FOUR, (columns[1] - columns[0]) // WIDE * WIDE
    if count < MANY:
        high = ZERO
    middle, place = columns[0] + whole, base + whole * operands.matrix.cols
    multiply_panels(operands, high, (columns[0], middle), base, out, begin, pitch, space)
    multiply_block(operands, (ZERO, high), (middle, columns[1]), place, out, begin + whole, pitch)
    multiply_block(operands, (high, count), columns, base, out, begin + high * pitch, pitch)


_multiply_rows = by_dtype(int8=_multiply_in_panels, int16=_multiply_plainly, float32=_multiply_plainly)


@device
def multiply_chunks(
    inputs: Any, count: Any, weights: Any, space: Any, out: Any, top: Any, columns: Any
) -> None:
    """Compute ``count`` rows of output from ``top``, chunk by chunk of weight.

    inputs: :class:`RowCodes`. weights: :class:`Weights`. space: bytes for a chunk's sums and unpacked codes,
    and for a panel.
    """
    codes, starts, moves, factors = inputs
    weight, matrix, scales, _bias = weights
    cols = matrix.cols
    chunk = max(chunk_of(codes) // cols // WIDE, ONE) * WIDE
    sums, space = space[: FOUR * chunk].view(np.float32), space[FOUR * chunk :]
    unpacked = space[: chunk * cols if matrix.bits < np.uint64(8) else ZERO]
    space = space[len(unpacked) :]
    for first in range(columns[0], columns[1], chunk):
        last, begin = min(first + chunk, columns[1]), top * matrix.rows + first
        held, base = weight, first * cols
        if matrix.bits < np.uint64(8):
            unpack_rows(weight, matrix, first, last, unpacked)
            held, base = unpacked, ZERO
        operands = Operands(codes, starts, held, matrix, scales)
        _multiply_rows(codes, operands, count, (first, last), base, (out, begin, matrix.rows, space))
        move, moved = np.uint32(0), sums[: chunk if len(moves) > 0 else ZERO]
        if len(moves) > 0:
            multiply_block(operands, (count, count + ONE), (first, last), base, moved, ZERO, chunk)
        for r in range(count):
            at, factor = begin + r * matrix.rows, factors[r if len(factors) > 1 else ZERO]
            if len(moves) > 0:
                move = moves[r]
            finish_row(out, at, last - first, weights, first, factor, move, moved)
