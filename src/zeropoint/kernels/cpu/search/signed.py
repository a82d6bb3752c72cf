"""Q3_K and Q6_K: blocks of 16 with a signed scale; see :mod:`zeropoint.ops.ggml.super_blocks`."""

from typing import Any, NamedTuple

import numpy as np

from ..machine.descriptor import OK
from ..machine.intrinsics import device, inlined, scratch
from ..machine.vector import above, any_lane, floats_of, larger, load_lanes, smaller, store_lanes, words_of
from .lanes import LANES, LEAST, ONE, SUPER, divided, is_zero, magnitudes, rounded, where
from .line_search import fit_signed
from .scale_codes import by_signed_largest
from .super_block import (
    ZERO,
    important_weights,
    load_group,
    load_importance,
    sums_of,
    write_codes,
    write_level,
)

THREE = np.uint64(3)
_TINY = np.float32(2.0**-130)
_SIZE, _LONG, _ROOM = np.uint64(16), 16 * 16, 256 + 8
_PASSES, _AT_ONCE = 5, np.uint64(4)
_WIDE, _MANY, _FOUND = 4 * _LONG, 16 * _LONG, 16 * 32


class SignedKind(NamedTuple):
    """A type.

    bits: of a code, 3 or 6. columns: of a row, which importance is for. weighted: whether there is
    importance.
    """

    bits: Any
    columns: Any
    weighted: Any


@device
def _squares(values: Any, weights: Any) -> None:
    for i in range(_SIZE):
        value = load_lanes(values, i * LANES)
        store_lanes(weights, i * LANES, value * value)


@device
def _begin_moves(x: Any, at: Any, codes: Any, sums: Any, place: Any) -> Any:
    """Write the first codes, from -4 to 3, of 16 blocks, and their sums; return the largest magnitudes."""
    least, most = words_of(np.uint32(0xFFFFFFFC)), words_of(np.uint32(3))
    value = amax = products = squares = floats_of(np.float32(0))
    for i in range(at, at + SUPER, LANES):
        number = load_lanes(x, i)
        beyond = above(magnitudes(number), amax)
        value, amax = where(beyond, number, value), where(beyond, magnitudes(number), amax)
    inverse = divided(np.float32(-4), value)
    for i in range(at, at + SUPER, LANES):
        number = load_lanes(x, i)
        weight, code = number * number, rounded(inverse * number, least, most)
        store_lanes(codes, i, code)
        products, squares = products + weight * number * code, squares + weight * code * code
    store_lanes(sums, place, products)
    store_lanes(sums, place + LANES, squares)
    return amax


@inlined
def _may_move(dividend: Any, left: Any, code: Any) -> Any:
    """Return where a quotient, clamped to the codes, may round to another code; without dividing.

    That is past half a step, less a 5000th for the roundings of the quotient and here, which are less than
    that but of numbers as small as _TINY; these may move, too.
    """
    held = smaller(larger(dividend, floats_of(np.float32(-4)) * left), floats_of(np.float32(3)) * left)
    off = magnitudes(held - code * left) + floats_of(_TINY)
    return above(left, floats_of(np.float32(0))) & above(off, floats_of(np.float32(0.4999)) * left)


@inlined
def _move(x: Any, codes: Any, at: Any, sums: Any, place: Any, seldom: Any) -> Any:
    """Move one code of each of 16 blocks where that is better; return where it was.

    seldom: whether to look first whether one may, which is worth it after the first pass: nine of ten vectors
    then have none.
    """
    least, most, zero = words_of(np.uint32(0xFFFFFFFC)), words_of(np.uint32(3)), floats_of(np.float32(0))
    number, code = load_lanes(x, at), load_lanes(codes, at)
    products, squares = load_lanes(sums, place), load_lanes(sums, place + LANES)
    weight = number * number
    left, rest = products - weight * number * code, squares - weight * code * code
    dividend = number * rest
    if seldom and not any_lane(_may_move(dividend, left, code)):
        return words_of(np.uint32(0))
    moved = rounded(dividend / left, least, most)
    more, more_squares = left + weight * number * moved, rest + weight * moved * moved
    better = above(left, zero) & above(magnitudes(moved - code), zero) & above(more_squares, zero)
    better = better & above(more * more * squares, products * products * more_squares)
    store_lanes(codes, at, where(better, moved, code))
    store_lanes(sums, place, where(better, more, products))
    store_lanes(sums, place + LANES, where(better, more_squares, squares))
    return better


