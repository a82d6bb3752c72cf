"""Division of a weight into units, and of units into tiles.

Units follow from the plan alone, tiles from the memory limit. A unit is some rows, or columns where the
layout is cut so, with all of their codes and parameters. A tile is some rows of a unit; where units are
columns, a tile yields a part of every line, which is buffered until the other parts are there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...codecs.act_order import group_index
from ...codecs.tensor_fields import ROWS
from ...methods import Scope, method_named
from .limits import Limits
from .placement import Placement

UNIT_VALUES = 1 << 23
"""Numbers in a unit of a weight: a tenth of a second's work, so little is lost, and few journal records."""
_WIDER = 2
"""Size of units of columns over units of rows: they read a piece of each row."""


class Tile(NamedTuple):
    """Rows and columns of a matrix that are worked on at once."""

    rows: range
    columns: range


def unit_lines(item: Placement) -> int:
    """Return the rows, or columns, of a unit of ``item``."""
    alignment, most = item.alignment, UNIT_VALUES * (1 if item.axis == ROWS else _WIDER)
    return max(alignment, most // max(1, item.line_values) // alignment * alignment)


def tile_shape(item: Placement, limits: Limits) -> tuple[int, int]:
    """Return the rows and columns of a tile of ``item``.

    Raises CheckpointError where memory is too little for the least that can be.
    """
    if item.axis == ROWS:
        alignment = min(item.alignment, max(1, item.extent))
        return limits.rows(item.line_values, alignment, item.value_bytes), item.shape[1]
    rows = limits.rows(_columns(item), _height(item), item.value_bytes, kept=_kept_bytes(item))
    return min(rows, item.shape[0]), _columns(item)


def tile_bytes(item: Placement, limits: Limits) -> int:
    """Return the memory for a tile and buffered results of others."""
    return math.prod(tile_shape(item, limits)) * item.value_bytes + _kept_bytes(item)


def tiles(item: Placement, limits: Limits, start: int, count: int) -> list[Tile]:
    """Return the tiles of ``count`` rows or columns from ``start`` on."""
    whole = range(start, start + count)
    rows, columns = (whole, range(item.shape[1])) if item.axis == ROWS else (range(item.shape[0]), whole)
    step = tile_shape(item, limits)[0]
    return [Tile(rows[at : at + step], columns) for at in range(0, len(rows), step)]


def _columns(item: Placement) -> int:
    """Return the columns of a unit of a weight cut along columns."""
    return min(unit_lines(item), item.shape[1])


def _kept_bytes(item: Placement) -> int:
    """Return the bytes of a unit buffered until its last tile."""
    if item.axis == ROWS:
        return 0
    return -(-sum(placed.nbytes for placed in item.outputs) * _columns(item) // item.shape[1])


def _height(item: Placement) -> int:
    """Return the row multiple of tiles in a unit of columns.

    It covers whole blocks, whole words across lines, and whole rows of the source; all rows, where no part of
    them can be processed alone.
    """
    specs, weight = [placed.spec for placed in item.outputs], item.layer.weight
    scope = method_named(item.method).scope(weight)
    apart = all(spec.axis is None or len(spec.shape) > 1 for spec in specs)
    if not apart or scope not in (Scope.BLOCKS, Scope.ROWS) or group_index(item.layer) is not None:
        return item.shape[0]
    cut = weight.granularity.grid(item.shape)[0] > 1
    block = weight.granularity.block_shape(item.shape)[0] if cut else 1
    least = math.lcm(block, item.origin.alignment, item.code_rows, *(spec.across[1] for spec in specs))
    return min(least, item.shape[0])
