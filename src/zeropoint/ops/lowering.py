"""From schemes and shapes to the numbers that kernels are written for, the same for every backend."""

from __future__ import annotations

import math


def row_mapping(
    lead: tuple[int, ...], extents: tuple[int, ...], grid: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return (div, mod) with parameter row = row // div % mod, or None when no such pair exists."""
    rows = math.prod(lead)
    shared = [axis for axis, count in enumerate(grid) if count > 1]
    if not shared:
        return max(1, rows), 1
    first, last = shared[0], shared[-1]
    for axis in range(first, last + 1):
        split = extents[axis] > 1
        if split and (
            axis != last or (lead[axis] % extents[axis] and axis != 0 and math.prod(lead[:axis]) > 1)
        ):
            return None
    return math.prod(lead[last + 1 :]) * extents[last], math.prod(grid[first : last + 1])
