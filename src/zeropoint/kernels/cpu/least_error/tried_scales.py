"""Scales of least error, any elements, 16 blocks: :mod:`zeropoint.ops.window_search`.

A lane is a block. Errors equal the reference's, in float64 and its order, with or without weights; each
scale that the reference tries is tried. Powers other than the second, whose exact errors take long, are first
measured nearly (:mod:`.powers`): only 16 blocks of which one has scales whose order is not certain are
searched again by exact ones.

Gain that keeps it, over plain torch: 17 times the speed on float8, 6 on nf4, 10 on FP4, 20 with weights on
int4. Gain that keeps lanes of blocks, over one block at a time: 3 times the speed on float8 in groups of 128,
2 to 5 with weights on int4, 1.8 on nf4 in groups of 64, 6 to 7 on FP4. Gain of clipping by the largest number
alone: 1.2 times the speed on int4 under ``scale=search2.4`` (64 x 2048 float32, method ``mse``, one AVX-512
thread).
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float32, Float64, UInt64
from ..machine import vector as v
from ..machine.descriptor import unpack
from ..machine.intrinsics import device, float64_of, inlined, scratch
from ..machine.named_records import unpacker
from ..machine.reductions import any_lane, most_lane
from ..machine.team import bundled
from .lane_errors import add_clipped, add_errors, add_products, add_squares, decode_lanes, load_blocks
from .lanes import LANES, magnitudes, narrowed, where
from .powers import (
    LEAST_SUM,
    Power,
    add_clipped_powers,
    add_near_clipped_powers,
    add_near_powers,
    add_powers,
    apart_of,
    is_square,
    near_powers_of,
    powers_of,
    units_of,
)
from .windows import ONES

_PARTS, _NONE = np.uint64(16), np.uint64(0)
_AMAX, _START, _TRIED, _BEST, _FACTORS, _DIVISORS, _UNITS = (np.uint64(n * 16) for n in range(7))
"""Where floats lie: magnitudes of blocks, scales, factors, divisors of decode_lanes, units of near powers."""
FLOATS_OF_BLOCKS = 112
_LIMIT, _ERROR, _SECOND, _FOUND, _EXACT = (np.uint64(n * 16) for n in range(5))
"""Where errors lie: of the start, the least, the least of all others, and of two that are compared."""
_TAME, _SMALL = np.float32(2.0**60), np.float32(2.0**-60)
"""Near powers are of largest magnitudes between these, or zero."""
_CLIPPED = np.float64(1 + 2.0**-12)
"""By how much what is clipped, nearly measured, is more than errors that are less for certain."""


class ScaleTries(NamedTuple):
    """What is tried; see :class:`zeropoint.ops.window_search.WindowSearch`.

    parts: (16,) float64, the steps of an octave. table: float32, all scales, ascending, or none. halved:
    uint8, whether half of each is a scale. doubled: of how many the double is one. values: (16,) float32, of
    a codebook's codes in their order. halving, empty, doubling: of the window. reach: largest magnitude over
    a scale that is taken. end: largest magnitude of a value. safe: outweighs roundings. top: as halving.
    least, largest: of the format of scales. coarse, over: the scale above, and whether it divides. checked:
    after how many steps it is asked whether all else clips too much. largest_clips: whether the largest
    number alone says so. row: whether the numbers of one block fill all lanes, which then agree. slots: of
    blocks, each with memory of its own. power: of errors, :class:`.powers.Power`; others than the second are
    without weights.
    """

    doubled: UInt64
    halving: Float32
    empty: Float32
    doubling: Float32
    reach: Float32
    end: Float64
    safe: Float64
    top: Float64
    least: Float64
    largest: Float64
    over: Flag
    checked: UInt64
    largest_clips: Flag
    row: Flag
    power: Power
    parts: Any
    table: Any
    halved: Any
    values: Any
    coarse: Float32 = 1.0
    weighted: Flag = False
    pitch: UInt64 = 0
    slots: UInt64 = 1


unpack_tries = unpacker(ScaleTries)


class _Room(NamedTuple):
    """Memory of 16 blocks: numbers, decoded values, weights, sums, scales, errors."""

    columns: Any
    decoded: Any
    weights: Any
    sums: Any
    more: Any
    scales: Any
    errors: Any
    places: Any


@inlined
def _factors(scales: Any, tries: Any) -> Any:
    if tries.over:
        return scales / v.floats_of(tries.coarse)
    return scales * v.floats_of(tries.coarse)


@device
def _factor(scale: Any, tries: Any) -> Any:
    return np.float32(scale / tries.coarse) if tries.over else np.float32(scale * tries.coarse)


@inlined
def _stored(scales: Any, tries: Any, to: Any) -> Any:
    """Return doubles as scales without a table are stored."""
    held = v.smaller(v.larger(scales, v.doubles_of(tries.least)), v.doubles_of(tries.largest))
    return narrowed(v.narrow_doubles(held), to)


@device
def _measure(room: Any, size: Any, at: Any, element: Any, rule: Any, tries: Any, near: Any) -> None:
    """Write errors under scales at ``at`` to ``sums``; ``near``: approximately."""
    factors = _factors(v.load_lanes(room.scales, at), tries)
    v.store_lanes(room.scales, _FACTORS, factors)
    decode_lanes(room.columns, size, room.scales[_FACTORS:], element, rule.unit, tries.values, room.decoded)
    if is_square(tries.power):
        add_errors(room.columns, room.decoded, room.weights, size, tries.row, room.sums)
    elif near:
        units = room.scales[_UNITS:]
        add_near_powers(room.columns, room.decoded, size, tries.row, tries.power, units, room.sums)
    else:
        add_powers(room.columns, room.decoded, size, tries.row, tries.power, room.sums)


@inlined
def _power_past(room: Any, past: Any, tries: Any, near: Any) -> Any:
    """Return powers of doubles that are not negative."""
    if is_square(tries.power):
        return past * past
    if near:
        units = v.load_lanes(room.scales, _UNITS)
        return v.wide_floats(near_powers_of(v.narrow_doubles(past), units, tries.power))
    return powers_of(past, tries.power)


@device
def _clip(room: Any, size: Any, tries: Any, near: Any) -> None:
    """Write clipping's share of errors under tried scales to ``sums``."""
    factors = _factors(v.load_lanes(room.scales, _TRIED), tries)
    end = v.wide_floats(factors) * v.doubles_of(tries.end)
    if tries.largest_clips:
        past = v.larger(v.wide_floats(v.load_lanes(room.scales, _AMAX)) - end, v.doubles_of(np.float64(0)))
        v.store_lanes(room.sums, _NONE, _power_past(room, past, tries, near))
        return
    v.store_lanes(room.more, _NONE, end)
    if is_square(tries.power):
        add_clipped(room.columns, room.more, room.weights, size, tries.row, room.sums)
    elif near:
        units = room.scales[_UNITS:]
        add_near_clipped_powers(room.columns, size, tries.row, tries.power, units, room.more, room.sums)
    else:
        add_clipped_powers(room.columns, size, tries.row, tries.power, room.more, room.sums)


