"""The scales that fit integer codes best, 16 blocks at once: :mod:`zeropoint.ops.integer_fits` again.

A lane is a block. Numbers in fixed point are split into two parts of half their places, so that sums of
their products with codes are whole numbers that float32 holds: exact, whether or not the machine fuses
products with sums. Errors are those of the reference, in float64 and its order.
"""

from typing import Any, NamedTuple

import numpy as np

from ..encode.block_scales import block_scales, rounded
from ..encode.elements import MAGIC, is_identity
from ..encode.rows import PACKED, encode_span, tile_span
from ..encode.steps import can_encode_steps
from ..machine.descriptor import BAD_VALUE, INTEGER, NO_ROUNDING, OK, RECIPROCAL, TO_BFLOAT16
from ..machine.intrinsics import bits32, device, float32_of, inlined, scratch, shl32
from ..machine.tile import NOT_FINITE, TILE, block_amax
from ..machine.vector import (
    above,
    above_doubles,
    bits_of,
    doubles_of,
    first_float16,
    float16_of_floats,
    floats_of,
    larger,
    load_lanes,
    narrow_doubles,
    smaller,
    store_lanes,
    values_of,
    wide_floats,
    words_of,
)
from .lanes import LANES, magnitudes, multiply_add, where, whole
from .windows import load_columns

LONGEST = 128 * 16
_UNITS, _LIFT = np.float32(2.0**64), np.float32(2.0**-64)


class Fitting(NamedTuple):
    """What is tried; see :class:`zeropoint.ops.integer_fits.Fits`.

    ratios: float32, an even number of them. reach: amax over a scale is below this. smallest, largest: of
    the format of scales. fits: how often codes are taken under the scale that fits the best ones.
    """

    places: Any
    first: Any
    ratios: Any
    least: Any
    reach: Any
    smallest: Any
    largest: Any
    fits: Any


@device
def _power_of(exponent: Any) -> Any:
    """Return ``2 ** exponent``, a normal number; exponent: int64."""
    return float32_of(shl32(np.uint32(exponent + np.int64(127)), np.uint32(23)))


@device
def _exponent_of(amax: Any) -> Any:
    """Return e with ``2 ** (e - 1) <= amax < 2 ** e``, int64; 0 of zero."""
    if amax == np.float32(0):
        return np.int64(0)
    small = amax < _LIFT
    field = bits32(np.float32(amax * _UNITS) if small else amax) >> np.uint32(23)
    return np.int64(field) - np.int64(126) - (np.int64(64) if small else np.int64(0))


@device
def _to_fixed_point(columns: Any, size: Any, places: Any, lanes: Any, parts: Any) -> None:
    """Write the numbers of 16 blocks in fixed point, and two parts of each, to ``parts``.

    lanes: (80,) float32 takes the largest magnitudes of blocks, those in fixed point, and two factors each by
    which numbers were multiplied.
    """
    wholes, high, low = parts
    amax = floats_of(np.float32(0))
    for i in range(size):
        amax = larger(magnitudes(load_lanes(columns, i * LANES)), amax)
    store_lanes(lanes, np.uint64(0), amax)
    for b in range(LANES):
        exponent = np.int64(places) - _exponent_of(lanes[b])
        half = exponent // np.int64(2)
        lanes[32 + b], lanes[48 + b] = _power_of(half), _power_of(exponent - half)
    first, second = load_lanes(lanes, LANES + LANES), load_lanes(lanes, LANES + LANES + LANES)
    split = np.int64(places) // np.int64(2)
    down, up = floats_of(_power_of(-split)), floats_of(_power_of(split))
    largest = floats_of(np.float32(0))
    for i in range(size):
        number = whole((load_lanes(columns, i * LANES) * first) * second)
        largest = larger(magnitudes(number), largest)
        upper = whole(number * down)
        store_lanes(wholes, i * LANES, number)
        store_lanes(high, i * LANES, upper)
        store_lanes(low, i * LANES, number - upper * up)
    store_lanes(lanes, LANES, largest)


