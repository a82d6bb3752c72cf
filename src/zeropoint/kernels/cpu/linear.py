"""The linear layer on integer codes: quantize rows, multiply by packed weights, scale, in one call.

    y[m, n] = (sum over groups g of float32(sum over k in g of a[m, k] * w[n, k]) * t[n, g]) * s[m] + bias[n]

a: codes of the input less their zero points. They are those of :mod:`.quantize`, whose kernel is called for
64 rows at a time, and are kept in 16 bits while the rows of the weight pass over them. w: codes of the
weight, bytes as they are kept, or 4 bits that are brought to bytes some rows at a time. Threads take rows of
the input, or, where these are few, of the weight; every result is computed in one order, so that neither
changes it.
"""

from typing import Any, NamedTuple

import numpy as np

from .intrinsics import bits32, device, float32_of, inlined, scratch
from .layout import GIVEN, OK
from .products import HIGH, LANES, WIDE, multiply_groups, multiply_rows
from .quantize import quantize_rows
from .vector import (
    STEP,
    bits_of,
    floats_of,
    floats_of_integers,
    load_lanes,
    load_nibbles,
    octets_of,
    store_lanes,
)

ROWS = 64
"""Rows of the input that are quantized at once: their codes and 64 KiB of weight fit the second cache."""
CHUNK = 1 << 16
"""Bytes of weight that all of these rows pass over before the next."""
SUMS = HIGH * WIDE
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)


class Matrix(NamedTuple):
    """A packed weight: ``rows`` rows of ``cols`` codes of ``bits`` bits, a scale a ``group`` of a row.

    grouped: whether sums are scaled group by group, as those of several groups and of floats are.
    """

    rows: np.uint64
    cols: np.uint64
    row_bytes: np.uint64
    bits: np.uint64
    group: np.uint64
    groups: np.uint64
    signed: np.uint8
    grouped: np.uint8


class Input(NamedTuple):
    """How the input is quantized; ``layout`` is for any number of rows, one block each or one for all."""

    layout: Any
    element: Any
    rule: Any
    order: Any
    signed: np.uint8


