"""Exact sums of magnitudes, in one read with the extremes.

Numbers whose exponents lie near each other have a sum that float64 holds exactly: so a piece of them is added
on float64 lanes, and only its total is added to an integer of 320 bits, in limbs. The extremes of a piece say
which numbers are near enough; those that are too small, and so would be rounded, are added one by one. A
tensor is ``outer`` times ``blocks`` runs of ``inner`` neighbors, as in :mod:`.count`.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .count import FINITE, FRACTION_BITS, PANEL, run_keys, start_columns, widened
from .intrinsics import LINE, bits32, device, float32_of, inlined, prefetch, prefetch_far, scratch
from .scales import power_of
from .tile import TILE, ordered, value_of_key
from .vector import (
    HALF,
    STEP,
    WHOLE,
    any_below,
    bits_of,
    doubles_of,
    first_float16,
    halves_of,
    larger_bits,
    larger_signed,
    load_lanes,
    pairs_of,
    second_float16,
    smaller_bits,
    smaller_signed,
    store_lanes,
    sum_of_doubles,
    values_of,
    wide_floats,
    words_of,
)

FRACTION = np.uint64(0x7FFFFF)
MAGNITUDE = np.uint32(0x7FFFFFFF)
PIECE = 4096
"""Numbers of one sum: twice they are read, the second time from the first cache."""
SPAN = np.uint64(1 << 20)
"""Numbers after which limbs are carried."""
REACH = np.uint32(53 - 24 - 12)
"""Most exponents between the largest and the smallest of PIECE numbers of 24 bits, for a sum of 53 bits."""
REACH_OF_HALVES, REACH_OF_FOUR = np.uint32(53 - 8 - 12), np.uint32(24 - 8 - 2)
"""The same of PIECE numbers of 8 bits, and of four of them for a sum of 24 bits.

