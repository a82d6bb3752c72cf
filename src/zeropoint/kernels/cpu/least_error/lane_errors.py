"""Decoded values of 16 blocks and block sums, float64, added pairwise.

Columns are arrays of 16 numbers, one of each block, after those of the place before. Sums take eight terms at
a time in registers: the first three halvings of :func:`zeropoint.layout.blocks.pairwise_sums`.
"""

from typing import Any

import numpy as np

from ..encode.elements import EXPONENT, INFINITE, MAGIC
from ..machine.descriptor import FLOAT, INTEGER, RECIPROCAL, THRESHOLDS, ZERO_INSIDE
from ..machine.intrinsics import device, inlined, shl32
from ..machine.vector import (
    above,
    bits_of,
    doubles_of,
    floats_of,
    larger,
    larger_bits,
    load_lanes,
    smaller,
    store_lanes,
    values_of,
    wide_floats,
    words_of,
)
from .lanes import LANES, add_neighbors, add_pairwise, magnitudes, narrowed, where

LONGEST = 128 * 16
"""Numbers of 16 of the longest blocks."""
SUMS = 16 * 16
"""Sums of eight terms each of 16 of the longest blocks."""
_EIGHT, _SIGN = np.uint64(8), np.uint32(0x80000000)


@device
def decode_affine(columns: Any, size: Any, scales: Any, zeros: Any, element: Any, out: Any) -> None:
    """Decode integers with zero points; scales, zeros: (16,) float32."""
    by, zero = load_lanes(scales, np.uint64(0)), load_lanes(zeros, np.uint64(0))
    inverse = floats_of(np.float32(1)) / by
    low, high, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        t = narrowed(x * inverse if element.scaling == RECIPROCAL else x / by, element.quotient)
        if element.zero_place == ZERO_INSIDE:
            t = narrowed(t + zero, element.quotient)
            q = ((smaller(larger(t, low), high) + magic) - magic) - zero
        else:
            q = (smaller(larger(t, low - zero), high - zero) + magic) - magic
        store_lanes(out, i * LANES, q * by)


@inlined
def _quotient(x: Any, by: Any, inverse: Any, element: Any) -> Any:
    return narrowed(x * inverse if element.scaling == RECIPROCAL else x / by, element.quotient)


@device
def _decode_integers(columns: Any, size: Any, by: Any, factors: Any, element: Any, out: Any) -> None:
    divisor, factor = load_lanes(by, np.uint64(0)), load_lanes(factors, np.uint64(0))
    inverse = floats_of(np.float32(1)) / divisor
    low, high, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(size):
        t = _quotient(load_lanes(columns, i * LANES), divisor, inverse, element)
        store_lanes(out, i * LANES, ((smaller(larger(t, low), high) + magic) - magic) * factor)


@device
def _decode_floats(columns: Any, size: Any, by: Any, factors: Any, element: Any, out: Any) -> None:
    divisor, factor = load_lanes(by, np.uint64(0)), load_lanes(factors, np.uint64(0))
    inverse = floats_of(np.float32(1)) / divisor
    most, exponent = floats_of(element.maximum), words_of(EXPONENT)
    low = words_of(shl32(element.emin, np.uint32(23)))
    lift = words_of(shl32(np.uint32(np.uint32(23) - element.mantissa), np.uint32(23)))
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        a = smaller(magnitudes(_quotient(x, divisor, inverse, element)), most)
        c = values_of(larger_bits(bits_of(a) & exponent, low) + lift)
        signed = bits_of(((a + c) - c) * factor) | (bits_of(x) & words_of(_SIGN))
        store_lanes(out, i * LANES, values_of(signed))