def chunk_rows(cols: Any) -> Any:
    """Return how many rows of a weight of ``cols`` bytes make a chunk: whole tiles."""
    return max(CHUNK // (WIDE * cols), 1) * WIDE


def work_bytes(rows: int, cols: int, bits: int) -> int:
    """Return the bytes of workspace for ``rows`` rows of input and a weight of ``bits`` bits."""
    return 4 * min(rows, ROWS) * cols + (chunk_rows(cols) * cols if bits < 8 else 0)


@device
def widen_codes(codes: Any, at: Any, count: Any, signed: Any, zero: Any, target: Any) -> None:
    """Set ``target[i] = codes[at + i] - zero`` in 16 bits."""
    if signed:
        for i in range(count):
            target[i] = np.int16(np.int16(np.int8(codes[at + i])) - zero)
    else:
        for i in range(count):
            target[i] = np.int16(np.int16(codes[at + i]) - zero)


@device
def unpack_rows(packed: Any, matrix: Any, first: Any, last: Any, target: Any) -> None:
    """Bring rows ``first`` to ``last`` of 4-bit codes to bytes, two's complement."""
    sign = np.uint8(8) if matrix.signed else np.uint8(0)
    whole = matrix.cols - matrix.cols % np.uint64(STEP)
    for n in range(first, last):
        begin, to = n * matrix.row_bytes, (n - first) * matrix.cols
        for i in range(ZERO, whole, np.uint64(STEP)):
            codes = load_nibbles(packed, begin + i // TWO)
            store_lanes(target, to + i, (codes ^ octets_of(sign)) - octets_of(sign))
        for i in range(whole, matrix.cols):
            byte = packed[begin + i // TWO]
            code = np.uint8(byte >> np.uint8(4)) if i % TWO > ZERO else np.uint8(byte & np.uint8(15))
            target[to + i] = np.uint8(np.uint8(code ^ sign) - sign)


@device
def add_rest(
    codes: Any, row: Any, weight: Any, column: Any, first: Any, last: Any, out: Any, at: Any
) -> None:
    """Add products ``first`` to ``last``, which do not fill a step, to the int32 in the bits of ``out``."""
    total = np.int32(bits32(out[at]))
    for i in range(first, last):
        total += np.int32(codes[row + i]) * np.int32(np.int8(weight[column + i]))
    out[at] = float32_of(np.uint32(total))


class Operands(NamedTuple):
    """What tiles are made of: 16-bit codes of the input, bytes of the weight, its shape and its scales."""

    codes: Any
    weight: Any
    matrix: Any
    scales: Any


@inlined
def multiply_tile(operands: Any, rows: Any, high: Any, columns: Any, out: Any, places: Any) -> None:
    """Multiply one row, or the four of ``rows``, by two of the weight; results are sums or their bits.

    columns: where the two begin in the weight, and in its scales.
    """
    codes, weight, matrix, scales = operands
    begin, scale_at = columns
    if matrix.grouped:
        steps, groups = matrix.group // np.uint64(LANES), matrix.groups
        if high == ONE:
            multiply_groups(codes, rows[:1], weight, begin, steps, out, places[:1], scales, scale_at, groups)
        else:
            multiply_groups(codes, rows, weight, begin, steps, out, places, scales, scale_at, groups)
        return
    steps = matrix.cols // np.uint64(LANES)
    if high == ONE:
        multiply_rows(codes, rows[:1], weight, begin, steps, out, places[:1])
    else:
        multiply_rows(codes, rows, weight, begin, steps, out, places)
    done = steps * np.uint64(LANES)
    if done < matrix.cols:
        for r in range(high):
            for c in range(np.uint64(WIDE)):
                add_rest(codes, rows[r], weight, begin[c], done, matrix.cols, out, places[r] + c)


@inlined
def four_places(at: Any, high: Any, pitch: Any) -> Any:
    """Return where ``high`` rows begin, the last one again for those that a tile of four has too many."""
    last = at + (high - ONE) * pitch
    return at, min(at + pitch, last), min(at + TWO * pitch, last), last


@device
def multiply_block(
    codes: Any, count: Any, weight: Any, base: Any, matrix: Any, scales: Any, first: Any, last: Any, out: Any,
    begin: Any,
) -> None:  # fmt: skip
    """Multiply ``count`` rows of codes by rows ``first`` to ``last`` of the weight, which begin at ``base``.

    Results of the first row begin at ``out[begin]``.
    """
    alone = scratch(SUMS, np.float32)
    operands = Operands(codes, weight, matrix, scales)
    row = ZERO
    while row < count:
        left = count - row
        high = min(left, np.uint64(HIGH)) if left > TWO else ONE
        rows = four_places(row * matrix.cols, high, matrix.cols)
        at = begin + row * matrix.rows
        for n in range(first, last, np.uint64(WIDE)):
            second = min(n + ONE, last - ONE)
            begins = base + (n - first) * matrix.cols, base + (second - first) * matrix.cols
            columns = begins, (n * matrix.groups, second * matrix.groups)
            if second > n:
                places = four_places(at + n, high, matrix.rows)
                multiply_tile(operands, rows, high, columns, out, places)
            else:
                places = four_places(ZERO, high, TWO)
                multiply_tile(operands, rows, high, columns, alone, places)
                for r in range(high):
                    out[at + r * matrix.rows + n] = alone[r * TWO]
        row += high


@device
def finish_row(
    out: Any, at: Any, count: Any, matrix: Any, scales: Any, first: Any, scale: Any, bias: Any
) -> None:
    """Turn ``count`` sums, with or without their weight's scale, into results."""
    whole, lanes = count - count % np.uint64(LANES), np.uint64(LANES)
    biased, raw = len(bias) > 0, not matrix.grouped
    factor = floats_of(scale)
    for i in range(ZERO, whole, lanes):
        y = load_lanes(out, at + i)
        if raw:
            y = floats_of_integers(bits_of(y)) * load_lanes(scales, first + i)
        y = y * factor
        if biased:
            y = y + load_lanes(bias, first + i)
        store_lanes(out, at + i, y)
    for i in range(whole, count):
        t = out[at + i]
        if raw:
            t = np.float32(np.int32(bits32(t))) * scales[first + i]
        t = t * scale
        out[at + i] = t + bias[first + i] if biased else t


@device
def linear_rows(
    x: Any, source: Any, given: Any, weight: Any, matrix: Any, scales: Any, bias: Any, work: Any, out: Any,
    rows: Any, columns: Any,
) -> Any:  # fmt: skip
    """Compute rows ``rows[0]`` to ``rows[1]`` and columns ``columns[0]`` to ``columns[1]`` of the output.

    x: (M * cols,), as :func:`.quantize.quantize_rows` takes it. given: float32 scale and zero point of the
    input, (1,) each, unread where the rule chooses them. weight: packed bytes. scales: (rows * groups,)
    float32. bias: (rows,) float32, or empty. work: bytes of :func:`work_bytes`. out: (M * rows,) float32.
    Returns OK, BAD_VALUE or BAD_SCALE; after the latter two the output means nothing.
    """
    own_scales, own_zeros = scratch(ROWS, np.float32), scratch(ROWS, np.float32)
    nothing = scratch(LANES, np.uint8)
    block, cols = min(np.uint64(ROWS), rows[1] - rows[0]), matrix.cols
    wide = work[: TWO * block * cols].view(np.int16)
    codes = work[TWO * block * cols : np.uint64(3) * block * cols]
    unpacked = work[np.uint64(4) * block * cols :]
    known = source.rule.how == GIVEN
    used_scales, used_zeros = given if known else (own_scales, own_zeros)
    chunk = max(np.uint64(CHUNK) // (np.uint64(WIDE) * cols), ONE) * np.uint64(WIDE)
    state = OK
    for top in range(rows[0], rows[1], block):
        count = min(block, rows[1] - top)
        found = quantize_rows(
            x[top * cols :], source.layout, source.element, source.rule, source.order, used_scales, nothing,
            used_zeros, codes, ZERO, count,
        )  # fmt: skip
        state = max(state, found)
        for r in range(count):
            shift = np.int16(0)
            if source.element.zero_place:
                shift = np.int16(used_zeros[ZERO if known else r])
            widen_codes(codes, r * cols, cols, source.signed, shift, wide[r * cols :])
        for first in range(columns[0], columns[1], chunk):
            last, begin = min(first + chunk, columns[1]), top * matrix.rows
            if matrix.bits < np.uint64(8):
                unpack_rows(weight, matrix, first, last, unpacked)
                multiply_block(wide, count, unpacked, ZERO, matrix, scales, first, last, out, begin)
            else:
                multiply_block(wide, count, weight, first * cols, matrix, scales, first, last, out, begin)
            for r in range(count):
                scale = used_scales[ZERO if known else r]
                at = begin + r * matrix.rows + first
                finish_row(out, at, last - first, matrix, scales, first, scale, bias)
    return state


@device
def float_rows(
    x: Any, weight: Any, matrix: Any, scales: Any, bias: Any, work: Any, out: Any, rows: Any, columns: Any
) -> None:
    """Compute rows and columns of the output as :func:`linear_rows` does, from float32 ``x`` as it is.

    Rows of the weight are whole steps, and ``matrix.grouped`` is set.
    """
    chunk = max(np.uint64(CHUNK) // (np.uint64(WIDE) * matrix.cols), ONE) * np.uint64(WIDE)
    values, count, begin = x[rows[0] * matrix.cols :], rows[1] - rows[0], rows[0] * matrix.rows
    for first in range(columns[0], columns[1], chunk):
        last = min(first + chunk, columns[1])
        if matrix.bits < np.uint64(8):
            unpack_rows(weight, matrix, first, last, work)
            multiply_block(values, count, work, ZERO, matrix, scales, first, last, out, begin)
        else:
            base = first * matrix.cols
            multiply_block(values, count, weight, base, matrix, scales, first, last, out, begin)
        for r in range(count):
            at = begin + r * matrix.rows + first
            finish_row(out, at, last - first, matrix, scales, first, np.float32(1), bias)
