"""Factorization ``m diag(d) m^T``, m unit upper triangular, last column first.

The matrix is positive definite.
    d_k = h_kk          m_ik = h_ik / d_k          h_il -= m_ik h_lk          for i <= l < k

A block of columns is eliminated on the diagonal, then in the rows above, then from the columns before it.
Packed are ``minus[i / HIGH][k][i]``, -m, and ``kept[i / WIDE][k][i]``, h_ik as it is divided, k descending.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import UInt64
from ..machine.intrinsics import device, scratch
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.vector import doubles_of, load_lanes, store_lanes
from .register_tiles import HIGH, WIDE, add_products

BLOCK = 128
"""Columns that are eliminated together."""
ROWS = 64
"""Rows that a thread takes at a time; their panels fit the second cache."""
_BLOCK, _HIGH, _WIDE, _ROWS = np.uint64(BLOCK), np.uint64(HIGH), np.uint64(WIDE), np.uint64(ROWS)
_COLUMNS = BLOCK * WIDE
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)


class EliminatedBlock(NamedTuple):
    """A block of columns of a matrix: columns, begin and end."""

    columns: UInt64
    begin: UInt64
    end: UInt64


unpack_block = unpacker(EliminatedBlock)


@over_rows
def factor_diagonal(h: Any, sizes: Any, d: Any, corner: Any, first: Any, last: Any) -> Any:
    """Eliminate a block in its rows; 0, or failed pivot plus one.

    h: flat, changed to m. sizes: packed :class:`EliminatedBlock`. d: pivots.
    corner: (BLOCK * BLOCK,), set to ``corner[k][l]``, h_lk as it is divided. first, last: of one row.
    """
    pitch, begin, end = unpack_block(sizes)
    width = end - begin
    for step in range(width):
        k = width - ONE - step
        pivot = h[(begin + k) * pitch + begin + k]
        if not pivot > 0.0:
            return begin + k + ONE
        d[begin + k] = pivot
        for i in range(k):
            corner[k * _BLOCK + i] = h[(begin + i) * pitch + begin + k]
        for i in range(k):
            row = (begin + i) * pitch + begin
            share = corner[k * _BLOCK + i] / pivot
            h[row + k] = share
            for j in range(i, k):
                h[row + j] = h[row + j] - share * corner[k * _BLOCK + j]
    return ZERO


@over_rows
def factor_rows(
    h: Any, sizes: Any, d: Any, corner: Any, minus: Any, kept: Any, first: Any, last: Any
) -> None:
    """Eliminate a block's columns in rows above, WIDE rows a group."""
    pitch, begin, end = unpack_block(sizes)
    width = end - begin
    columns = scratch(_COLUMNS, np.float64)
    for group in range(first, last):
        top = group * _WIDE
        for i in range(_WIDE):
            for k in range(width):
                columns[k * _WIDE + i] = h[(top + i) * pitch + begin + k]
        for step in range(width):
            k = width - ONE - step
            values = load_lanes(columns, k * _WIDE)
            shares = values / doubles_of(d[begin + k])
            store_lanes(kept, (group * _BLOCK + step) * _WIDE, values)
            for j in range(k):
                rest = load_lanes(columns, j * _WIDE) - shares * doubles_of(corner[k * _BLOCK + j])
                store_lanes(columns, j * _WIDE, rest)
            store_lanes(columns, k * _WIDE, shares)
            for i in range(_WIDE):
                at = ((group * TWO + i // _HIGH) * _BLOCK + step) * _HIGH + i % _HIGH
                minus[at] = -columns[k * _WIDE + i]
        for i in range(_WIDE):
            for k in range(width):
                h[(top + i) * pitch + begin + k] = columns[k * _WIDE + i]


@device
def _subtract_rows(h: Any, pitch: Any, end: Any, steps: Any, minus: Any, kept: Any, top: Any) -> None:
    """Subtract a block's products from ROWS rows, diagonal to column ``end``."""
    bottom = min(top + _ROWS, end)
    for column in range(top, end, _WIDE):
        b = column * _BLOCK
        for row in range(top, min(bottom, column + _WIDE), _HIGH):
            add_products((h, row * pitch + column, pitch), (minus, row * _BLOCK), (kept, b), steps)


@over_rows
def factor_rest(h: Any, sizes: Any, minus: Any, kept: Any, first: Any, last: Any) -> None:
    """Eliminate a block's columns from what is left of the matrix.

    ``first`` to ``last`` are pairs of ROWS rows, one from the top and one from the bottom, which together
    have the same number of columns.
    """
    pitch, end, behind = unpack_block(sizes)
    width = behind - end
    groups = (end + _ROWS - ONE) // _ROWS
    for pair in range(first, last):
        _subtract_rows(h, pitch, end, width, minus, kept, pair * _ROWS)
        if groups - ONE - pair > pair:
            _subtract_rows(h, pitch, end, width, minus, kept, (groups - ONE - pair) * _ROWS)
