"""Q3_K and Q6_K: blocks of 16 with a signed scale; see :mod:`zeropoint.ops.ggml.super_blocks`."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, UInt64
from ..encode.elements import MAGIC
from ..machine.descriptor import BAD_VALUE, OK
from ..machine.emit import emit_packed
from ..machine.intrinsics import device, inlined, load64, narrow_half, scratch, store64, widen_half
from ..machine.lane_math import integers
from ..machine.named_records import unpacker
from ..machine.vector import (
    above,
    any_lane,
    bits_of,
    floats_of,
    larger,
    load_lanes,
    low_octets,
    smaller,
    store_lanes,
    words_of,
)
from .lanes import (
    LANES,
    LEAST,
    ONE,
    SUPER,
    divided,
    is_bad,
    is_zero,
    magnitudes,
    most_lane,
    negative,
    rounded,
    rounded_within,
    transpose,
    where,
    worse,
)
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
_TINY = np.float32(2.0**-100)
_SIZE, _EIGHT, _LONG, _ROOM = np.uint64(16), np.uint64(8), 16 * 16, 256 + 8
_LATER, _AT_ONCE = np.uint64(4 * 16), np.uint64(8)
"""Moves of the passes after the first; super-blocks at once."""
_WIDE, _ROWS, _MANY, _FOUND, _MOST = 8 * _LONG, 9 * _LONG, 16 * _LONG, 16 * 32, 8 * 16 + 1


class SignedKind(NamedTuple):
    """A type.

    bits: of a code, 3 or 6. columns: of a row, which importance is for. weighted: whether there is
    importance.
    """

    bits: UInt64
    columns: UInt64
    weighted: Flag


unpack_signed = unpacker(SignedKind)


@device
def _squares(values: Any, weights: Any) -> None:
    for i in range(_SIZE):
        value = load_lanes(values, i * LANES)
        store_lanes(weights, i * LANES, value * value)


@inlined
def _begin(x: Any, at: Any, codes: Any, sums: Any, place: Any) -> Any:
    """Write first codes, -4 to 3, of 16 blocks, and their sums.

    Returns the numbers of largest magnitude, and the bits of magnitudes of which one may not be finite.
    """
    least, most = floats_of(np.float32(-4)), floats_of(np.float32(3))
    value = amax = products = squares = floats_of(np.float32(0))
    worst = words_of(np.uint32(0))
    for i in range(at, at + SUPER, LANES):
        number = load_lanes(x, i)
        worst = worse(worst, number)
        beyond = above(magnitudes(number), amax)
        value, amax = where(beyond, number, value), where(beyond, magnitudes(number), amax)
    inverse = divided(np.float32(-4), value)
    for i in range(at, at + SUPER, LANES):
        number = load_lanes(x, i)
        weight, code = number * number, rounded_within(inverse * number, least, most)
        store_lanes(codes, i, code)
        products, squares = products + weight * number * code, squares + weight * code * code
    store_lanes(sums, place, products)
    store_lanes(sums, place + LANES, squares)
    return value, worst


@device
def _store_fits(sums: Any, place: Any, scales: Any, to: Any) -> None:
    """Write the scales that fit codes, from their sums."""
    zero, squares = floats_of(np.float32(0)), load_lanes(sums, place + LANES)
    scale = where(above(squares, zero), load_lanes(sums, place) / squares, zero)
    store_lanes(scales, to, scale)


@device
def _begin_blocks(x: Any, at: Any, values: Any, codes: Any, sums: Any, found: Any, extremes: Any) -> Any:
    """Write a super-block's first codes, scales to ``found``, and largest numbers.

    Returns BAD_VALUE where a number is not finite, else OK.
    """
    transpose(x, at, _SIZE, values, ZERO, LANES)
    value, worst = _begin(values, ZERO, codes, sums, ZERO)
    _store_fits(sums, ZERO, found, ZERO)
    zero, empty = floats_of(np.float32(0)), above(floats_of(LEAST), magnitudes(value))
    store_lanes(found, ZERO, where(empty, zero, load_lanes(found, ZERO)))
    store_lanes(extremes, ZERO, where(empty, zero, value))
    if any_lane(empty):
        for i in range(ZERO, SUPER, LANES):
            store_lanes(codes, i, where(empty, floats_of(np.float32(-4)), load_lanes(codes, i)))
    return BAD_VALUE if is_bad(worst) else OK


@device
def _gather_movable(x: Any, at: Any, block: Any, extremes: Any, rows: Any, places: Any, count: Any) -> Any:
    """Copy blocks with movable codes to ``rows``; return the new count.

    Under a number of largest magnitude that is positive the sum of products is at most zero, and stays there:
    llama.cpp moves codes of positive sums alone.
    """
    for b in range(LANES):
        # Without a branch: half of them are such blocks.
        store_lanes(rows, count * _SIZE, load_lanes(x, at + b * _SIZE))
        places[count] = block + b
        count += ONE if extremes[b] < np.float32(0) else ZERO
    return count


@inlined
def _move(moving: Any, at: Any, sums: Any, place: Any) -> Any:
    """Move one code of 16 blocks where better; return its place.

    moving: (numbers, codes, products, squares), what each code has in the sums the latter two.
    """
    numbers, codes, own_products, own_squares = moving
    least, most, zero = words_of(np.uint32(0xFFFFFFFC)), words_of(np.uint32(3)), floats_of(np.float32(0))
    number, code = load_lanes(numbers, at), load_lanes(codes, at)
    old_product, old_square = load_lanes(own_products, at), load_lanes(own_squares, at)
    products, squares = load_lanes(sums, place), load_lanes(sums, place + LANES)
    weight = number * number
    left, rest = products - old_product, squares - old_square
    moved = rounded(number * rest / left, least, most)
    product, square = weight * number * moved, weight * moved * moved
    more, more_squares = left + product, rest + square
    better = above(left, zero) & above(magnitudes(moved - code), zero) & above(more_squares, zero)
    better = better & above(more * more * squares, products * products * more_squares)
    store_lanes(codes, at, where(better, moved, code))
    store_lanes(own_products, at, where(better, product, old_product))
    store_lanes(own_squares, at, where(better, square, old_square))
    store_lanes(sums, place, where(better, more, products))
    store_lanes(sums, place + LANES, where(better, more_squares, squares))
    return better


@inlined
def _bound(codes: Any, at: Any, bounds: Any) -> None:
    """Bound the multiples of ``left`` between which a code stays.

    That is half a step, less a 5000th for the roundings of quotient and multiples; past the ends of codes
    there is no end.
    """
    code, half = load_lanes(codes, at), floats_of(np.float32(0.4999))
    none = floats_of(np.float32(np.inf))
    first, last = above(floats_of(np.float32(-3.5)), code), above(code, floats_of(np.float32(2.5)))
    store_lanes(bounds[0], at, where(first, negative(none), code - half))
    store_lanes(bounds[1], at, where(last, none, code + half))


@inlined
def _may_move(moving: Any, bounds: Any, at: Any, sums: Any, place: Any) -> Any:
    """Return whether a code of 16 blocks may move, without dividing."""
    left = load_lanes(sums, place) - load_lanes(moving[2], at)
    dividend = load_lanes(moving[0], at) * (load_lanes(sums, place + LANES) - load_lanes(moving[3], at))
    below = above(load_lanes(bounds[0], at) * left, dividend)
    return any_lane(below | above(dividend, load_lanes(bounds[1], at) * left))


@device
def _move_again(moving: Any, bounds: Any, begin: Any, sums: Any, place: Any) -> None:
    """Run later passes until as many codes as exist stay.

    Only one in ten vectors has a code that may move. Sums below _TINY are of products that may be subnormal,
    whose roundings no bound covers.
    """
    products = load_lanes(sums, place)
    small = above(floats_of(_TINY), products) & above(products, floats_of(np.float32(0)))
    every = any_lane(small)
    for i in range(begin, begin + SUPER, LANES):
        _bound(moving[1], i, bounds)
    still = ZERO
    for step in range(_LATER):
        at = begin + step % _SIZE * LANES
        still += ONE
        may = every or _may_move(moving, bounds, at, sums, place)
        if may and any_lane(_move(moving, at, sums, place)):
            _bound(moving[1], at, bounds)
            still = ZERO
        if still == _SIZE:
            return


@device
def _fit_by_moves(rows: Any, count: Any, moving: Any, bounds: Any, sums: Any, fits: Any) -> None:
    """Find scales of blocks by single-code moves; see ``three_bit_scale``.

    rows: of blocks. moving: as :func:`_move` has it, of 16 blocks each. fits: takes the scales. All
    groups in turns in the first pass: a move waits for the one before.
    """
    numbers, codes, own_products, own_squares = moving
    groups, two = (count + LANES - ONE) // LANES, LANES + LANES
    for g in range(groups):
        transpose(rows, g * SUPER, _SIZE, numbers, g * SUPER, LANES)
        _begin(numbers, g * SUPER, codes, sums, g * two)
        for i in range(g * SUPER, (g + ONE) * SUPER, LANES):
            number, code = load_lanes(numbers, i), load_lanes(codes, i)
            weight = number * number
            store_lanes(own_products, i, weight * number * code)
            store_lanes(own_squares, i, weight * code * code)
    for i in range(ZERO, SUPER, LANES):
        for g in range(groups):
            _move(moving, g * SUPER + i, sums, g * two)
    for g in range(groups):
        _move_again(moving, bounds, g * SUPER, sums, g * two)
        _store_fits(sums, g * two, fits, g * LANES)


@device
def _codes_of_search(values: Any, found: Any, top: Any, codes: Any) -> None:
    """Write the codes of :func:`.line_search.fit_signed`; blocks of zeros have ``-top``."""
    least, most = words_of(np.uint32(0)) - words_of(np.uint32(top)), words_of(np.uint32(top - np.float32(1)))
    inverse = load_lanes(found, LANES)
    empty, lowest = is_zero(inverse), floats_of(-top)
    for i in range(_SIZE):
        code = rounded(inverse * load_lanes(values, i * LANES), least, most)
        store_lanes(codes, i * LANES, where(empty, lowest, code))


@device
def _choose_codes(values: Any, top: Any, stored: Any, codes: Any) -> None:
    """Write codes under stored scales; zero scales leave codes."""
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
        if d == 0:  # all codes are zero codes
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
    """Quantize super-blocks to Q3_K with importance; arguments as in :func:`six_bit_rows`.

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
            row = importance, column, kind.columns
            important_weights(own_values, own, row, _SIZE, SUPER, factor, weights)
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
def _keep_moved(codes: Any, places: Any, count: Any, block: Any, tried: Any) -> None:
    """Copy moved codes to a super-block's columns, from ``block`` on."""
    for k in range(count):
        if places[k] >= block and places[k] < block + LANES:
            for i in range(_SIZE):
                moved = codes[k // LANES * SUPER + i * LANES + k % LANES]
                tried[i * LANES + (places[k] - block)] = moved


@device
def _scales_of_blocks(numbers: Any, block: Any, stored: Any, room: Any, scales: Any, halves: Any) -> Any:
    """Write scales of blocks as :func:`.scale_codes.by_signed_largest` has them, and to ``stored``.

    Returns whether none of them, as float32, is zero or not finite.
    """
    octets, fine = room
    found = load_lanes(numbers, ZERO)
    amax, place = most_lane(magnitudes(found)), ZERO
    if amax > _TINY and not is_bad(worse(words_of(np.uint32(0)), found)):
        while abs(numbers[place]) != amax:
            place += ONE
        inverse = np.float32(np.float32(-32) / numbers[place])
        end = floats_of(np.float32(31))
        code = rounded_within(floats_of(inverse) * found, floats_of(np.float32(-32)), end)
        half = narrow_half(np.float32(1) / inverse)
        store_lanes(stored, ZERO, floats_of(widen_half(half)) * code)
        six = integers(code) & words_of(np.uint32(0x3F))
        store_lanes(octets, ZERO, low_octets(six, six))
        store64(scales, block * _SIZE, load64(octets, ZERO))
        store64(scales, block * _SIZE + _EIGHT, load64(octets, _EIGHT))
        halves[block] = half
    else:
        d = by_signed_largest(numbers, _SIZE, np.float32(-32), np.float32(0), fine)
        for i in range(_SIZE):
            fine[i] = np.int32(-32) if d == 0 else max(min(fine[i], np.int32(31)), np.int32(-32))
        _store_scales(d, np.int32(0x3F), block, fine, stored, scales, halves)
    scale = load_lanes(stored, ZERO)
    return not any_lane(is_zero(scale)) and not is_bad(worse(words_of(np.uint32(0)), scale))


@inlined
def _row_words(x: Any, at: Any, inverse: Any) -> Any:
    """Block codes as words, quotients' distances, and largest quotients.

    Quotients are products with the inverse scale, within ``2 ** -22`` of themselves.
    """
    magic = floats_of(MAGIC)
    quotient = load_lanes(x, at) * floats_of(inverse)
    held = larger(smaller(quotient, floats_of(np.float32(3))), floats_of(np.float32(-4)))
    lifted = held + magic
    return bits_of(lifted), magnitudes(held - (lifted - magic)), magnitudes(quotient)


@device
def _row_codes(x: Any, at: Any, stored: Any, inverses: Any, codes: Any) -> Any:
    """Write a super-block's codes, bytes; whether they are certain."""
    by = load_lanes(stored, ZERO)
    store_lanes(inverses, ZERO, where(is_zero(by), floats_of(np.float32(0)), divided(np.float32(1), by)))
    off = most = floats_of(np.float32(0))
    mask = words_of(np.uint32(7))
    for b in range(ZERO, LANES, np.uint64(2)):
        first, away, large = _row_words(x, at + b * _SIZE, inverses[b])
        second, more, larger_one = _row_words(x, at + (b + ONE) * _SIZE, inverses[b + ONE])
        off, most = larger(off, larger(away, more)), larger(most, larger(large, larger_one))
        store_lanes(codes, b * _SIZE, low_octets(first & mask, second & mask))
    near = above(off, floats_of(np.float32(0.49999)))
    return not any_lane(near | above(most, floats_of(np.float32(2.0**20))))


@device
def moved_rows(x: Any, packed: Any, scales: Any, halves: Any, first: Any, last: Any) -> Any:
    """Quantize super-blocks to Q3_K without importance; arguments as in :func:`six_bit_rows`."""
    values, tried, inverses = scratch(_LONG, np.float32), scratch(_LONG, np.float32), scratch(16, np.float32)
    rows, places = scratch(_ROWS, np.float32), scratch(_MOST, np.uint64)
    moving = (
        scratch(_WIDE, np.float32), scratch(_WIDE, np.float32), scratch(_WIDE, np.float32),
        scratch(_WIDE, np.float32),
    )  # fmt: skip
    bounds = scratch(_WIDE, np.float32), scratch(_WIDE, np.float32)
    found, fits, extremes = scratch(128, np.float32), scratch(128, np.float32), scratch(16, np.float32)
    sums, stored, octets = scratch(256, np.float32), scratch(16, np.float32), scratch(32, np.uint8)
    fine = scratch(16, np.int32)
    codes, room = scratch(_LONG, np.uint8), scratch(_ROOM, np.uint8)
    state = OK
    for start in range(first, last, _AT_ONCE):
        count, movable = min(_AT_ONCE, last - start), ZERO
        for n in range(count):
            at = (start + n) * SUPER
            state = max(state, _begin_blocks(x, at, values, tried, sums, found[n * LANES :], extremes))
            movable = _gather_movable(x, at, n * LANES, extremes, rows, places, movable)
        for i in range(movable * _SIZE, (movable + LANES) * _SIZE, LANES):
            store_lanes(rows, i, floats_of(np.float32(0)))
        _fit_by_moves(rows, movable, moving, bounds, sums, fits)
        for k in range(movable):
            found[places[k]] = fits[k]
        for n in range(count):
            block = start + n
            plain = _scales_of_blocks(found[n * LANES :], block, stored, (octets, fine), scales, halves)
            nbytes = block * (SUPER * THREE // np.uint64(8))
            if plain and _row_codes(x, block * SUPER, stored, inverses, codes):
                emit_packed(codes, SUPER, THREE, room, packed, nbytes)
                continue
            # Codes of scales of zero are those that were moved.
            _begin_blocks(x, block * SUPER, values, tried, sums, found[n * LANES :], extremes)
            _keep_moved(moving[1], places, movable, n * LANES, tried)
            _choose_codes(values, np.float32(4), stored, tried)
            write_codes(tried, _SIZE, SUPER, THREE, codes, room, packed, nbytes)
    return state


@device
def _store_scales(d: Any, mask: Any, block: Any, fine: Any, stored: Any, scales: Any, halves: Any) -> None:
    """Write a super-block's scales for the file, and float32 to ``stored``."""
    for i in range(_SIZE):
        stored[i] = np.float32(fine[i])
        fine[i] &= mask
    whole = write_level(fine, _SIZE, block, d, scales, halves, np.uint16(0))
    for i in range(_SIZE):
        stored[i] = np.float32(whole * stored[i])
