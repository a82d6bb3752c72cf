"""Exact sums of magnitudes, in one read with the extremes.

Numbers whose exponents lie near each other have a sum that float64 holds exactly: so a strip of them is
added on float64 lanes, and only its total is added to an integer of 320 bits, in limbs. A strip that reaches
too far, or holds subnormal or non-finite numbers, is added number by number. A tensor is ``outer`` times
``blocks`` runs of ``inner`` neighbors, as in :mod:`.count`.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .count import (
    FINITE,
    FRACTION_BITS,
    PANEL,
    finish_columns,
    run_keys,
    start_columns,
    take_columns,
    widened,
)
from .intrinsics import bits32, device, float32_of, scratch
from .scales import power_of
from .tile import TILE, fetch_ahead
from .vector import (
    HALF,
    STEP,
    bits_of,
    doubles_of,
    halves_of,
    larger_bits,
    largest_lane,
    load_lanes,
    pairs_of,
    smaller_bits,
    smallest_lane,
    store_lanes,
    sum_of_doubles,
    values_of,
    wide_floats,
    words_of,
)

FRACTION = np.uint64(0x7FFFFF)
MAGNITUDE = np.uint32(0x7FFFFFFF)
STRIP = np.uint64(512)
"""Most numbers of one sum: few enough that hardly any of them is far from the others."""
REACH = np.uint32(53 - 24 - 9)
"""Most exponents between the largest and the smallest of STRIP numbers of 24 bits, for a sum of 53 bits."""
REACH_OF_FOUR = np.uint32(24 - 8 - 2)
"""The same for a sum of 24 bits of four numbers of 8 bits."""
FOURS = np.uint64(64)
"""Numbers that are added as 16 sums of four."""
UNIT = np.uint32(127 + (127 + 23) // 2)
"""Exponent field of the root of the units that numbers with exponent field 0 would count."""
LIMBS, LIMB_BITS = np.uint64(10), np.uint64(32)
LIMB, PLACE = np.uint64(0xFFFFFFFF), np.uint64(31)
ROWS, COLUMNS = np.uint64(256), np.uint64(256)
"""Rows and columns that are read together: twice, the second time from the cache."""
FETCHED_ROWS = np.uint64(4)
"""Rows that are asked for ahead of time."""


@device
def are_near(most: Any, least: Any, reach: Any) -> Any:
    """Return whether two magnitudes, by their bits, are normal and at most ``reach`` exponents apart."""
    top, bottom = most >> np.uint32(23), least >> np.uint32(23)
    return top - bottom <= reach and bottom > np.uint32(0) and np.uint64(top) < FINITE


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
def add_total(total: Any, least: Any, limbs: Any, b: Any) -> None:
    """Add the exact sum of numbers from the magnitude ``least`` on, by its bits, to block ``b``."""
    e = np.uint32(least >> np.uint32(23))
    half = np.uint32(e >> np.uint32(1))
    root, other = np.uint32(UNIT - half), np.uint32(UNIT - np.uint32(e - half))
    units = total * np.float64(power_of(root)) * np.float64(power_of(other))
    add_units(np.uint64(np.int64(units)), np.uint64(e), limbs, b)


@device
def add_one(value: Any, limbs: Any, counts: Any, b: Any) -> None:
    """Add a number to the sum of block ``b``, unless it is not finite."""
    bits = np.uint64(bits32(value))
    e = (bits >> FRACTION_BITS) & np.uint64(0xFF)
    if e < FINITE:
        lead = np.uint64(1) << FRACTION_BITS if e > np.uint64(0) else np.uint64(0)
        add_units((bits & FRACTION) + lead, e, limbs, b)
        counts[b] += np.int64(1)


@device
def add_strip(words: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> None:
    """Add ``words[at : at + count]``, whole vectors, to block ``b``."""
    total = doubles_of(np.float64(0))
    most, least = words_of(np.uint32(0)), words_of(np.uint32(0xFFFFFFFF))
    for i in range(at, at + count, HALF):
        bits = bits_of(load_lanes(words, i)) & words_of(MAGNITUDE)
        most, least = larger_bits(most, bits), smaller_bits(least, bits - words_of(np.uint32(1)))
        total = total + wide_floats(values_of(bits))
    largest, smallest = np.uint32(largest_lane(most)), np.uint32(smallest_lane(least) + np.uint32(1))
    if largest == np.uint32(0):
        counts[b] += np.int64(count)
    elif are_near(largest, smallest, REACH):
        add_total(sum_of_doubles(total), smallest, limbs, b)
        counts[b] += np.int64(count)
    else:
        for i in range(at, at + count):
            add_one(words[i], limbs, counts, b)


@device
def add_half_strip(x: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> Any:
    """Add ``x[at : at + count]``, bits of bfloat16, to block ``b``; return whether that was possible.

    Four numbers of 8 bits that lie near each other have a sum that float32 holds.
    """
    total = doubles_of(np.float64(0))
    most, least = halves_of(np.uint16(0)), halves_of(np.uint16(0xFFFF))
    size, one, upper = halves_of(np.uint16(0x7FFF)), halves_of(np.uint16(1)), words_of(np.uint32(0x7FFF0000))
    half = words_of(np.uint32(16))
    for i in range(at, at + count, FOURS):
        u, v = load_lanes(x, i) & size, load_lanes(x, i + STEP) & size
        most, least = (
            larger_bits(larger_bits(most, u), v),
            smaller_bits(smaller_bits(least, u - one), v - one),
        )
        p, q = pairs_of(u), pairs_of(v)
        first = values_of(p << half) + values_of(p & upper)
        second = values_of(q << half) + values_of(q & upper)
        total = total + wide_floats(first + second)
    largest = np.uint32(np.uint32(largest_lane(most)) << np.uint32(16))
    smallest = np.uint32(np.uint32(np.uint16(smallest_lane(least) + np.uint16(1))) << np.uint32(16))
    if largest > np.uint32(0):
        if not are_near(largest, smallest, REACH_OF_FOUR):
            return False
        add_total(sum_of_doubles(total), smallest, limbs, b)
    counts[b] += np.int64(count)
    return True


@device
def add_run(words: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> None:
    """Add ``words[at : at + count]``, at most a strip, to block ``b``."""
    whole = at + count // HALF * HALF
    if at < whole:
        add_strip(words, at, whole - at, limbs, counts, b)
    for i in range(whole, at + count):
        add_one(words[i], limbs, counts, b)


def _add_near(x: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> Any:
    """Add ``x[at : at + count]`` without widening it, where it is known how; return whether that was so."""


@overload(_add_near, inline="always")
def _add_near_overload(x: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> Any:
    def add(x: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> Any:
        return count % FOURS == np.uint64(0) and add_half_strip(x, at, count, limbs, counts, b)

    def leave(x: Any, at: Any, count: Any, limbs: Any, counts: Any, b: Any) -> Any:
        return False

    return add if x.dtype == types.uint16 else leave


@device
def add_tile(x: Any, at: Any, count: Any, kind: Any, tile: Any, limbs: Any, counts: Any, b: Any) -> None:
    """Add ``x[at : at + count]``, of any dtype, to block ``b``."""
    end = at + count
    for i in range(at, end, STRIP):
        n = min(STRIP, end - i)
        if not _add_near(x, i, n, limbs, counts, b):
            words, start = widened(x, i, n, kind, tile)
            add_run(words, start, n, limbs, counts, b)


@device
def sum_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, limbs: Any, counts: Any, lows: Any,
    highs: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Sum blocks ``first`` to ``last``, and find their extremes.

    limbs: (blocks * LIMBS,) int64, of 32 bits each. counts: (blocks,) int64, of finite numbers.
    """
    tile = scratch(TILE, np.float32)
    for b in range(first, last):
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for o in range(outer):
            at = (o * blocks + b) * inner
            end = min(at + inner, np.uint64(len(x)))
            while at < end:
                n = min(np.uint64(TILE), end - at)
                add_tile(x, at, n, kind, tile, limbs, counts, b)
                carry(limbs, b)
                low, high = run_keys(x, at, at + n, low, high)
                at += n
        lows[b], highs[b] = low, high


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