@inlined
def _may_be_better(room: Any, size: Any, alive: Any, tries: Any, near: Any) -> Any:
    """Blocks of ``alive`` whose tried scales do not clip too much."""
    _clip(room, size, tries, near)
    least = v.smaller(v.load_lanes(room.errors, _ERROR), v.load_lanes(room.errors, _LIMIT))
    safe = tries.safe * (_CLIPPED if near else np.float64(1))
    worse = v.above_doubles(v.load_lanes(room.sums, _NONE), least * v.doubles_of(safe))
    return alive & (worse ^ v.words_of(ONES))


@inlined
def _keep(room: Any, alive: Any, better: Any) -> None:
    """Keep better tried scales, and their errors from ``sums``.

    alive: blocks for which they are no others.
    """
    found, error = v.load_lanes(room.sums, _NONE), v.load_lanes(room.errors, _ERROR)
    other = where(better, error, where(alive, found, v.doubles_of(np.float64(np.inf))))
    v.store_lanes(room.errors, _SECOND, v.smaller(other, v.load_lanes(room.errors, _SECOND)))
    v.store_lanes(room.errors, _ERROR, where(better, found, error))
    best, tried = v.load_lanes(room.scales, _BEST), v.load_lanes(room.scales, _TRIED)
    v.store_lanes(room.scales, _BEST, where(better, tried, best))


