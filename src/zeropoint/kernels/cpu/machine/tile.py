"""Tiles: loads and widening, block extremes, block values spread over elements.

A tile is TILE elements, widened to float32. Every stage is one plain loop over a tile, because short loops
over scratch that stays in L1 vectorize reliably, compose freely, and cost less than the memory traffic they
hide. Loop indices are unsigned: a signed index brings Numba's wrap-around branch, which stops the vectorizer.
"""

from typing import Any

import numpy as np

from .intrinsics import (
    LINE,
    amax16,
    amax32,
    bits32,
    by_dtype,
    device,
    float32_of,
    inlined,
    prefetch,
    widen_half,
)
from .reductions import largest_lane, smallest_lane
from .vector import (
    STEP,
    WHOLE,
    bits_of,
    halves_of,
    larger_bits,
    larger_signed,
    load_lanes,
    smaller_bits,
    words_of,
)

SPREAD = np.uint64(16)
"""Elements that are spread at once; divides the group sizes that occur in practice."""
TILE = 2048
"""Elements; float32 tile, spread scales and codes take 18 KiB, less than every L1 data cache."""
FEW = 1 << 15
"""Most values of rows that are taken together: 128 KiB of float32 stay in the cache of a core."""
ALONE = np.uint64(256)
"""Elements of a block from which it pays to take it alone."""
NOT_FINITE = np.uint32(0x7F800000)
FETCHED = np.uint64(32)
"""Cache lines that are asked for ahead of time."""
NOTHING = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
"""Lowest and highest key of no numbers."""
BFLOAT16, FLOAT16, FLOAT32 = np.uint8(0), np.uint8(1), np.uint8(2)
_TWO, _FOUR, _EIGHT = np.uint64(2), np.uint64(4), np.uint64(8)


@device
def _copy(source: Any, start: Any, count: Any, kind: Any, tile: Any) -> None:
    """Widen ``source[start : start + count]`` exactly to ``tile``; kind: of halves."""
    for i in range(count):
        tile[i] = source[start + i]


@device
def _widen(source: Any, start: Any, count: Any, kind: Any, tile: Any) -> None:
    if kind == BFLOAT16:
        for i in range(count):
            tile[i] = float32_of(np.uint32(np.uint16(source[start + i])) << np.uint32(16))
    else:
        for i in range(count):
            tile[i] = widen_half(np.uint16(source[start + i]))


load = by_dtype(float32=_copy, uint16=_widen, int16=_widen)


@device
def clear(tile: Any) -> None:
    """Set all of a tile to zero."""
    for i in range(np.uint64(TILE)):
        tile[i] = np.float32(0)