Of float16 any PIECE numbers have such a sum.
"""
ROWS, REACH_OF_ROWS = np.uint64(512), np.uint32(53 - 24 - 9)
"""Rows of float32 that are summed at a time, few enough that hardly any column is left, and their reach."""
FOURS = np.uint64(64)
"""Numbers that are added as 16 sums of four."""
UNIT = np.uint32(127 + (127 + 23) // 2)
"""Exponent field of the root of the units that numbers with exponent field 0 would count."""
LIMBS, LIMB_BITS = np.uint64(10), np.uint64(32)
LIMB, PLACE = np.uint64(0xFFFFFFFF), np.uint64(31)
AHEAD = np.uint64(PIECE)
FIRST = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
"""Keys of the extremes of nothing."""
COLUMNS = 2048
"""Columns whose sums are kept at a time."""
TOGETHER = np.uint64(8)
"""Rows that are added together."""


@device
def add_units(units: Any, e: Any, limbs: Any, b: Any) -> None:
    """Add ``units``, below 2**53, of the last bit of numbers with exponent field ``e`` to block ``b``."""
    position = max(e, np.uint64(1)) - np.uint64(1)
    shift, place = position & PLACE, b * LIMBS + (position >> np.uint64(5))
    low, high = (units & LIMB) << shift, (units >> LIMB_BITS) << shift
    limbs[place] += np.int64(low & LIMB)
    limbs[place + np.uint64(1)] += np.int64((low >> LIMB_BITS) + (high & LIMB))
    limbs[place + np.uint64(2)] += np.int64(high >> LIMB_BITS)


@device
def carry(limbs: Any, b: Any) -> None:
    """Move what a limb of block ``b`` has above 32 bits to the next one; due after 2**30 additions."""
    for place in range(b * LIMBS, b * LIMBS + LIMBS - np.uint64(1)):
        limbs[place + np.uint64(1)] += limbs[place] >> np.int64(LIMB_BITS)
        limbs[place] &= np.int64(LIMB)


@device
def add_total(total: Any, e: Any, limbs: Any, b: Any) -> None:
    """Add an exact sum, without bits below those of 24 with exponent field ``e``, to block ``b``."""
    e = max(np.uint32(e), np.uint32(1))
    half = np.uint32(e >> np.uint32(1))
    root, other = np.uint32(UNIT - half), np.uint32(UNIT - np.uint32(e - half))
    units = total * np.float64(power_of(root)) * np.float64(power_of(other))
    add_units(np.uint64(np.int64(units)), np.uint64(e), limbs, b)


@device
def add_magnitude(bits: Any, limbs: Any, b: Any) -> None:
    """Add a finite number, by the bits of its magnitude, to the sum of block ``b``."""
    e = np.uint64(bits) >> FRACTION_BITS
    lead = np.uint64(1) << FRACTION_BITS if e > np.uint64(0) else np.uint64(0)
    add_units((np.uint64(bits) & FRACTION) + lead, e, limbs, b)


@device
def add_one(value: Any, limbs: Any, counts: Any, b: Any) -> None:
    """Add a number to the sum of block ``b``, unless it is not finite."""
    bits = np.uint32(bits32(value) & MAGNITUDE)
    if np.uint64(bits) >> FRACTION_BITS < FINITE:
        add_magnitude(bits, limbs, b)
        counts[b] += np.int64(1)


@inlined
def fewer_exponents(e: Any, reach: Any) -> Any:
    """Return the exponent field ``reach`` below ``e``, or 0, where subnormal numbers are."""
    return np.uint32(e - min(e, reach))


@inlined
def limit_of(e: Any, bits: Any) -> Any:
    """Return what the magnitudes below exponent field ``e``, less one, are less than.

    bits: of fractions. Less one, zero is the largest; where ``e`` is 0, nothing is less.
    """
    floor = np.uint32(e << bits)
    return np.uint32(floor - min(floor, np.uint32(1)))


@inlined
def add_words(words: Any, at: Any, count: Any, e: Any, limbs: Any, b: Any) -> Any:
    """Return the sum of finite ``words[at : at + count]``, at most a piece, but for the smallest of them.

    e: exponent field of the largest. Those that are too small for an exact sum are added to block ``b``.
    """
    one, size, total = words_of(np.uint32(1)), words_of(MAGNITUDE), doubles_of(np.float64(0))
    least = words_of(limit_of(fewer_exponents(e, REACH), np.uint32(23)))
    whole = at + count // WHOLE * WHOLE
    for i in range(at, whole, WHOLE):
        prefetch(words, i + AHEAD)
        prefetch(words, i + AHEAD + HALF)
        u, v = bits_of(load_lanes(words, i)) & size, bits_of(load_lanes(words, i + HALF)) & size
        if any_below(smaller_bits(u - one, v - one), least):
            for n in range(i, i + WHOLE):
                add_magnitude(bits32(words[n]) & MAGNITUDE, limbs, b)
        else:
            total = total + (wide_floats(values_of(u)) + wide_floats(values_of(v)))
    for i in range(whole, at + count):
        add_magnitude(bits32(words[i]) & MAGNITUDE, limbs, b)
    return total


@inlined
def add_halves(x: Any, at: Any, count: Any, e: Any, limbs: Any, b: Any) -> Any:
    """Do what :func:`add_words` does on bits of bfloat16.

    Four of them, of 8 bits, that lie near each other have a sum that float32 holds.
    """
    one, size, total = halves_of(np.uint16(1)), halves_of(np.uint16(0x7FFF)), doubles_of(np.float64(0))
    half, upper = words_of(np.uint32(16)), words_of(np.uint32(0x7FFF0000))
    of_four = halves_of(np.uint16(limit_of(fewer_exponents(e, REACH_OF_FOUR), np.uint32(7))))
    least = halves_of(np.uint16(limit_of(fewer_exponents(e, REACH_OF_HALVES), np.uint32(7))))
    whole = at + count // FOURS * FOURS
    for i in range(at, whole, FOURS):
        prefetch(x, i + AHEAD)
        prefetch(x, i + AHEAD + WHOLE)
        u, v = load_lanes(x, i) & size, load_lanes(x, i + STEP) & size
        p, q, found = pairs_of(u), pairs_of(v), smaller_bits(u - one, v - one)
        first, second = values_of(p << half), values_of(p & upper)
        third, fourth = values_of(q << half), values_of(q & upper)
        if not any_below(found, of_four):
            total = total + wide_floats((first + second) + (third + fourth))
        elif not any_below(found, least):
            total = total + (wide_floats(first) + wide_floats(second))
            total = total + (wide_floats(third) + wide_floats(fourth))
        else:
            for n in range(i, i + FOURS):
                add_magnitude((np.uint32(x[n]) << np.uint32(16)) & MAGNITUDE, limbs, b)
    for i in range(whole, at + count):
        add_magnitude((np.uint32(x[i]) << np.uint32(16)) & MAGNITUDE, limbs, b)
    return total


def _add_finite(x: Any, at: Any, count: Any, kind: Any, tile: Any, e: Any, limbs: Any, b: Any) -> Any:
    """Sum bfloat16 as it is, and others as float32."""


@overload(_add_finite, inline="always")
def _add_finite_overload(
    x: Any, at: Any, count: Any, kind: Any, tile: Any, e: Any, limbs: Any, b: Any
) -> Any:
    def as_it_is(x: Any, at: Any, count: Any, kind: Any, tile: Any, e: Any, limbs: Any, b: Any) -> Any:
        return add_halves(x, at, count, e, limbs, b)

    def widen(x: Any, at: Any, count: Any, kind: Any, tile: Any, e: Any, limbs: Any, b: Any) -> Any:
        words, start = widened(x, at, count, kind, tile)
        return add_words(words, start, count, e, limbs, b)

    return as_it_is if x.dtype == types.uint16 else widen


@device
def add_piece(
    x: Any, at: Any, count: Any, largest: Any, kind: Any, tile: Any, limbs: Any, counts: Any, b: Any
) -> None:
    """Add ``x[at : at + count]``, at most a piece, to block ``b``; largest: bits of the largest magnitude."""
    e = np.uint32(largest >> np.uint32(23))
    if np.uint64(e) < FINITE:
        total = sum_of_doubles(_add_finite(x, at, count, kind, tile, e, limbs, b))
        if total > np.float64(0):
            add_total(total, fewer_exponents(e, REACH), limbs, b)
        counts[b] += np.int64(count)
    else:
        words, start = widened(x, at, count, kind, tile)
        for i in range(start, start + count):
            add_one(words[i], limbs, counts, b)


@device
def sum_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, limbs: Any, counts: Any, lows: Any,
    highs: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Sum blocks ``first`` to ``last``, and find their extremes.

    limbs: (blocks * LIMBS,) int64, of 32 bits each. counts: (blocks,) int64, of finite numbers.
    """
    tile = scratch(PIECE, np.float32)
    for b in range(first, last):
        lows[b], highs[b] = FIRST
        for o in range(outer):
            begin = (o * blocks + b) * inner
            end = min(begin + inner, np.uint64(len(x)))
            for span in range(begin, end, SPAN):
                stop = min(span + SPAN, end)
                for at in range(span, stop, np.uint64(PIECE)):
                    n = min(np.uint64(PIECE), stop - at)
                    low, high = run_keys(x, at, at + n, *FIRST)
                    lows[b], highs[b] = min(lows[b], low), max(highs[b], high)
                    ends = bits32(value_of_key(low, kind)), bits32(value_of_key(high, kind))
                    largest = max(ends[0] & MAGNITUDE, ends[1] & MAGNITUDE)
                    add_piece(x, at, n, largest, kind, tile, limbs, counts, b)
                carry(limbs, b)


