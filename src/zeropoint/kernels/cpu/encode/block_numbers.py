"""Extremes of blocks, and the scales and offsets they ask for."""

from typing import Any

import numpy as np

from ..machine.descriptor import FROM_SIGNED, OFFSET_OF_ROUNDED, OFFSET_TRUNCATED
from ..machine.intrinsics import device, float32_of, inlined
from ..machine.reductions import any_below
from ..machine.tile import fetch_ahead, load, ordered
from ..machine.vector import above, bits_of, load_lanes, store_lanes, values_of, words_of
from .elements import INFINITE
from .group_extremes import GROUP, can_group, group_extremes
from .rows import tile_span

ZERO, ONE, LANES = np.uint64(0), np.uint64(1), np.uint64(16)


@inlined
def float_of_key(key: Any) -> Any:
    """Float of an integer that orders like it."""
    bits = np.uint32(key)
    return float32_of(bits if bits < np.uint32(0x80000000) else np.uint32(bits ^ np.uint32(0x7FFFFFFF)))


@device
def _tile_extremes(tile: Any, blocks: Any, block: Any, lows: Any, highs: Any) -> None:
    """Extremes of each block of a tile; -0 is less than 0."""
    for b in range(blocks):
        least = most = np.int32(ordered(tile[b * block]))
        for i in range(b * block + ONE, (b + ONE) * block):
            number = np.int32(ordered(tile[i]))
            least, most = min(least, number), max(most, number)
        lows[b], highs[b] = float_of_key(least), float_of_key(most)


@device
def first_of(numbers: Any, magnitude: Any) -> Any:
    """Return the first number with the given magnitude, which must occur."""
    i = ZERO
    while abs(numbers[i]) != magnitude:
        i += ONE
    return numbers[i]


@device
def _signed_numbers(
    x: Any, at: Any, blocks: Any, layout: Any, lows: Any, highs: Any, tile: Any, numbers: Any
) -> None:
    """Find the number of largest magnitude of each block, first of equals."""
    magnitude = words_of(np.uint32(0x7FFFFFFF))
    for first in range(ZERO, blocks, LANES):
        low, high = bits_of(load_lanes(lows, first)), bits_of(load_lanes(highs, first))
        a, b = low & magnitude, high & magnitude
        upper = above(values_of(b), values_of(a))
        store_lanes(numbers, first, values_of(low ^ ((low ^ high) & upper)))
        if any_below(a ^ b, words_of(np.uint32(1))):
            for n in range(first, min(first + LANES, blocks)):
                if abs(lows[n]) == abs(highs[n]):
                    load(x, at + n * layout.block, layout.block, layout.kind, tile)
                    numbers[n] = first_of(tile, abs(highs[n]))


@device
def range_numbers(lows: Any, highs: Any, blocks: Any, chain: Any, numbers: Any) -> None:
    """Write scales from ranges, which are widened where that is asked for.

    A quotient of two float32 in double precision, rounded, is their float32 quotient.
    """
    steps = np.float32(chain.steps)
    again = np.uint32(np.float64(steps) != chain.steps)
    for b in range(blocks):
        low, high = lows[b], highs[b]  # zeros keep their signs
        low = np.float32(0) if chain.under_zero and low > np.float32(0) else low
        high = np.float32(0) if chain.zeroed and high < np.float32(0) else high
        width = high - low
        numbers[b] = width / steps
        lows[b], highs[b] = low, high
        again |= np.uint32(1) if width == INFINITE else np.uint32(0)
    for b in range(blocks if again > np.uint32(0) else ZERO):
        width = highs[b] - lows[b]
        halves = highs[b] / steps - lows[b] / steps  # the width of nearly all of float32 overflows
        numbers[b] = halves if width == INFINITE else np.float32(np.float64(width) / chain.steps)


@device
def edge_numbers(lows: Any, highs: Any, blocks: Any, chain: Any, numbers: Any) -> None:
    """Scales by rule edge, and numbers of the smallest code in ``lows``."""
    steps = np.float32(chain.steps)
    for b in range(blocks):
        low, high = lows[b], highs[b]
        width = high - low
        step = high / steps - low / steps if width == INFINITE else width / steps
        step = max(chain.quiet if width == np.float32(0) else step, chain.step)
        edge = low if abs(low) > abs(high) else high
        step = step if abs(low) > abs(high) else -step
        codes = np.rint(edge / step)
        lost = codes == np.float32(0)
        numbers[b] = step if lost else edge / codes
        lows[b] = np.float32(0) if lost else edge


@device
def zero_points(lows: Any, scales: Any, ideal: Any, blocks: Any, element: Any, rule: Any, zeros: Any) -> None:
    """Zero points; of lost scales the code of zero, or the nearest."""
    home = max(element.low, np.float32(0))
    for b in range(blocks):
        lost = scales[b] == np.float32(0)
        quotient = lows[b] / (np.float32(1) if lost else scales[b])
        if rule.offset == OFFSET_OF_ROUNDED:
            quotient = np.rint(quotient)
        zero = element.low - quotient
        if ideal[b] == np.float32(0) and not rule.formula:
            zero = home
        zero = np.trunc(zero) if rule.offset == OFFSET_TRUNCATED else np.rint(zero)
        zeros[b] = home if lost else min(max(zero, element.low), element.high)


@device
def read_blocks(
    x: Any, at: Any, span: Any, layout: Any, chain: Any, tile: Any, ends: Any, numbers: Any
) -> None:
    """Find the extremes of a span's blocks, and numbers of signed scales."""
    lows, highs = ends
    first = ZERO
    if can_group(layout.block):
        first = span // layout.block // GROUP * GROUP
        group_extremes(x, at, first, layout.block, lows, highs)
    done = first * layout.block
    while done < span:
        part = tile_span(layout.block, span - done)
        blocks = part // layout.block
        fetch_ahead(x, at + done + part, part)
        load(x, at + done, part, layout.kind, tile)
        _tile_extremes(tile, blocks, layout.block, lows[first:], highs[first:])
        done += part
        first += blocks
    if chain.scale_from == FROM_SIGNED:
        _signed_numbers(x, at, first, layout, lows, highs, tile, numbers)
