"""The scales that fit integer codes best, 16 blocks at once: :mod:`zeropoint.ops.integer_fits` again.

A lane is a block. Numbers in fixed point are split into two parts of half their places, so that sums of
their products with codes are whole numbers that float32 holds: exact, whether or not the machine fuses
products with sums. Errors are those of the reference, in float64 and its order.

**What is left out.** For codes q of a block x, and any part A of its numbers,

    min over t of ||x - t q||^2  >=  R_A  =  min over t of sum over A (x_i - t q_i)^2,

so that q gains at most ``||x||^2 - R_A``, and is left out where other codes that are tried gain more. Such a
part is the first half of the numbers; or those that take the last code of their sign, which they do under all
smaller scales, so that none of these is tried. Sums of up to 128 terms of one sign are within ``2 ** -16`` of
themselves in float32, R_A within ``2 ** -14 ||x||^2``, and what it is compared with within
``2 ** -14 ||x||^2``; twice as much as both is asked for.

Which of two scales has less error is decided in float32 where that is plain: codes of products with
reciprocals differ only where quotients of at most Q lie within ``Q 2 ** -22`` of the middle between codes, by
which an error of up to 128 numbers changes by at most ``2 ** -14 Q`` squared scales; sums of errors are
within ``2 ** -16`` of themselves.
"""

from typing import Any, NamedTuple

import numpy as np

from ..encode.block_scales import rounded
from ..encode.elements import INFINITE, MAGIC, is_identity
from ..encode.rows import PACKED, encode_span, tile_span
from ..encode.steps import can_encode_steps
from ..machine.descriptor import BAD_VALUE, INTEGER, NO_ROUNDING, OK, RECIPROCAL
from ..machine.intrinsics import bits32, device, float32_of, inlined, scratch, shl32
from ..machine.tile import NOT_FINITE, TILE
from ..machine.vector import (
    above,
    above_doubles,
    any_lane,
    doubles_of,
    floats_of,
    larger,
    load_lanes,
    narrow_doubles,
    smaller,
    store_lanes,
    wide_floats,
    words_of,
)
from .lanes import LANES, add_pairwise, magnitudes, multiply_add, narrowed, where, whole
from .windows import ONES, load_columns, start_scales

LONGEST = 128 * 16
_APART, _NEAR = np.float32(2.0**-12), np.float32(1 + 2.0**-13)
_SMALL, _LARGE = np.float32(2.0**-50), np.float32(2.0**50)
"""Between these squares of scales are far from the ends of float32."""
_EVERY, _FEW, _TWO = np.uint64(4), np.float32(31), np.uint64(2)
_PROBED, _CLIPPED = np.float32(1.08), np.float32(1.7)
"""Of the largest code, the quotient of the largest number that is tried first, and from which on, after every
four scales, numbers are looked for that all smaller ones clip."""
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


@inlined
def fitting_of(ratios: Any, numbers: Any, counts: Any) -> Any:
    """Return what is tried from arrays: float32, (5,) float64 and uint64."""
    return Fitting(
        counts[0], np.float32(numbers[0]), ratios, numbers[1], np.float32(numbers[2]), numbers[3], numbers[4],
        counts[1],
    )  # fmt: skip


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

    lanes: float32, takes the largest magnitudes of blocks, those in fixed point, and two factors each by
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
def _add_sums(parts: Any, begin: Any, end: Any, inverses: Any, element: Any, sums: Any) -> Any:
    """Add to sums of products, upper and lower ones, and of squares of codes under two inverse scales."""
    wholes, high, low = parts
    first, second = inverses
    (a, b, c), (d, e, f) = sums
    least, most, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(begin, end):
        x, u, v = load_lanes(wholes, i * LANES), load_lanes(high, i * LANES), load_lanes(low, i * LANES)
        q = (smaller(larger(x * first, least), most) + magic) - magic
        r = (smaller(larger(x * second, least), most) + magic) - magic
        a, b, c = multiply_add(u, q, a), multiply_add(v, q, b), multiply_add(q, q, c)
        d, e, f = multiply_add(u, r, d), multiply_add(v, r, e), multiply_add(r, r, f)
    return (a, b, c), (d, e, f)


@inlined
def _add_free_sums(parts: Any, begin: Any, end: Any, inverses: Any, sums: Any) -> Any:
    """Do what :func:`_add_sums` does, under scales that clip no number."""
    wholes, high, low = parts
    first, second = inverses
    (a, b, c), (d, e, f) = sums
    magic = floats_of(MAGIC)
    for i in range(begin, end):
        x, u, v = load_lanes(wholes, i * LANES), load_lanes(high, i * LANES), load_lanes(low, i * LANES)
        q, r = (x * first + magic) - magic, (x * second + magic) - magic
        a, b, c = multiply_add(u, q, a), multiply_add(v, q, b), multiply_add(q, q, c)
        d, e, f = multiply_add(u, r, d), multiply_add(v, r, e), multiply_add(r, r, f)
    return (a, b, c), (d, e, f)


