"""Blocks put together from codes and levels, and taken apart; see :mod:`zeropoint.layout.bit_places`.

Some blocks at a time, so that their numbers stay in the nearest cache. A move goes over all of them before
the next one does, 32 bytes at once where it has as many: shifts are less than a byte, and what they bring
from a neighbor lies outside of the mask.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from ....ops.lowering import Flag, Int64, UInt64
from .byte_vectors import (
    load_bytes,
    load_four_bytes,
    load_signs,
    load_strided,
    store_bytes,
    store_four_bytes,
    store_signs,
)
from .emit import emit_packed
from .intrinsics import I8, I16, I32, I64, address, device, inlined, load64, primitive, scratch, store64
from .named_records import record_type, unpacker
from .pack import apart, load_codes, steps_of, together
from .tile import fetch_ahead
from .vector import HALF, in_all_lanes, load_lanes, longs_of, octets_of, store_lanes, words_of

# It has no types.
_tools: Any = cgutils

LEVELS = 4
"""Most levels of a type."""
_TILE, _BLOCKS, _WHOLE = 8192, np.uint64(64), np.uint64(8)
"""Most values and most blocks that are moved at a time."""
_ROOM = _TILE + 16
"""Values of a tile, and slack for the last whole word or vector."""
FEW = np.uint64(4)
"""Bytes of digits that are moved together where there are no 16; a run is a whole number of them."""
FIVE = np.uint64(5)
"""Digits of a code, of base 3."""
_DIGITS: Any = np.array(
    [sum(code // 3 ** (4 - n) % 3 << 8 * n for n in range(5)) for code in range(256)], np.uint64
)
"""The digits of each code as bytes, the highest one first."""
VALUED_DIGITS: Any = np.where(np.arange(256) < 243, _DIGITS, np.uint64(0x0303030303))
"""Likewise, with digits of 3 for unused codes, whose values are zeros."""
_THREE, _SIGN = np.uint64(3), np.uint64(1)
_PLACES = np.uint64(81 << 32 | 27 << 24 | 9 << 16 | 3 << 8 | 1)
"""The fifth byte of its product with a word is the number whose digits are the first five bytes."""
_WIDENS, _DROPS = np.uint32(34522), np.uint32(23)
"""Times the one and without the bits of the other, ``256 * n + 242`` with n below 243 is divided by 243."""


def _mover(word: Any, count: int) -> Any:
    """Build the or-move of ``count`` words of each block."""
    kind, width = ir.VectorType(word, count), word.width

    @primitive
    def move(
        typingctx: Any, source: Any, begin: Any, pitch: Any, target: Any, at: Any, step: Any, right: Any,
        left: Any, mask: Any, flip: Any, blocks: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            origin, first, pitch, into, place, step, *numbers, blocks = args
            numbers = [builder.trunc(n, word) if width < 64 else n for n in numbers]
            each = word(int.from_bytes(b"\1" * (width // 8), "little"))
            numbers[2:] = [builder.mul(n, each) for n in numbers[2:]]
            right, left, mask, flip = (in_all_lanes(builder, n, kind) for n in numbers)
            with _tools.for_range(builder, blocks) as loop:
                here = builder.add(first, builder.mul(loop.index, pitch))
                there = builder.add(place, builder.mul(loop.index, step))
                value = builder.load(address(context, builder, signature.args[0], origin, here, kind))
                value.align = 1
                value = builder.xor(builder.and_(builder.lshr(value, right), mask), flip)
                to = address(context, builder, signature.args[3], into, there, kind)
                old = builder.load(to)
                old.align = 1
                builder.store(builder.or_(old, builder.shl(value, left)), to).align = 1
            return context.get_dummy_value()

        number = types.uint64
        return types.void(source, number, number, target, *[number] * 7), codegen

    return move


_move32, _move16, _move8 = _mover(I64, 4), _mover(I64, 2), _mover(I64, 1)
_move4, _move2, _move1 = _mover(I32, 1), _mover(I16, 1), _mover(I8, 1)


@inlined
def _move(
    source: Any, begin: Any, pitch: Any, target: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Or bits of blocks into ``target``; move: size, right, left, mask, flip."""
    size, right, left, mask, flip = move
    done, width = np.uint64(0), np.uint64(32)
    while done < size:
        while done + width > size:
            width >>= np.uint64(1)
        here, there = begin + done, at + done
        if width == np.uint64(32):
            _move32(source, here, pitch, target, there, step, right, left, mask, flip, blocks)
        elif width == np.uint64(16):
            _move16(source, here, pitch, target, there, step, right, left, mask, flip, blocks)
        elif width == np.uint64(8):
            _move8(source, here, pitch, target, there, step, right, left, mask, flip, blocks)
        elif width == np.uint64(4):
            _move4(source, here, pitch, target, there, step, right, left, mask, flip, blocks)
        elif width == np.uint64(2):
            _move2(source, here, pitch, target, there, step, right, left, mask, flip, blocks)
        else:
            _move1(source, here, pitch, target, there, step, right, left, mask, flip, blocks)
        done += width


