"""Best scales and zero points, 16 blocks at once: :mod:`zeropoint.ops.affine_fits`, compiled.

A lane is a block, or 16 neighbors of one long block fill the lanes, which then agree on all that is of the
block. Sums without weights are of whole numbers below ``2 ** 53``, those of codes and their squares of 128
numbers below ``2 ** 24``: exact in any order, whether or not the machine fuses products with sums. Sums with
weights are added pairwise, like errors, for short blocks eight terms at a time in registers.

Gain that keeps it, over plain torch: 20 times the speed. Gain that keeps lanes of blocks, over one block at a
time: 2 times the speed on int4 in groups of 128, 4 in groups of 32 and with weights; of three zero points at
once: 1.08 (64 x 2048 float32, method ``mse``, one AVX-512 thread).
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float64, UInt64
from ..encode.block_scales import rounded
from ..machine import vector as v
from ..machine.descriptor import unpack
from ..machine.intrinsics import device, inlined, scratch
from ..machine.named_records import unpacker
from ..machine.reductions import any_lane, whole
from ..machine.team import bundled
from . import affine_sums as s
from .lane_errors import add_differences, add_errors, decode_affine, load_blocks
from .lanes import LANES, where
from .windows import ONES

_GAIN, _PRODUCT, _SQUARE, _MEAN = (np.uint64(n * 16) for n in range(4))
"""Where sums of the best codes lie; see :class:`zeropoint.ops.affine_fits.Sums`."""


class AffineFitting(NamedTuple):
    """What is tried; see :mod:`zeropoint.ops.affine_fits`.

    widths: float64. least, most: of the format of scales. inverse: the largest reciprocal of a scale. places:
    binary ones. steps: places of each width. pitch: how many weights lie between two rows. row: whether the
    numbers of one block fill all lanes. slots: of blocks, each with memory of its own.
    """

    least: Float64
    most: Float64
    inverse: Float64
    places: UInt64
    steps: UInt64
    patience: UInt64
    fits: UInt64
    real: Flag
    row: Flag
    widths: Any
    weighted: Flag = False
    pitch: UInt64 = 0
    slots: UInt64 = 1


unpack_affine = unpacker(AffineFitting)


@inlined
def _keep(room: Any, alive: Any, product: Any, total: Any, square: Any, zero: Any, real: Any) -> None:
    """Keep the sums that gain more; zero: 0 where already subtracted."""
    none, own, best = v.doubles_of(np.float64(0)), room.blocks, room.best
    count, mean = v.load_lanes(own, s.COUNT), zero
    if real:
        mean = total / count
        product = product - (count * mean) * v.load_lanes(own, s.NUMBERS)
        square = square - (count * mean) * mean
    gains = v.above_doubles(product, none) & v.above_doubles(square, none)
    gain = where(gains, (product * product) / square, none)
    gain = where(v.above_doubles(v.doubles_of(np.float64(np.inf)), gain), gain, none)
    better = alive & v.above_doubles(gain, v.load_lanes(best, _GAIN))
    v.store_lanes(best, _GAIN, where(better, gain, v.load_lanes(best, _GAIN)))
    v.store_lanes(best, _PRODUCT, where(better, product, v.load_lanes(best, _PRODUCT)))
    v.store_lanes(best, _SQUARE, where(better, square, v.load_lanes(best, _SQUARE)))
    v.store_lanes(best, _MEAN, where(better, mean, v.load_lanes(best, _MEAN)))


@inlined
def _keep_exact(room: Any, alive: Any, sums: Any, zero: Any, numbers: Any, real: Any) -> None:
    """Keep exact sums of codes less integer zero points; numbers: their sum."""
    product, total, square = sums
    if not real:
        product = product - zero * numbers
        square = (square - (zero + zero) * total) + (zero * zero) * v.load_lanes(room.blocks, s.COUNT)
    _keep(room, alive, product, total, square, zero, real)


@inlined
def _usable(zero: Any, element: Any, fitting: Any) -> Any:
    """Return zero points as codes are taken under them, doubles."""
    most, none = v.doubles_of(fitting.inverse), v.doubles_of(np.float64(0))
    ones = v.words_of(ONES)
    held = (v.above_doubles(zero, most) ^ ones) & (v.above_doubles(none - most, zero) ^ ones)
    # NaN is neither above nor below.
    held = held & (v.above_doubles(zero, none) | (v.above_doubles(none, zero)))
    zero = where(held, zero, none)
    if fitting.real:
        return zero
    return v.smaller(
        v.larger(whole(zero), v.doubles_of(np.float64(element.low))), v.doubles_of(np.float64(element.high))
    )


@device
def _take_weighted(
    room: Any, size: Any, lanes: Any, alive: Any, zero: Any, element: Any, fitting: Any
) -> None:
    """Sum codes under ``zero`` and reciprocals in ``lanes``; keep the best."""
    narrow, none = v.narrow_doubles(zero), v.floats_of(np.float32(0))
    v.store_lanes(lanes, LANES, narrow)
    v.store_lanes(lanes, LANES + LANES, none if fitting.real else narrow)
    s.add_weighted(room, size, lanes, element, fitting.row)
    product, total = v.load_lanes(room.products, np.uint64(0)), v.load_lanes(room.totals, np.uint64(0))
    _keep(room, alive, product, total, v.load_lanes(room.squares, np.uint64(0)), zero, fitting.real)


@inlined
def _zero_at(room: Any, place: Any, inverse: Any, element: Any, fitting: Any) -> Any:
    """Return the zero points of a place of ranges, doubles."""
    part = np.float64(place) / np.float64(fitting.steps - np.uint64(1))
    code = np.float64(element.low) + part * (np.float64(element.high) - np.float64(element.low))
    first, last = v.load_lanes(room.blocks, s.FIRST), v.load_lanes(room.blocks, s.LAST)
    zero = v.doubles_of(code) - (first + v.doubles_of(part) * (last - first)) * inverse
    return _usable(zero, element, fitting)


@device
def _try_width(
    room: Any, size: Any, lanes: Any, alive: Any, inverse: Any, element: Any, fitting: Any
) -> None:
    """Take codes under ranges of one width at all places; inverse: doubles."""
    real, narrow = fitting.real, v.narrow_doubles(inverse)
    if fitting.weighted:
        v.store_lanes(lanes, np.uint64(0), narrow)
        for place in range(fitting.steps):
            zero = _zero_at(room, place, inverse, element, fitting)
            _take_weighted(room, size, lanes, alive, zero, element, fitting)
        return
    numbers = v.load_lanes(room.blocks, s.SUM)
    for place in range(np.uint64(0), fitting.steps, s.THREE):
        a = _zero_at(room, place, inverse, element, fitting)
        b = _zero_at(room, place + np.uint64(1), inverse, element, fitting)
        c = _zero_at(room, place + np.uint64(2), inverse, element, fitting)
        zeros = v.narrow_doubles(a), v.narrow_doubles(b), v.narrow_doubles(c)
        one, two, three = s.add_three(room, size, narrow, zeros, element, fitting.row)
        _keep_exact(room, alive, one, a, numbers, real)
        _keep_exact(room, alive, two, b, numbers, real)
        _keep_exact(room, alive, three, c, numbers, real)


@device
def _sweep(room: Any, size: Any, lanes: Any, element: Any, fitting: Any) -> None:
    """Find the best codes of 16 blocks over all widths and places."""
    none, zero, best = v.doubles_of(np.float64(0)), v.floats_of(np.float32(0)), room.best
    v.store_lanes(best, _GAIN, none)
    v.store_lanes(best, _PRODUCT, none)
    v.store_lanes(best, _SQUARE, v.doubles_of(np.float64(1)))
    v.store_lanes(best, _MEAN, none)
    width = v.load_lanes(room.blocks, s.LAST) - v.load_lanes(room.blocks, s.FIRST)
    wide, codes = (
        v.above_doubles(width, none),
        v.doubles_of(np.float64(element.high) - np.float64(element.low)),
    )
    alive, misses, patience = wide, zero, v.floats_of(np.float32(fitting.patience))
    for step in range(np.uint64(fitting.widths.size)):
        if not any_lane(alive):
            break
        inverse = where(wide, codes / (width * v.doubles_of(fitting.widths[step])), none)
        before = v.load_lanes(best, _GAIN)
        _try_width(room, size, lanes, alive, inverse, element, fitting)
        gained = v.above_doubles(v.load_lanes(best, _GAIN), before)
        misses = where(gained, zero, misses + v.floats_of(np.float32(1)))
        alive = alive & v.above(patience, misses)


@device
def _refit(room: Any, size: Any, lanes: Any, element: Any, fitting: Any) -> None:
    """Take codes under the scale and zero point fitting the best."""
    best, none, own = room.best, v.doubles_of(np.float64(0)), room.blocks
    product, mean = v.load_lanes(best, _PRODUCT), v.load_lanes(best, _MEAN)
    inverse = where(v.above_doubles(product, none), v.load_lanes(best, _SQUARE) / product, none)
    inverse = v.smaller(inverse, v.doubles_of(fitting.inverse))
    zero = mean - v.load_lanes(own, s.NUMBERS) * inverse if fitting.real else mean
    zero, narrow = _usable(zero, element, fitting), v.narrow_doubles(inverse)
    if fitting.weighted:
        v.store_lanes(lanes, np.uint64(0), narrow)
        _take_weighted(room, size, lanes, v.words_of(ONES), zero, element, fitting)
    else:
        numbers = v.load_lanes(own, s.SUM)
        near = v.narrow_doubles(zero)
        sums, _, _ = s.add_three(room, size, narrow, (near, near, near), element, fitting.row)
        _keep_exact(room, v.words_of(ONES), sums, zero, numbers, fitting.real)


@device
def _whole_zero(zero: Any, start: Any, element: Any, real: Any) -> Any:
    """Zero point as kept, float32; the start's where not finite."""
    if real:
        return np.float32(zero) if abs(zero) < np.float64(np.inf) else start
    low, high = np.float64(element.low), np.float64(element.high)
    return np.float32(np.rint(min(max(zero, low), high)))


