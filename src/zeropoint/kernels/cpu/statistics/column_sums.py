"""Exact column sums of magnitudes, with extremes, in one read: :mod:`.sums`.

Lanes are columns. Some rows are added to sums and ends, which say at the end whether the sums are exact; the
numbers of a column whose sum is not are added one by one.
"""

from typing import Any

import numpy as np

from ..machine import vector as v
from ..machine.intrinsics import LINE, by_dtype, device, float32_of, inlined, prefetch_far, scratch
from ..machine.team import over_rows
from ..machine.tile import BFLOAT16, FLOAT32, ordered, value_of_key
from .count import FINITE, start_columns, unpack_runs
from .sums import (
    ANY_REACH,
    MAGNITUDE,
    PIECE,
    REACH,
    REACH_OF_HALVES,
    add_one,
    add_total,
    carry,
    fewer_exponents,
    size_of,
)

ROWS, REACH_OF_ROWS = np.uint64(512), np.uint32(53 - 24 - 9)
"""Rows of float32 that are summed at a time, so few that hardly a sum is not exact, and their reach."""
COLUMNS = 2048
"""Columns whose sums are kept at a time."""
TOGETHER = np.uint64(8)
"""Rows that are added together."""


@inlined
def larger_ends(ends: Any, bits: Any, one: Any) -> Any:
    """Outermost bits of lanes widened by ``bits``; one: in each lane.

    See :func:`four_of`.
    """
    top, first, high, low = ends
    less = bits - one
    top, first = v.larger_bits(top, bits), v.smaller_bits(first, less)
    return top, first, v.larger_signed(high, bits), v.smaller_signed(low, less)


@inlined
def load_ends(ends: Any, i: Any) -> Any:
    """Return the ends of a cache line's columns."""
    top, first, high, low = ends
    return v.load_lanes(top, i), v.load_lanes(first, i), v.load_lanes(high, i), v.load_lanes(low, i)


@inlined
def store_ends(ends: Any, i: Any, found: Any) -> None:
    """Store the ends of a cache line's columns."""
    top, first, high, low = ends
    v.store_lanes(top, i, found[0])
    v.store_lanes(first, i, found[1])
    v.store_lanes(high, i, found[2])
    v.store_lanes(low, i, found[3])


def _ends_of(kind: Any) -> Any:
    @inlined
    def make(x: Any) -> Any:
        """Make arrays of number bits, a number of ``x`` a column."""
        return scratch(COLUMNS, kind), scratch(COLUMNS, kind), scratch(COLUMNS, kind), scratch(COLUMNS, kind)

    return make


_ends_for = by_dtype(float32=_ends_of(np.uint32), uint16=_ends_of(np.uint16), int16=_ends_of(np.uint16))


@inlined
def _floats_of_bfloat16(x: Any, bits: Any) -> Any:
    """Widen 32 numbers of 16 bits exactly, in the order of :func:`total_of`."""
    pairs = v.pairs_of(bits)
    return v.values_of(pairs << v.words_of(np.uint32(16))), v.values_of(
        pairs & v.words_of(np.uint32(0xFFFF0000))
    )


@inlined
def _floats_of_float16(x: Any, bits: Any) -> Any:
    return v.first_float16(bits), v.second_float16(bits)


_floats_of_halves = by_dtype(uint16=_floats_of_bfloat16, int16=_floats_of_float16)


@inlined
def _add_words(x: Any, at: Any, count: Any, blocks: Any, i: Any, sums: Any) -> None:
    """Add the cache lines from column ``i`` on of ``count`` rows."""
    (totals, ends), one, size = sums, v.words_of(np.uint32(1)), v.words_of(MAGNITUDE)
    found, total = load_ends(ends, i), v.load_lanes(totals, i)
    for r in range(count):
        place = at + r * blocks + i
        prefetch_far(x, place + count * blocks)
        bits = v.bits_of(v.load_lanes(x, place))
        found = larger_ends(found, bits, one)
        total = total + v.wide_floats(v.values_of(bits & size))
    v.store_lanes(totals, i, total)
    store_ends(ends, i, found)


@inlined
def _add_halves(x: Any, at: Any, count: Any, blocks: Any, i: Any, sums: Any) -> None:
    (totals, ends), one, size = sums, v.halves_of(np.uint16(1)), v.halves_of(np.uint16(0x7FFF))
    found, first, second = load_ends(ends, i), v.load_lanes(totals, i), v.load_lanes(totals, i + v.HALF)
    for r in range(count):
        place = at + r * blocks + i
        prefetch_far(x, place + count * blocks)
        bits = v.load_lanes(x, place)
        found = larger_ends(found, bits, one)
        u, w = _floats_of_halves(x, bits & size)
        first, second = first + v.wide_floats(u), second + v.wide_floats(w)
    v.store_lanes(totals, i, first)
    v.store_lanes(totals, i + v.HALF, second)
    store_ends(ends, i, found)


_add_lines = by_dtype(float32=_add_words, uint16=_add_halves, int16=_add_halves)