@inlined
def _no_sums() -> Any:
    zero = floats_of(np.float32(0))
    return (zero, zero, zero), (zero, zero, zero)


@device
def _squares_of(wholes: Any, size: Any, left: Any) -> None:
    """Write sums of squares of the first half of the numbers, and of all."""
    total = floats_of(np.float32(0))
    for i in range(size):
        if i == size // _TWO:
            store_lanes(left, np.uint64(0), total)
        x = load_lanes(wholes, i * LANES)
        total = multiply_add(x, x, total)
    store_lanes(left, LANES, total)


@inlined
def _residual(squares: Any, product: Any, square: Any) -> Any:
    """Return what the scale that fits codes leaves of numbers, from their sums, or 0 without codes."""
    zero = floats_of(np.float32(0))
    return where(above(square, zero), squares - product * (product / square), zero)


@inlined
def _most_left(best: Any, total: Any) -> Any:
    """Return more than what the best codes leave of the numbers; nothing is asked of blocks of zeros."""
    product, square = narrow_doubles(best[0]), narrow_doubles(best[1])
    left = (total - product * (product / square)) + total * floats_of(_APART)
    return where(above(total, floats_of(np.float32(0))), left, floats_of(np.float32(-1)))


@inlined
def _all_above(residual: Any, left: Any) -> Any:
    return not any_lane(above(residual, left) ^ words_of(ONES))


@device
def _clips_too_much(wholes: Any, size: Any, inverse: Any, element: Any, left: Any) -> Any:
    """Return whether numbers that smaller scales clip, too, leave more than ``left`` of all blocks."""
    zero, half = floats_of(np.float32(0)), np.float32(0.5)
    high, low = floats_of(element.high), floats_of(element.low)
    above_high, below_low = floats_of(element.high - half), floats_of(element.low + half)
    squares = product = square = zero
    for i in range(size):
        x = load_lanes(wholes, i * LANES)
        t = x * inverse
        over, under = above(t, above_high), above(below_low, t)
        code, own = where(over, high, where(under, low, zero)), where(over | under, x, zero)
        squares, product = multiply_add(own, own, squares), multiply_add(own, code, product)
        square = multiply_add(code, code, square)
    return _all_above(_residual(squares, product, square), left)


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
def _probe(parts: Any, size: Any, element: Any, fitting: Any, first: Any, up: Any, left: Any) -> None:
    """Write more than what the codes under a likely scale leave of the numbers, after sums of squares."""
    _squares_of(parts[0], size, left)
    ratio, k = np.float32(_PROBED * element.high / fitting.first), np.uint64(0)
    while k < np.uint64(fitting.ratios.size) - np.uint64(1) and fitting.ratios[k] < ratio:
        k += np.uint64(1)
    inverse = first * floats_of(fitting.ratios[k])
    one, _two = _add_sums(parts, np.uint64(0), size, (inverse, inverse), element, _no_sums())
    best = _better((doubles_of(np.float64(0)), doubles_of(np.float64(1))), one, up)
    store_lanes(left, LANES + LANES, _most_left(best, load_lanes(left, LANES)))


@inlined
def _leaves_too_much(sums: Any, squares: Any, up: Any, left: Any) -> Any:
    """Return whether the codes of a half of the numbers leave more than ``left`` of all blocks."""
    upper, lower, square = sums
    return _all_above(_residual(squares, upper * up + lower, square), left)


