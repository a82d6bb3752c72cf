"""Cuts into row and column tiles, for transposed tensors, 2-D blocks."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ...schemes import Granularity

RUN = 128
"""Bytes that a tile reads of a row of memory."""
TILE, PER_THREAD = 8192, 64
"""Elements of a tile whose blocks are small, and of a thread."""
LARGEST_TILE = 32768
"""Elements of the largest tile, with 64 for each of 512 threads."""
LEAST_RUN = 32
"""Bytes that a tile of one large block reads of a row of memory, at least: a sector."""
SHORTEST = 8
"""Columns of the smallest tile: eight codes of any width are whole bytes."""


NEAR = 8
"""Rows of memory of a thread, of the same block."""


class TileCut(NamedTuple):
    """What kernels take at run time.

    batch, step: elements of memory from a matrix to the next one, and from a row of memory to the next one.
    rows, cols, row_bytes: of a matrix, and bytes of codes of a row. down, across: tiles of a matrix.
    block_rows, block_cols: elements of a block. grid_rows, grid_cols: blocks of a matrix.
    """

    batch: int
    step: int
    rows: int
    cols: int
    row_bytes: int
    down: int
    across: int
    block_rows: int
    block_cols: int
    grid_rows: int
    grid_cols: int


class TileShape(NamedTuple):
    """What kernels are compiled for; lengths are powers of two.

    rows, cols: of a tile. lines, elements: the same, rows of memory and elements of these. block_lines,
    block_elements: of a part of a tile that is inside of one block. near: lines of a thread, and run: columns
    of a thread, which follow each other. exact: whether these parts are blocks, but along an axis that is one
    block. transposed: whether columns are rows of memory. even: whether tiles fill the matrices.
    """

    rows: int
    cols: int
    lines: int
    elements: int
    block_lines: int
    block_elements: int
    near: int
    run: int
    exact: bool
    transposed: bool
    even: bool


class Tiles(NamedTuple):
    """A tensor in tiles, and the programs that take them."""

    cut: TileCut
    shape: TileShape
    programs: int
    warps: int


class _Axis(NamedTuple):
    """Elements of an axis, of its blocks, and its memory stride."""

    length: int
    block: int
    stride: int

    @property
    def power(self) -> int:
        """The least power of two that the axis fits into."""
        return 1 << max(0, self.length - 1).bit_length()

    @property
    def span(self) -> int:
        """The least power of two that whole blocks fill, or 0."""
        return self.power if self.block >= self.length else self.block & -(self.block & (self.block - 1) == 0)


@functools.lru_cache(maxsize=1024)
def tiles_of(
    granularity: Granularity, shape: tuple[int, ...], strides: tuple[int, ...], width: int, itemsize: int,
    *, whole: bool,
) -> Tiles | None:  # fmt: skip
    """Tiles of a tensor with codes of ``width`` bits, or None.

    whole: whether each block must be inside of one tile. Rows or columns must follow each other in memory.
    """
    blocks = granularity.block_shape(shape)
    axes = _joined([_Axis(*each) for each in zip(shape, blocks, strides, strict=True)], width)
    batch, rows, cols = [*[_Axis(1, 1, 0)] * (3 - len(axes)), *axes][-3:]
    transposed = cols.stride != 1 and cols.length > 1
    if len(axes) > 3 or batch.block != 1 or (transposed and rows.stride != 1):
        return None
    found = _tile(rows, cols, itemsize, transposed=transposed, whole=whole)
    if found is None:
        return None
    high, wide = found
    parts = _part(rows, high), _part(cols, wide)
    lines, elements, block_lines, block_elements = high, wide, *parts
    if transposed:
        lines, elements, block_lines, block_elements = wide, high, *parts[::-1]
    made = TileShape(
        rows=high, cols=wide, lines=lines, elements=elements, block_lines=block_lines,
        block_elements=block_elements, near=min(NEAR, block_lines),
        run=min(wide, 32, 128 // width, max(SHORTEST, parts[1])) if 8 % width == 0 else SHORTEST,
        exact=_is_exact(rows, high) and _is_exact(cols, wide), transposed=transposed,
        even=rows.length % high == 0 and cols.length % wide == 0,
    )  # fmt: skip
    down, across = -(-rows.length // high), -(-cols.length // wide)
    cut = TileCut(
        batch=batch.stride, step=cols.stride if transposed else rows.stride, rows=rows.length,
        cols=cols.length, row_bytes=-(-cols.length * width // 8), down=down, across=across,
        block_rows=rows.block, block_cols=cols.block, grid_rows=-(-rows.length // rows.block),
        grid_cols=-(-cols.length // cols.block),
    )  # fmt: skip
    warps = max(1, high * wide // (32 * PER_THREAD))
    return Tiles(cut=cut, shape=made, programs=batch.length * down * across, warps=warps)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _joined(axes: list[_Axis], width: int) -> list[_Axis]:
    """Merge axes that are neighbors in memory and in blocks."""
    made: list[_Axis] = []
    for axis in reversed([axis for axis in axes if axis.length > 1]):
        inner = made[-1] if made else _Axis(0, 1, 0)
        block = axis.block * inner.length
        follows = axis.stride == inner.length * inner.stride
        whole_bytes = len(made) > 1 or inner.length * width % 8 == 0
        whole = inner.block >= inner.length and (axis.block >= axis.length or block & (block - 1) == 0)
        inside = axis.block == 1 and inner.length % inner.block == 0
        if made and follows and whole_bytes and (whole or inside):
            block = block if inner.block >= inner.length else inner.block
            made[-1] = _Axis(axis.length * inner.length, block, inner.stride)
        else:
            made.append(axis)
    return made[::-1]


def _tile(
    rows: _Axis, cols: _Axis, itemsize: int, *, transposed: bool, whole: bool
) -> tuple[int, int] | None:
    """Rows and columns of tiles; None if whole blocks fit none."""
    high, wide = (rows.span, cols.span) if whole else (1, 1)
    if not high or not wide:
        return None
    wide, run, least = max(wide, SHORTEST), RUN // itemsize, LEAST_RUN // itemsize
    if transposed:
        high = max(high, min(least, rows.power))
        high = max(high, min(run, LARGEST_TILE // wide, rows.power))
        wide = max(wide, min(TILE // high, cols.power))
    else:
        wide = max(wide, min(least, cols.power))
        wide = max(wide, min(2 * run, LARGEST_TILE // high, cols.power))
        high = max(high, min(TILE // wide, rows.power))
        wide = max(wide, min(TILE // high, cols.power))
    return (high, wide) if high * wide <= LARGEST_TILE else None


def _part(axis: _Axis, tile: int) -> int:
    """Elements of a tile along an axis inside one block."""
    return tile if axis.block >= axis.length else math.gcd(axis.block, tile)


def _is_exact(axis: _Axis, tile: int) -> bool:
    return axis.block >= axis.length or axis.block == _part(axis, tile)
