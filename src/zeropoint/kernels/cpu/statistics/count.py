"""One-read statistics of data: block extremes and bin counts.

A tensor is ``outer`` times ``blocks`` runs of ``inner`` neighbors; run ``(o, b)`` belongs to block ``b``. All
results are merged by minimum, maximum or integer addition, so that threads never change them. Counting is
bound by one load, addition and store for each number, on counters that stay in the cache; LANES neighbors
count into counters of their own, so that a number that repeats does not wait for its predecessor.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import UInt8, UInt64
from ..machine.intrinsics import LINE, bits32, by_dtype, device, inlined, load64, prefetch_far, scratch
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.tile import NOTHING, TILE, bits_at, load, ordered, run_keys
from ..machine.vector import larger_bits, larger_signed, smaller_bits, store_lanes

LANES, LANE_BITS = np.uint64(4), np.uint64(2)
FRACTION_BITS = np.uint64(23)
FINITE = np.uint64(255)
"""Exponent fields of finite numbers."""
COUNTED = np.uint64(1 << 31)
"""Numbers after which counters are emptied at the latest."""
ENDS = np.uint64(3)
"""Outermost numbers that are kept of each column."""
ROWS = np.uint64(8)
"""Rows that are taken together, twice four."""
PANEL = np.uint64(64)
"""Neighbors of different blocks that are taken together: whole cache lines, counters that fit a cache."""


class RunShape(NamedTuple):
    """Runs of a tensor; kind: dtype; shift: mantissa bits bins leave out."""

    kind: UInt8
    outer: UInt64
    blocks: UInt64
    inner: UInt64
    shift: UInt64 = 0
    slots: UInt64 = 0


unpack_runs = unpacker(RunShape)


@inlined
def _as_it_is(x: Any, at: Any, count: Any, kind: Any, tile: Any) -> Any:
    """Widen ``x[at : at + count]`` to float32: array, and first place."""
    return x, at


@inlined
def _as_tile(x: Any, at: Any, count: Any, kind: Any, tile: Any) -> Any:
    load(x, at, count, kind, tile)
    return tile, np.uint64(0)


widened = by_dtype(float32=_as_it_is, uint16=_as_tile, int16=_as_tile)


@over_rows
def extreme_keys(x: Any, runs: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Smallest and largest keys of blocks, int32; NaN and Inf are outermost."""
    shape = unpack_runs(runs)
    outer, blocks, inner = shape.outer, shape.blocks, shape.inner
    for b in range(first, last):
        low, high = NOTHING
        for o in range(outer):
            at = (o * blocks + b) * inner
            low, high = run_keys(x, at, min(at + inner, np.uint64(len(x))), low, high)
        lows[b], highs[b] = low, high


@inlined
def ends_of_rows(x: Any, at: Any, blocks: Any) -> Any:
    """Find the ends of a cache line's columns in four rows."""
    third = at + blocks + blocks
    p, q = bits_at(x, at), bits_at(x, at + blocks)
    r, s = bits_at(x, third), bits_at(x, third + blocks)
    return (
        larger_bits(larger_bits(p, q), larger_bits(r, s)),
        smaller_bits(smaller_bits(p, q), smaller_bits(r, s)),
        larger_signed(larger_signed(p, q), larger_signed(r, s)),
    )


@device
def take_rows(x: Any, at: Any, blocks: Any, lanes: Any, b: Any) -> None:
    """Widen the ends of a cache line's columns by ROWS rows."""
    for row in range(ROWS):
        prefetch_far(x, at + (ROWS + row) * blocks)
    most, least, top = ends_of_rows(x, at, blocks)
    also = ends_of_rows(x, at + np.uint64(4) * blocks, blocks)
    most, least, top = larger_bits(most, also[0]), smaller_bits(least, also[1]), larger_signed(top, also[2])
    second = b + blocks
    third = second + blocks
    store_lanes(lanes, b, larger_bits(bits_at(lanes, b), most))
    store_lanes(lanes, second, smaller_bits(bits_at(lanes, second), least))
    store_lanes(lanes, third, larger_signed(bits_at(lanes, third), top))


@device
def take_keys(x: Any, at: Any, first: Any, last: Any, lows: Any, highs: Any) -> None:
    """Widen the keys of blocks ``first`` to ``last`` by one row."""
    for b in range(first, last):
        key = np.int32(ordered(x[at + b]))
        lows[b], highs[b] = min(lows[b], key), max(highs[b], key)


