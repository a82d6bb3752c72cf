"""Best scales of integer codes, 16 blocks at once: :mod:`zeropoint.ops.integer_fits`, compiled.

A lane is a block. Numbers in fixed point are split into two parts of half their places, so that sums of
their products with codes are whole numbers that float32 holds: exact, whether or not the machine fuses
products with sums. Errors equal the reference's, in float64 and its order.

**What is left out.** Codes grow as scales shrink: those of magnitudes under a scale between ``s > s'`` lie
between those under both, clipped or not. A code grows by one, from ``m - 1/2`` to ``m + 1/2``, where its
number is m scales. With ``P = x . q`` and ``Q = ||q||^2``, that adds m scales to P and 2 m to Q, so that the
sums of all codes between have

    P_s + s' / 2 (Q - Q_s)  <=  P  <=  P_s + s / 2 (Q - Q_s),
    P_s' - s / 2 (Q_s' - Q)  <=  P  <=  P_s' - s' / 2 (Q_s' - Q).

The two upper bounds are lines, which meet in a point V. Gains ``P^2 / Q`` are convex in Q along a line, and
so at most those under s or s', or that of V: where V gains less than codes that are tried, all codes between
gain less than the larger of both ends, by a part of at least ``2 ** -17 / Q``, or are the codes of an end.
So the first scales that are tried lie apart, and pairs of neighbors are split, half and half, where V gains
as much as the best codes of the block, which each block does for itself.

Products of numbers and reciprocals are rounded, which moves m by ``2 ** -23`` of itself: lines are as much
steeper and flatter as ``2 ** -20``. What V is above the flatter line through an end is exact but for two
roundings, and V follows from it in float32, within ``2 ** -20`` of its gain.

Gain that keeps it, over :mod:`.long_fits` and a second pass, with the same bytes: 5 times the speed on int4
and int2, 4 to 6 on int8; of scales that lie apart: 1.8 times the speed on int4 in groups of 128, 3.2 on int2;
of sums without clipping: 1.15 on int8 (256 x 2048 float32, ``scale=search``, one AVX-512 thread).
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Float32, Float64, UInt64
from ..encode.block_scales import ScaleArrays, rounded
from ..machine.descriptor import RECIPROCAL, unpack
from ..machine.intrinsics import device, inlined, scratch
from ..machine.named_records import unpacker
from ..machine.reductions import any_lane, multiply_add, whole
from ..machine.team import bundled
from ..machine.vector import (
    above,
    above_doubles,
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
from .lane_errors import LONGEST
from .lanes import LANES, add_pairwise, code_of, exponent_of, magnitudes, narrowed, power_of, where
from .windows import ONES, load_columns, over_spans

MOST_RATIOS = 228
"""Of blocks of up to 128 numbers, of two bits."""
_TRIED, _PICKED = MOST_RATIOS * 48, MOST_RATIOS * 16
_NEARLY = np.float32(1 - 2.0**-16)
"""Of the largest gain, what others have at least that are compared with it as they are."""
_STEEPER, _FLATTER = np.float32(1 + 2.0**-20), np.float32(1 - 2.0**-20)
_TWO, _ROW = np.uint64(2), LANES + LANES + LANES


class Fitting(NamedTuple):
    """What is tried; see :class:`zeropoint.ops.integer_fits.Fits`.

    ratios: float32, an even number of them. reach: amax over a scale is below this. smallest, largest: of
    the format of scales. fits: how often codes are taken under the scale that fits the best ones. apart: how
    many steps lie between the scales that are tried first, a power of two. slots: of long blocks.
    """

    places: UInt64
    first: Float32
    least: Float64
    reach: Float32
    smallest: Float64
    largest: Float64
    fits: UInt64
    apart: UInt64
    ratios: Any
    slots: UInt64 = 0


unpack_fitting = unpacker(Fitting)


@device
def _to_fixed_point(columns: Any, size: Any, places: Any, lanes: Any, parts: Any) -> None:
    """Write fixed-point numbers of 16 blocks and their halves to ``parts``.

    lanes: float32, takes the largest magnitudes of blocks, those in fixed point, and two factors each by
    which numbers were multiplied.
    """
    wholes, high, low = parts
    amax = floats_of(np.float32(0))
    for i in range(size):
        amax = larger(magnitudes(load_lanes(columns, i * LANES)), amax)
    store_lanes(lanes, np.uint64(0), amax)
    for b in range(LANES):
        exponent = np.int64(places) - exponent_of(np.float64(lanes[b]))
        half = exponent // np.int64(2)
        lanes[32 + b], lanes[48 + b] = np.float32(power_of(half)), np.float32(power_of(exponent - half))
    first, second = load_lanes(lanes, LANES + LANES), load_lanes(lanes, LANES + LANES + LANES)
    split = np.int64(places) // np.int64(2)
    down, up = floats_of(np.float32(power_of(-split))), floats_of(np.float32(power_of(split)))
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
def _add_sums(parts: Any, size: Any, inverses: Any, element: Any, free: Any) -> Any:
    """Add upper and lower products and squared codes, under two inverse scales.

    free: whether neither scale clips a number.
    """
    wholes, high, low = parts
    first, second = inverses
    zero, least, most = floats_of(np.float32(0)), floats_of(element.low), floats_of(element.high)
    (a, b, c), (d, e, f) = (zero, zero, zero), (zero, zero, zero)
    if free:
        for i in range(size):
            x, u, v = load_lanes(wholes, i * LANES), load_lanes(high, i * LANES), load_lanes(low, i * LANES)
            q, r = whole(x * first), whole(x * second)
            a, b, c = multiply_add(u, q, a), multiply_add(v, q, b), multiply_add(q, q, c)
            d, e, f = multiply_add(u, r, d), multiply_add(v, r, e), multiply_add(r, r, f)
        return (a, b, c), (d, e, f)
    for i in range(size):
        x, u, v = load_lanes(wholes, i * LANES), load_lanes(high, i * LANES), load_lanes(low, i * LANES)
        q = whole(smaller(larger(x * first, least), most))
        r = whole(smaller(larger(x * second, least), most))
        a, b, c = multiply_add(u, q, a), multiply_add(v, q, b), multiply_add(q, q, c)
        d, e, f = multiply_add(u, r, d), multiply_add(v, r, e), multiply_add(r, r, f)
    return (a, b, c), (d, e, f)


@inlined
def _better(best: Any, sums: Any, up: Any, asked: Any) -> Any:
    """Keep products and squares that gain more; up: upper parts' unit.

    asked: words, zero of lanes that keep theirs.
    """
    upper, lower, squares = sums
    product, square = wide_floats(upper) * up + wide_floats(lower), wide_floats(squares)
    own, other = product * product * best[1], best[0] * best[0] * square
    gains = asked & above_doubles(product, doubles_of(np.float64(0)))
    less = above_doubles(other, own)
    gains = gains & (less ^ words_of(ONES))
    return where(gains, product, best[0]), where(gains, square, best[1])


@inlined
def _sums_at(tried: Any, k: Any) -> Any:
    at = k * _ROW
    return load_lanes(tried, at), load_lanes(tried, at + LANES), load_lanes(tried, at + LANES + LANES)


@inlined
def _store_sums(tried: Any, k: Any, sums: Any) -> None:
    at = k * _ROW
    store_lanes(tried, at, sums[0])
    store_lanes(tried, at + LANES, sums[1])
    store_lanes(tried, at + LANES + LANES, sums[2])


@inlined
def _gain(sums: Any, unit: Any) -> Any:
    """Return about what codes gain, NaN of codes that are all zeros."""
    product = sums[0] * unit + sums[1]
    return product * (product / sums[2])


@inlined
def _try_apart(parts: Any, size: Any, element: Any, fitting: Any, first: Any, unit: Any, tried: Any) -> Any:
    """Take codes under every ``fitting.apart``-th scale: approximate largest gains."""
    last, apart = np.uint64(fitting.ratios.size) - np.uint64(1), fitting.apart
    free, best = np.float32(element.high + np.float32(0.49)) / fitting.first, floats_of(np.float32(0))
    for k in range(np.uint64(0), last + apart, apart + apart):
        one, two = min(k, last), min(k + apart, last)
        inverses = first * floats_of(fitting.ratios[one]), first * floats_of(fitting.ratios[two])
        sums, more = _add_sums(parts, size, inverses, element, fitting.ratios[two] < free)
        _store_sums(tried, one, sums)
        _store_sums(tried, two, more)
        best = larger(_gain(more, unit), larger(_gain(sums, unit), best))
    return best


@inlined
def _may_gain(one: Any, two: Any, slopes: Any, units: Any, most: Any) -> Any:
    """Mask of blocks where scales between two may gain as much.

    units: of the upper parts, floats and doubles.
    """
    zero, (steeper, flatter), (unit, up) = floats_of(np.float32(0)), slopes, units
    square = two[2] - one[2]
    rise = wide_floats(two[0] - one[0]) * up + wide_floats(two[1] - one[1])
    rest = narrow_doubles(rise - wide_floats(flatter) * wide_floats(square))
    more = smaller(larger(rest / (steeper - flatter), zero), square)
    top = (one[0] * unit + one[1]) + steeper * more
    return above(top * top, (most * floats_of(_NEARLY)) * (one[2] + more))


@device
def _split(
    tried: Any, step: Any, fitting: Any, largest: Any, units: Any, most: Any, asked: Any, picks: Any
) -> Any:
    """List each block's midpoints that may have better scales around them.

    asked, picks: uint32, (16,) room, and a row of 16 numbers of scales after the other. Returns how many rows
    these are; blocks with fewer scales are given the first one again.
    """
    last, counts, rows = np.uint64(fitting.ratios.size) - np.uint64(1), scratch(16, np.uint32), np.uint64(0)
    store_lanes(counts, np.uint64(0), words_of(np.uint32(0)))
    half, none = largest * floats_of(np.float32(np.float32(0.5) / fitting.first)), floats_of(np.float32(0))
    for a in range(np.uint64(0), last - step // _TWO, step):
        end = min(a + step, last)
        one, two = _sums_at(tried, a), _sums_at(tried, end)
        known = (above(none, one[2]) | above(none, two[2])) ^ words_of(ONES)
        if any_lane(known):
            steeper = half * floats_of(_STEEPER / fitting.ratios[a])
            slopes = steeper, half * floats_of(_FLATTER / fitting.ratios[end])
            store_lanes(asked, np.uint64(0), known & _may_gain(one, two, slopes, units, most))
            for b in range(LANES):
                picks[np.uint64(counts[b]) * LANES + b] = np.uint32(a + step // _TWO)
                counts[b] += asked[b] & np.uint32(1)
    for b in range(LANES):
        rows = max(rows, np.uint64(counts[b]))
    for b in range(LANES):
        for row in range(np.uint64(counts[b]), rows + rows % _TWO):
            picks[row * LANES + b] = np.uint32(0)
    return rows


@device
def _try_picked(
    parts: Any, size: Any, element: Any, fitting: Any, first: Any, picks: Any, lanes: Any, tried: Any
) -> Any:
    """Take codes of two rows of ``picks``; return the sums.

    lanes: room for (96,) float32.
    """
    for b in range(LANES + LANES):
        lanes[b] = fitting.ratios[picks[b]]
    inverses = first * load_lanes(lanes, np.uint64(0)), first * load_lanes(lanes, LANES)
    one, two = _add_sums(parts, size, inverses, element, False)
    _store_sums(lanes, np.uint64(0), one)
    _store_sums(lanes, np.uint64(1), two)
    for b in range(LANES):
        to, more = np.uint64(picks[b]) * _ROW + b, np.uint64(picks[LANES + b]) * _ROW + b
        for n in range(np.uint64(0), _ROW, LANES):
            tried[to + n], tried[more + n] = lanes[n + b], lanes[_ROW + n + b]
    return one, two


@device
def _best_tried(tried: Any, count: Any, unit: Any, up: Any, most: Any) -> Any:
    """Pick the best codes' sums, later of equals; most: approximate gain."""
    best, limit = (doubles_of(np.float64(0)), doubles_of(np.float64(1))), most * floats_of(_NEARLY)
    for k in range(count):
        sums = _sums_at(tried, k)
        near = above(sums[2], floats_of(np.float32(0))) & above(_gain(sums, unit), limit)
        if any_lane(near):
            best = _better(best, sums, up, near)
    return best


