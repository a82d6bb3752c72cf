"""The kernels that count as Python calls them; see :mod:`.count` and :mod:`.sums` for what each is told.

Blocks from ``first`` to ``last`` are cut into ``parts`` for the threads of ``team``; see :mod:`.team`.
"""

from typing import Any

import numpy as np

from . import count, sums
from .intrinsics import device, kernel
from .team import run_parts


@kernel
def extreme_keys(
    x: Any, outer: Any, blocks: Any, inner: Any, lows: Any, highs: Any, first: Any, last: Any, parts: Any,
    team: Any,
) -> Any:  # fmt: skip
    """Find the keys of the extremes of blocks."""
    return run_parts(count.extreme_keys, (x, outer, blocks, inner, lows, highs), first, last, parts, team)


@kernel
def column_keys(
    x: Any, outer: Any, blocks: Any, lanes: Any, lows: Any, highs: Any, first: Any, last: Any, parts: Any,
    team: Any,
) -> Any:  # fmt: skip
    """Find the keys of the extremes of blocks that are columns."""
    return run_parts(count.column_keys, (x, outer, blocks, lanes, lows, highs), first, last, parts, team)


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
def count_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, shift: Any, tables: Any, slots: Any, counts: Any,
    lows: Any, highs: Any, first: Any, last: Any, parts: Any, team: Any,
) -> Any:  # fmt: skip
    """Count long blocks in bins. Rows are ``slots``, a table and some blocks each."""
    args = x, kind, outer, blocks, inner, shift, tables, slots, counts, lows, highs
    return run_parts(_count_slots, args, first, last, parts, team)


@kernel
def count_short_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, shift: Any, counts: Any, first: Any, last: Any,
    parts: Any, team: Any,
) -> Any:  # fmt: skip
    """Count short blocks in bins."""
    args = x, kind, outer, blocks, inner, shift, counts
    return run_parts(count.count_short_runs, args, first, last, parts, team)


@kernel
def sum_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, limbs: Any, counts: Any, lows: Any, highs: Any,
    first: Any, last: Any, parts: Any, team: Any,
) -> Any:  # fmt: skip
    """Add up long blocks."""
    args = x, kind, outer, blocks, inner, limbs, counts, lows, highs
    return run_parts(sums.sum_runs, args, first, last, parts, team)


@kernel
def sum_short_runs(
    x: Any, kind: Any, outer: Any, blocks: Any, inner: Any, limbs: Any, counts: Any, first: Any, last: Any,
    parts: Any, team: Any,
) -> Any:  # fmt: skip
    """Add up short blocks."""
    args = x, kind, outer, blocks, inner, limbs, counts
    return run_parts(sums.sum_short_runs, args, first, last, parts, team)


@kernel
def sum_columns(
    x: Any, kind: Any, outer: Any, blocks: Any, lanes: Any, limbs: Any, counts: Any, lows: Any, highs: Any,
    first: Any, last: Any, parts: Any, team: Any,
) -> Any:  # fmt: skip
    """Add up blocks that are columns."""
    args = x, kind, outer, blocks, lanes, limbs, counts, lows, highs
    return run_parts(sums.sum_columns, args, first, last, parts, team)
