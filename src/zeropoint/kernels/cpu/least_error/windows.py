"""Least-squares scales and their codes: :mod:`zeropoint.ops.window_search`, compiled.

16 blocks are columns, so that a lane is a block. Each scale that can be best is tried in float32: numbers are
multiplied by a reciprocal r of it, and errors of the rounded products are measured in units of the scale.
What that is off by is bounded: a product is within ``2 ** -22 |x r|`` of the quotient and, where it takes
another code, both lie as near to the middle between the two, so that the root of a sum of squares is within
``2 ** -20 ||x||`` of that in float64; and sums of up to 128 squares, whether or not the machine fuses
products with sums, are within ``2 ** -17`` of themselves. Hence a scale whose sum exceeds the least one by
more than

    2 ** -15 of the least  +  2 ** -22 ||x||^2

is worse in float64, too. Scales at or past the lower end of the window may be given a larger error: they are
never taken. Where another scale is nearer than that, or is not plainly inside float32, the block is decided
in float64 and in the order of the reference (:func:`decide`); of a normal distribution, one in a thousand.

Gain that keeps it, over :mod:`.tried_scales` and a second pass, with the same bytes: 11 times the speed on
mxfp4 and mxint8, 8.6 times on nvfp4 (512 x 2048 float32, ``scale=search``, one AVX-512 thread).
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Float32, UInt32
from ..encode.block_scales import (
    BlockFactors,
    BlockStatistics,
    ScaleArrays,
    block_scales,
    combined,
    inverse_power_of,
    minifloat_value,
    minifloat_values,
    power_of,
)
from ..encode.elements import EXPONENT, INFINITE, MAGIC
from ..encode.rows import PACKED, encode_span, tile_span
from ..encode.step_access import Elements, values_in_order
from ..machine import vector as v
from ..machine.descriptor import BAD_VALUE, INTEGER, MULTIPLY, OK, POWER, unpack
from ..machine.intrinsics import bits32, device, float32_of, inlined, scratch, shl32
from ..machine.named_records import unpacker
from ..machine.reductions import any_lane, integers, multiply_add
from ..machine.team import over_rows
from ..machine.tile import NOT_FINITE, TILE, block_amax, load
from .lanes import LANES, add_neighbors, magnitudes, transpose, where
from .window_errors import float_errors, integer_errors, quarter_errors, takes_quarters

MOST = np.uint64(128)
"""Values of the longest blocks."""
_LONG = 128 * 16
_NEAR, _ABSOLUTE = np.float32(1 + 2.0**-15), np.float32(2.0**-22)
_BEYOND = np.float32(1 + 2.0**-19)
"""Outweighs the roundings of ends of codes."""
_LEAST, _LARGEST = np.float32(2.0**-50), np.float32(2.0**50)
"""Factors and magnitudes whose squares float32 holds."""
_TINY, ZERO, ONE, _QUARTER = np.float32(2.0**-120), np.float32(0), np.float32(1), np.float32(0.25)
ONES = np.uint32(0xFFFFFFFF)


class Candidates(NamedTuple):
    """Which scales can be best; see :class:`zeropoint.params.scale_windows.Window`.

    last: the largest code of a scale. doubled: the largest whose double is a scale. normal: the least code of
    which, and of all above it, half is a scale.
    """

    halving: Float32
    empty: Float32
    doubling: Float32
    most: Float32
    last: UInt32
    doubled: UInt32
    normal: UInt32


unpack_candidates = unpacker(Candidates)


@device
def factor_of(code: Any, rule: Any) -> Any:
    """Return the scale of a block, coarser levels included."""
    if rule.how == POWER:
        return power_of(code)
    return combined(minifloat_value(code, rule), rule)


@inlined
def factors_of(codes: Any, rule: Any) -> Any:
    """Scales of codes, whole floats; no power of two is subnormal."""
    words = integers(codes)
    if rule.how == POWER:
        return v.values_of(words << v.words_of(np.uint32(23)))
    values = minifloat_values(words, rule)
    if rule.inverse:
        return values / v.floats_of(rule.coarse)
    return values * v.floats_of(rule.coarse)


@device
def rounded_value(t: Any, element: Any) -> Any:
    """Value of a quotient's code; of floats, without sign."""
    if element.kind == INTEGER:
        a = t if t > element.low else element.low
        a = a if a < element.high else element.high
        return np.float32(np.float32(a + MAGIC) - MAGIC)
    a = min(np.float32(abs(t)), element.maximum)
    e = max(np.uint32(bits32(a) & EXPONENT), shl32(element.emin, np.uint32(23)))
    c = float32_of(np.uint32(e + shl32(np.uint32(np.uint32(23) - element.mantissa), np.uint32(23))))
    return np.float32(np.float32(a + c) - c)