@inlined
def _two_sums(parts: Any, size: Any, inverses: Any, element: Any) -> Any:
    """Return sums of products, upper and lower ones, and of squares of codes under two inverse scales."""
    wholes, high, low = parts
    first, second = inverses
    a = b = c = d = e = f = floats_of(np.float32(0))
    least, most, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(size):
        x, u, v = load_lanes(wholes, i * LANES), load_lanes(high, i * LANES), load_lanes(low, i * LANES)
        q = (smaller(larger(x * first, least), most) + magic) - magic
        r = (smaller(larger(x * second, least), most) + magic) - magic
        a, b, c = multiply_add(u, q, a), multiply_add(v, q, b), multiply_add(q, q, c)
        d, e, f = multiply_add(u, r, d), multiply_add(v, r, e), multiply_add(r, r, f)
    return (a, b, c), (d, e, f)


@inlined
def _better(best: Any, sums: Any, up: Any) -> Any:
    """Return the products and squares, as doubles, that gain more; up: units of the upper parts."""
    upper, lower, squares = sums
    product, square = wide_floats(upper) * up + wide_floats(lower), wide_floats(squares)
    own, other = product * product * best[1], best[0] * best[0] * square
    gains = above_doubles(product, doubles_of(np.float64(0)))
    less = above_doubles(other, own)
    gains = gains & (less ^ words_of(np.uint32(0xFFFFFFFF)))
    return where(gains, product, best[0]), where(gains, square, best[1])