@device
def _fit(parts: Any, size: Any, element: Any, fitting: Any, lanes: Any, found: Any) -> None:
    """Write to ``found``, (32,) float64, sums of products and of squares of the best codes of 16 blocks."""
    zero, nothing, left = floats_of(np.float32(0)), np.uint64(0), scratch(48, np.float32)
    largest = load_lanes(lanes, LANES)
    first = where(above(largest, zero), floats_of(fitting.first) / largest, zero)
    power = _power_of(np.int64(fitting.places) // np.int64(2))
    up, best = doubles_of(np.float64(power)), (doubles_of(np.float64(0)), doubles_of(np.float64(1)))
    _probe(parts, size, element, fitting, first, up, left)
    squares, total, most = load_lanes(left, nothing), load_lanes(left, LANES), load_lanes(left, LANES + LANES)
    free = np.float32(element.high + np.float32(0.49)) / fitting.first
    clipped = _CLIPPED * element.high / fitting.first if element.high <= _FEW else INFINITE
    for k in range(nothing, np.uint64(fitting.ratios.size), _TWO):
        ratios = fitting.ratios[k], fitting.ratios[k + np.uint64(1)]
        inverses, sums = (first * floats_of(ratios[0]), first * floats_of(ratios[1])), _no_sums()
        if ratios[1] < free:
            sums = _add_free_sums(parts, nothing, size // _TWO, inverses, sums)
        else:
            sums = _add_sums(parts, nothing, size // _TWO, inverses, element, sums)
        unit = floats_of(power)
        worse = _leaves_too_much(sums[0], squares, unit, most)
        if not (worse and _leaves_too_much(sums[1], squares, unit, most)):
            if ratios[1] < free:
                one, two = _add_free_sums(parts, size // _TWO, size, inverses, sums)
            else:
                one, two = _add_sums(parts, size // _TWO, size, inverses, element, sums)
            best = _better(_better(best, one, up), two, up)
        if ratios[1] > clipped and k % _EVERY == nothing:
            own = _most_left(best, total)
            if _clips_too_much(parts[0], size, inverses[1], element, own):
                break
    for _ in range(fitting.fits):
        product, square = narrow_doubles(best[0]), narrow_doubles(best[1])
        inverse = where(above(product, zero), square / product, zero)
        one, _two = _add_sums(parts, nothing, size, (inverse, inverse), element, _no_sums())
        best = _better(best, one, up)
    store_lanes(found, nothing, best[0])
    store_lanes(found, LANES, best[1])


@device
def _squared_errors(columns: Any, size: Any, scales: Any, element: Any, squares: Any) -> None:
    """Write the squared errors of 16 blocks to the first lanes of ``squares``, float64, added pairwise."""
    by = load_lanes(scales, np.uint64(0))
    inverse = floats_of(np.float32(1)) / by
    least, most, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        t = narrowed(x * inverse if element.scaling == RECIPROCAL else x / by, element.quotient)
        q = (smaller(larger(t, least), most) + magic) - magic
        off = wide_floats(q * by) - wide_floats(x)
        store_lanes(squares, i * LANES, off * off)
    add_pairwise(squares, size)


@inlined
def _near_errors(columns: Any, size: Any, by: Any, more: Any, element: Any) -> Any:
    """Return about the squared errors of 16 blocks under two scales."""
    inverse, second = floats_of(np.float32(1)) / by, floats_of(np.float32(1)) / more
    least, most, magic = floats_of(element.low), floats_of(element.high), floats_of(MAGIC)
    total = other = floats_of(np.float32(0))
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        q = (smaller(larger(x * inverse, least), most) + magic) - magic
        r = (smaller(larger(x * second, least), most) + magic) - magic
        u, v = q * by - x, r * more - x
        total, other = multiply_add(u, u, total), multiply_add(v, v, other)
    return total, other


@device
def _decide_plainly(columns: Any, size: Any, starts: Any, tried: Any, element: Any, better: Any) -> Any:
    """Write what is above zero for blocks for which scales ``tried`` are plainly better than ``starts``.

    Returns whether all others are plainly not.
    """
    by, more, zero = (
        load_lanes(starts, np.uint64(0)),
        load_lanes(tried, np.uint64(0)),
        floats_of(np.float32(0)),
    )
    error, found = _near_errors(columns, size, by, more, element)
    slack = (by * by + more * more) * floats_of(np.float32((element.high + np.float32(1)) * _APART))
    near = floats_of(_NEAR)
    less, worse = above(error, found * near + slack), above(found, error * near + slack)
    store_lanes(better, np.uint64(0), where(less, floats_of(np.float32(1)), zero))
    same = (above(by, more) | above(more, by)) ^ words_of(ONES)
    tame = above(smaller(by, more), floats_of(_SMALL)) & above(floats_of(_LARGE), larger(by, more))
    decided = same | (tame & (less | worse))
    return element.quotient == NO_ROUNDING and not any_lane(decided ^ words_of(ONES))


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
    size, starts, tried, better = layout.block, lanes[64:80], lanes[80:96], lanes[96:112]
    # Rows of blocks are read through the room of a part.
    load_columns(x, at, blocks, size, layout.kind, True, parts[0], columns)
    _to_fixed_point(columns, size, fitting.places, lanes, parts)
    _fit(parts, size, element, fitting, lanes, found)
    for b in range(LANES):
        starts[b] = scales[b] if b < blocks else np.float32(1)
        s = _stored(found, lanes, b, fitting, to)
        tried[b] = s if s > np.float32(0) and b < blocks else starts[b]
    if not _decide_plainly(columns, size, starts, tried, element, better):
        _squared_errors(columns, size, starts, element, squares)
        for b in range(LANES):
            found[32 + b] = squares[b]
        _squared_errors(columns, size, tried, element, squares)
        for b in range(LANES):
            better[b] = np.float32(1) if squares[b] < found[32 + b] else np.float32(0)
    for b in range(blocks):
        if better[b] > np.float32(0):
            scales[b] = factors[b] = tried[b]


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
        scratch(LONGEST, np.float32), parts, scratch(112, np.float32), scratch(48, np.float64),
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
        magnitude, found = start_scales(
            x, at, span, layout, element, rule, block_at, scales, nothing, amax, per_block
        )
        worst, state = max(worst, magnitude), max(state, found)
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