@device
def squared_error(values: Any, size: Any, factor: Any, element: Any, unit: Any, squares: Any) -> Any:
    """Squared error of a block, added pairwise; squares: float64 room."""
    by = np.float32(factor * unit)
    multiply = element.scaling == MULTIPLY
    # A scale of zero makes zeros of all numbers, also of zeros.
    by = by if by > np.float32(0) else INFINITE
    inverse = np.float32(np.float32(1) / by)
    for i in range(size):
        t = np.float32(values[i] * inverse) if multiply else np.float32(values[i] / by)
        q = np.float32(rounded_value(t, element) * unit)
        x = values[i] if element.kind == INTEGER else np.float32(abs(values[i]))
        off = np.float64(np.float32(q * factor)) - np.float64(x)
        squares[i] = off * off
    add_neighbors(squares, size)
    return squares[0]


@device
def find_highest(amax: Any, rule: Any, window: Any) -> Any:
    """Code of the largest possible best scale, tried all; else -1."""
    high = np.int64(-1)
    for code in range(np.int64(0), np.int64(window.last) + np.int64(1)):
        factor = factor_of(np.uint32(code), rule)
        halved = code >= np.int64(window.normal) or (rule.how != POWER and code % np.int64(2) == np.int64(0))
        if np.float32(factor * (window.halving if halved else window.empty)) < amax:
            high = np.int64(code)
    return high


@device
def decide(
    values: Any, size: Any, start: Any, high: Any, element: Any, rule: Any, window: Any, squares: Any
) -> Any:
    """Code of a block's least-error scale in float64, as the reference.

    values: of the block. start: the code that wins ties. high: the code of the largest scale that can be
    best, or -1 where it is still to be found.
    """
    amax = ZERO
    for i in range(size):
        amax = max(amax, np.float32(abs(values[i])))
    limit = squared_error(values, size, factor_of(start, rule), element, rule.unit, squares)
    best, error = start, np.float64(np.inf)
    if not (amax > ZERO and limit > np.float64(0)):
        return start
    if high < np.int64(0):
        high = find_highest(amax, rule, window)
    least = np.int64(0 if rule.how == POWER else 1)
    for step in range(max(high - least + np.int64(1), np.int64(0))):
        code = high - np.int64(step)
        factor = factor_of(np.uint32(code), rule)
        if np.float32(factor * window.doubling) <= amax and code <= np.int64(window.doubled):
            break
        past = np.float64(amax) - np.float64(factor) * (np.float64(window.most) * np.float64(_BEYOND))
        if past > np.float64(0) and past * past > min(error, limit) * np.float64(_BEYOND):
            break
        found = squared_error(values, size, factor, element, rule.unit, squares)
        if found <= error:
            error, best = found, np.uint32(code)
    return best if error < limit else start


