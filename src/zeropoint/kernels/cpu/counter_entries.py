"""The kernels that count as Python calls them; see :mod:`.count` and :mod:`.sums` for what each is told.

Blocks from ``first`` to ``last`` are cut into ``parts`` for the threads of ``team``; see :mod:`.team`.
"""

from typing import Any

import numpy as np

from . import column_sums, count, sums
from .intrinsics import device, kernel
from .team import run_parts


@kernel
def extreme_keys(*args: Any) -> Any:
    """Find the keys of the extremes of blocks."""
    return run_parts(count.extreme_keys, args)


@kernel
def column_keys(*args: Any) -> Any:
    """Find the keys of the extremes of blocks that are columns."""
    return run_parts(count.column_keys, args)


@device
def _count_slots(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, shift: Any, tables: Any, slots: Any, counts: Any,
    lows: Any, highs: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    size, one = np.uint64(len(tables)) // slots, np.uint64(1)
    for slot in range(first, last):
        table = tables[slot * size : (slot + one) * size]
        begin, end = blocks * slot // slots, blocks * (slot + one) // slots
        count.count_runs(x, kind, outer, blocks, inner, shift, table, counts, lows, highs, begin, end)


@kernel
def count_runs(*args: Any) -> Any:
    """Count long blocks in bins. Rows are ``slots``, a table and some blocks each."""
    return run_parts(_count_slots, args)


@kernel
def count_short_runs(*args: Any) -> Any:
    """Count short blocks in bins."""
    return run_parts(count.count_short_runs, args)


@kernel
def sum_runs(*args: Any) -> Any:
    """Add up long blocks."""
    return run_parts(sums.sum_runs, args)


@kernel
def sum_short_runs(*args: Any) -> Any:
    """Add up short blocks."""
    return run_parts(sums.sum_short_runs, args)


@kernel
def sum_columns(*args: Any) -> Any:
    """Add up blocks that are columns."""
    return run_parts(column_sums.sum_columns, args)