@device
def _fit(parts: Any, size: Any, element: Any, fitting: Any, lanes: Any, found: Any) -> None:
    """Write to ``found``, (32,) float64, sums of products and of squares of the best codes of 16 blocks."""
    zero = floats_of(np.float32(0))
    largest = load_lanes(lanes, LANES)
    first = where(above(largest, zero), floats_of(fitting.first) / largest, zero)
    up = doubles_of(np.float64(_power_of(np.int64(fitting.places) // np.int64(2))))
    best = doubles_of(np.float64(0)), doubles_of(np.float64(1))
    for k in range(np.uint64(0), np.uint64(fitting.ratios.size), np.uint64(2)):
        inverses = (
            first * floats_of(fitting.ratios[k]),
            first * floats_of(fitting.ratios[k + np.uint64(1)]),
        )
        one, two = _two_sums(parts, size, inverses, element)
        best = _better(_better(best, one, up), two, up)
    for _ in range(fitting.fits):
        product, square = narrow_doubles(best[0]), narrow_doubles(best[1])
        inverse = where(above(product, zero), square / product, zero)
        one, _two = _two_sums(parts, size, (inverse, inverse), element)
        best = _better(best, one, up)
    store_lanes(found, np.uint64(0), best[0])
    store_lanes(found, LANES, best[1])


@inlined
def _quotients(x: Any, by: Any, inverse: Any, element: Any) -> Any:
    """Return numbers in units of scales, as the element's encoding rounds them."""
    t = x * inverse if element.scaling == RECIPROCAL else x / by
    if element.quotient == TO_BFLOAT16:
        bits = bits_of(t)
        odd = (bits >> words_of(np.uint32(16))) & words_of(np.uint32(1))
        return values_of((bits + words_of(np.uint32(0x7FFF)) + odd) & words_of(np.uint32(0xFFFF0000)))
    if element.quotient != NO_ROUNDING:
        return first_float16(float16_of_floats(t, t))
    return t


@device
def _squared_errors(columns: Any, size: Any, scales: Any, element: Any, squares: Any) -> None:
    """Write the squared errors of 16 blocks to the first lanes of ``squares``, float64, added pairwise."""
    by = load_lanes(scales, np.uint64(0))
    inverse = floats_of(np.float32(1)) / by
    least, most, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        t = _quotients(x, by, inverse, element)
        q = (smaller(larger(t, least), most) + magic) - magic
        off = wide_floats(q * by) - wide_floats(x)
        store_lanes(squares, i * LANES, off * off)
    count = size
    while count > np.uint64(1):
        half = count // np.uint64(2)
        for i in range(half):
            pair = load_lanes(squares, i * LANES) + load_lanes(squares, (half + i) * LANES)
            store_lanes(squares, i * LANES, pair)
        if count % np.uint64(2) > np.uint64(0):
            store_lanes(squares, half * LANES, load_lanes(squares, (count - np.uint64(1)) * LANES))
            half += np.uint64(1)
        count = half


@device
def _stored(found: Any, lanes: Any, b: Any, fitting: Any, to: Any) -> Any:
    """Return the scale of the best codes of block ``b`` as it is stored, or 0 where there is none."""
    product, square, amax = found[b], found[LANES + b], lanes[b]
    if not product > np.float64(0):
        return np.float32(0)
    units = np.float64(lanes[32 + b]) * np.float64(lanes[48 + b])
    scale = max((product / square) / units, np.float64(amax) * fitting.least)
    s = rounded(np.float32(min(max(scale, fitting.smallest), fitting.largest)), to)
    return s if np.float32(s * fitting.reach) > amax else np.float32(0)


@device
def _search_blocks(
    x: Any, at: Any, blocks: Any, layout: Any, element: Any, to: Any, fitting: Any, room: Any, scales: Any,
    factors: Any,
) -> None:  # fmt: skip
    """Replace the scales of up to 16 blocks of ``x[at:]``, all finite, where others have less error.

    scales, factors: of the blocks, as their starts gave them. to: what scales are rounded to.
    """
    columns, parts, lanes, found, squares = room
    size = layout.block
    # Rows of blocks are read through the room of a part.
    load_columns(x, at, blocks, size, layout.kind, True, parts[0], columns)
    _to_fixed_point(columns, size, fitting.places, lanes, parts)
    _fit(parts, size, element, fitting, lanes, found)
    for b in range(LANES):
        lanes[64 + b] = scales[b] if b < blocks else np.float32(1)
    _squared_errors(columns, size, lanes[64:80], element, squares)
    for b in range(LANES):
        found[32 + b] = squares[b]
        s = _stored(found, lanes, b, fitting, to)
        lanes[64 + b] = s if s > np.float32(0) else lanes[64 + b]
    _squared_errors(columns, size, lanes[64:80], element, squares)
    for b in range(blocks):
        if squares[b] < found[32 + b]:
            scales[b] = factors[b] = lanes[64 + b]


@device
def fitted_rows(
    x: Any, layout: Any, element: Any, rule: Any, fitting: Any, order: Any, scales: Any, out: Any, first: Any,
    last: Any,
) -> Any:  # fmt: skip
    """Quantize rows ``first`` to ``last`` of ``x``, whole blocks, under the scales that fit codes best.

    Arguments and results are those of :func:`..encode.rows.quantize_rows`; fitting: :class:`Fitting`.
    """
    floats = scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32)
    room = floats, scratch(TILE, np.uint8), scratch(PACKED, np.uint8)
    parts = scratch(LONGEST, np.float32), scratch(LONGEST, np.float32), scratch(LONGEST, np.float32)
    search_room = (
        scratch(LONGEST, np.float32), parts, scratch(80, np.float32), scratch(48, np.float64),
        scratch(LONGEST, np.float64),
    )  # fmt: skip
    amax, none, nothing = scratch(TILE, np.uint32), scratch(1, np.float32), scratch(1, np.uint8)
    per_block, worst, state = scratch(TILE, np.float32), np.uint32(0), OK
    known, block = can_encode_steps(element, is_identity(order)), layout.block
    at, end = first * layout.cols, last * layout.cols
    block_at, byte_at = first * layout.row_blocks, first * layout.row_bytes
    while at < end:
        span = tile_span(block, end - at)
        blocks = span // block
        block_amax(x, at, span, block, layout.kind, amax)
        for b in range(blocks):
            worst = max(worst, amax[b])
        state = max(
            state,
            block_scales(
                amax, none, none, blocks, rule, False, block_at, scales, nothing, none, per_block, none
            ),
        )
        if worst < NOT_FINITE and state == OK and element.kind == INTEGER:
            for b in range(np.uint64(0), blocks, LANES):
                _search_blocks(
                    x, at + b * block, min(LANES, blocks - b), layout, element, rule.stored, fitting,
                    search_room, scales[block_at + b : block_at + blocks], per_block[b:blocks],
                )  # fmt: skip
        byte_at = encode_span(x, at, span, layout, element, order, known, per_block, none, room, out, byte_at)
        at += span
        block_at += blocks
    return BAD_VALUE if worst >= NOT_FINITE else state