@inlined
def _code_below(numbers: Any, rule: Any) -> Any:
    """Codes of largest scales not above numbers, floats; else 0."""
    drop = np.uint32(23) if rule.how == POWER else np.uint32(np.uint32(23) - rule.mantissa)
    base = np.uint32(0) if rule.how == POWER else shl32(np.uint32(rule.emin - np.uint32(1)), rule.mantissa)
    return v.larger(
        v.floats_of_integers((v.bits_of(numbers) >> v.words_of(drop)) - v.words_of(base)), v.floats_of(ZERO)
    )


@inlined
def _highest(amax: Any, rule: Any, window: Any) -> Any:
    """Return the codes of the largest scales that can be best."""
    halving, one = v.floats_of(window.halving), v.floats_of(ONE)
    near = amax * v.floats_of(np.float32(ONE / window.halving))
    if rule.how != POWER:
        near = near * v.floats_of(rule.coarse if rule.inverse else np.float32(ONE / rule.coarse))
    codes = v.smaller(_code_below(near, rule) + one, v.floats_of(np.float32(window.last)))
    for _ in range(2):
        inside = v.above(amax, factors_of(codes, rule) * halving)
        codes = v.larger(where(inside, codes, codes - one), v.floats_of(ZERO))
    return codes


@inlined
def _near_factors(codes: Any, rule: Any, by: Any) -> Any:
    """Scales of codes times units, a few ulps off; by: coarser."""
    words = integers(v.larger(codes, v.floats_of(ONE)))
    if rule.how == POWER:
        return v.values_of(words << v.words_of(np.uint32(23))) * by
    bits = words << v.words_of(np.uint32(np.uint32(23) - rule.mantissa))
    lift = shl32(np.uint32(rule.emin - np.uint32(1)), np.uint32(23))
    return v.values_of(bits + v.words_of(lift)) * by


@device
def search_lanes(
    columns: Any, size: Any, starts: Any, element: Any, rule: Any, window: Any, found: Any
) -> None:
    """Find the codes of the scales of 16 blocks.

    columns: magnitudes of floats, or integers' numbers. starts: (32,) float32, codes, and what elements are
    divided or multiplied by. found: (64,) float32 takes the codes; what is not zero for blocks that are to be
    decided in float64; the codes of the largest scales that can be best, or -1 where these are still to be
    found; what elements are divided or multiplied by.
    """
    zero, one, infinite = v.floats_of(ZERO), v.floats_of(ONE), v.floats_of(INFINITE)
    amax = squares = zero
    for i in range(size):
        x = v.load_lanes(columns, i * LANES)
        amax, squares = v.larger(magnitudes(x), amax), multiply_add(x, x, squares)
    start, normal = v.load_lanes(starts, np.uint64(0)), v.floats_of(np.float32(window.normal))
    codes = high = _highest(amax, rule, window)
    # The start must be tried, half of every scale be one, and squares be normal numbers.
    factors, large = factors_of(high, rule), v.floats_of(_LARGEST)
    hard = v.above(start, high) | v.above(normal, high) | v.above(normal, start)
    hard = hard | v.above(amax, large) | v.above(factors, large) | v.above(v.floats_of(_LEAST), factors)
    coarse = ONE if rule.how == POWER else np.float32(ONE / rule.coarse) if rule.inverse else rule.coarse
    by = v.floats_of(np.float32(coarse * rule.unit))
    quarters = takes_quarters(element, window)
    units = v.floats_of(np.float32(coarse * rule.unit * (_QUARTER if quarters else ONE)))
    slack = multiply_add(squares, v.floats_of(_ABSOLUTE), v.floats_of(_TINY))
    best = second = infinite
    picked, most = start, v.floats_of(np.float32(np.float32(window.most / rule.unit) * _BEYOND))
    alive = v.above(amax, zero) & (hard ^ v.words_of(ONES))
    while any_lane(alive):
        lower = codes - one
        own, after = _near_factors(codes, rule, units), _near_factors(lower, rule, units)
        inverse, next_inverse = one / own, one / after
        if element.kind == INTEGER:
            error, other = integer_errors(columns, size, inverse, next_inverse, element)
        elif quarters:
            error, other = quarter_errors(columns, size, inverse, next_inverse)
        else:
            error, other = float_errors(columns, size, inverse, next_inverse, element)
        error, other = (
            where(alive, error * own * own, infinite),
            where(alive, other * after * after, infinite),
        )
        nearer = v.above(best, error)
        second = v.smaller(second, where(nearer, best, error))
        best, picked = where(nearer, error, best), where(nearer, codes, picked)
        nearer = v.above(best, other)
        second = v.smaller(second, where(nearer, best, other))
        best, picked = where(nearer, other, best), where(nearer, lower, picked)
        codes = lower - one
        past = v.larger(amax - _near_factors(codes, rule, by) * most, zero)
        alive = alive & v.above(multiply_add(best, v.floats_of(_NEAR), slack), past * past)
        few = alive & v.above(normal, codes - one)
        hard, alive = hard | few, alive & (few ^ v.words_of(ONES))
    near = hard | v.above(multiply_add(best, v.floats_of(_NEAR), slack), second)
    v.store_lanes(found, np.uint64(0), picked)
    v.store_lanes(found, LANES, v.values_of(near & v.above(amax, zero) & v.words_of(np.uint32(0x3F800000))))
    v.store_lanes(found, LANES + LANES, where(hard, v.floats_of(np.float32(-1)), high))
    if element.scaling == MULTIPLY:
        factors = v.values_of((v.words_of(np.uint32(254)) - integers(picked)) << v.words_of(np.uint32(23)))
    else:
        factors = factors_of(picked, rule) * v.floats_of(rule.unit)
    changed = v.above(picked, start) | v.above(start, picked)
    v.store_lanes(found, LANES + LANES + LANES, where(changed, factors, v.load_lanes(starts, LANES)))


