"""The kernels of dense products as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .feedback import elimination, grams, rows
from .machine.intrinsics import inlined
from .machine.team import bundled, over_rows
from .statistics.column_squares import square_columns

pack_columns = over_rows(grams.pack_columns)
"""Pack columns; rows are chunks of tokens."""
add_tiles = over_rows(grams.add_tiles)
"""Add products of columns; rows are tiles."""
mirror = over_rows(grams.mirror)
"""Copy the upper half of a matrix; rows are panels."""
add_squares = over_rows(square_columns)
"""Add the squares of columns; rows are runs."""
factor_diagonal = over_rows(elimination.factor_diagonal)
"""Eliminate a block on the diagonal; one row."""
factor_rows = over_rows(elimination.factor_rows)
"""Eliminate a block in the rows above it."""
factor_rest = over_rows(elimination.factor_rest)
"""Eliminate a block from what is left; rows are pairs."""
pack_rows = over_rows(rows.pack_rows)
"""Pack rows of a matrix; rows are tiles."""


@inlined
def _rounding_of(record: Any, tables: Any) -> Any:
    levels, bounds, scales, offsets, zeros, block_of = tables
    return rows.unpack_rounding(
        record, levels=levels, bounds=bounds, scales=scales, offsets=offsets, zeros=zeros, block_of=block_of
    )


@bundled
def feed_rows(args: Any, first: Any, last: Any) -> None:
    """Process a block of columns; rows are panels. See :func:`.feedback.rows.feed_rows`.

    :class:`.feedback.rows.ColumnBlock`, :class:`.feedback.rows.GridRounding` and its arrays,
    :class:`.feedback.rows.FeedArrays`.
    """
    block, rounding, arrays = args[0], _rounding_of(args[1], args[2]), rows.FeedArrays(*args[3:])
    rows.feed_rows(arrays, rounding, rows.unpack_columns(block), np.uint64(first), np.uint64(last))


@bundled
def move_rows(args: Any, first: Any, last: Any) -> None:
    """Move values of a block of columns; rows are panels. See :func:`.feedback.rows.move_rows`.

    :class:`.feedback.rows.ColumnBlock`, :class:`.feedback.rows.GridRounding` and its arrays,
    :class:`.feedback.rows.MoveArrays`.
    """
    block, rounding, arrays = args[0], _rounding_of(args[1], args[2]), rows.MoveArrays(*args[3:])
    rows.move_rows(arrays, rounding, rows.unpack_columns(block), np.uint64(first), np.uint64(last))


add_errors = over_rows(rows.add_errors)
"""Add products of errors and a matrix; rows are panels."""