@device
def _fit_by_moves(x: Any, count: Any, codes: Any, found: Any, sums: Any) -> None:
    """Find scales of codes by moving one code at a time, of ``count`` super-blocks; see ``three_bit_scale``.

    Several at once in the first pass: a move waits for the one before. sums: room for two vectors a
    super-block.
    """
    zero, two = floats_of(np.float32(0)), LANES + LANES
    for n in range(count):
        amax = _begin_moves(x, n * SUPER, codes, sums, n * two)
        store_lanes(found, n * LANES, amax)
    for i in range(ZERO, SUPER, LANES):
        for n in range(count):
            _move(x, codes, n * SUPER + i, sums, n * two, False)
    for n in range(count):
        for _ in range(1, _PASSES):
            moves = words_of(np.uint32(0))
            for i in range(n * SUPER, (n + ONE) * SUPER, LANES):
                moves = moves | _move(x, codes, i, sums, n * two, True)
            if not any_lane(moves):
                break
    for n in range(count):
        empty = above(floats_of(LEAST), load_lanes(found, n * LANES))
        products, squares = load_lanes(sums, n * two), load_lanes(sums, n * two + LANES)
        scale = where(above(squares, zero), products / squares, zero)
        store_lanes(found, n * LANES, where(empty, zero, scale))
        for i in range(n * SUPER, (n + ONE) * SUPER, LANES):
            store_lanes(codes, i, where(empty, floats_of(np.float32(-4)), load_lanes(codes, i)))


@device
def _codes_of_search(values: Any, found: Any, top: Any, codes: Any) -> None:
    """Write the codes of :func:`.line_search.fit_signed`; those of blocks of zeros are ``-top``."""
    least, most = words_of(np.uint32(0)) - words_of(np.uint32(top)), words_of(np.uint32(top - np.float32(1)))
    inverse = load_lanes(found, LANES)
    empty, lowest = is_zero(inverse), floats_of(-top)
    for i in range(_SIZE):
        code = rounded(inverse * load_lanes(values, i * LANES), least, most)
        store_lanes(codes, i * LANES, where(empty, lowest, code))


@device
def _choose_codes(values: Any, top: Any, stored: Any, codes: Any) -> None:
    """Write codes under stored scales; where these are zero, what is there stays."""
    least, most = words_of(np.uint32(0)) - words_of(np.uint32(top)), words_of(np.uint32(top - np.float32(1)))
    scale = load_lanes(stored, ZERO)
    empty = is_zero(scale)
    for i in range(_SIZE):
        code = rounded(load_lanes(values, i * LANES) / scale, least, most)
        store_lanes(codes, i * LANES, where(empty, load_lanes(codes, i * LANES), code))


