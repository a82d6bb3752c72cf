"""Extremes of 16 blocks at once, as integers that order like floats.

Gain that keeps it, with products in place of quotients (:mod:`.chained_steps`): 1.5 times the speed of q4_k.
"""

from typing import Any

import numpy as np

from ..machine import vector as v
from ..machine.intrinsics import by_dtype, device, inlined
from ..machine.reductions import (
    interleaved_pairs,
    larger_of_2,
    larger_of_4,
    larger_of_8,
    larger_of_16,
    smaller_of_2,
    smaller_of_4,
    smaller_of_8,
    smaller_of_16,
)
from ..machine.tile import fetch_ahead

GROUP = np.uint64(16)
"""Blocks per group."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@inlined
def keys_of(values: Any) -> Any:
    """Floats as signed integers that order like them; its own inverse."""
    bits = v.bits_of(values)
    return bits ^ (v.shift_signed(bits, v.words_of(np.uint32(31))) & v.words_of(_MAGNITUDE))


@inlined
def half_keys(bits: Any) -> Any:
    """16-bit floats as signed integers that order like them; own inverse."""
    return bits ^ (v.shift_signed(bits, v.halves_of(np.uint16(15))) & v.halves_of(np.uint16(0x7FFF)))


@inlined
def _ends_of_floats(x: Any, at: Any) -> Any:
    """Smallest and largest keys of a step per lane, of floats' width."""
    a, b = keys_of(v.load_lanes(x, at)), keys_of(v.load_lanes(x, at + v.HALF))
    return v.smaller_signed(a, b), v.larger_signed(a, b)


@inlined
def _keys_of_halves(x: Any, at: Any) -> Any:
    keys = half_keys(v.load_lanes(x, at))
    return keys, keys


_ends_of_step = by_dtype(float32=_ends_of_floats, uint16=_keys_of_halves, int16=_keys_of_halves)


@inlined
def _ends_of_1(x: Any, at: Any, block: Any) -> Any:
    """Smallest and largest keys per lane over a block's steps."""
    low, high = _ends_of_step(x, at)
    for i in range(at + v.WHOLE, at + block, v.WHOLE):
        next_low, next_high = _ends_of_step(x, i)
        low, high = v.smaller_signed(low, next_low), v.larger_signed(high, next_high)
    return low, high


@inlined
def _ends_of_two_vectors(x: Any, at: Any) -> Any:
    """Smallest and largest keys of two 16-element blocks, interleaved."""
    a, b = keys_of(v.load_lanes(x, at)), keys_of(v.load_lanes(x, at + v.HALF))
    return smaller_of_2(a, b), larger_of_2(a, b)


@inlined
def _keys_of_pairs(x: Any, at: Any) -> Any:
    keys = interleaved_pairs(half_keys(v.load_lanes(x, at)))
    return keys, keys


_ends_of_halves = by_dtype(float32=_ends_of_two_vectors, uint16=_keys_of_pairs, int16=_keys_of_pairs)


@inlined
def _ends_of_2(x: Any, at: Any, block: Any) -> Any:
    if block == v.HALF:
        return _ends_of_halves(x, at)
    low, high = _ends_of_1(x, at, block)
    next_low, next_high = _ends_of_1(x, at + block, block)
    return smaller_of_2(low, next_low), larger_of_2(high, next_high)


@inlined
def _ends_of_4(x: Any, at: Any, block: Any) -> Any:
    low, high = _ends_of_2(x, at, block)
    next_low, next_high = _ends_of_2(x, at + np.uint64(2) * block, block)
    return smaller_of_4(low, next_low), larger_of_4(high, next_high)


@inlined
def _ends_of_8(x: Any, at: Any, block: Any) -> Any:
    low, high = _ends_of_4(x, at, block)
    next_low, next_high = _ends_of_4(x, at + np.uint64(4) * block, block)
    return smaller_of_8(low, next_low), larger_of_8(high, next_high)


@inlined
def can_group(block: Any) -> Any:
    """Return whether :func:`group_extremes` knows the blocks."""
    return block == v.HALF or block % v.WHOLE == np.uint64(0)


@inlined
def _halves_of_keys(low: Any, high: Any) -> Any:
    """16-bit floats of 16 blocks' keys, paired per block: lows, highs."""
    half = v.words_of(np.uint32(16))
    least, most = v.pairs_of(low), v.pairs_of(high)
    least = v.smaller_signed(v.shift_signed(least, half), v.shift_signed(least << half, half))
    most = v.larger_signed(v.shift_signed(most, half), v.shift_signed(most << half, half))
    return half_keys(v.low_halves(least, most))


@inlined
def _floats_of_keys(x: Any, low: Any, high: Any) -> Any:
    """Floats of keys of 16 blocks; pairs of halves share a block."""
    return v.values_of(keys_of(v.values_of(low))), v.values_of(keys_of(v.values_of(high)))


@inlined
def _bfloat16_of_keys(x: Any, low: Any, high: Any) -> Any:
    halves = _halves_of_keys(low, high)
    return v.first_bfloat16(halves), v.second_bfloat16(halves)


@inlined
def _float16_of_keys(x: Any, low: Any, high: Any) -> Any:
    halves = _halves_of_keys(low, high)
    return v.first_float16(halves), v.second_float16(halves)


_numbers_of = by_dtype(float32=_floats_of_keys, uint16=_bfloat16_of_keys, int16=_float16_of_keys)


@inlined
def _extremes_of_groups(x: Any, at: Any, blocks: Any, block: Any, lows: Any, highs: Any) -> None:
    for b in range(np.uint64(0), blocks, GROUP):
        begin = at + b * block
        fetch_ahead(x, begin + GROUP * block, GROUP * block)
        low, high = _ends_of_8(x, begin, block)
        next_low, next_high = _ends_of_8(x, begin + np.uint64(8) * block, block)
        least, most = _numbers_of(x, smaller_of_16(low, next_low), larger_of_16(high, next_high))
        v.store_lanes(lows, b, least)
        v.store_lanes(highs, b, most)


@device
def group_extremes(x: Any, at: Any, blocks: Any, block: Any, lows: Any, highs: Any) -> None:
    """Extremes of ``blocks`` blocks, whole groups; -0 is less than 0."""
    if block == v.HALF:  # a constant, as places of vectors otherwise are as many variables
        _extremes_of_groups(x, at, blocks, v.HALF, lows, highs)
    elif block == v.WHOLE:
        _extremes_of_groups(x, at, blocks, v.WHOLE, lows, highs)
    else:
        _extremes_of_groups(x, at, blocks, block, lows, highs)