@device
def _decode_table(
    columns: Any, size: Any, by: Any, factors: Any, element: Any, values: Any, out: Any
) -> None:
    divisor, factor = load_lanes(by, np.uint64(0)), load_lanes(factors, np.uint64(0))
    inverse = floats_of(np.float32(1)) / divisor
    for i in range(size):
        t = _quotient(load_lanes(columns, i * LANES), divisor, inverse, element)
        value = floats_of(values[0])
        for k in range(THRESHOLDS):
            beyond = above(t, floats_of(element.thresholds[k]))
            value = where(beyond, floats_of(values[k + 1]), value)
        store_lanes(out, i * LANES, value * factor)


@device
def decode_lanes(
    columns: Any, size: Any, factors: Any, element: Any, unit: Any, values: Any, out: Any
) -> None:
    """Write what the codes of 16 blocks decode to.

    factors: float32, 16 that lie before room for as many. unit: step of codes. values: (16,) float32, of a
    codebook's codes in their order.
    """
    by = load_lanes(factors, np.uint64(0)) * floats_of(unit)
    divisors = factors[LANES:]
    # A scale of zero makes zeros of all numbers, also of zeros.
    store_lanes(factors, np.uint64(0), by)
    store_lanes(divisors, np.uint64(0), where(above(by, floats_of(np.float32(0))), by, floats_of(INFINITE)))
    if element.kind == INTEGER:
        _decode_integers(columns, size, divisors, factors, element, out)
    elif element.kind == FLOAT:
        _decode_floats(columns, size, divisors, factors, element, out)
    else:
        _decode_table(columns, size, divisors, factors, element, values, out)


@device
def load_weights(
    weights: Any, block: Any, blocks: Any, layout: Any, weighted: Any, pitch: Any, columns: Any
) -> None:
    """Load weights of up to 16 blocks as columns; ones fill up.

    weights: float64, by rows of ``pitch``; 0 where all rows have the same.
    """
    size, one = layout.block, doubles_of(np.float64(1))
    for i in range(size):
        store_lanes(columns, i * LANES, one)
    for b in range(blocks if weighted else np.uint64(0)):
        row, place = (block + b) // layout.row_blocks, (block + b) % layout.row_blocks
        at = row * pitch + place * size
        for i in range(size):
            columns[i * LANES + b] = weights[at + i]


@inlined
def _error(columns: Any, decoded: Any, weights: Any, i: Any) -> Any:
    at = i * LANES
    off = wide_floats(load_lanes(decoded, at)) - wide_floats(load_lanes(columns, at))
    return (off * off) * load_lanes(weights, at)


@device
def add_row(values: Any, count: Any) -> None:
    """Add ``count`` vectors of one block pairwise, into all first lanes."""
    add_neighbors(values, count * LANES)
    store_lanes(values, np.uint64(0), doubles_of(values[0]))


@device
def add_errors(columns: Any, decoded: Any, weights: Any, size: Any, row: Any, sums: Any) -> None:
    """Write squared errors of 16 blocks to ``sums``, float64.

    row: whether it is one block, of ``size`` vectors of neighbors; all lanes have its sum then.
    """
    if row:
        for i in range(size):
            store_lanes(sums, i * LANES, _error(columns, decoded, weights, i))
        add_row(sums, size)
        return
    m = size // _EIGHT
    two, four = m + m, m + m + m + m
    for j in range(m):
        k, n, p = j + m, j + two, j + two + m
        a = _error(columns, decoded, weights, j) + _error(columns, decoded, weights, j + four)
        b = _error(columns, decoded, weights, n) + _error(columns, decoded, weights, n + four)
        c = _error(columns, decoded, weights, k) + _error(columns, decoded, weights, k + four)
        d = _error(columns, decoded, weights, p) + _error(columns, decoded, weights, p + four)
        store_lanes(sums, j * LANES, (a + b) + (c + d))
    add_pairwise(sums, m)


@inlined
def _fit(columns: Any, decoded: Any, weights: Any, i: Any) -> Any:
    at = i * LANES
    value, weight = wide_floats(load_lanes(decoded, at)), load_lanes(weights, at)
    return (value * wide_floats(load_lanes(columns, at))) * weight, (value * value) * weight