@inlined
def _no_worse(room: Any) -> Any:
    found, error = v.load_lanes(room.sums, _NONE), v.load_lanes(room.errors, _ERROR)
    return v.above_doubles(found, error) ^ v.words_of(ONES)


@device
def _count_below(amax: Any, ratio: Any, equal: Any, tries: Any) -> Any:
    """Count scales whose product with ``ratio`` is below ``amax`` (``equal``: or equal)."""
    least, most = np.int64(0), np.int64(tries.table.size)
    while least < most:
        middle = (least + most) // np.int64(2)
        end = np.float32(_factor(tries.table[middle], tries) * ratio)
        if end < amax or (equal and end == amax):
            least = middle + np.int64(1)
        else:
            most = middle
    return least


@device
def _ends(amax: Any, tries: Any) -> Any:
    """Places of a block's smallest and largest possible best scales."""
    low = min(_count_below(amax, tries.doubling, True, tries), np.int64(tries.doubled))
    high = _count_below(amax, tries.halving, False, tries) - np.int64(1)
    for place in range(np.int64(tries.table.size)):
        if not tries.halved[place] and np.float32(_factor(tries.table[place], tries) * tries.empty) < amax:
            high = max(high, np.int64(place))
    return low, high


@device
def _try_table(room: Any, size: Any, element: Any, rule: Any, tries: Any, near: Any) -> None:
    """Try possible best scales of a table, largest first."""
    scales, places, zero = room.scales, room.places, v.floats_of(np.float32(0))
    for b in range(LANES):
        places[b], places[LANES + b] = _ends(scales[_AMAX + b], tries)
        some = places[LANES + b] >= places[b] and room.errors[_LIMIT + b] > np.float64(0)
        scales[_TRIED + b] = np.float32(1) if some else np.float32(0)
    alive = v.above(v.load_lanes(scales, _TRIED), zero)
    while any_lane(alive):
        for b in range(LANES):
            scales[_TRIED + b] = tries.table[max(places[LANES + b], np.int64(0))]
        alive = _may_be_better(room, size, alive, tries, near)
        if not any_lane(alive):
            return
        _measure(room, size, _TRIED, element, rule, tries, near)
        _keep(room, alive, alive & _no_worse(room))
        for b in range(LANES):
            places[LANES + b] -= np.int64(1)
            scales[_TRIED + b] = np.float32(1) if places[LANES + b] >= places[b] else np.float32(0)
        alive = alive & v.above(v.load_lanes(scales, _TRIED), zero)


@inlined
def _inside(room: Any, tries: Any) -> Any:
    """Mask of tried scales above the window's lower end, approximately."""
    factors = _factors(v.load_lanes(room.scales, _TRIED), tries)
    return v.above(factors * v.floats_of(tries.reach), v.load_lanes(room.scales, _AMAX))


