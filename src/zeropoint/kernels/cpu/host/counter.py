"""Host side of counting: flat arrays, threads over blocks, numbers of keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ....layout.runs import Runs
from ....ops.registry import Extremes
from ....ops.threads import parts_for, share, thread_count
from ..machine.intrinsics import LINE
from ..machine.named_records import pack
from ..machine.vector import HALF
from ..statistics import column_sums, count, sums
from ..statistics.count import ENDS, FRACTION_BITS, LANES, RunShape
from ..statistics.sums import LIMBS
from .arrays import flat_array
from .views import KINDS


class CpuCounter:
    """The kernels as :class:`zeropoint.ops.registry.Counter`: float32, bfloat16 and float16 of the host."""

    def takes(self, x: torch.Tensor) -> bool:
        return x.device.type == "cpu" and x.dtype in KINDS

    def extremes(self, x: torch.Tensor, runs: Runs) -> Extremes:
        data, cut = flat_array(x), _cut(runs, x.numel())
        ends = np.empty((2, cut.blocks), np.int32)
        lows, highs = ends
        shape = pack(_shape(cut, x))
        if cut.inner == 1:
            lanes = np.tile(data[: cut.blocks], int(ENDS))
            share(count.column_keys, (data, shape, lanes, lows, highs), _lines(cut, data), x.numel())
        else:
            share(count.extreme_keys, (data, shape, lows, highs), cut.blocks, x.numel())
        return _values(ends, runs, x.dtype)

    def bins(self, x: torch.Tensor, runs: Runs, mantissa_bits: int) -> tuple[Extremes, torch.Tensor]:
        data, cut = flat_array(x), _cut(runs, x.numel())
        shape = _shape(cut, x)._replace(shift=int(FRACTION_BITS) - mantissa_bits)
        keys, width = 512 << mantissa_bits, 255 << mantissa_bits
        counts = np.zeros(cut.blocks * 2 * width, np.int64)
        ends = np.empty((2, cut.blocks), np.int32)
        lows, highs = ends
        long = cut.outer * cut.inner >= keys
        if long:
            slots = parts_for(cut.blocks, x.numel())
            with _TABLES.of(slots * keys * int(LANES)) as tables:
                args = data, pack(shape._replace(slots=slots)), tables, counts, lows, highs
                share(count.count_runs, args, slots, x.numel())
        else:
            share(count.count_short_runs, (data, pack(shape), counts), cut.blocks, x.numel())
        found = _values(ends, runs, x.dtype) if long else self.extremes(x, runs)
        return found, _merged(counts, runs, 2 * width)

    def sums(self, x: torch.Tensor, runs: Runs) -> tuple[Extremes, torch.Tensor, torch.Tensor]:
        data, cut = flat_array(x), _cut(runs, x.numel())
        shape = pack(_shape(cut, x))
        limbs, counts = np.zeros(cut.blocks * int(LIMBS), np.int64), np.zeros(cut.blocks, np.int64)
        ends = np.empty((2, cut.blocks), np.int32)
        lows, highs = ends
        short = 1 < cut.inner < int(HALF)
        if cut.inner == 1:
            args = data, shape, limbs, counts, lows, highs
            share(column_sums.sum_columns, args, _lines(cut, data), x.numel())
        elif short:
            share(sums.sum_short_runs, (data, shape, limbs, counts), cut.blocks, x.numel())
        else:
            args = data, shape, limbs, counts, lows, highs
            share(sums.sum_runs, args, cut.blocks, x.numel())
        found = self.extremes(x, runs) if short else _values(ends, runs, x.dtype)
        return found, _merged(limbs, runs, int(LIMBS)), _merged(counts, runs, 1)


class _Tables:
    """Counter tables lent to kernels, by size: zero while free."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}

    @contextmanager
    def of(self, size: int) -> Iterator[Any]:
        """Lend ``size`` counters; a kernel that fails does not give them back."""
        free = self._free.setdefault(size, [])
        try:
            table = free.pop()
        except IndexError:
            table = np.zeros(size, np.uint32)
        yield table
        free.append(table)


_TABLES = _Tables()
COUNTER = CpuCounter()


def _cut(runs: Runs, elements: int) -> Runs:
    """Cut a long run per thread; the last may be short."""
    if runs.blocks > 1:
        return runs
    parts = parts_for(thread_count(), elements)
    return Runs(1, parts, -(-elements // parts))


def _shape(runs: Runs, x: torch.Tensor) -> RunShape:
    """Describe the runs of ``x`` for kernels."""
    return RunShape(kind=KINDS[x.dtype], outer=runs.outer, blocks=runs.blocks, inner=runs.inner)


def _lines(cut: Runs, data: Any) -> int:
    """Cache lines of a row of columns: threads share whole ones."""
    return -(-cut.blocks * data.itemsize // LINE)


def _values(keys: Any, runs: Runs, dtype: torch.dtype) -> Extremes:
    """Numbers of keys, (2, blocks) int32, merged for one block.

    Zeros are positive: which of them is found depends on the order of reading.
    """
    if keys.shape[1] > runs.blocks:
        keys = np.array([[keys[0].min()], [keys[1].max()]])
    wide = dtype == torch.float32
    bits = keys ^ (keys >> 31 & (0x7FFFFFFF if wide else 0x7FFF))
    if dtype == torch.float16:
        numbers = bits.astype(np.int16).view(np.float16)
    else:
        numbers = (bits if wide else bits << 16).view(np.float32)
    both = torch.from_numpy(numbers).double() + 0.0  # of any NaN; NumPy's cast warns of some
    return both[0], both[1]


def _merged(numbers: Any, runs: Runs, width: int) -> torch.Tensor:
    """``width`` numbers a block; one block's are summed over parts."""
    rows = torch.from_numpy(numbers).reshape(-1, width)
    return rows.sum(0, keepdim=True) if len(rows) > runs.blocks else rows
