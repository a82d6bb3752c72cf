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
from .intrinsics import bits32, device, float32_of, inlined, narrow_half, prefetch, prefetch_far, scratch
from .scales import power_of
from .steps import values_in_order
from .tile import TILE, ordered, value_of_key
from .vector import (
    HALF,
    STEP,
    WHOLE,
    any_below,
    bits_of,
    doubles_of,
    halves_of,
    larger_bits,
    larger_signed,
    load_lanes,
    pairs_of,
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
REACH_OF_ROWS = np.uint32(53 - 24 - 9)
"""The same of ROWS numbers."""
REACH_OF_HALVES, REACH_OF_FOUR = np.uint32(53 - 8 - 12), np.uint32(24 - 8 - 2)
"""The same of PIECE numbers of 8 bits, and of four of them for a sum of 24 bits."""
FOURS = np.uint64(64)
"""Numbers that are added as 16 sums of four."""
UNIT = np.uint32(127 + (127 + 23) // 2)
"""Exponent field of the root of the units that numbers with exponent field 0 would count."""
LIMBS, LIMB_BITS = np.uint64(10), np.uint64(32)
LIMB, PLACE = np.uint64(0xFFFFFFFF), np.uint64(31)
AHEAD = np.uint64(PIECE)
FIRST = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
"""Keys of the extremes of nothing."""
ROWS, COLUMNS = np.uint64(512), 512
"""Rows and columns whose sums are kept at a time."""
TOGETHER = np.uint64(8)
"""Rows that are added together."""


@device
def are_near(most: Any, least: Any) -> Any:
    """Return whether two magnitudes, by their bits, are normal and near enough for a sum over ROWS."""
    top, bottom = most >> np.uint32(23), least >> np.uint32(23)
    return top - bottom <= REACH_OF_ROWS and bottom > np.uint32(0) and np.uint64(top) < FINITE


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
    """Add an exact sum of numbers, without bits below those of exponent field ``e``, to block ``b``."""
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
def larger_ends(ends: Any, bits: Any) -> Any:
    """Return the outermost bits of lanes widened by ``bits``: see :func:`four_of`."""
    top, first, high, low = ends
    less = bits - words_of(np.uint32(1))
    top, first = larger_bits(top, bits), smaller_bits(first, less)
    return top, first, larger_signed(high, bits), smaller_signed(low, less)


@device
def four_of(ends: Any, i: Any) -> Any:
    """Return the bits of up to four numbers of column ``i``, which hold its extremes and what lies next to 0.

    ends: arrays of the largest bits and the smallest less one, without sign and with it. Less one, zero is
    the largest without sign, and so is -0 with it: so neither hides the number next to it, and each is among
    the four where it is an extreme.
    """
    top, first, high, low = ends
    one = np.uint32(1)
    return np.uint32(top[i]), np.uint32(first[i] + one), np.uint32(high[i]), np.uint32(low[i] + one)


@device
def clear_columns(totals: Any, ends: Any, width: Any) -> None:
    """Begin the sums and ends of ``width`` columns."""
    top, first, high, low = ends
    for i in range(width):
        totals[i], top[i], first[i] = np.float64(0), np.uint32(0), np.uint32(0xFFFFFFFF)
        high[i], low[i] = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)


@inlined
def load_ends(ends: Any, i: Any) -> Any:
    """Return the ends of 16 columns."""
    top, first, high, low = ends
    return load_lanes(top, i), load_lanes(first, i), load_lanes(high, i), load_lanes(low, i)


@inlined
def store_ends(ends: Any, i: Any, found: Any) -> None:
    """Store the ends of 16 columns."""
    top, first, high, low = ends
    store_lanes(top, i, found[0])
    store_lanes(first, i, found[1])
    store_lanes(high, i, found[2])
    store_lanes(low, i, found[3])


@device
def add_rows(
    x: Any, at: Any, count: Any, blocks: Any, width: Any, kind: Any, tile: Any, totals: Any, ends: Any
) -> None:
    """Add ``count`` rows of ``width`` columns, the first from ``x[at]`` on, to their sums and ends."""
    whole, size = width // WHOLE * WHOLE, words_of(MAGNITUDE)
    for i in range(np.uint64(0), whole, WHOLE):
        first, second = load_ends(ends, i), load_ends(ends, i + HALF)
        total, other = load_lanes(totals, i), load_lanes(totals, i + HALF)
        for r in range(count):
            place = at + r * blocks + i
            prefetch_far(x, place + count * blocks)
            prefetch_far(x, place + count * blocks + HALF)
            p, q = values_in_order(x, place)
            u, v = bits_of(p), bits_of(q)
            first, second = larger_ends(first, u), larger_ends(second, v)
            total = total + wide_floats(values_of(u & size))
            other = other + wide_floats(values_of(v & size))
        store_lanes(totals, i, total)
        store_lanes(totals, i + HALF, other)
        store_ends(ends, i, first)
        store_ends(ends, i + HALF, second)
    if whole < width:
        for r in range(count):
            words, start = widened(x, at + r * blocks + whole, width - whole, kind, tile)
            add_row(words, start, whole, width, totals, ends)


@device
def add_row(words: Any, at: Any, first: Any, last: Any, totals: Any, ends: Any) -> None:
    """Add columns ``first`` to ``last`` of a row, from ``words[at]`` on, to their sums and ends."""
    top, next_up, high, low = ends
    for i in range(first, last):
        word = np.uint32(bits32(words[at + i - first]))
        less = np.uint32(word - np.uint32(1))
        totals[i] += np.float64(float32_of(np.uint32(word & MAGNITUDE)))
        top[i], next_up[i] = max(top[i], word), min(next_up[i], less)
        high[i] = np.uint32(max(np.int32(high[i]), np.int32(word)))
        low[i] = np.uint32(min(np.int32(low[i]), np.int32(less)))


def _key_in(x: Any, value: Any) -> Any:
    """Order a value."""


@overload(_key_in, inline="always")
def _key_in_overload(x: Any, value: Any) -> Any:
    def of_float(x: Any, value: Any) -> Any:
        return ordered(value)

    def of_bfloat16(x: Any, value: Any) -> Any:
        return ordered(np.uint16(bits32(value) >> np.uint32(16)))

    def of_float16(x: Any, value: Any) -> Any:
        return ordered(np.int16(narrow_half(value)))

    if x.dtype == types.float32:
        return of_float
    return of_bfloat16 if x.dtype == types.uint16 else of_float16


@inlined
def key_in(x: Any, value: Any) -> Any:
    """Return the integer that orders as ``value`` does, a number of ``x`` widened to float32."""
    return _key_in(x, value)


@device
def sum_columns(
    x: Any, kind: Any, outer: Any, blocks: Any, limbs: Any, counts: Any, lows: Any, highs: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    """Sum columns ``first`` to ``last``, blocks of single neighbors, and find their extremes."""
    tile, totals, one = scratch(STEP, np.float32), scratch(COLUMNS, np.float64), np.uint64(1)
    ends = (
        scratch(COLUMNS, np.uint32), scratch(COLUMNS, np.uint32), scratch(COLUMNS, np.uint32),
        scratch(COLUMNS, np.uint32),
    )  # fmt: skip
    start_columns(lows, highs, first, last)
    for p in range(first, last, np.uint64(COLUMNS)):
        width = min(np.uint64(COLUMNS), last - p)
        for o in range(np.uint64(0), outer, ROWS):
            rows = min(ROWS, outer - o)
            clear_columns(totals, ends, width)
            for r in range(o, o + rows, TOGETHER):
                count = min(TOGETHER, o + rows - r)
                add_rows(x, r * blocks + p, count, blocks, width, kind, tile, totals, ends)
            for i in range(width):
                b, most, least = p + i, np.uint32(0), np.uint32(0xFFFFFFFF)
                for bits in four_of(ends, i):
                    key, size = key_in(x, float32_of(bits)), np.uint32(bits & MAGNITUDE)
                    lows[b], highs[b] = min(lows[b], key), max(highs[b], key)
                    most, least = max(most, size), min(least, np.uint32(size - np.uint32(1)))
                least = np.uint32(least + np.uint32(1))
                if most == np.uint32(0) or are_near(most, least):
                    if most > np.uint32(0):
                        add_total(totals[i], least >> np.uint32(23), limbs, b)
                    counts[b] += np.int64(rows)
                else:
                    for r in range(o, o + rows):
                        words, start = widened(x, r * blocks + b, one, kind, tile)
                        add_one(words[start], limbs, counts, b)
        for b in range(p, p + width):
            carry(limbs, b)
