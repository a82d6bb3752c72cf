"""Word transposition between rows and lines; see :mod:`zeropoint.layout.word_lines`.

Some rows and words of each at a time, by way of scratch that stays in the nearest cache: single words move
between rows and scratch, and whole vectors, of a cache line each, between scratch and lines. Where words
of lines hold codes of several rows, vectors of the eight words of a place are transposed on the way.
"""

from typing import Any

import numpy as np
from numba import types

from .intrinsics import ANY, I64, INDEX, inlined, instruction, load_from, scratch, store_at
from .team import over_rows
from .vector import HALF, WORDS, load_lanes, store_lanes, words_of

PANEL = 16
"""Words of a row that are moved together: a cache line."""
ROWS = 128
"""Rows that are: eight vectors of their words at one place."""
ROOM = ROWS * PANEL
_ROWS, _EIGHT = np.uint64(ROWS), np.uint64(8)


@instruction(types.void, ANY, INDEX)
def _transpose(builder: Any, room: Any, at: Any) -> None:
    """Transpose eight words per lane, 8 x 8 fields of 4 bits."""
    places = [builder.add(at, I64(n * WORDS.count)) for n in range(8)]
    rows = [load_from(builder, room, place, WORDS.lanes, 4) for place in places]
    for gap, low in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        shift, mask = (WORDS.lanes([number] * WORDS.count) for number in (4 * gap, low))
        for n in range(8):
            if not n & gap:
                # The upper fields of one are exchanged with the lower ones of the other.
                moved = builder.and_(builder.xor(builder.lshr(rows[n], shift), rows[n + gap]), mask)
                rows[n] = builder.xor(rows[n], builder.shl(moved, shift))
                rows[n + gap] = builder.xor(rows[n + gap], moved)
    for place, row in zip(places, rows, strict=True):
        store_at(builder, row, room, place, 4)


@inlined
def _line_of(across: Any, place: Any, vector: Any, top: Any, length: Any) -> Any:
    """Place of a vector in its line, and how many words exist.

    top: the first of the rows. length: words of a line.
    """
    if across:
        line, first = place * _EIGHT + vector, top // _EIGHT
    else:
        line, first = place, top + vector * HALF
    left = length - min(length, first)
    return line * length + first, min(left, HALF)


@over_rows
def turn_panels(rows: Any, lines: Any, order: Any, sizes: Any, first: Any, last: Any) -> None:
    """Move panels ``first`` to ``last`` of the words of rows.

    rows: (count * width,) uint32. lines: as many words. order: (ROWS,) uint64, the place in scratch of each
    of some rows. sizes: count, width, whether words of lines hold codes of several rows, what they differ by,
    and whether lines become rows.
    """
    room = scratch(ROOM, np.uint32)
    count, width, across, back = sizes[0], sizes[1], sizes[2] != 0, sizes[4] != 0
    flip, length = words_of(np.uint32(sizes[3])), count // _EIGHT if across else count
    for panel in range(first, last):
        begin = panel * np.uint64(PANEL)
        places = min(np.uint64(PANEL), width - begin)
        for top in range(np.uint64(0), count, _ROWS):
            some = min(_ROWS, count - top)
            if not back:
                for row in range(some):
                    source, at = (top + row) * width + begin, order[row]
                    for place in range(places):
                        room[place * _ROWS + at] = rows[source + place]
            for place in range(places):
                at = place * _ROWS
                if across and not back:
                    _transpose(room, at)
                for vector in range(_EIGHT):
                    line, words = _line_of(across, begin + place, vector, top, length)
                    _move(lines, line, words, room, at + vector * HALF, flip, back)
                if across and back:
                    _transpose(room, at)
            if back:
                for row in range(some):
                    target, at = (top + row) * width + begin, order[row]
                    for place in range(places):
                        rows[target + place] = room[place * _ROWS + at]


@inlined
def _move(lines: Any, line: Any, words: Any, room: Any, at: Any, flip: Any, back: Any) -> None:
    """Move a vector, or ``words`` of it, between scratch and a line."""
    if words == HALF and back:
        store_lanes(room, at, load_lanes(lines, line) ^ flip)
    elif words == HALF:
        store_lanes(lines, line, load_lanes(room, at) ^ flip)
    elif back:
        for n in range(words):
            room[at + n] = lines[line + n]
        store_lanes(room, at, load_lanes(room, at) ^ flip)
    else:
        store_lanes(room, at, load_lanes(room, at) ^ flip)
        for n in range(words):
            lines[line + n] = room[at + n]