@device
def _try_steps(room: Any, size: Any, element: Any, rule: Any, tries: Any, near: Any) -> None:
    """Try scales down from the window's upper end by a factor."""
    scales, none = room.scales, v.doubles_of(np.float64(0))
    amax, start = v.load_lanes(scales, _AMAX), v.load_lanes(scales, _START)
    top, step = v.wide_floats(amax) / v.doubles_of(tries.top), np.uint64(0)
    alive = v.above(amax, v.floats_of(np.float32(0))) & v.above_doubles(
        v.load_lanes(room.errors, _LIMIT), none
    )
    while any_lane(alive):
        octave = float64_of((np.uint64(1023) - step // _PARTS) << np.uint64(52))
        scale = top * v.doubles_of(tries.parts[step % _PARTS] * octave)
        tried = where(v.above_doubles(scale, none), _stored(scale, tries, rule.stored), start)
        v.store_lanes(scales, _TRIED, tried)
        alive = alive & v.above_doubles(scale, v.doubles_of(tries.least)) & _inside(room, tries)
        step += np.uint64(1)
        if step % tries.checked == np.uint64(0):
            alive = _may_be_better(room, size, alive, tries, near)
        if not any_lane(alive):
            return
        _measure(room, size, _TRIED, element, rule, tries, near)
        _keep(room, alive, alive & _no_worse(room))


@inlined
def _is_unsure(a: Any, b: Any, power: Any) -> Any:
    """Return for which blocks the order of near errors is not certain."""
    apart = v.doubles_of(apart_of(power))
    certain = v.above_doubles(a, b * apart) | v.above_doubles(b, a * apart)
    certain = certain & v.above_doubles(v.smaller(a, b), v.doubles_of(LEAST_SUM))
    return certain ^ v.words_of(ONES)


@inlined
def _differ(room: Any, first: Any, second: Any) -> Any:
    a, b = v.load_lanes(room.scales, first), v.load_lanes(room.scales, second)
    return v.above(a, b) | v.above(b, a)


@inlined
def _less(
    room: Any, size: Any, places: Any, asked: Any, element: Any, rule: Any, tries: Any, near: Any
) -> Any:
    """Mask of ``asked`` blocks where the first scale has less error.

    places: of both scales, and of both errors. Where near errors do not say, both are measured exactly.
    """
    scales, errors = places
    first, second = v.load_lanes(room.errors, errors[0]), v.load_lanes(room.errors, errors[1])
    less = asked & v.above_doubles(second, first)
    if near and any_lane(asked & _is_unsure(first, second, tries.power)):
        _measure(room, size, scales[0], element, rule, tries, False)
        v.store_lanes(room.errors, _EXACT, v.load_lanes(room.sums, _NONE))
        _measure(room, size, scales[1], element, rule, tries, False)
        less = asked & v.above_doubles(v.load_lanes(room.sums, _NONE), v.load_lanes(room.errors, _EXACT))
    return less


@device
def _fit(room: Any, size: Any, element: Any, rule: Any, tries: Any, near: Any) -> None:
    """Try the least-squares scales of the best codes."""
    best, one, none = (
        v.load_lanes(room.scales, _BEST),
        v.doubles_of(np.float64(1)),
        v.doubles_of(np.float64(0)),
    )
    v.store_lanes(room.scales, _FACTORS, _factors(best, tries))
    decode_lanes(room.columns, size, room.scales[_FACTORS:], element, rule.unit, tries.values, room.decoded)
    add_products(room.columns, room.decoded, room.weights, size, tries.row, room.sums)
    add_squares(room.columns, room.decoded, room.weights, size, tries.row, room.more)
    share = v.load_lanes(room.sums, _NONE) / v.load_lanes(room.more, _NONE)
    usable = v.above_doubles(share, none) & v.above_doubles(v.doubles_of(np.float64(np.inf)), share)
    tried = _stored(v.wide_floats(best) * where(usable, share, one), tries, rule.stored)
    v.store_lanes(room.scales, _TRIED, tried)
    asked = _differ(room, _TRIED, _BEST) & _inside(room, tries)
    _measure(room, size, _TRIED, element, rule, tries, near)
    v.store_lanes(room.errors, _FOUND, v.load_lanes(room.sums, _NONE))
    places = (_TRIED, _BEST), (_FOUND, _ERROR)
    better = _less(room, size, places, asked, element, rule, tries, near)
    v.store_lanes(room.sums, _NONE, v.load_lanes(room.errors, _FOUND))
    _keep(room, asked, better)


@device
def _search_from(room: Any, size: Any, element: Any, rule: Any, tries: Any, near: Any) -> Any:
    """Write best scales of 16 blocks to _BEST, 0 for starts.

    near: whether to measure nearly. Returns whether that was enough.
    """
    scales, zero, infinite = room.scales, v.floats_of(np.float32(0)), v.doubles_of(np.float64(np.inf))
    v.store_lanes(scales, _BEST, v.load_lanes(scales, _START))
    _measure(room, size, _START, element, rule, tries, near)
    v.store_lanes(room.errors, _LIMIT, v.load_lanes(room.sums, _NONE))
    v.store_lanes(room.errors, _ERROR, infinite)
    v.store_lanes(room.errors, _SECOND, infinite)
    if tries.table.size > 0:
        _try_table(room, size, element, rule, tries, near)
    else:
        _try_steps(room, size, element, rule, tries, near)
    amax = v.load_lanes(scales, _AMAX)
    some = v.above(amax, zero)
    if near:
        tame = v.above(v.floats_of(_TAME), amax) & v.above(amax, v.floats_of(_SMALL))
        error, second = v.load_lanes(room.errors, _ERROR), v.load_lanes(room.errors, _SECOND)
        if any_lane(some & ((tame ^ v.words_of(ONES)) | _is_unsure(error, second, tries.power))):
            return False
    if tries.table.size == 0:
        for _ in range(2):
            _fit(room, size, element, rule, tries, near)
    asked = some & _differ(room, _BEST, _START)
    better = _less(room, size, ((_BEST, _START), (_ERROR, _LIMIT)), asked, element, rule, tries, near)
    v.store_lanes(scales, _BEST, where(better, v.load_lanes(scales, _BEST), zero))
    return True


@device
def _search_blocks(room: Any, size: Any, element: Any, rule: Any, tries: Any) -> None:
    """Find the best scales of 16 blocks, whose starts are known."""
    scales, amax = room.scales, v.floats_of(np.float32(0))
    for i in range(size):
        amax = v.larger(magnitudes(v.load_lanes(room.columns, i * LANES)), amax)
    if tries.row:
        amax = v.floats_of(most_lane(amax))
    v.store_lanes(scales, _AMAX, amax)
    v.store_lanes(scales, _UNITS, units_of(amax))
    if is_square(tries.power) or not _search_from(room, size, element, rule, tries, True):
        _search_from(room, size, element, rule, tries, False)


@bundled
def tried_slots(args: Any, first: Any, last: Any) -> None:
    """Improve scales of whole blocks, others become 0; rows are slots.

    16 blocks are searched at a time, or a long one. args: numbers, a descriptor, weights of errors, float64,
    by rows of ``pitch``, :class:`ScaleTries` and its arrays, scales of a start, float32, the level's own, and
    memory, float32 and float64: for each slot twice and thrice the numbers of what is searched at a time.
    """
    x, packed, weights, record, (parts, table, halved, values), scales, floats, doubles = args
    layout, element, rule = unpack(packed)
    tries = unpack_tries(record, parts=parts, table=table, halved=halved, values=values)
    step, blocks, slots = np.uint64(1) if tries.row else LANES, np.uint64(scales.size), tries.slots
    own, errors, places = (
        scratch(FLOATS_OF_BLOCKS, np.float32),
        scratch(80, np.float64),
        scratch(32, np.int64),
    )
    n = layout.block * step
    for slot in range(first, last):
        narrow, wide = floats[slot * (n + n) :], doubles[slot * (n + n + n) :]
        room = _Room(narrow[:n], narrow[n:], wide[:n], wide[n : n + n], wide[n + n :], own, errors, places)
        for i in range(_NONE, n, LANES):
            v.store_lanes(room.weights, i, v.doubles_of(np.float64(1)))
        end = blocks * (slot + np.uint64(1)) // slots
        for block in range(blocks * slot // slots, end, step):
            count = min(step, end - block)
            load_blocks(x, weights, block, count, layout, tries, room)
            v.store_lanes(own, _START, v.floats_of(scales[block] if tries.row else np.float32(1)))
            for b in range(count):
                own[_START + b] = scales[block + b]
            _search_blocks(room, n // LANES, element, rule, tries)
            for b in range(count):
                scales[block + b] = own[_BEST + b]