@inlined
def _pair(columns: Any, decoded: Any, weights: Any, i: Any, j: Any) -> Any:
    a, b = _fit(columns, decoded, weights, i), _fit(columns, decoded, weights, j)
    return a[0] + b[0], a[1] + b[1]


@device
def add_fits(
    columns: Any, decoded: Any, weights: Any, size: Any, row: Any, products: Any, squares: Any
) -> None:
    """Write sums of value times number, and of squared values.

    row: as of :func:`add_errors`.
    """
    if row:
        for i in range(size):
            product, square = _fit(columns, decoded, weights, i)
            store_lanes(products, i * LANES, product)
            store_lanes(squares, i * LANES, square)
        add_row(products, size)
        add_row(squares, size)
        return
    m = size // _EIGHT
    two, four = m + m, m + m + m + m
    for j in range(m):
        k, n, p = j + m, j + two, j + two + m
        a = _pair(columns, decoded, weights, j, j + four)
        b = _pair(columns, decoded, weights, n, n + four)
        c = _pair(columns, decoded, weights, k, k + four)
        d = _pair(columns, decoded, weights, p, p + four)
        store_lanes(products, j * LANES, (a[0] + b[0]) + (c[0] + d[0]))
        store_lanes(squares, j * LANES, (a[1] + b[1]) + (c[1] + d[1]))
    add_pairwise(products, m)
    add_pairwise(squares, m)


@inlined
def _past(columns: Any, weights: Any, i: Any, end: Any) -> Any:
    x = wide_floats(magnitudes(load_lanes(columns, i * LANES)))
    past = larger(x - end, doubles_of(np.float64(0)))
    return (past * past) * load_lanes(weights, i * LANES)


@device
def add_clipped(columns: Any, weights: Any, size: Any, row: Any, ends: Any, sums: Any) -> None:
    """Write weighted squares past ``ends``, (16,) float64, to ``sums``.

    row: as of :func:`add_errors`.
    """
    end, m = load_lanes(ends, np.uint64(0)), size // _EIGHT
    if row:
        for i in range(size):
            store_lanes(sums, i * LANES, _past(columns, weights, i, end))
        add_row(sums, size)
        return
    two, four = m + m, m + m + m + m
    for j in range(m):
        k, n, p = j + m, j + two, j + two + m
        a = _past(columns, weights, j, end) + _past(columns, weights, j + four, end)
        b = _past(columns, weights, n, end) + _past(columns, weights, n + four, end)
        c = _past(columns, weights, k, end) + _past(columns, weights, k + four, end)
        d = _past(columns, weights, p, end) + _past(columns, weights, p + four, end)
        store_lanes(sums, j * LANES, (a + b) + (c + d))
    add_pairwise(sums, m)


@inlined
def _less(columns: Any, decoded: Any, weights: Any, i: Any) -> Any:
    at = i * LANES
    off = wide_floats(load_lanes(columns, at)) - wide_floats(load_lanes(decoded, at))
    return off * load_lanes(weights, at)


@device
def add_differences(columns: Any, decoded: Any, weights: Any, size: Any, row: Any, sums: Any) -> None:
    """Write sums of numbers minus decoded values to ``sums``.

    row: as of :func:`add_errors`.
    """
    if row:
        for i in range(size):
            store_lanes(sums, i * LANES, _less(columns, decoded, weights, i))
        add_row(sums, size)
        return
    m = size // _EIGHT
    two, four = m + m, m + m + m + m
    for j in range(m):
        k, n, p = j + m, j + two, j + two + m
        a = _less(columns, decoded, weights, j) + _less(columns, decoded, weights, j + four)
        b = _less(columns, decoded, weights, n) + _less(columns, decoded, weights, n + four)
        c = _less(columns, decoded, weights, k) + _less(columns, decoded, weights, k + four)
        d = _less(columns, decoded, weights, p) + _less(columns, decoded, weights, p + four)
        store_lanes(sums, j * LANES, (a + b) + (c + d))
    add_pairwise(sums, m)