@device
def _fitted(room: Any, b: Any, starts: Any, element: Any, rule: Any, fitting: Any) -> Any:
    """Round scale and zero point fitting the best codes of ``b``."""
    best, own = room.best, room.blocks
    product, infinite = best[_PRODUCT + b], np.float64(np.inf)
    inverse = np.float64(0)
    if product > np.float64(0):
        inverse = min(best[_SQUARE + b] / product, fitting.inverse)
    zero = best[_MEAN + b]
    if fitting.real:
        zero -= own[s.NUMBERS + b] * inverse
    scale = np.float64(0)
    if best[_GAIN + b] > np.float64(0):
        scale = own[s.UNIT + b] / inverse
        zero -= own[s.MIDDLE + b] / scale
    if not (abs(scale) < infinite and abs(zero) < infinite):
        scale = np.float64(0)
    near = starts[b]
    if scale > np.float64(0):
        near = rounded(np.float32(min(max(scale, fitting.least), fitting.most)), rule.stored)
    return near, _whole_zero(zero, starts[LANES + b], element, fitting.real)


@device
def _errors(room: Any, size: Any, tried: Any, element: Any, row: Any) -> None:
    """Write errors under scales and zero points to ``squares``."""
    decode_affine(room.columns, size, tried[:LANES], tried[LANES:], element, room.decoded)
    add_errors(room.columns, room.decoded, room.weights, size, row, room.squares)