@device
def sum_short_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, limbs: Any, counts: Any, first: Any, last: Any
) -> None:
    """Sum blocks ``first`` to ``last`` of few neighbors, those of many blocks in the order of memory."""
    tile = scratch(TILE, np.float32)
    panel = max(PANEL // inner, np.uint64(1))
    for p in range(first, last, panel):
        width = min(panel, last - p)
        for o in range(outer):
            at = (o * blocks + p) * inner
            end = min(at + width * inner, np.uint64(len(x)))
            b, left = np.uint64(p), inner
            while at < end:
                n = min(np.uint64(TILE), end - at)
                words, start = widened(x, at, n, kind, tile)
                for i in range(start, start + n):
                    add_one(words[i], limbs, counts, b)
                    left -= np.uint64(1)
                    if left == np.uint64(0):
                        b, left = b + np.uint64(1), inner
                at += n
            for c in range(p, p + width):
                carry(limbs, c)


@inlined
def larger_ends(ends: Any, bits: Any, one: Any) -> Any:
    """Return the outermost bits of lanes widened by ``bits``: see :func:`four_of`; one: in each lane."""
    top, first, high, low = ends
    less = bits - one
    top, first = larger_bits(top, bits), smaller_bits(first, less)
    return top, first, larger_signed(high, bits), smaller_signed(low, less)


@inlined
def load_ends(ends: Any, i: Any) -> Any:
    """Return the ends of a cache line's columns."""
    top, first, high, low = ends
    return load_lanes(top, i), load_lanes(first, i), load_lanes(high, i), load_lanes(low, i)


@inlined
def store_ends(ends: Any, i: Any, found: Any) -> None:
    """Store the ends of a cache line's columns."""
    top, first, high, low = ends
    store_lanes(top, i, found[0])
    store_lanes(first, i, found[1])
    store_lanes(high, i, found[2])
    store_lanes(low, i, found[3])


def _ends_for(x: Any) -> Any:
    """Make arrays of the bits of numbers of ``x``, a number a column."""


@overload(_ends_for, inline="always")
def _ends_for_overload(x: Any) -> Any:
    kind = np.uint32 if x.dtype == types.float32 else np.uint16

    def make(x: Any) -> Any:
        return scratch(COLUMNS, kind), scratch(COLUMNS, kind), scratch(COLUMNS, kind), scratch(COLUMNS, kind)

    return make


def _floats_of_halves(x: Any, bits: Any) -> Any:
    """Widen 32 numbers of 16 bits exactly, in the order of :func:`total_of`."""


@overload(_floats_of_halves, inline="always")
def _floats_of_halves_overload(x: Any, bits: Any) -> Any:
    def of_bfloat16(x: Any, bits: Any) -> Any:
        pairs = pairs_of(bits)
        return values_of(pairs << words_of(np.uint32(16))), values_of(pairs & words_of(np.uint32(0xFFFF0000)))

    def of_float16(x: Any, bits: Any) -> Any:
        return first_float16(bits), second_float16(bits)

    return of_bfloat16 if x.dtype == types.uint16 else of_float16


def _add_lines(x: Any, at: Any, count: Any, blocks: Any, i: Any, totals: Any, ends: Any) -> Any:
    """Add the cache lines from column ``i`` on of ``count`` rows."""


@overload(_add_lines, inline="always")
def _add_lines_overload(x: Any, at: Any, count: Any, blocks: Any, i: Any, totals: Any, ends: Any) -> Any:
    def of_words(x: Any, at: Any, count: Any, blocks: Any, i: Any, totals: Any, ends: Any) -> Any:
        one, size = words_of(np.uint32(1)), words_of(MAGNITUDE)
        found, total = load_ends(ends, i), load_lanes(totals, i)
        for r in range(count):
            place = at + r * blocks + i
            prefetch_far(x, place + count * blocks)
            bits = bits_of(load_lanes(x, place))
            found = larger_ends(found, bits, one)
            total = total + wide_floats(values_of(bits & size))
        store_lanes(totals, i, total)
        store_ends(ends, i, found)

    def of_halves(x: Any, at: Any, count: Any, blocks: Any, i: Any, totals: Any, ends: Any) -> Any:
        one, size = halves_of(np.uint16(1)), halves_of(np.uint16(0x7FFF))
        found, first, second = load_ends(ends, i), load_lanes(totals, i), load_lanes(totals, i + HALF)
        for r in range(count):
            place = at + r * blocks + i
            prefetch_far(x, place + count * blocks)
            bits = load_lanes(x, place)
            found = larger_ends(found, bits, one)
            u, v = _floats_of_halves(x, bits & size)
            first, second = first + wide_floats(u), second + wide_floats(v)
        store_lanes(totals, i, first)
        store_lanes(totals, i + HALF, second)
        store_ends(ends, i, found)

    return of_words if x.dtype == types.float32 else of_halves


@device
def add_rows(x: Any, at: Any, rows: Any, blocks: Any, width: Any, step: Any, totals: Any, ends: Any) -> None:
    """Set sums and ends of ``width`` columns, by cache lines, to those of rows, the first from ``x[at]`` on.

    step: columns of a cache line.
    """
    top, first, high, low = ends
    sign = np.uint32(1) << np.uint32(8 * x.itemsize - 1)
    for i in range(width):
        totals[i], top[i], first[i] = np.float64(0), np.uint32(0), np.uint32(0xFFFFFFFF)
        high[i], low[i] = sign, sign - np.uint32(1)
    for r in range(np.uint64(0), rows, TOGETHER):
        for i in range(np.uint64(0), width, step):
            _add_lines(x, at + r * blocks, min(TOGETHER, rows - r), blocks, i, totals, ends)


def _total_of(x: Any, totals: Any, i: Any) -> Any:
    """Find the sum of a column."""


@overload(_total_of, inline="always")
def _total_of_overload(x: Any, totals: Any, i: Any) -> Any:
    def in_order(x: Any, totals: Any, i: Any) -> Any:
        return totals[i]

    def by_pairs(x: Any, totals: Any, i: Any) -> Any:
        lane = i % WHOLE
        return totals[i - lane + lane % np.uint64(2) * HALF + lane // np.uint64(2)]

    return by_pairs if x.dtype == types.uint16 else in_order


@inlined
def total_of(x: Any, totals: Any, i: Any) -> Any:
    """Return the sum of column ``i``; those of bfloat16 are kept even columns first, 32 by 32."""
    return _total_of(x, totals, i)


def _key_of(x: Any, bits: Any) -> Any:
    """Order the bits of a number."""


@overload(_key_of, inline="always")
def _key_of_overload(x: Any, bits: Any) -> Any:
    def of_word(x: Any, bits: Any) -> Any:
        return ordered(float32_of(np.uint32(bits)))

    def of_half(x: Any, bits: Any) -> Any:
        return ordered(np.uint16(bits))

    return of_word if x.dtype == types.float32 else of_half


@inlined
def four_of(x: Any, ends: Any, i: Any) -> Any:
    """Return the keys of up to four numbers of column ``i``, which hold its extremes and what lies next to 0.

    ends: arrays of the largest bits and the smallest less one, without sign and with it. Less one, zero is
    the largest without sign, and so is -0 with it: so neither hides the number next to it, and each is among
    the four where it is an extreme.
    """
    top, first, high, low = ends
    one = np.uint32(1)
    return _key_of(x, top[i]), _key_of(x, first[i] + one), _key_of(x, high[i]), _key_of(x, low[i] + one)


@inlined
def size_of(key: Any, kind: Any) -> Any:
    """Return the bits of the magnitude of a number, as float32, from its key."""
    return np.uint32(bits32(value_of_key(key, kind)) & MAGNITUDE)


@device
def add_column(
    x: Any, at: Any, rows: Any, blocks: Any, kind: Any, limbs: Any, counts: Any, lows: Any, highs: Any, b: Any
) -> None:  # fmt: skip
    """Add ``rows`` numbers, each ``blocks`` further, one by one to column ``b`` and its extremes."""
    for r in range(rows):
        key = np.int32(ordered(x[at + r * blocks]))
        lows[b], highs[b] = min(lows[b], key), max(highs[b], key)
        add_one(value_of_key(key, kind), limbs, counts, b)


@device
def sum_columns(
    x: Any, kind: Any, outer: Any, blocks: Any, limbs: Any, counts: Any, lows: Any, highs: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    """Sum columns ``first`` to ``last``, blocks of single neighbors, and find their extremes."""
    totals, ends = scratch(COLUMNS, np.float64), _ends_for(x)
    step, wide = np.uint64(LINE // x.itemsize), x.itemsize > 2
    most_rows, unit = (ROWS, REACH_OF_ROWS) if wide else (np.uint64(PIECE), REACH)
    reach = REACH_OF_ROWS if wide else REACH_OF_HALVES
    start_columns(lows, highs, first, last)
    for p in range(first, last, np.uint64(COLUMNS)):
        width = min(np.uint64(COLUMNS), last - p)
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
                    add_column(x, at + i, rows, blocks, kind, limbs, counts, lows, highs, b)
            for i in range(whole, width):
                add_column(x, at + i, rows, blocks, kind, limbs, counts, lows, highs, p + i)
        for b in range(p, p + width):
            carry(limbs, b)
