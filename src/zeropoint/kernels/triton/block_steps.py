"""Arguments of dense kernels, run-time and compile-time, as named tuples."""

from __future__ import annotations

from typing import Any, NamedTuple

FEED, SOLVE, DESCEND = range(3)
"""Kinds of a step on a column: error feedback, substitution, coordinate descent."""


class Tokens(NamedTuple):
    """Tensor shape, (tokens, columns), and row pitch of its rounded copy."""

    tokens: int
    columns: int
    pitch: int


class GramSizes(NamedTuple):
    """Tokens in whole chunks, whole-tile columns of operands, and result shape."""

    tokens: int
    x_pitch: int
    y_pitch: int
    height: int
    width: int


class GramTile(NamedTuple):
    """Constants of compilation of :func:`.programs.column_products.add_column_products`."""

    tile: int
    dot: bool


class LineSizes(NamedTuple):
    """Pairs of lines, numbers of each, and line pitch in memory."""

    steps: int
    height: int
    width: int
    target_pitch: int
    left_pitch: int
    right_pitch: int


class Lines(NamedTuple):
    """Transposed rows: see :func:`.programs.blocked_feedback.process_block`.

    ``found`` has the values, as Triton's own tuples have something else under that name.
    """

    weight: Any
    numbers: Any
    found: Any
    errors: Any
    losses: Any


class BlockSizes(NamedTuple):
    """Rows, columns, and the columns of a block."""

    rows: int
    columns: int
    begin: int
    end: int


class BlockStep(NamedTuple):
    """Constants of compilation of :func:`.programs.blocked_feedback.process_block`.

    kind: of those above. consecutive: whether levels are consecutive integers. halvings: of the bounds of
    others, until one is found. narrow: whether values are computed in float32. lanes: rows of a program.
    """

    kind: int
    consecutive: bool
    halvings: int
    narrow: bool
    lanes: int


class GridTensors(NamedTuple):
    """A :class:`zeropoint.ops.feedback_grid.Grid`: float64, scales, offsets and zeros (blocks, rows).

    last: place of the last level. block_of: int64.
    """

    levels: Any
    last: int
    bounds: Any
    scales: Any
    offsets: Any
    zeros: Any
    block_of: Any


class Eliminated(NamedTuple):
    """Scratch of :func:`.programs.blocked_feedback.eliminate_block`, (steps, size)."""

    minus: Any
    kept: Any


class Eliminating(NamedTuple):
    """Columns of a matrix, and of a block."""

    size: int
    begin: int
    end: int