@device
def _replace(room: Any, size: Any, best: Any, tried: Any, element: Any, row: Any) -> None:
    """Replace scales and zero points by candidates with less error."""
    errors = room.best
    _errors(room, size, tried, element, row)
    for b in range(LANES):
        if room.squares[b] < errors[b]:
            errors[b], best[b], best[LANES + b] = room.squares[b], tried[b], tried[LANES + b]


@device
def _search_blocks(size: Any, element: Any, rule: Any, fitting: Any, room: Any, best: Any) -> None:
    """Improve the scales and zero points of 16 blocks, (32,) float32."""
    tried, lanes = room.lanes[:32], room.lanes[32:]
    s.to_fixed_point(size, fitting, room)
    _sweep(room, size, lanes, element, fitting)
    for _ in range(fitting.fits):
        _refit(room, size, lanes, element, fitting)
    for b in range(LANES):
        tried[b], tried[LANES + b] = _fitted(room, b, best, element, rule, fitting)
    _errors(room, size, best, element, fitting.row)
    v.store_lanes(room.best, np.uint64(0), v.load_lanes(room.squares, np.uint64(0)))
    _replace(room, size, best, tried, element, fitting.row)
    if not fitting.real:
        return
    decode_affine(room.columns, size, best[:LANES], best[LANES:], element, room.decoded)
    add_differences(room.columns, room.decoded, room.weights, size, fitting.row, room.squares)
    for b in range(LANES):
        steps = (room.squares[b] / room.blocks[s.COUNT + b]) / np.float64(best[b])
        zero = _whole_zero(np.float64(best[LANES + b]) - steps, best[LANES + b], element, True)
        tried[b], tried[LANES + b] = best[b], zero
    _replace(room, size, best, tried, element, fitting.row)


