"""Numbers of one level of a chain: rounded and stored."""

from typing import Any

import numpy as np

from ....ops.lowering import Level
from ..machine import vector as v
from ..machine.descriptor import AS_BFLOAT16, AS_FLOAT16, AS_INTEGER, AS_LADDER
from ..machine.intrinsics import and32, bits32, device, narrow_half, scratch, shr32, to_bfloat16, widen_half
from ..machine.named_records import unpacker
from ..machine.tile import ordered
from .elements import INFINITE, MAGIC

_ZERO, _ONE = np.uint64(0), np.uint64(1)
CLIMBERS = 256
"""Numbers that are searched for together."""


unpack_level = unpacker(Level)


@device
def _climb(numbers: Any, at: Any, count: Any, level: Any, ladder: Any, places: Any) -> None:
    """Bisect the nearest ladder value of up to CLIMBERS numbers.

    Each step of the bisection runs for all numbers, so that their loads overlap.
    """
    own, keys, left = scratch(CLIMBERS, np.int32), ladder[0], level.rungs
    for i in range(count):
        own[i], places[i] = np.int32(ordered(numbers[at + i])), np.uint32(level.first)
    while left > _ONE:
        half = left // np.uint64(2)
        for i in range(count):
            low = np.uint64(places[i])
            places[i] = np.uint32(low + (half if keys[low + half - _ONE] < own[i] else _ZERO))
        left -= half


@device
def _on_ladder(
    numbers: Any, count: Any, level: Any, ladder: Any, rounds: Any, stores: Any, out: Any, at: Any
) -> None:
    """Round numbers to the nearest ladder values, write their codes, or both."""
    places = scratch(CLIMBERS, np.uint32)
    for b in range(_ZERO, np.uint64(count), np.uint64(CLIMBERS)):
        few = min(count - b, np.uint64(CLIMBERS))
        _climb(numbers, b, few, level, ladder, places)
        if rounds:
            for i in range(few):
                numbers[b + i] = ladder[1][places[i]]
        if stores:
            for i in range(few):
                out[at + b + i] = ladder[2][places[i]]


@device
def round_numbers(numbers: Any, count: Any, level: Any, ladder: Any, clips: Any) -> None:
    """Round numbers to a level's format; clips: floats saturate at its ends.

    ``numbers`` has room for whole vectors, whose last lanes are lost.
    """
    if level.held == AS_INTEGER:
        low, high, magic = v.floats_of(level.low), v.floats_of(level.high), v.floats_of(MAGIC)
        for b in range(_ZERO, count, v.HALF):
            x = v.smaller(v.larger(v.load_lanes(numbers, b), low), high)
            v.store_lanes(numbers, b, (x + magic) - magic)
        return
    if level.held == AS_LADDER:
        _on_ladder(numbers, count, level, ladder, True, False, scratch(1, np.uint8), _ZERO)
        return
    if clips:
        for b in range(count):
            numbers[b] = min(max(numbers[b], level.low), level.high)
    if level.held == AS_FLOAT16:
        for b in range(count):
            numbers[b] = widen_half(narrow_half(numbers[b]))
    elif level.held == AS_BFLOAT16:
        for b in range(count):
            numbers[b] = to_bfloat16(numbers[b])  # Inf where that overflows


@device
def misfits(ideal: Any, numbers: Any, count: Any, level: Any) -> Any:
    """Whether a number, rounded to the coarsest level, is past its ends."""
    bad = np.uint32(0)
    for b in range(count):
        past = (ideal[b] > level.most) | (ideal[b] < level.least) | (not abs(numbers[b]) < INFINITE)
        bad |= np.uint32(1) if past else np.uint32(0)
    return bad != np.uint32(0)


@device
def store_numbers(numbers: Any, count: Any, level: Any, ladder: Any, out: Any, at: Any) -> None:
    """Store numbers that the format of a level holds."""
    if level.held == AS_INTEGER:
        whole = count // v.WHOLE * v.WHOLE
        magic, mask = v.floats_of(MAGIC), v.octets_of(np.uint8(level.mask))
        for b in range(_ZERO, whole, v.WHOLE):
            first, second = v.load_lanes(numbers, b) + magic, v.load_lanes(numbers, b + v.HALF) + magic
            v.store_lanes(out, at + b, v.low_octets(v.bits_of(first), v.bits_of(second)) & mask)
        for b in range(whole, count):
            out[at + b] = np.uint8(and32(bits32(np.float32(numbers[b] + MAGIC)), level.mask))
    elif level.held == AS_LADDER:
        _on_ladder(numbers, count, level, ladder, False, True, out, at)
    elif level.held == AS_FLOAT16:
        halves = out.view(np.uint16)
        for b in range(count):
            halves[at + b] = narrow_half(numbers[b])
    elif level.held == AS_BFLOAT16:
        halves = out.view(np.uint16)
        for b in range(count):
            halves[at + b] = np.uint16(shr32(bits32(numbers[b]), np.uint32(16)))
    else:
        floats = out.view(np.float32)
        for b in range(count):
            floats[at + b] = numbers[b]


@device
def keep_numbers(numbers: Any, count: Any, level: Any, ladder: Any, clips: Any, out: Any, at: Any) -> None:
    """Run :func:`round_numbers` and :func:`store_numbers`, with one search of the ladder for both."""
    if level.held == AS_LADDER:
        _on_ladder(numbers, count, level, ladder, True, True, out, at)
        return
    round_numbers(numbers, count, level, ladder, clips)
    store_numbers(numbers, count, level, ladder, out, at)