@device
def _fit(parts: Any, size: Any, element: Any, fitting: Any, lanes: Any, found: Any, tries: Any) -> None:
    """Write the best codes' product and square sums to ``found``."""
    tried, picks, room, asked = tries
    zero, none, count = floats_of(np.float32(0)), np.uint64(0), np.uint64(fitting.ratios.size)
    largest = load_lanes(lanes, LANES)
    first = where(above(largest, zero), floats_of(fitting.first) / largest, zero)
    power = np.float32(power_of(np.int64(fitting.places) // np.int64(2)))
    unit, up = floats_of(power), doubles_of(np.float64(power))
    for k in range(count):
        store_lanes(tried, k * _ROW + LANES + LANES, floats_of(np.float32(-1)))
    most, step = _try_apart(parts, size, element, fitting, first, unit, tried), fitting.apart
    while step > np.uint64(1):
        rows = _split(tried, step, fitting, largest, (unit, up), most, asked, picks)
        for row in range(none, rows, _TWO):
            one, two = _try_picked(parts, size, element, fitting, first, picks[row * LANES :], room, tried)
            most = larger(_gain(one, unit), larger(_gain(two, unit), most))
        step //= _TWO
    best = _best_tried(tried, count, unit, up, most)
    for _ in range(fitting.fits):
        product, square = narrow_doubles(best[0]), narrow_doubles(best[1])
        inverse = where(above(product, zero), square / product, zero)
        one, _two = _add_sums(parts, size, (inverse, inverse), element, False)
        best = _better(best, one, up, words_of(ONES))
    store_lanes(found, none, best[0])
    store_lanes(found, LANES, best[1])


@device
def _squared_errors(columns: Any, size: Any, scales: Any, element: Any, squares: Any) -> None:
    """Write squared errors of 16 blocks to ``squares``, float64, added pairwise."""
    by = load_lanes(scales, np.uint64(0))
    inverse = floats_of(np.float32(1)) / by
    for i in range(size):
        x = load_lanes(columns, i * LANES)
        t = narrowed(x * inverse if element.scaling == RECIPROCAL else x / by, element.quotient)
        off = wide_floats(code_of(t, element) * by) - wide_floats(x)
        store_lanes(squares, i * LANES, off * off)
    add_pairwise(squares, size)


@device
def _stored(found: Any, lanes: Any, b: Any, fitting: Any, to: Any) -> Any:
    """Round the scale of the best codes of ``b``; 0 if none."""
    product, square, amax = found[b], found[LANES + b], lanes[b]
    if not product > np.float64(0):
        return np.float32(0)
    units = np.float64(lanes[32 + b]) * np.float64(lanes[48 + b])
    scale = max((product / square) / units, np.float64(amax) * fitting.least)
    s = rounded(np.float32(min(max(scale, fitting.smallest), fitting.largest)), to)
    return s if np.float32(s * fitting.reach) > amax else np.float32(0)


@device
def _search_blocks(
    x: Any, at: Any, blocks: Any, desc: Any, fitting: Any, room: Any, scales: Any, factors: Any
) -> None:
    """Improve scales of up to 16 finite blocks of ``x[at:]``.

    scales, factors: of the blocks, as their starts gave them.
    """
    layout, element, rule = desc
    columns, parts, lanes, found, squares, tries = room
    size, starts, tried = layout.block, lanes[64:80], lanes[80:96]
    # Rows of blocks are read through the room of a part.
    load_columns(x, at, blocks, size, layout.kind, True, parts[0], columns)
    _to_fixed_point(columns, size, fitting.places, lanes, parts)
    _fit(parts, size, element, fitting, lanes, found, tries)
    for b in range(LANES):
        starts[b] = scales[b] if b < blocks else np.float32(1)
        s = _stored(found, lanes, b, fitting, rule.stored)
        tried[b] = s if s > np.float32(0) and b < blocks else starts[b]
    _squared_errors(columns, size, starts, element, squares)
    for b in range(LANES):
        found[32 + b] = squares[b]
    _squared_errors(columns, size, tried, element, squares)
    for b in range(blocks):
        if squares[b] < found[32 + b]:
            scales[b] = factors[b] = tried[b]


@inlined
def _room() -> Any:
    """Memory of :func:`_search_blocks`."""
    parts = scratch(LONGEST, np.float32), scratch(LONGEST, np.float32), scratch(LONGEST, np.float32)
    tried, picks = scratch(_TRIED, np.float32), scratch(_PICKED, np.uint32)
    tries = tried, picks, scratch(96, np.float32), scratch(16, np.uint32)
    columns, lanes, found = scratch(LONGEST, np.float32), scratch(96, np.float32), scratch(48, np.float64)
    return columns, parts, lanes, found, scratch(LONGEST, np.float64), tries


_fitted_rows = over_spans(_search_blocks, _room)


@bundled
def fitted_rows(args: Any, first: Any, last: Any) -> Any:
    """Quantize rows of whole blocks under the scales fitting codes best.

    Arguments and results: see :func:`.windows.searched_rows`; in the place of a window, a packed
    :class:`Fitting` and its ratios; scales: float32.
    """
    x, desc, fitting, ratios, order, scales, out = args
    tried = unpack_fitting(fitting, ratios=ratios)
    stored = ScaleArrays(scales, scratch(1, np.uint8), scratch(1, np.float32))
    return _fitted_rows(x, unpack(desc), tried, order, (stored, scales), out, first, last)