@bundled
def affine_slots(args: Any, first: Any, last: Any) -> None:
    """Improve scales and zero points of whole blocks; rows are slots.

    16 blocks are searched at a time, or a long one. args: numbers, a descriptor, weights of errors, float64,
    by rows of ``pitch``, :class:`AffineFitting` and its widths, scales and zero points of a start, float32,
    and memory, float32 and float64: for each slot three and five times the numbers of what is searched at a
    time.
    """
    x, packed, weights, record, widths, scales, zeros, floats, doubles = args
    (layout, element, rule), fitting = unpack(packed), unpack_affine(record, widths=widths)
    step, blocks, slots = np.uint64(1) if fitting.row else LANES, np.uint64(scales.size), fitting.slots
    of_blocks, sums, lanes = scratch(128, np.float64), scratch(64, np.float64), scratch(80, np.float32)
    n, best = layout.block * step, scratch(32, np.float32)
    two, four = n + n, n + n + n + n
    for slot in range(first, last):
        narrow, wide = floats[slot * (two + n) :], doubles[slot * (four + n) :]
        room = s.Room(
            narrow[:n], narrow[n:two], narrow[two:], wide[:n], wide[n:two], wide[two : two + n],
            wide[two + n : four], wide[four:], of_blocks, sums, lanes,
        )  # fmt: skip
        for i in range(np.uint64(0), n, LANES):
            v.store_lanes(room.weights, i, v.doubles_of(np.float64(1)))
        end = blocks * (slot + np.uint64(1)) // slots
        for block in range(blocks * slot // slots, end, step):
            count = min(step, end - block)
            load_blocks(x, weights, block, count, layout, fitting, room)
            v.store_lanes(best, np.uint64(0), v.floats_of(scales[block] if fitting.row else np.float32(1)))
            v.store_lanes(best, LANES, v.floats_of(zeros[block] if fitting.row else np.float32(0)))
            for b in range(count):
                best[b], best[LANES + b] = scales[block + b], zeros[block + b]
            _search_blocks(n // LANES, element, rule, fitting, room, best)
            for b in range(count):
                scales[block + b], zeros[block + b] = best[b], best[LANES + b]
