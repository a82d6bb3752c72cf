"""The kernels of :mod:`.statistics` as Python calls them; see :mod:`.entries`."""

from typing import Any

import numpy as np

from .machine.team import over_rows
from .statistics import column_sums, count, sums

extreme_keys = over_rows(count.extreme_keys)
"""Find the keys of the extremes of blocks."""
column_keys = over_rows(count.column_keys)
"""Find the keys of the extremes of blocks that are columns."""


@over_rows
def count_runs(
    x: Any, runs: Any, tables: Any, counts: Any, lows: Any, highs: Any, first: Any, last: Any
) -> None:
    """Count long blocks in bins. Rows are slots: a table, blocks."""
    shape, one = count.unpack_runs(runs), np.uint64(1)
    blocks, slots = shape.blocks, shape.slots
    size = np.uint64(len(tables)) // slots
    for slot in range(first, last):
        table = tables[slot * size : (slot + one) * size]
        begin, end = blocks * slot // slots, blocks * (slot + one) // slots
        count.count_runs(x, shape, table, counts, (lows, highs), begin, end)


count_short_runs = over_rows(count.count_short_runs)
"""Count short blocks in bins."""
sum_runs = over_rows(sums.sum_runs)
"""Add up long blocks."""
sum_short_runs = over_rows(sums.sum_short_runs)
"""Add up short blocks."""
sum_columns = over_rows(column_sums.sum_columns)
"""Add up blocks that are columns."""