@device
def load_columns(
    x: Any, at: Any, blocks: Any, size: Any, kind: Any, signed: Any, own: Any, columns: Any
) -> None:
    """Load up to 16 blocks as columns, magnitudes unless ``signed``; zero-filled."""
    count, total = blocks * size, size * LANES
    for i in range(np.uint64(0), count - count % v.WHOLE, v.WHOLE):
        a, b = values_in_order(x, at + i)
        if not signed:
            a, b = magnitudes(a), magnitudes(b)
        v.store_lanes(own, i, a)
        v.store_lanes(own, i + LANES, b)
    rest = count % v.WHOLE
    if rest > np.uint64(0):
        load(x, at + count - rest, rest, kind, own[count - rest : count])
        for i in range(count - rest, count):
            own[i] = own[i] if signed else np.float32(abs(own[i]))
    for i in range(count, total, LANES):
        v.store_lanes(own, i, v.floats_of(np.float32(0)))
    for i in range(np.uint64(0), size, LANES):
        transpose(own, i, size, columns, i * LANES, LANES)


@device
def search_blocks(
    x: Any, at: Any, blocks: Any, desc: Any, window: Any, room: Any, codes: Any, factors: Any
) -> None:
    """Replace scales of up to 16 finite blocks by least-error ones.

    codes, factors: of the blocks, as their starts gave them.
    """
    layout, element, rule = desc
    own, columns, lanes, squares = room
    starts, found = lanes[: np.uint64(32)], lanes[np.uint64(32) :]
    size = layout.block
    load_columns(x, at, blocks, size, layout.kind, element.kind == INTEGER, own, columns)
    for b in range(blocks):
        starts[b] = np.float32(codes[b])
        starts[LANES + b] = factors[b]
    for b in range(blocks, LANES):
        starts[b] = starts[LANES + b] = ONE
    search_lanes(columns, size, starts, element, rule, window, found)
    unsure = any_lane(v.bits_of(v.load_lanes(found, LANES)))
    for b in range(blocks):
        factors[b] = found[48 + b]
        if unsure and found[LANES + b] > ZERO:
            code = decide(
                own[b * size : (b + np.uint64(1)) * size], size, np.uint32(codes[b]), np.int64(found[32 + b]),
                element, rule, window, squares,
            )  # fmt: skip
            found[b] = np.float32(code)
            if code != np.uint32(codes[b]):
                f = factor_of(code, rule) * rule.unit
                factors[b] = inverse_power_of(code) if element.scaling == MULTIPLY else f
            else:
                factors[b] = starts[LANES + b]
    for b in range(blocks):
        codes[b] = np.uint8(found[b])