@device
def fetch_ahead(source: Any, start: Any, count: Any) -> None:
    """Prefetch ``count`` elements of ``source`` from ``start``, one request a cache line."""
    step = np.uint64(LINE // source.itemsize)
    for i in range(np.uint64(0), count, step):
        prefetch(source, start + i)


@inlined
def _word_magnitude(x: Any) -> Any:
    """Clear the sign of float bits: uint32 or uint16, ordered as values."""
    return np.uint32(bits32(x) & np.uint32(0x7FFFFFFF))


@inlined
def _half_magnitude(x: Any) -> Any:
    return np.uint16(np.uint16(x) & np.uint16(0x7FFF))


magnitude = by_dtype(float32=_word_magnitude, uint16=_half_magnitude, int16=_half_magnitude)


@device
def widen_magnitude(bits: Any, kind: Any) -> Any:
    """Widen magnitude bits of the source to uint32 bits of float32."""
    if kind == FLOAT32:
        return np.uint32(bits)
    if kind == BFLOAT16:
        return np.uint32(np.uint32(bits) << np.uint32(16))
    return bits32(widen_half(np.uint16(bits)))


@inlined
def _word_magnitudes(x: Any, at: Any) -> Any:
    """Load magnitude bits of 32 neighbors: halves, or larger of two words."""
    first = bits_of(load_lanes(x, at)) & words_of(np.uint32(0x7FFFFFFF))
    second = bits_of(load_lanes(x, at + np.uint64(STEP // 2))) & words_of(np.uint32(0x7FFFFFFF))
    return larger_bits(first, second)


@inlined
def _half_magnitudes(x: Any, at: Any) -> Any:
    return load_lanes(x, at) & halves_of(np.uint16(0x7FFF))


magnitudes_at = by_dtype(float32=_word_magnitudes, uint16=_half_magnitudes, int16=_half_magnitudes)


@inlined
def run_amax(source: Any, at: Any, end: Any) -> Any:
    """Largest magnitude bits of ``source[at:end]``, on the source's own lanes."""
    m = np.uint32(0)
    if at + np.uint64(STEP) <= end:
        most = magnitudes_at(source, at)
        at += np.uint64(STEP)
        while at + np.uint64(STEP) <= end:
            most = larger_bits(most, magnitudes_at(source, at))
            at += np.uint64(STEP)
        m = np.uint32(largest_lane(most))
    while at < end:
        m = max(m, np.uint32(magnitude(source[at])))
        at += np.uint64(1)
    return m


@inlined
def _few_amax(source: Any, start: Any, blocks: Any, few: Any, amax: Any) -> None:
    """Magnitude bits of blocks of ``few`` elements, a constant to unroll."""
    for b in range(blocks):
        most = magnitude(source[start + b * few])
        for i in range(np.uint64(1), few):
            most = max(most, magnitude(source[start + b * few + i]))
        amax[b] = np.uint32(most)


@device
def block_amax(source: Any, start: Any, count: Any, block: Any, kind: Any, amax: Any) -> None:
    """Largest magnitude of each block of ``block`` elements, as float32 bits.

    NaN and Inf compare largest. Blocks of 2 to 8 are lanes, of 16 and 32 vectors; others are runs of vectors.
    """
    blocks = (count + block - np.uint64(1)) // block
    full = count // block
    if block == _TWO:
        _few_amax(source, start, full, _TWO, amax)
    elif block == _FOUR:
        _few_amax(source, start, full, _FOUR, amax)
    elif block == _EIGHT:
        _few_amax(source, start, full, _EIGHT, amax)
    elif block == np.uint64(16):
        for b in range(full):
            amax[b] = np.uint32(amax16(source, start + b * block))
    elif block == np.uint64(32):
        for b in range(full):
            amax[b] = np.uint32(amax32(source, start + b * block))
    else:
        full = np.uint64(0)
    for b in range(full, blocks):
        at = start + b * block
        amax[b] = run_amax(source, at, min(at + block, start + count))
    for b in range(blocks):
        amax[b] = widen_magnitude(amax[b], kind)


@inlined
def _word_key(x: Any) -> Any:
    """Integer that orders as a float32, or 16-bit float bits, does."""
    k = np.int32(bits32(x))
    return k if k >= np.int32(0) else np.int32(k ^ np.int32(0x7FFFFFFF))


@inlined
def _half_key(x: Any) -> Any:
    k = np.int16(x)
    return np.int32(k) if k >= np.int16(0) else np.int32(np.int16(k ^ np.int16(0x7FFF)))


ordered = by_dtype(float32=_word_key, uint16=_half_key, int16=_half_key)


@inlined
def _words_at(x: Any, at: Any) -> Any:
    """Load a cache line as integers: 16 words, or 32 halves."""
    return bits_of(load_lanes(x, at))


@inlined
def _halves_at(x: Any, at: Any) -> Any:
    return load_lanes(x, at)


@inlined
def _no_halves(x: Any, at: Any) -> Any:
    return halves_of(np.uint16(0))


bits_at = by_dtype(float32=_words_at, uint16=_halves_at, int16=_halves_at)
halves_at = by_dtype(float32=_no_halves, uint16=_halves_at, int16=_halves_at)
"""A step of 16-bit floats; others never come there."""


@inlined
def _ends_of_words(x: Any, most: Any, least: Any, top: Any) -> Any:
    """Outermost lanes: largest and smallest without sign, largest with it."""
    sign = np.uint32(0x80000000)
    greatest = np.uint32(largest_lane(top ^ words_of(sign)) ^ sign)
    return float32_of(largest_lane(most)), float32_of(smallest_lane(least)), float32_of(greatest)


@inlined
def _ends_of_halves(x: Any, most: Any, least: Any, top: Any) -> Any:
    sign = np.uint16(0x8000)
    greatest = np.uint16(largest_lane(top ^ halves_of(sign)) ^ sign)
    return largest_lane(most), smallest_lane(least), greatest


_ends = by_dtype(float32=_ends_of_words, uint16=_ends_of_halves, int16=_ends_of_halves)


@device
def run_keys(x: Any, at: Any, end: Any, low: Any, high: Any) -> Any:
    """Return ``low`` and ``high`` widened to the keys of ``x[at:end]``.

    Without sign, the largest bits are the lowest negative number, if there is one, and the smallest the
    lowest positive one, else the highest number; with sign, the largest are the highest positive one. So no
    lane has to be converted to a key.
    """
    step = np.uint64(LINE // x.itemsize)
    ahead = step * FETCHED
    if at + step <= end:
        first = bits_at(x, at)
        most, least, top = first, first, first
        at += step
        while at + step <= end:
            prefetch(x, at + ahead)
            bits = bits_at(x, at)
            most, least, top = larger_bits(most, bits), smaller_bits(least, bits), larger_signed(top, bits)
            at += step
        for found in _ends(x, most, least, top):
            key = np.int32(ordered(found))
            low, high = min(low, key), max(high, key)
    while at < end:
        key = np.int32(ordered(x[at]))
        low, high = min(low, key), max(high, key)
        at += np.uint64(1)
    return low, high


@device
def value_of_key(key: Any, kind: Any) -> Any:
    """Return the float32 whose source has the given ordering integer."""
    if kind == FLOAT32:
        k = key if key >= np.int32(0) else np.int32(key ^ np.int32(0x7FFFFFFF))
        return float32_of(np.uint32(k))
    half = key if key >= np.int32(0) else np.int32(key ^ np.int32(0x7FFF))
    if kind == BFLOAT16:
        return float32_of(np.uint32(np.uint32(np.uint16(half)) << np.uint32(16)))
    return widen_half(np.uint16(half))


@device
def run_extremes(source: Any, at: Any, end: Any, kind: Any) -> Any:
    """Extremes of ``source[at:end]`` as float32; NaN counts by its bits."""
    low, high = run_keys(source, at, end, *NOTHING)
    return value_of_key(low, kind), value_of_key(high, kind)


@inlined
def _spread_few(values: Any, blocks: Any, few: Any, out: Any) -> None:
    """Repeat values over blocks of ``few`` elements, a constant to unroll."""
    for b in range(blocks):
        for i in range(few):
            out[b * few + i] = values[b]


@device
def spread(values: Any, count: Any, block: Any, out: Any) -> None:
    """Repeat ``values[b]`` over block ``b``: later stages are one long loop."""
    full = count // block
    if block == _TWO:
        _spread_few(values, full, _TWO, out)
    elif block == _FOUR:
        _spread_few(values, full, _FOUR, out)
    elif block == _EIGHT:
        _spread_few(values, full, _EIGHT, out)
    elif block % SPREAD == 0:
        units = block // SPREAD
        for b in range(full):
            v = values[b]
            for u in range(units):
                base = b * block + u * SPREAD
                for i in range(SPREAD):
                    out[base + i] = v
    else:
        for b in range(full):
            v = values[b]
            for i in range(b * block, (b + np.uint64(1)) * block):
                out[i] = v
    for i in range(full * block, count):
        out[i] = values[full]


@device
def factor_shift(block: Any, count: Any) -> Any:
    """Find n with element i in block ``i >> n``, else 0.

    Blocks are powers of two of at least half a step, or one block is all there is.
    """
    if block >= count:
        return np.uint64(63)
    n = np.uint64(4)
    while (np.uint64(1) << n) < block:
        n += np.uint64(1)
    return n if (np.uint64(1) << n) == block else np.uint64(0)


@device
def factor_cut(block: Any, span: Any) -> Any:
    """Shift of :func:`factor_shift`, and elements of ``span`` for which it holds.

    Whole blocks of any number of whole steps are taken one by one, where they are not short.
    """
    shift, whole = factor_shift(block, span), block % WHOLE == np.uint64(0) and span % block == np.uint64(0)
    if shift == np.uint64(0) and whole and block >= ALONE:
        return factor_shift(block, block), block
    return shift, np.uint64(TILE)
