"""Word transposition between rows and lines; see :mod:`zeropoint.layout.word_lines`.

Some rows and words of each at a time, by way of scratch that stays in the nearest cache: single words move
between rows and scratch, and whole vectors, of a cache line each, between scratch and lines. Where words
of lines hold codes of several rows, vectors of the eight words of a place are transposed on the way.
"""

from typing import Any

import numpy as np

from .intrinsics import device, inlined, scratch
from .vector import HALF, load_lanes, store_lanes, words_of

PANEL = 16
"""Words of a row that are moved together: a cache line."""
ROWS = 128
"""Rows that are: eight vectors of their words at one place."""
ROOM = ROWS * PANEL
_ROWS, _EIGHT = np.uint64(ROWS), np.uint64(8)
_LOW = np.uint32(0x0000FFFF), np.uint32(0x00FF00FF), np.uint32(0x0F0F0F0F)


@inlined
def _swapped(a: Any, b: Any, by: Any, low: Any) -> Any:
    """Exchange the upper fields of ``a`` with the lower ones of ``b``."""
    shift, mask = words_of(np.uint32(by)), words_of(low)
    moved = ((a >> shift) ^ b) & mask
    return a ^ (moved << shift), b ^ moved


@device
def _transpose(room: Any, at: Any) -> None:
    """Transpose eight words per lane, 8 x 8 fields of 4 bits."""
    a, b = load_lanes(room, at), load_lanes(room, at + HALF)
    c, d = load_lanes(room, at + np.uint64(2) * HALF), load_lanes(room, at + np.uint64(3) * HALF)
    e, f = load_lanes(room, at + np.uint64(4) * HALF), load_lanes(room, at + np.uint64(5) * HALF)
    g, h = load_lanes(room, at + np.uint64(6) * HALF), load_lanes(room, at + np.uint64(7) * HALF)
    a, e = _swapped(a, e, 16, _LOW[0])
    b, f = _swapped(b, f, 16, _LOW[0])
    c, g = _swapped(c, g, 16, _LOW[0])
    d, h = _swapped(d, h, 16, _LOW[0])
    a, c = _swapped(a, c, 8, _LOW[1])
    b, d = _swapped(b, d, 8, _LOW[1])
    e, g = _swapped(e, g, 8, _LOW[1])
    f, h = _swapped(f, h, 8, _LOW[1])
    a, b = _swapped(a, b, 4, _LOW[2])
    c, d = _swapped(c, d, 4, _LOW[2])
    e, f = _swapped(e, f, 4, _LOW[2])
    g, h = _swapped(g, h, 4, _LOW[2])
    store_lanes(room, at, a)
    store_lanes(room, at + HALF, b)
    store_lanes(room, at + np.uint64(2) * HALF, c)
    store_lanes(room, at + np.uint64(3) * HALF, d)
    store_lanes(room, at + np.uint64(4) * HALF, e)
    store_lanes(room, at + np.uint64(5) * HALF, f)
    store_lanes(room, at + np.uint64(6) * HALF, g)
    store_lanes(room, at + np.uint64(7) * HALF, h)


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


@device
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
