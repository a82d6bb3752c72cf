"""The kernels of dense products as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .feedback import elimination, grams, rows
from .machine.intrinsics import device, inlined, kernel
from .machine.team import run_bundled, run_parts
from .statistics.column_squares import square_columns


@kernel
def pack_columns(*args: Any) -> Any:
    """Pack columns; rows are chunks of tokens. See :func:`.feedback.grams.pack_columns`."""
    return run_parts(grams.pack_columns, args)


@kernel
def add_tiles(*args: Any) -> Any:
    """Add products of columns; rows are tiles. See :func:`.feedback.grams.add_tiles`."""
    return run_parts(grams.add_tiles, args)


@kernel
def mirror(*args: Any) -> Any:
    """Copy the upper half of a matrix; rows are panels. See :func:`.feedback.grams.mirror`."""
    return run_parts(grams.mirror, args)


@kernel
def add_squares(*args: Any) -> Any:
    """Add the squares of columns; rows are runs. See :func:`.statistics.column_squares.square_columns`."""
    return run_parts(square_columns, args)


@kernel
def factor_diagonal(*args: Any) -> Any:
    """Eliminate a block on the diagonal; one row. See :func:`.feedback.elimination.factor_diagonal`."""
    return run_parts(elimination.factor_diagonal, args)


@kernel
def factor_rows(*args: Any) -> Any:
    """Eliminate a block in the rows above it. See :func:`.feedback.elimination.factor_rows`."""
    return run_parts(elimination.factor_rows, args)


@kernel
def factor_rest(*args: Any) -> Any:
    """Eliminate a block from what is left; rows are pairs. See :func:`.feedback.elimination.factor_rest`."""
    return run_parts(elimination.factor_rest, args)


@kernel
def pack_rows(*args: Any) -> Any:
    """Pack rows of a matrix; rows are tiles. See :func:`.feedback.rows.pack_rows`."""
    return run_parts(rows.pack_rows, args)


@inlined
def _rounding_of(record: Any, tables: Any) -> Any:
    levels, bounds, scales, offsets, zeros, block_of = tables
    return rows.unpack_rounding(
        record, levels=levels, bounds=bounds, scales=scales, offsets=offsets, zeros=zeros, block_of=block_of
    )


@device
def _feed(args: Any, first: Any, last: Any) -> None:
    block, rounding, arrays = args[0], _rounding_of(args[1], args[2]), rows.FeedArrays(*args[3:])
    rows.feed_rows(arrays, rounding, rows.unpack_columns(block), np.uint64(first), np.uint64(last))


@kernel
def feed_rows(*args: Any) -> Any:
    """Process a block of columns; rows are panels. See :func:`.feedback.rows.feed_rows`.

    :class:`.feedback.rows.ColumnBlock`, :class:`.feedback.rows.GridRounding` and its arrays,
    :class:`.feedback.rows.FeedArrays`.
    """
    return run_bundled(_feed, args)


@device
def _move(args: Any, first: Any, last: Any) -> None:
    block, rounding, arrays = args[0], _rounding_of(args[1], args[2]), rows.MoveArrays(*args[3:])
    rows.move_rows(arrays, rounding, rows.unpack_columns(block), np.uint64(first), np.uint64(last))


@kernel
def move_rows(*args: Any) -> Any:
    """Move values of a block of columns; rows are panels. See :func:`.feedback.rows.move_rows`.

    :class:`.feedback.rows.ColumnBlock`, :class:`.feedback.rows.GridRounding` and its arrays,
    :class:`.feedback.rows.MoveArrays`.
    """
    return run_bundled(_move, args)


@kernel
def add_errors(*args: Any) -> Any:
    """Add products of errors and a matrix; rows are panels. See :func:`.feedback.rows.add_errors`."""
    return run_parts(rows.add_errors, args)