@device
def start_scales(
    x: Any, at: Any, span: Any, desc: Any, block_at: Any, stored: Any, amax: Any, factors: Any
) -> Any:
    """Write start scales of searches in a span, and their factors.

    stored: :class:`..encode.block_scales.ScaleArrays`. amax: room. Returns the bits of the largest magnitude,
    and OK or BAD_SCALE.
    """
    layout, element, rule = desc
    blocks, worst, none = span // layout.block, np.uint32(0), scratch(1, np.float32)
    block_amax(x, at, span, layout.block, layout.kind, amax)
    for b in range(blocks):
        worst = max(worst, amax[b])
    found, used = BlockStatistics(amax, none, none), BlockFactors(factors, none)
    state = block_scales(found, blocks, rule, element.scaling == MULTIPLY, block_at, stored, used)
    return worst, state


def over_spans(search: Any, room_of: Any) -> Any:
    """Build the driver of a search of 16 blocks at a time.

    search: improves the scales of some blocks, and their factors. room_of: its memory.
    """

    @device
    def rows(x: Any, desc: Any, tried: Any, order: Any, found: Any, out: Any, first: Any, last: Any) -> Any:
        layout, block, (stored, scales) = desc.layout, desc.layout.block, found
        floats = scratch(TILE, np.float32), scratch(TILE, np.float32), scratch(TILE, np.float32)
        room = floats, scratch(TILE, np.uint8), scratch(PACKED, np.uint8)
        search_room, amax, none = room_of(), scratch(TILE, np.uint32), scratch(1, np.float32)
        per_block, worst, state = scratch(TILE, np.float32), np.uint32(0), OK
        at, end = first * layout.cols, last * layout.cols
        block_at, byte_at = first * layout.row_blocks, first * layout.row_bytes
        while at < end:
            span = tile_span(block, end - at)
            blocks = span // block
            magnitude, started = start_scales(x, at, span, desc, block_at, stored, amax, per_block)
            worst, state = max(worst, magnitude), max(state, started)
            if worst < NOT_FINITE and state == OK:
                for b in range(np.uint64(0), blocks, LANES):
                    some, own = min(LANES, blocks - b), scales[block_at + b : block_at + blocks]
                    search(x, at + b * block, some, desc, tried, search_room, own, per_block[b:blocks])
            used = BlockFactors(per_block, none)
            byte_at = encode_span(Elements(x, at, span), desc, order, used, room, out, byte_at)
            at += span
            block_at += blocks
        return BAD_VALUE if worst >= NOT_FINITE else state

    return rows


@inlined
def _room() -> Any:
    """Memory of :func:`search_blocks`."""
    floats = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(96, np.float32)
    return (*floats, scratch(128, np.float64))


_searched_rows = over_spans(search_blocks, _room)


@over_rows
def searched_rows(
    x: Any, desc: Any, window: Any, order: Any, codes: Any, out: Any, first: Any, last: Any
) -> Any:
    """Quantize rows of whole blocks under scales of least squared error.

    Arguments and results: see :func:`..encode.rows.quantize_rows`; desc: packed; window: a packed
    :class:`Candidates`; codes: of scales.
    """
    none, tried = scratch(1, np.float32), unpack_candidates(window)
    stored = ScaleArrays(none, codes, none)
    return _searched_rows(x, unpack(desc), tried, order, (stored, codes), out, first, last)