@device
def start_columns(lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Set the keys of columns ``first`` to ``last`` to empty ranges."""
    for b in range(first, last):
        lows[b], highs[b] = NOTHING


@device
def take_columns(x: Any, rows: Any, blocks: Any, lanes: Any, ends: Any, first: Any, last: Any) -> None:
    """Widen columns' lows and highs by rows between two ``rows``."""
    (begin, end), (lows, highs) = rows, ends
    step = np.uint64(LINE // x.itemsize)
    whole = first + (last - first) // step * step
    done = begin + (end - begin) // ROWS * ROWS
    for o in range(begin, done, ROWS):
        for b in range(first, whole, step):
            take_rows(x, o * blocks + b, blocks, lanes, b)
        for at in range(o, o + ROWS):
            take_keys(x, at * blocks, whole, last, lows, highs)
    for o in range(done, end):
        take_keys(x, o * blocks, first, last, lows, highs)


@over_rows
def column_keys(x: Any, runs: Any, lanes: Any, lows: Any, highs: Any, first: Any, last: Any) -> None:
    """Keys of columns, blocks of single neighbors: some cache lines.

    lanes: (ENDS * blocks,) of x's dtype, the first row of x that often.
    """
    shape, step = unpack_runs(runs), np.uint64(LINE // x.itemsize)
    begin, end, blocks = first * step, min(last * step, shape.blocks), shape.blocks
    start_columns(lows, highs, begin, end)
    take_columns(x, (np.uint64(0), shape.outer), blocks, lanes, (lows, highs), begin, end)
    for copy in range(ENDS):
        take_keys(lanes, copy * blocks, begin, end, lows, highs)


@device
def count_words(words: Any, at: Any, count: Any, shift: Any, table: Any) -> None:
    """Count ``words[at : at + count]`` in ``table``, LANES counters a key."""
    low, high = shift - LANE_BITS, shift - LANE_BITS + np.uint64(32)
    keys = np.uint64(len(table)) - LANES
    end = at + count // LANES * LANES
    for i in range(at, end, LANES):
        two = load64(words, i)
        table[(two >> low) & keys] += np.uint32(1)
        table[((two >> high) & keys) + np.uint64(1)] += np.uint32(1)
        two = load64(words, i + np.uint64(2))
        table[((two >> low) & keys) + np.uint64(2)] += np.uint32(1)
        table[((two >> high) & keys) + np.uint64(3)] += np.uint32(1)
    for i in range(end, at + count):
        table[(np.uint64(bits32(words[i])) >> low) & keys] += np.uint32(1)


@device
def move_counts(table: Any, bins: Any, counts: Any, at: Any) -> None:
    """Add counters of finite numbers to ``counts`` and clear all counters.

    They are ``counts[at : at + 2 * bins]``.
    """
    keys = np.uint64(len(table)) // LANES
    half = keys // np.uint64(2)
    for k in range(keys):
        j = k * LANES
        if (load64(table, j) | load64(table, j + np.uint64(2))) != np.uint64(0):
            total = np.uint64(0)
            for lane in range(LANES):
                total += np.uint64(table[j + lane])
                table[j + lane] = np.uint32(0)
            negative = np.uint64(k >= half)
            place = k - half * negative
            if place < bins:
                counts[at + bins * negative + place] += np.int64(total)


@device
def _count_blocks(x: Any, runs: Any, table: Any, counts: Any, ends: Any, first: Any, last: Any) -> None:
    """Count blocks ``first`` to ``last`` in bins, and find their extremes.

    runs: :class:`RunShape`. table: (2**(32 - shift) * LANES,) uint32, zero before and after. counts:
    (blocks * 2 * bins,) int64. ends: keys, smallest and largest.
    """
    (lows, highs), kind, outer, blocks = ends, runs.kind, runs.outer, runs.blocks
    inner, shift = runs.inner, runs.shift
    tile = scratch(TILE, np.float32)
    bins = FINITE << (FRACTION_BITS - shift)
    for b in range(first, last):
        low, high = NOTHING
        place, counted = b * np.uint64(2) * bins, np.uint64(0)
        for o in range(outer):
            at = (o * blocks + b) * inner
            end = min(at + inner, np.uint64(len(x)))
            while at < end:
                n = min(np.uint64(TILE), end - at)
                words, start = widened(x, at, n, kind, tile)
                count_words(words, start, n, shift, table)
                low, high = run_keys(x, at, at + n, low, high)
                at += n
                counted += n
                if counted >= COUNTED:
                    move_counts(table, bins, counts, place)
                    counted = np.uint64(0)
        move_counts(table, bins, counts, place)
        lows[b], highs[b] = low, high


@over_rows
def count_runs(
    x: Any, runs: Any, tables: Any, counts: Any, lows: Any, highs: Any, first: Any, last: Any
) -> None:
    """Count long blocks in bins. Rows are slots: a table, blocks."""
    shape, one = unpack_runs(runs), np.uint64(1)
    blocks, slots = shape.blocks, shape.slots
    size = np.uint64(len(tables)) // slots
    for slot in range(first, last):
        table = tables[slot * size : (slot + one) * size]
        begin, end = blocks * slot // slots, blocks * (slot + one) // slots
        _count_blocks(x, shape, table, counts, (lows, highs), begin, end)


@device
def count_one(value: Any, shift: Any, bins: Any, counts: Any, b: Any) -> None:
    """Count a finite number in the bins of block ``b``."""
    bits = bits32(value)
    place = (np.uint64(bits) & np.uint64(0x7FFFFFFF)) >> shift
    if place < bins:
        counts[(b * np.uint64(2) + (np.uint64(bits) >> np.uint64(31))) * bins + place] += np.int64(1)


@over_rows
def count_short_runs(x: Any, runs: Any, counts: Any, first: Any, last: Any) -> None:
    """Count blocks that are smaller than their bins, directly."""
    shape = unpack_runs(runs)
    kind, outer, blocks, inner, shift = shape.kind, shape.outer, shape.blocks, shape.inner, shape.shift
    tile = scratch(TILE, np.float32)
    bins = FINITE << (FRACTION_BITS - shift)
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
                    count_one(words[i], shift, bins, counts, b)
                    left -= np.uint64(1)
                    if left == np.uint64(0):
                        b, left = b + np.uint64(1), inner
                at += n