@device
def _pack(
    numbers: Any, begin: Any, pitch: Any, lines: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Pack bits of 8 numbers of each block; move: bits, low, flip."""
    bits, low, flip = move
    steps = steps_of(bits)
    for block in range(blocks):
        word = together(load64(numbers, begin + block * pitch) >> low, steps) ^ flip
        for n in range(bits):
            lines[at + n + block * step] |= np.uint8(word >> (n * _WHOLE))


@device
def _unpack(
    lines: Any, at: Any, step: Any, numbers: Any, begin: Any, pitch: Any, move: Any, blocks: Any
) -> None:
    """Unpack bits of 8 numbers of each block; move: bits, low, flip."""
    bits, low, flip = move
    steps = steps_of(bits)
    for block in range(blocks):
        word = np.uint64(0)
        for n in range(bits):
            word |= np.uint64(lines[at + n + block * step]) << (n * _WHOLE)
        place = begin + block * pitch
        store64(numbers, place, load64(numbers, place) | (apart(word ^ flip, steps) << low))


@device
def _pack_signs(
    numbers: Any, begin: Any, pitch: Any, lines: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Pack one bit of 32 numbers of a block; move: low, flip."""
    mask, flip = octets_of(np.uint8(_SIGN << move[0])), np.uint32(move[1])
    for block in range(blocks):
        store_signs(lines, at + block * step, load_lanes(numbers, begin + block * pitch) & mask, flip)


@device
def _unpack_signs(
    lines: Any, at: Any, step: Any, numbers: Any, begin: Any, pitch: Any, move: Any, blocks: Any
) -> None:
    """Or 32 bits of each block into 32 numbers; move: low, flip."""
    mask, flip = octets_of(np.uint8(_SIGN << move[0])), np.uint32(move[1])
    for block in range(blocks):
        place, bits = begin + block * pitch, load_signs(lines, at + block * step, flip) & mask
        store_lanes(numbers, place, load_lanes(numbers, place) | bits)


@device
def _join_digits(
    numbers: Any, begin: Any, pitch: Any, lines: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Write bytes of digits; move: bytes, numbers of a byte.

    See ``Digits`` in layout/bit_places.py.
    """
    run, places = move
    fill, most = words_of(np.uint32(242)), words_of(_WIDENS)
    last = words_of(np.uint32(0xFF) if places == FIVE else np.uint32(0))
    for block in range(blocks):
        source, target = begin + block * pitch, at + block * step
        j = np.uint64(0)
        while j < run:
            total, from_here = words_of(np.uint32(0)), source + j
            for _ in range(np.uint64(4)):
                total = total + total + total + load_bytes(numbers, from_here)
                from_here += run
            total = total + total + total + (load_bytes(numbers, from_here) & last)
            total = ((total << words_of(np.uint32(8))) + fill) * most >> words_of(_DROPS)
            if j + HALF <= run:
                store_bytes(lines, target + j, total)
                j += HALF
            else:
                store_four_bytes(lines, target + j, total)
                j += FEW


@device
def _split_digits(
    lines: Any, at: Any, step: Any, numbers: Any, begin: Any, pitch: Any, move: Any, blocks: Any
) -> None:
    """Write the digits of bytes; the inverse of :func:`_join_digits`."""
    run, places = move
    low, eight = words_of(np.uint32(0xFF)), words_of(np.uint32(8))
    for block in range(blocks):
        source, target = at + block * step, begin + block * pitch
        j = np.uint64(0)
        while j < run:
            wide = j + HALF <= run
            rest = load_bytes(lines, source + j) if wide else load_four_bytes(lines, source + j)
            place = target + j
            for n in range(FIVE):
                rest = rest + rest + rest
                if wide and n < places:
                    store_bytes(numbers, place, rest >> eight)
                elif n < places:
                    store_four_bytes(numbers, place, rest >> eight)
                rest, place = rest & low, place + run
            j += HALF if wide else FEW


@device
def load_digits(table: Any, data: Any, at: Any, blocks: Any, block: Any, numbers: Any) -> None:
    """Write the digits of codes of five by a table.

    Blocks end with their digits.
    """
    codes = (block + FIVE - np.uint64(1)) // FIVE
    eights = codes // _WHOLE * _WHOLE
    for b in range(blocks):
        source, target = at + b * codes, b * block
        for i in range(np.uint64(0), eights, _WHOLE):
            word = load64(data, source + i)
            for n in range(np.uint64(8)):
                store64(numbers, target + (i + n) * FIVE, table[np.uint8(word >> (n * _WHOLE))])
        for i in range(eights, codes):
            store64(numbers, target + i * FIVE, table[data[source + i]])


@inlined
def _fives(x: Any) -> Any:
    """Numbers whose base-3 digits are the lowest five bytes, in low bytes."""
    twos = x + x + x + (x >> longs_of(np.uint64(8)))
    fours = (twos << longs_of(np.uint64(3))) + twos + (twos >> longs_of(np.uint64(16)))
    return fours + fours + fours + (x >> longs_of(np.uint64(32)))


@device
def emit_digits(numbers: Any, blocks: Any, block: Any, missing: Any, target: Any, at: Any) -> None:
    """Write codes of five digits, highest first; missing: fills a block's last."""
    whole, rest = block // FIVE, block % FIVE
    eights = whole // _WHOLE * _WHOLE
    codes = whole + (np.uint64(1) if rest > np.uint64(0) else np.uint64(0))
    for b in range(blocks):
        place, own = at + b * codes, b * block
        for i in range(np.uint64(0), eights, _WHOLE):
            store_bytes(target, place + i, _fives(load_strided(numbers, own + i * FIVE, FIVE)))
        for i in range(eights, whole):
            # No partial sum of the five products reaches a byte's end.
            target[place + i] = np.uint8(load64(numbers, own + i * FIVE) * _PLACES >> np.uint64(32))
        if rest > np.uint64(0):
            code = np.uint64(0)
            for i in range(FIVE):
                digit = np.uint64(numbers[own + whole * FIVE + i]) if i < rest else missing
                code = code * _THREE + digit
            target[place + whole] = np.uint8(code)


@device
def _clear(target: Any, begin: Any, count: Any) -> None:
    for i in range(begin, begin + count):
        target[i] = np.uint8(0)


class BitMove(NamedTuple):
    """Move of the numbers of field ``n``; see :class:`zeropoint.layout.bit_places.Move`.

    Of one whose size is 0, 8 numbers follow one another bit by bit, or 32 of one bit each: its mask is how
    many bits each has, and its flip the flipped bits of all. Of one whose mask is 0, numbers are digits: its
    shift is how many of a byte are numbers.
    """

    n: Int64
    at: UInt64
    first: UInt64
    size: UInt64
    shift: UInt64
    low: UInt64
    mask: UInt64
    flip: UInt64


class BlockBytes(NamedTuple):
    """Blocks of bytes.

    joins: whether they are joined, rather than split. bits: of a code, or 0 of codes of five digits. nbytes:
    of a block. block, one, two, three, four: its values, and bytes of its numbers of each level. zero: the
    digit of zero.
    """

    joins: Flag
    bits: UInt64
    nbytes: UInt64
    block: UInt64
    one: UInt64
    two: UInt64
    three: UInt64
    four: UInt64
    zero: UInt64


unpack_blocks, unpack_move = unpacker(BlockBytes), unpacker(BitMove)
_MOVE = record_type(BitMove).itemsize


@device
def move_rows(data: Any, levels: Any, lines: Any, moves: Any, sizes: Any, first: Any, last: Any) -> None:
    """Join blocks ``first`` to ``last``, or split them.

    data: packed codes. levels: bytes of each. lines: of the blocks. sizes: packed :class:`BlockBytes`.
    """
    room, packed = scratch(_ROOM, np.uint8), scratch(_ROOM, np.uint8)
    joins, bits, nbytes, block, one, two, three, four, zero = unpack_blocks(sizes)
    pitches = block, one, two, three, four
    whole, digits = bits == _WHOLE, bits == np.uint64(0)
    codes = (block + FIVE - np.uint64(1)) // FIVE
    per = min(np.uint64(_TILE) // block, _BLOCKS)
    for start in range(first, last, per):
        count = min(per, last - start)
        fields = data if whole else room, levels[0], levels[1], levels[2], levels[3]
        if joins:
            _clear(lines, start * nbytes, count * nbytes)
            if digits:
                load_digits(_DIGITS, data, start * codes, count, block, room)
            elif not whole:
                load_codes(data, start * block * bits // _WHOLE, count * block, bits, room)
        else:
            fetch_ahead(lines, (start + per) * nbytes, count * nbytes)
            for field in range(5):
                begin = np.uint64(0) if field == 0 and not whole else start * pitches[field]
                _clear(fields[field], begin, count * pitches[field])
        for m in range(len(moves) // _MOVE):
            n, place, number, size, shift, low, mask, flip = unpack_move(moves, m)
            at, pitch = start * nbytes + place, pitches[n]
            begin = (np.uint64(0) if n == 0 and not whole else start * pitch) + number
            if mask == 0 and joins:
                _join_digits(fields[n], begin, pitch, lines, at, nbytes, (size, shift), count)
            elif mask == 0:
                _split_digits(lines, at, nbytes, fields[n], begin, pitch, (size, shift), count)
            elif size == 0 and mask == _SIGN and joins:
                _pack_signs(fields[n], begin, pitch, lines, at, nbytes, (low, flip), count)
            elif size == 0 and mask == _SIGN:
                _unpack_signs(lines, at, nbytes, fields[n], begin, pitch, (low, flip), count)
            elif size == 0 and joins:
                _pack(fields[n], begin, pitch, lines, at, nbytes, (mask, low, flip), count)
            elif size == 0:
                _unpack(lines, at, nbytes, fields[n], begin, pitch, (mask, low, flip), count)
            elif joins:
                _move(fields[n], begin, pitch, lines, at, nbytes, (size, low, shift, mask, flip), count)
            else:
                _move(lines, at, nbytes, fields[n], begin, pitch, (size, shift, low, mask, flip), count)
        if not joins and digits:
            emit_digits(room, count, block, zero, data, start * codes)
        elif not joins and not whole:
            emit_packed(room, count * block, bits, packed, data, start * block * bits // _WHOLE)