@device
def clear_columns(totals: Any, mosts: Any, leasts: Any, width: Any) -> None:
    """Begin the sums of ``width`` columns."""
    for i in range(width):
        totals[i], mosts[i], leasts[i] = np.float64(0), np.uint32(0), np.uint32(0xFFFFFFFF)


@device
def add_row(words: Any, at: Any, width: Any, totals: Any, mosts: Any, leasts: Any) -> None:
    """Add one row of ``width`` columns to their sums; ``leasts`` are one less, so that zero is largest."""
    whole = width // HALF * HALF
    for i in range(np.uint64(0), whole, HALF):
        bits = bits_of(load_lanes(words, at + i)) & words_of(MAGNITUDE)
        store_lanes(totals, i, load_lanes(totals, i) + wide_floats(values_of(bits)))
        store_lanes(mosts, i, larger_bits(load_lanes(mosts, i), bits))
        store_lanes(leasts, i, smaller_bits(load_lanes(leasts, i), bits - words_of(np.uint32(1))))
    for i in range(whole, width):
        word = np.uint32(bits32(words[at + i]) & MAGNITUDE)
        totals[i] += np.float64(float32_of(word))
        mosts[i] = max(mosts[i], word)
        leasts[i] = min(leasts[i], np.uint32(word - np.uint32(1)))


@device
def sum_columns(
    x: Any, kind: Any, outer: Any, blocks: Any, lanes: Any, limbs: Any, counts: Any, lows: Any,
    highs: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Sum columns ``first`` to ``last``, blocks of single neighbors, and find their extremes.

    lanes: see :func:`.count.column_keys`.
    """
    tile, totals = scratch(TILE, np.float32), scratch(TILE, np.float64)
    mosts, leasts = scratch(TILE, np.uint32), scratch(TILE, np.uint32)
    start_columns(lows, highs, first, last)
    for p in range(first, last, COLUMNS):
        width = min(COLUMNS, last - p)
        for o in range(np.uint64(0), outer, ROWS):
            rows = min(ROWS, outer - o)
            clear_columns(totals, mosts, leasts, width)
            for r in range(o, o + rows):
                fetch_ahead(x, (r + FETCHED_ROWS) * blocks + p, width)
                words, start = widened(x, r * blocks + p, width, kind, tile)
                add_row(words, start, width, totals, mosts, leasts)
            for i in range(width):
                least = np.uint32(leasts[i] + np.uint32(1))
                if mosts[i] == np.uint32(0) or are_near(mosts[i], least, REACH):
                    if mosts[i] > np.uint32(0):
                        add_total(totals[i], least, limbs, p + i)
                    counts[p + i] += np.int64(rows)
                else:
                    for r in range(o, o + rows):
                        words, start = widened(x, r * blocks + p + i, np.uint64(1), kind, tile)
                        add_one(words[start], limbs, counts, p + i)
            take_columns(x, o, o + rows, blocks, lanes, lows, highs, p, p + width)
        for b in range(p, p + width):
            carry(limbs, b)
        finish_columns(blocks, lanes, lows, highs, p, p + width)