@device
def six_bit_rows(
    x: Any, importance: Any, kind: Any, packed: Any, scales: Any, halves: Any, first: Any, last: Any
) -> Any:
    """Quantize super-blocks ``first`` to ``last`` of ``x``, float32, to Q6_K.

    packed: takes codes. scales: their codes, 16 bytes a super-block.
    """
    own, values, weights = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(_LONG, np.float32)
    tried, found, fine = scratch(_LONG, np.float32), scratch(32, np.float32), scratch(16, np.int32)
    stored, codes, room = scratch(16, np.float32), scratch(_LONG, np.uint8), scratch(_ROOM, np.uint8)
    top = np.float32(32)
    state = OK
    for block in range(first, last):
        state = max(state, load_group(x, block * SUPER, SUPER, _SIZE, own, values))
        if kind.weighted:
            load_importance(importance, block * SUPER % kind.columns, _SIZE, kind.columns, weights)
        else:
            _squares(values, weights)
        fit_signed(values, weights, _SIZE, top, found)
        d = by_signed_largest(found, _SIZE, np.float32(-128), LEAST, fine)
        if d == 0:  # all codes are those of zeros
            store_lanes(found, LANES, floats_of(np.float32(0)))
        _codes_of_search(values, found, top, tried)
        _store_scales(d, np.int32(0xFF), block, fine, stored, scales, halves)
        _choose_codes(values, top, stored, tried)
        nbytes = block * (SUPER * kind.bits // np.uint64(8))
        write_codes(tried, _SIZE, SUPER, kind.bits, codes, room, packed, nbytes)
    return state


@device
def three_bit_rows(
    x: Any, importance: Any, kind: Any, packed: Any, scales: Any, halves: Any, first: Any, last: Any
) -> Any:
    """Quantize super-blocks to Q3_K with importance; arguments are those of :func:`six_bit_rows`.

    The scales of 16 super-blocks are searched at once.
    """
    own, weights, values = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(_MANY, np.float32)
    tried, scale_columns, sum_columns = (
        scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(_LONG, np.float32)
    )  # fmt: skip
    found, best, sums = scratch(_FOUND, np.float32), scratch(32, np.float32), scratch(16, np.float32)
    stored, fine = scratch(16, np.float32), scratch(16, np.int32)
    codes, room = scratch(_LONG, np.uint8), scratch(_ROOM, np.uint8)
    top, factor, two = np.float32(4), np.float32(2), LANES + LANES
    state = OK
    for start in range(first, last, LANES):
        count = min(LANES, last - start)
        for i in range(np.uint64(_LONG)):
            scale_columns[i] = sum_columns[i] = np.float32(0)
        for n in range(count):
            at, own_values = (start + n) * SUPER, values[n * SUPER :]
            state = max(state, load_group(x, at, SUPER, _SIZE, own, own_values))
            column = at % kind.columns
            important_weights(
                own_values, own, importance, column, _SIZE, SUPER, factor, kind.columns, weights
            )
            sums_of(weights, _SIZE, sums)
            fit_signed(own_values, weights, _SIZE, top, found[n * two :])
            for i in range(_SIZE):
                scale_columns[i * LANES + n], sum_columns[i * LANES + n] = found[n * two + i], sums[i]
        fit_signed(scale_columns, sum_columns, _SIZE, np.float32(32), best)
        _codes_of_search(scale_columns, best, np.float32(32), sum_columns)
        for n in range(count):
            for i in range(_SIZE):
                fine[i] = np.int32(sum_columns[i * LANES + n])
            _store_scales(best[n], np.int32(0x3F), start + n, fine, stored, scales, halves)
            _codes_of_search(values[n * SUPER :], found[n * two :], top, tried)
            _choose_codes(values[n * SUPER :], top, stored, tried)
            nbytes = (start + n) * (SUPER * kind.bits // np.uint64(8))
            write_codes(tried, _SIZE, SUPER, kind.bits, codes, room, packed, nbytes)
    return state


@device
def moved_rows(x: Any, packed: Any, scales: Any, halves: Any, first: Any, last: Any) -> Any:
    """Quantize super-blocks to Q3_K without importance; arguments are those of :func:`six_bit_rows`."""
    values, tried, own = scratch(_WIDE, np.float32), scratch(_WIDE, np.float32), scratch(_LONG, np.float32)
    found, sums, fine = scratch(64, np.float32), scratch(128, np.float32), scratch(16, np.int32)
    stored, codes, room = scratch(16, np.float32), scratch(_LONG, np.uint8), scratch(_ROOM, np.uint8)
    state = OK
    for start in range(first, last, _AT_ONCE):
        count = min(_AT_ONCE, last - start)
        for n in range(count):
            state = max(state, load_group(x, (start + n) * SUPER, SUPER, _SIZE, own, values[n * SUPER :]))
        _fit_by_moves(values, count, tried, found, sums)
        for n in range(count):
            d = by_signed_largest(found[n * LANES :], _SIZE, np.float32(-32), np.float32(0), fine)
            for i in range(_SIZE):
                fine[i] = np.int32(-32) if d == 0 else max(min(fine[i], np.int32(31)), np.int32(-32))
            _store_scales(d, np.int32(0x3F), start + n, fine, stored, scales, halves)
            _choose_codes(values[n * SUPER :], np.float32(4), stored, tried[n * SUPER :])
            nbytes = (start + n) * (SUPER * THREE // np.uint64(8))
            write_codes(tried[n * SUPER :], _SIZE, SUPER, THREE, codes, room, packed, nbytes)
    return state


@device
def _store_scales(d: Any, mask: Any, block: Any, fine: Any, stored: Any, scales: Any, halves: Any) -> None:
    """Write the scales of a super-block as the file has them, and to ``stored`` as float32."""
    for i in range(_SIZE):
        stored[i] = np.float32(fine[i])
        fine[i] &= mask
    whole = write_level(fine, _SIZE, block, d, scales, halves, np.uint16(0))
    for i in range(_SIZE):
        stored[i] = np.float32(whole * stored[i])
