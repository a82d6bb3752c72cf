"""Blocks put together from codes and levels, and taken apart; see :mod:`zeropoint.layout.bit_places`.

Some blocks at a time, so that their numbers stay in the nearest cache. A move goes over all of them before
the next one does, 32 bytes at once where it has as many: shifts are less than a byte, and what they bring
from a neighbor lies outside of the mask.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from ....ops.lowering import Flag, Int64, UInt64
from .base3 import (
    DIGIT,
    DIGITS,
    FIVE,
    bytes_to_codes,
    codes_to_bytes,
    emit_digits,
    join_digits,
    load_digits,
    permutes_lines,
    split_digits,
)
from .byte_vectors import load_signs, store_signs
from .emit import emit_packed
from .intrinsics import (
    ANY,
    I8,
    I16,
    I32,
    I64,
    INDEX,
    device,
    inlined,
    instruction,
    load64,
    load_from,
    scratch,
    store64,
    store_at,
    tools,
    tuple_of,
)
from .named_records import record_type, unpacker
from .pack import apart, load_codes, steps_of, together
from .team import over_rows
from .tile import fetch_ahead
from .vector import in_all_lanes, load_lanes, octets_of, store_lanes

LEVELS = 4
"""Most levels of a type."""
_TILE, _BLOCKS, _WHOLE = 8192, np.uint64(64), np.uint64(8)
"""Most values and most blocks that are moved at a time."""
_ROOM = _TILE + 16
"""Values of a tile, and slack for the last whole word or vector."""
_SIGN = np.uint64(1)


def _mover(word: Any, count: int) -> Any:
    """Build the or-move of ``count`` words of each block."""
    kind, width = ir.VectorType(word, count), word.width

    @instruction(types.void, ANY, INDEX, INDEX, ANY, INDEX, INDEX, tuple_of(INDEX, 4), INDEX)
    def move(
        builder: Any,
        source: Any,
        begin: Any,
        pitch: Any,
        target: Any,
        at: Any,
        step: Any,
        bits: Any,
        blocks: Any,
    ) -> None:
        numbers = [builder.trunc(n, word) if width < 64 else n for n in bits]
        each = word(int.from_bytes(b"\1" * (width // 8), "little"))
        numbers[2:] = [builder.mul(n, each) for n in numbers[2:]]
        right, left, mask, flip = (in_all_lanes(builder, n, kind) for n in numbers)
        with tools.for_range(builder, blocks) as loop:
            here = builder.add(begin, builder.mul(loop.index, pitch))
            there = builder.add(at, builder.mul(loop.index, step))
            value = load_from(builder, source, here, kind)
            value = builder.xor(builder.and_(builder.lshr(value, right), mask), flip)
            old = load_from(builder, target, there, kind)
            store_at(builder, builder.or_(old, builder.shl(value, left)), target, there)

    return move


_move32, _move16, _move8 = _mover(I64, 4), _mover(I64, 2), _mover(I64, 1)
_move4, _move2, _move1 = _mover(I32, 1), _mover(I16, 1), _mover(I8, 1)


@inlined
def _move(
    source: Any, begin: Any, pitch: Any, target: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Or bits of blocks into ``target``; move: size, right, left, mask, flip."""
    size, bits, done, width = move[0], move[1:], np.uint64(0), np.uint64(32)
    while done < size:
        while done + width > size:
            width >>= np.uint64(1)
        here, there = begin + done, at + done
        if width == np.uint64(32):
            _move32(source, here, pitch, target, there, step, bits, blocks)
        elif width == np.uint64(16):
            _move16(source, here, pitch, target, there, step, bits, blocks)
        elif width == np.uint64(8):
            _move8(source, here, pitch, target, there, step, bits, blocks)
        elif width == np.uint64(4):
            _move4(source, here, pitch, target, there, step, bits, blocks)
        elif width == np.uint64(2):
            _move2(source, here, pitch, target, there, step, bits, blocks)
        else:
            _move1(source, here, pitch, target, there, step, bits, blocks)
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
def _clear(target: Any, begin: Any, count: Any) -> None:
    for i in range(begin, begin + count):
        target[i] = np.uint8(0)


class BitMove(NamedTuple):
    """Move of the numbers of field ``n``; see :class:`zeropoint.layout.bit_places.Move`.

    Of one whose size is 0, 8 numbers follow one another bit by bit, or 32 of one bit each: its mask is how
    many bits each has, and its flip the flipped bits of all. Of one whose mask is 0, numbers are digits of
    ``size`` bytes.
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
    digit of zero. digits, held: the first byte with digits, and a bit for each such byte from there on, where
    a vector holds them; see :func:`.base3.codes_to_bytes`.
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
    digits: UInt64
    held: UInt64


unpack_blocks, unpack_move = unpacker(BlockBytes), unpacker(BitMove)
_MOVE = record_type(BitMove).itemsize


@over_rows
def move_rows(
    data: Any, levels: Any, lines: Any, moves: Any, sizes: Any, tables: Any, first: Any, last: Any
) -> None:
    """Join blocks ``first`` to ``last``, or split them.

    data: packed codes. levels: bytes of each. lines: of the blocks. sizes: packed :class:`BlockBytes`.
    tables: of :func:`.base3.codes_to_bytes`.
    """
    room, packed = scratch(_ROOM, np.uint8), scratch(_ROOM, np.uint8)
    joins, bits, nbytes, block, one, two, three, four, zero, begins, held = unpack_blocks(sizes)
    pitches = block, one, two, three, four
    whole, digits = bits == _WHOLE, bits == np.uint64(0)
    codes = (block + FIVE - np.uint64(1)) // FIVE
    regroups = permutes_lines() and held != np.uint64(0)
    kept = (np.uint64(1) << codes) - np.uint64(1)
    per = min(np.uint64(_TILE) // block, _BLOCKS)
    for start in range(first, last, per):
        count = min(per, last - start)
        fields = data if whole else room, levels[0], levels[1], levels[2], levels[3]
        if joins:
            _clear(lines, start * nbytes, count * nbytes)
            if regroups:
                bytes_ = lines, start * nbytes + begins, nbytes, held
                codes_to_bytes((data, start * codes, codes, kept), bytes_, tables, zero, count)
            elif digits:
                load_digits(DIGITS, data, start * codes, count, block, room)
            elif not whole:
                load_codes(data, start * block * bits // _WHOLE, count * block, bits, room)
        else:
            fetch_ahead(lines, (start + per) * nbytes, count * nbytes)
            for field in range(1 if digits else 0, 5):
                begin = np.uint64(0) if field == 0 and not whole else start * pitches[field]
                _clear(fields[field], begin, count * pitches[field])
        for m in range(len(moves) // _MOVE):
            n, place, number, size, shift, low, mask, flip = unpack_move(moves, m)
            at, pitch = start * nbytes + place, pitches[n]
            begin = (np.uint64(0) if n == 0 and not whole else start * pitch) + number
            if mask == 0 and regroups:
                continue
            if mask == 0 and joins:
                join_digits((fields[n], begin, pitch), (lines, at, nbytes), size, count)
            elif mask == 0:
                split_digits((lines, at, nbytes), (fields[n], begin, pitch), size, count)
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
        if not joins and regroups:
            bytes_ = lines, start * nbytes + begins, nbytes, held
            bytes_to_codes(bytes_, (data, start * codes, codes, kept), tables, zero * DIGIT, count)
        elif not joins and digits:
            emit_digits(room, count, block, zero, data, start * codes)
        elif not joins and not whole:
            emit_packed(room, count * block, bits, packed, data, start * block * bits // _WHOLE)
