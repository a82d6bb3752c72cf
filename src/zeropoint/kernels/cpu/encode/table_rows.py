"""Codes of tables of blocks, and codes of which several are the digits of one."""

from typing import Any

import numpy as np

from ..machine.bit_moves import FIVE, emit_digits
from ..machine.descriptor import BAD_VALUE, OK
from ..machine.emit import emit_packed
from ..machine.intrinsics import device, scratch
from ..machine.pack import load_codes
from ..machine.tile import TILE, load

_ONE, _THREE, _EIGHT = np.uint64(1), np.uint64(3), np.uint64(8)
_ROOM = TILE + 8
"""Digits, and what is read past them as a whole word."""


@device
def table_rows(x: Any, sizes: Any, boundaries: Any, out: Any, first: Any, last: Any) -> Any:
    """Write the codes of rows ``first`` to ``last``: of how many boundaries of its block a number is above.

    sizes: (6,) uint64, bits of a code, values of a block, columns, blocks and bytes of a row, and the kind of
    ``x``. boundaries: float32, one less than there are codes for each block. Blocks end on bytes.
    """
    bits, block, cols, width, row_bytes, kind = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    tile, codes, packed = scratch(TILE, np.float32), scratch(TILE, np.uint8), scratch(TILE, np.uint8)
    count, odd = (_ONE << bits) - _ONE, np.uint32(0)
    for r in range(first, last):
        at, b = r * row_bytes, r * width
        for start in range(np.uint64(0), cols, block):
            size = min(block, cols - start)
            for i in range(np.uint64(0), size, np.uint64(TILE)):
                n = min(size - i, np.uint64(TILE))
                load(x, r * cols + start + i, n, kind, tile)
                for j in range(n):
                    codes[j] = np.uint8(0)
                    odd |= np.uint32(not (abs(tile[j]) < np.inf))
                for t in range(count):
                    boundary = boundaries[b * count + t]
                    for j in range(n):
                        codes[j] += np.uint8(tile[j] > boundary)
                if bits == _EIGHT:
                    for j in range(n):
                        out[at + j] = codes[j]
                else:
                    emit_packed(codes, n, bits, packed, out, at)
                at += (n * bits + np.uint64(7)) // _EIGHT
            b += _ONE
    return BAD_VALUE if odd else OK


@device
def digit_rows(source: Any, sizes: Any, out: Any, first: Any, last: Any) -> None:
    """Write the bytes of rows ``first`` to ``last`` whose digits are packed codes, the highest first.

    sizes: (8,) uint64, bits of a digit, the base, digits of a code, the digit in the place of those that are
    missing, values of a block, columns, and bytes of a row of ``source`` and of ``out``. Blocks of digits end
    on bytes.
    """
    bits, base, per, missing, block, cols = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    digits = scratch(_ROOM, np.uint8)
    most = np.uint64(TILE) // (per * _EIGHT) * (per * _EIGHT)
    for r in range(first, last):
        to, bit = r * sizes[7], np.uint64(0)
        for start in range(np.uint64(0), cols, block):
            size = min(block, cols - start)
            for i in range(np.uint64(0), size, most):
                n = min(size - i, most)
                load_codes(source, r * sizes[6] + bit // _EIGHT, n, bits, digits)
                bit += n * bits
                if base == _THREE and per == FIVE:
                    emit_digits(digits, _ONE, n, missing, out, to)
                    to += (n + per - _ONE) // per
                    continue
                for c in range((n + per - _ONE) // per):
                    code = np.uint64(0)
                    for j in range(c * per, (c + _ONE) * per):
                        code = code * base + (np.uint64(digits[j]) if j < n else missing)
                    out[to] = np.uint8(code)
                    to += _ONE
