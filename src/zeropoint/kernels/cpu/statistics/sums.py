"""Exact sums of magnitudes, in one read with the extremes.

Numbers whose exponents lie near each other have a sum that float64 holds exactly: so a piece of them is added
on float64 lanes, and only its total is added to an integer of 320 bits, in limbs. The extremes of a piece say
which numbers are near enough; those that are too small, and so would be rounded, are added one by one. A
tensor is ``outer`` times ``blocks`` runs of ``inner`` neighbors, as in :mod:`.count`.

Gain that keeps lanes and limbs: a bin of int64 for each exponent, whose sums are as exact, takes 3.5 times as
long on blocks of 32 and 3.4 times on a whole tensor (float32, one thread).
"""

from typing import Any

import numpy as np

from ..encode.block_scales import power_of
from ..machine import vector as v
from ..machine.intrinsics import bits32, by_dtype, device, inlined, prefetch_far, scratch
from ..machine.reductions import any_below, sum_of_doubles
from ..machine.team import over_rows
from ..machine.tile import FLOAT32, NOTHING, TILE, run_keys, value_of_key
from .count import FINITE, FRACTION_BITS, PANEL, unpack_runs, widened

FRACTION = np.uint64(0x7FFFFF)
MAGNITUDE = np.uint32(0x7FFFFFFF)
PIECE = 4096
"""Numbers of one sum: twice they are read, the second time from the first cache."""
SPAN = np.uint64(1 << 20)
"""Numbers after which limbs are carried."""
REACH = np.uint32(53 - 24 - 12)
"""Most exponents between the largest and the smallest of PIECE numbers of 24 bits, for a sum of 53 bits."""
REACH_OF_HALVES, REACH_OF_FOUR = np.uint32(53 - 8 - 12), np.uint32(24 - 8 - 2)
"""The same of PIECE numbers of 8 bits, and of four of them for a sum of 24 bits."""
ANY_REACH = np.uint32(255)
"""Reach of float16, of which any PIECE numbers have such a sum."""
LEAST_OVER = np.uint32(253)
"""Least exponent field of numbers of which four may have a sum that float32 does not hold."""
FOURS = np.uint64(64)
"""Numbers that are added as 16 sums of four."""
UNIT = np.uint32(127 + (127 + 23) // 2)
"""Exponent field of the root of the units that numbers with exponent field 0 would count."""
LIMBS, LIMB_BITS = np.uint64(10), np.uint64(32)
LIMB, PLACE = np.uint64(0xFFFFFFFF), np.uint64(31)
AHEAD = np.uint64(PIECE)
"""How far ahead numbers are asked for: while a piece is added, the next one comes to the second cache."""


@device
def add_units(units: Any, e: Any, limbs: Any, b: Any) -> None:
    """Add ``units`` < 2**53 of exponent field ``e`` to block ``b``."""
    position = max(e, np.uint64(1)) - np.uint64(1)
    shift, place = position & PLACE, b * LIMBS + (position >> np.uint64(5))
    low, high = (units & LIMB) << shift, (units >> LIMB_BITS) << shift
    limbs[place] += np.int64(low & LIMB)
    limbs[place + np.uint64(1)] += np.int64((low >> LIMB_BITS) + (high & LIMB))
    limbs[place + np.uint64(2)] += np.int64(high >> LIMB_BITS)


@device
def carry(limbs: Any, b: Any) -> None:
    """Carry limb overflow of block ``b``; due after 2**30 additions."""
    for place in range(b * LIMBS, b * LIMBS + LIMBS - np.uint64(1)):
        limbs[place + np.uint64(1)] += limbs[place] >> np.int64(LIMB_BITS)
        limbs[place] &= np.int64(LIMB)


@device
def add_total(total: Any, e: Any, limbs: Any, b: Any) -> None:
    """Add an exact sum, units of exponent field ``e``, to block ``b``."""
    e = max(np.uint32(e), np.uint32(1))
    half = np.uint32(e >> np.uint32(1))
    root, other = np.uint32(UNIT - half), np.uint32(UNIT - np.uint32(e - half))
    units = total * np.float64(power_of(root)) * np.float64(power_of(other))
    add_units(np.uint64(np.int64(units)), np.uint64(e), limbs, b)


@device
def add_magnitude(bits: Any, limbs: Any, b: Any) -> None:
    """Add a finite number's magnitude bits to the sum of block ``b``."""
    e = np.uint64(bits) >> FRACTION_BITS
    lead = np.uint64(1) << FRACTION_BITS if e > np.uint64(0) else np.uint64(0)
    add_units((np.uint64(bits) & FRACTION) + lead, e, limbs, b)


@device
def add_one(value: Any, limbs: Any, counts: Any, b: Any) -> None:
    """Add a number to block ``b``, unless it is not finite."""
    bits = np.uint32(bits32(value) & MAGNITUDE)
    if np.uint64(bits) >> FRACTION_BITS < FINITE:
        add_magnitude(bits, limbs, b)
        counts[b] += np.int64(1)


@inlined
def size_of(key: Any, kind: Any) -> Any:
    """Magnitude bits of a number, as float32, from its key."""
    return np.uint32(bits32(value_of_key(key, kind)) & MAGNITUDE)


@inlined
def fewer_exponents(e: Any, reach: Any) -> Any:
    """Exponent field ``reach`` below ``e``, or 0, the subnormals'."""
    return np.uint32(e - min(e, reach))


@inlined
def limit_of(e: Any, bits: Any) -> Any:
    """Bound of ``m - 1`` for magnitudes with exponent fields below ``e``.

    m: bits of a magnitude, ``bits`` of them its fraction. Zero is not among them, since it wraps to the
    largest number; where ``e`` is 0, none is.
    """
    floor = np.uint32(e << bits)
    return np.uint32(floor - min(floor, np.uint32(1)))


@inlined
def add_words(words: Any, at: Any, count: Any, far: Any, limbs: Any, b: Any) -> Any:
    """Sum finite words from ``at`` on in float64 where exact.

    Mostly: but for those below. far: exponent field of the largest, and the reach. Numbers that are too small
    for an exact sum, their neighbors in a step, and those behind the last whole step are added to block ``b``
    one by one.
    """
    one, size, total = v.words_of(np.uint32(1)), v.words_of(MAGNITUDE), v.doubles_of(np.float64(0))
    least = v.words_of(limit_of(fewer_exponents(*far), np.uint32(23)))
    whole = at + count // v.WHOLE * v.WHOLE
    for i in range(at, whole, v.WHOLE):
        prefetch_far(words, i + AHEAD)
        prefetch_far(words, i + AHEAD + v.HALF)
        u, w = v.bits_of(v.load_lanes(words, i)) & size, v.bits_of(v.load_lanes(words, i + v.HALF)) & size
        if any_below(v.smaller_bits(u - one, w - one), least):
            for n in range(i, i + v.WHOLE):
                add_magnitude(bits32(words[n]) & MAGNITUDE, limbs, b)
        else:
            total = total + (v.wide_floats(v.values_of(u)) + v.wide_floats(v.values_of(w)))
    for i in range(whole, at + count):
        add_magnitude(bits32(words[i]) & MAGNITUDE, limbs, b)
    return total


@inlined
def add_halves(x: Any, at: Any, count: Any, far: Any, limbs: Any, b: Any) -> Any:
    """Do what :func:`add_words` does on bits of bfloat16.

    Four of them, of 8 bits, that lie near each other have a sum that float32 holds, unless it overflows.
    """
    one, size, total = v.halves_of(np.uint16(1)), v.halves_of(np.uint16(0x7FFF)), v.doubles_of(np.float64(0))
    half, upper = v.words_of(np.uint32(16)), v.words_of(np.uint32(0x7FFF0000))
    near = fewer_exponents(far[0], REACH_OF_FOUR) if far[0] < LEAST_OVER else np.uint32(FINITE)
    of_four = v.halves_of(np.uint16(limit_of(near, np.uint32(7))))
    least = v.halves_of(np.uint16(limit_of(fewer_exponents(*far), np.uint32(7))))
    whole = at + count // FOURS * FOURS
    for i in range(at, whole, FOURS):
        prefetch_far(x, i + AHEAD)
        prefetch_far(x, i + AHEAD + v.WHOLE)
        u, w = v.load_lanes(x, i) & size, v.load_lanes(x, i + v.STEP) & size
        p, q, found = v.pairs_of(u), v.pairs_of(w), v.smaller_bits(u - one, w - one)
        first, second = v.values_of(p << half), v.values_of(p & upper)
        third, fourth = v.values_of(q << half), v.values_of(q & upper)
        if not any_below(found, of_four):
            total = total + v.wide_floats((first + second) + (third + fourth))
        elif not any_below(found, least):
            total = total + (v.wide_floats(first) + v.wide_floats(second))
            total = total + (v.wide_floats(third) + v.wide_floats(fourth))
        else:
            for n in range(i, i + FOURS):
                add_magnitude((np.uint32(x[n]) << np.uint32(16)) & MAGNITUDE, limbs, b)
    for i in range(whole, at + count):
        add_magnitude((np.uint32(x[i]) << np.uint32(16)) & MAGNITUDE, limbs, b)
    return total


@inlined
def _as_halves(x: Any, at: Any, count: Any, kind: Any, tile: Any) -> Any:
    """Array and place to add from, and reach; bfloat16 stay."""
    return x, at, REACH_OF_HALVES


@inlined
def _as_words(x: Any, at: Any, count: Any, kind: Any, tile: Any) -> Any:
    words, start = widened(x, at, count, kind, tile)
    return words, start, REACH if kind == FLOAT32 else ANY_REACH


_as_added = by_dtype(uint16=_as_halves, float32=_as_words, int16=_as_words)
_add_numbers = by_dtype(uint16=add_halves, float32=add_words)


@device
def add_piece(x: Any, at: Any, count: Any, largest: Any, kind: Any, tile: Any, sums: Any, b: Any) -> None:
    """Add numbers from ``x[at]``, at most a piece, to block ``b``.

    largest: bits of the largest magnitude. sums: limbs, and counts of finite numbers.
    """
    limbs, counts = sums
    e = np.uint32(largest >> np.uint32(23))
    if np.uint64(e) < FINITE:
        source, start, reach = _as_added(x, at, count, kind, tile)
        total = sum_of_doubles(_add_numbers(source, start, count, (e, reach), limbs, b))
        if total > np.float64(0):
            add_total(total, fewer_exponents(e, REACH), limbs, b)
        counts[b] += np.int64(count)
    else:
        words, start = widened(x, at, count, kind, tile)
        for i in range(start, start + count):
            add_one(words[i], limbs, counts, b)


@over_rows
def sum_runs(
    x: Any, runs: Any, limbs: Any, counts: Any, lows: Any, highs: Any, first: Any, last: Any
) -> None:
    """Sum blocks ``first`` to ``last``, and find their extremes.

    runs: packed :class:`.count.RunShape`. limbs: (blocks * LIMBS,) int64, of 32 bits each. counts: (blocks,)
    int64, of finite numbers.
    """
    shape = unpack_runs(runs)
    kind, outer, blocks, inner = shape.kind, shape.outer, shape.blocks, shape.inner
    tile = scratch(PIECE, np.float32)
    for b in range(first, last):
        lows[b], highs[b] = NOTHING
        for o in range(outer):
            begin = (o * blocks + b) * inner
            end = min(begin + inner, np.uint64(len(x)))
            for span in range(begin, end, SPAN):
                stop = min(span + SPAN, end)
                for at in range(span, stop, np.uint64(PIECE)):
                    n = min(np.uint64(PIECE), stop - at)
                    low, high = run_keys(x, at, at + n, *NOTHING)
                    lows[b], highs[b] = min(lows[b], low), max(highs[b], high)
                    largest = max(size_of(low, kind), size_of(high, kind))
                    add_piece(x, at, n, largest, kind, tile, (limbs, counts), b)
                carry(limbs, b)


@over_rows
def sum_short_runs(x: Any, runs: Any, limbs: Any, counts: Any, first: Any, last: Any) -> None:
    """Sum blocks of few neighbors, in the order of memory."""
    shape = unpack_runs(runs)
    kind, outer, blocks, inner = shape.kind, shape.outer, shape.blocks, shape.inner
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
