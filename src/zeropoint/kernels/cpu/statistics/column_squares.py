"""Sums of squares of columns in float64, in the order of rows: a square of a float32 is exact there."""

from typing import Any

import numpy as np

from ..machine.intrinsics import device, scratch
from ..machine.tile import TILE, load

RUN = 64
"""Columns that threads do not share, so that each has whole cache lines."""
_RUN, _TILE, ZERO = np.uint64(RUN), np.uint64(TILE), np.uint64(0)


@device
def square_columns(x: Any, kind: Any, sizes: Any, sums: Any, first: Any, last: Any) -> None:
    """Add the squares of runs ``first`` to ``last`` of columns to their sums.

    x: flat, rows of columns. sizes: (2,) uint64, rows and columns. sums: (columns,) float64.
    """
    tile, rows, columns = scratch(TILE, np.float32), sizes[0], sizes[1]
    end = min(last * _RUN, columns)
    for left in range(first * _RUN, end, _TILE):
        width = min(_TILE, end - left)
        for row in range(rows):
            load(x, row * columns + left, width, kind, tile)
            for i in range(width):
                value = np.float64(tile[i])
                sums[left + i] += value * value