@device
def add_rows(x: Any, at: Any, rows: Any, blocks: Any, width: Any, step: Any, totals: Any, ends: Any) -> None:
    """Set sums and ends of ``width`` columns from rows, by cache lines.

    The first row begins at ``x[at]``. step: columns of a cache line.
    """
    top, first, high, low = ends
    sign = np.uint32(1) << np.uint32(8 * x.itemsize - 1)
    for i in range(width):
        totals[i], top[i], first[i] = np.float64(0), np.uint32(0), np.uint32(0xFFFFFFFF)
        high[i], low[i] = sign, sign - np.uint32(1)
    for r in range(np.uint64(0), rows, TOGETHER):
        for i in range(np.uint64(0), width, step):
            _add_lines(x, at + r * blocks, min(TOGETHER, rows - r), blocks, i, (totals, ends))


@inlined
def _total(x: Any, totals: Any, i: Any) -> Any:
    """Sum of column ``i``; bfloat16: even columns first, 32 by 32."""
    return totals[i]


@inlined
def _total_of_pairs(x: Any, totals: Any, i: Any) -> Any:
    lane = i % v.WHOLE
    return totals[i - lane + lane % np.uint64(2) * v.HALF + lane // np.uint64(2)]


total_of = by_dtype(float32=_total, uint16=_total_of_pairs, int16=_total)


@inlined
def _key_of_word(x: Any, bits: Any) -> Any:
    """Order the bits of a number."""
    return ordered(float32_of(np.uint32(bits)))


@inlined
def _key_of_half(x: Any, bits: Any) -> Any:
    return ordered(np.uint16(bits))


_key_of = by_dtype(float32=_key_of_word, uint16=_key_of_half, int16=_key_of_half)


@inlined
def four_of(x: Any, ends: Any, i: Any) -> Any:
    """Keys of up to four numbers holding extremes and zero's neighbors.

    ends: arrays of the largest bits and the smallest less one, without sign and with it. Less one, zero is
    the largest without sign, and so is -0 with it: so neither hides the number next to it, and each is among
    the four where it is an extreme.
    """
    top, first, high, low = ends
    one = np.uint32(1)
    return _key_of(x, top[i]), _key_of(x, first[i] + one), _key_of(x, high[i]), _key_of(x, low[i] + one)


@device
def add_column(x: Any, at: Any, rows: Any, blocks: Any, kind: Any, into: Any, b: Any) -> None:
    """Add ``rows`` numbers from ``x[at]``, ``blocks`` apart, to column ``b``.

    into: limbs, counts, and smallest and largest keys.
    """
    limbs, counts, lows, highs = into
    for r in range(rows):
        key = np.int32(ordered(x[at + r * blocks]))
        lows[b], highs[b] = min(lows[b], key), max(highs[b], key)
        add_one(value_of_key(key, kind), limbs, counts, b)
    carry(limbs, b)


@over_rows
def sum_columns(
    x: Any, runs: Any, limbs: Any, counts: Any, lows: Any, highs: Any, first: Any, last: Any
) -> None:
    """Sum columns and find their extremes: cache lines ``first`` to ``last``.

    They are blocks of single neighbors.
    """
    shape, into = unpack_runs(runs), (limbs, counts, lows, highs)
    kind, outer, blocks = shape.kind, shape.outer, shape.blocks
    totals, ends = scratch(COLUMNS, np.float64), _ends_for(x)
    step, wide = np.uint64(LINE // x.itemsize), kind == FLOAT32
    most_rows, unit = (ROWS, REACH_OF_ROWS) if wide else (np.uint64(PIECE), REACH)
    reach = REACH_OF_ROWS if wide else REACH_OF_HALVES if kind == BFLOAT16 else ANY_REACH
    end = min(last * step, blocks)
    start_columns(lows, highs, first * step, end)
    for p in range(first * step, end, np.uint64(COLUMNS)):
        width = min(np.uint64(COLUMNS), end - p)
        whole = width // step * step
        for o in range(np.uint64(0), outer, most_rows):
            rows, at = min(most_rows, outer - o), o * blocks + p
            add_rows(x, at, rows, blocks, whole, step, totals, ends)
            for i in range(whole):
                b, most, least = p + i, np.uint32(0), np.uint32(0xFFFFFFFF)
                for key in four_of(x, ends, i):
                    size = size_of(key, kind)
                    lows[b], highs[b] = min(lows[b], key), max(highs[b], key)
                    most, least = max(most, size), min(least, np.uint32(size - np.uint32(1)))
                e, least = np.uint32(most >> np.uint32(23)), np.uint32(least + np.uint32(1))
                if np.uint64(e) < FINITE and least >= fewer_exponents(e, reach) << np.uint32(23):
                    if most > np.uint32(0):
                        add_total(total_of(x, totals, i), fewer_exponents(e, unit), limbs, b)
                    counts[b] += np.int64(rows)
                else:
                    add_column(x, at + i, rows, blocks, kind, into, b)
            for i in range(whole, width):
                add_column(x, at + i, rows, blocks, kind, into, p + i)
        for b in range(p, p + width):
            carry(limbs, b)
