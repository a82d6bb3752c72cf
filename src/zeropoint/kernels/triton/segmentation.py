"""Cuts of tensors into kernel segments, or reasons against them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ...layout.blocks import row_mapping
from ...schemes import Granularity
from .piece_cuts import covering_power

LONGEST = 32768
"""Elements of the longest segment: a program holds a segment in registers."""
SHORTEST = 8
"""Elements of the shortest: eight codes of any width are whole bytes."""
TILE = 1024
"""Elements of a program whose segments are shorter: for one warp, which waits for no other."""


class SegmentCut(NamedTuple):
    """What kernels take at run time.

    segments: of the tensor. per_row, length: segments of a row, and elements of each but the last.
    cols, row_bytes: elements, and bytes of codes, of a row. block, row_blocks: elements of a block along
    the row, and blocks of a row. row_div, row_mod: row ``r`` has the scales of row ``r // row_div %
    row_mod``.
    """

    segments: int
    per_row: int
    length: int
    cols: int
    row_bytes: int
    block: int
    row_blocks: int
    row_div: int
    row_mod: int


class SegmentShape(NamedTuple):
    """What kernels are compiled for.

    size: length of a segment rounded up to a power of two. many: segments of a program. flat: whether
    segments follow each other in memory without gaps.
    """

    size: int
    many: int
    flat: bool


class Segments(NamedTuple):
    """A tensor in segments; own: whether segment ``t`` has scale ``t``."""

    cut: SegmentCut
    shape: SegmentShape
    own: bool

    @property
    def programs(self) -> int:
        """Programs that take all segments."""
        return -(-self.cut.segments // self.shape.many)

    @property
    def warps(self) -> int:
        """Warps of a program: 32 elements a thread."""
        return max(1, self.shape.size * self.shape.many // 1024)


@functools.lru_cache(maxsize=1024)
def segments_of(granularity: Granularity, shape: tuple[int, ...], width: int) -> Segments | str:
    """Segments of a tensor with codes of ``width`` bits, or why none."""
    cols = shape[-1] if shape else 1
    grid, extents = granularity.grid(shape) or (1,), granularity.block_shape(shape) or (1,)
    mapping = row_mapping(shape[:-1], extents[:-1], grid[:-1])
    if mapping is None:
        return f"blocks of {granularity} in a tensor of shape {shape} span rows unevenly"
    block, row_blocks = min(extents[-1], max(cols, 1)), grid[-1]
    length = min(block, LONGEST)
    if block % length and row_blocks > 1:
        return f"blocks of {block} elements are longer than {LONGEST}, and no multiple of it"
    per_row = max(1, -(-cols // length))
    if per_row > 1 and length * width % 8:
        return f"blocks of {length} codes of {width} bits do not end on bytes"
    rows, row_bytes = math.prod(shape[:-1]), -(-cols * width // 8)
    size = max(SHORTEST, covering_power(length))
    cut = SegmentCut(rows * per_row, per_row, length, cols, row_bytes, block, row_blocks, *mapping)
    whole = cut.row_div == 1 and cut.row_mod >= rows
    return Segments(
        cut=cut,
        shape=SegmentShape(size, max(1, TILE // size), length == size and cols % length == 0),
        own=whole and row_blocks == per_row,
    )
