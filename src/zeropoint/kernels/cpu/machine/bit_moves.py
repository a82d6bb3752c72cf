"""Blocks put together from codes and levels, and taken apart; see :mod:`zeropoint.layout.bit_places`.

Some blocks at a time, so that their numbers stay in the nearest cache. A move goes over all of them before
the next one does, eight bytes at once where it has as many: shifts are less than a byte, and what they bring
from a neighbor lies outside of the mask.
"""

from typing import Any

import numpy as np

from .emit import emit_packed
from .intrinsics import device, load64, scratch, store64
from .pack import apart, load_codes, together

MOVE = 8
"""Numbers of a move: its field, then those of Move in layout/bit_places.py.

Of one whose size is 0, 8 numbers follow one another bit by bit: its mask is how many bits each has, and its
flip those of all 8.
"""
LEVELS = 4
"""Most levels of a type."""
_TILE, _WHOLE = np.uint64(4096), np.uint64(8)
_EACH = np.uint64(0x0101010101010101)


@device
def _move(
    source: Any, begin: Any, pitch: Any, target: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Or bits of ``blocks`` blocks into ``target``; move: size, right, left, mask, flip."""
    size, right, left, mask, flip = move
    words = size // _WHOLE
    for n in range(words):
        first = n * _WHOLE
        for block in range(blocks):
            word = ((load64(source, begin + first + block * pitch) >> right) & (mask * _EACH)) ^ (
                flip * _EACH
            )
            place = at + first + block * step
            store64(target, place, load64(target, place) | (word << left))
    for n in range(words * _WHOLE, size):
        for block in range(blocks):
            byte = ((np.uint64(source[begin + n + block * pitch]) >> right) & mask) ^ flip
            target[at + n + block * step] |= np.uint8(byte << left)


@device
def _pack(
    numbers: Any, begin: Any, pitch: Any, lines: Any, at: Any, step: Any, move: Any, blocks: Any
) -> None:
    """Or bits of 8 numbers of each block into as many bytes as they have bits; move: bits, low, flip."""
    bits, low, flip = move
    for block in range(blocks):
        word = together(load64(numbers, begin + block * pitch) >> low, bits) ^ flip
        for n in range(bits):
            lines[at + n + block * step] |= np.uint8(word >> (n * _WHOLE))


@device
def _unpack(
    lines: Any, at: Any, step: Any, numbers: Any, begin: Any, pitch: Any, move: Any, blocks: Any
) -> None:
    """Or bits of 8 numbers of each block into these numbers; move: bits, low, flip."""
    bits, low, flip = move
    for block in range(blocks):
        word = np.uint64(0)
        for n in range(bits):
            word |= np.uint64(lines[at + n + block * step]) << (n * _WHOLE)
        place = begin + block * pitch
        store64(numbers, place, load64(numbers, place) | (apart(word ^ flip, bits) << low))


@device
def _clear(target: Any, begin: Any, count: Any) -> None:
    for i in range(begin, begin + count):
        target[i] = np.uint8(0)


@device
def move_rows(
    data: Any, one: Any, two: Any, three: Any, four: Any, lines: Any, moves: Any, sizes: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    """Join blocks ``first`` to ``last``, or split them.

    data: packed codes. one to four: bytes of the levels. lines: of the blocks. sizes: whether they are
    joined, bits of a code, bytes of a block, then its values and bytes of its numbers of each level.
    """
    room, packed = scratch(4096, np.uint8), scratch(4096 + 8, np.uint8)
    joins, bits, nbytes, block = sizes[0] != 0, sizes[1], sizes[2], sizes[3]
    whole = bits == _WHOLE
    per = _TILE // block
    for start in range(first, last, per):
        count = min(per, last - start)
        fields = data if whole else room, one, two, three, four
        if joins:
            _clear(lines, start * nbytes, count * nbytes)
            if not whole:
                load_codes(data, start * block * bits // _WHOLE, count * block, bits, room)
        else:
            for field in range(5):
                begin = np.uint64(0) if field == 0 and not whole else start * sizes[3 + field]
                _clear(fields[field], begin, count * sizes[3 + field])
        for m in range(0, len(moves), MOVE):
            move = moves[m : m + MOVE]
            n = np.int64(move[0])  # with an index of uint64, Numba's sum would be a float
            size, shift, low, mask, flip = move[3], move[4], move[5], move[6], move[7]
            at, pitch = start * nbytes + move[1], sizes[3 + n]
            begin = (np.uint64(0) if n == 0 and not whole else start * pitch) + move[2]
            if size == 0 and joins:
                _pack(fields[n], begin, pitch, lines, at, nbytes, (mask, low, flip), count)
            elif size == 0:
                _unpack(lines, at, nbytes, fields[n], begin, pitch, (mask, low, flip), count)
            elif joins:
                _move(fields[n], begin, pitch, lines, at, nbytes, (size, low, shift, mask, flip), count)
            else:
                _move(lines, at, nbytes, fields[n], begin, pitch, (size, shift, low, mask, flip), count)
        if not joins and not whole:
            emit_packed(room, count * block, bits, packed, data, start * block * bits // _WHOLE)
