"""Blocks as contiguous runs in memory, for kernels that stream."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ..schemes import Granularity


class Runs(NamedTuple):
    """Runs ``(outer, block)`` of a tensor, each of length ``inner``."""

    outer: int
    blocks: int
    inner: int


@lru_cache(maxsize=1024)
def runs_of(granularity: Granularity, shape: tuple[int, ...]) -> Runs | None:
    """Return the runs of a contiguous tensor, if blocks are runs.

    Blocks are no runs where several axes are cut but for the last one element a block, or where the last
    block of an axis is short. A tensor with one block is one run.

    >>> runs_of(Granularity.channel(1), (8, 3, 5, 5))
    Runs(outer=8, blocks=3, inner=25)
    >>> runs_of(Granularity.block(2, 2), (4, 4)) is None
    True
    """
    extents, grid = granularity.block_shape(shape), granularity.grid(shape)
    cut = [axis for axis, count in enumerate(grid) if count > 1]
    if not cut:
        return Runs(1, 1, math.prod(shape))
    first, last = cut[0], cut[-1]
    between = all(extents[axis] == 1 or shape[axis] == 1 for axis in range(first, last))
    if not between or extents[last] * grid[last] != shape[last]:
        return None
    inner = extents[last] * math.prod(shape[last + 1 :])
    return Runs(math.prod(shape[:first]), math.prod(grid[first : last + 1]), inner)
