"""Column sums of squares in float64, by rows: float32 squares are exact."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import UInt8, UInt64
from ..machine.intrinsics import scratch
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.tile import TILE, load

RUN = 64
"""Columns that threads do not share, so that each has whole cache lines."""
_RUN, _TILE = np.uint64(RUN), np.uint64(TILE)


class RowsOfColumns(NamedTuple):
    """A matrix: dtype, rows and columns."""

    kind: UInt8
    rows: UInt64
    columns: UInt64


unpack_shape = unpacker(RowsOfColumns)


@over_rows
def square_columns(x: Any, shape: Any, sums: Any, first: Any, last: Any) -> None:
    """Add the squares of column runs ``first`` to ``last`` to their sums.

    x: flat, rows of columns. shape: packed :class:`RowsOfColumns`. sums: (columns,) float64.
    """
    tile, (kind, rows, columns) = scratch(TILE, np.float32), unpack_shape(shape)
    end = min(last * _RUN, columns)
    for left in range(first * _RUN, end, _TILE):
        width = min(_TILE, end - left)
        for row in range(rows):
            load(x, row * columns + left, width, kind, tile)
            for i in range(width):
                value = np.float64(tile[i])
                sums[left + i] += value * value
