"""The error that quantization makes: measured while a tile is in cache, and summed in one fixed order.

Sums are taken a row at a time, and the rows' sums are added exactly (math.fsum), so neither tile sizes nor
threads change a digit.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..formats import FloatFormat, Format
from ..functional import row_errors
from ..layout.blocks import reduce_blocks
from ..params import QuantizationParams
from ..params.bounds import largest_gap
from ..schemes import Scheme
from ..tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """How far a dequantized tensor is from the original.

    values: how many. sum_squares, sum_errors: sums of squares of the values and of the errors. largest:
    largest error.
    clipped: values past the last code. zero_blocks: blocks of zeros alone. lost_blocks: blocks that hold
    other values but came out as zeros.
    """

    values: int
    sum_squares: float
    sum_errors: float
    largest: float
    clipped: int
    zero_blocks: int
    lost_blocks: int

    @property
    def relative(self) -> float:
        """Root of the squared error over the squared values; 0 when nothing is lost."""
        if self.sum_errors == 0:
            return 0.0
        return math.sqrt(self.sum_errors / self.sum_squares) if self.sum_squares else math.inf

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in decibels; infinite when nothing is lost."""
        return (
            math.inf
            if self.relative == 0
            else -20 * math.log10(self.relative)
            if math.isfinite(self.relative)
            else -math.inf
        )

    @property
    def clipped_share(self) -> float:
        """Share of clipped values."""
        return self.clipped / max(1, self.values)

    @staticmethod
    def merge(items: Sequence[TensorError]) -> TensorError:
        """Return the error of several tensors taken as one."""
        return TensorError(
            values=sum(e.values for e in items), sum_squares=math.fsum(e.sum_squares for e in items),
            sum_errors=math.fsum(e.sum_errors for e in items),
            largest=max((e.largest for e in items), default=0.0),
            clipped=sum(e.clipped for e in items), zero_blocks=sum(e.zero_blocks for e in items),
            lost_blocks=sum(e.lost_blocks for e in items),
        )  # fmt: skip


class ErrorSum:
    """The error of one weight, gathered from parts of its rows in any order and by several threads.

    Sums of each row are kept until all rows are there, so that the total depends on no order. They lie in
    arrays made
    at the start: small results that live on between large ones that do not would scatter the heap.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._values = rows * columns
        self._pending = rows
        self._guard = threading.Lock()
        self._sums: npt.NDArray[np.float64] | None = None
        self._shape = (2, rows)
        self._largest = 0.0
        self._counts = [0, 0, 0]
        self._total: TensorError | None = None

    def add(self, x: torch.Tensor, q: QuantizedTensor, start: int) -> None:
        """Measure ``q``, the codes of the rows ``x`` that begin at row ``start``."""
        rows = row_errors(x, q)
        counts = (int(rows.clipped.sum()), *_quiet_blocks(x, q))
        with self._guard:
            if self._sums is None:
                self._sums = np.zeros(self._shape)
            self._sums[0, start : start + len(x)] = rows.squares
            self._sums[1, start : start + len(x)] = rows.errors
            self._largest = max(self._largest, float(rows.largest.max()))
            self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
            self._pending -= len(x)
            if not self._pending:
                self._total = self._sum(self._sums)
                self._sums = None

    def _sum(self, sums: npt.NDArray[np.float64]) -> TensorError:
        clipped, zero, lost = self._counts
        return TensorError(
            values=self._values, sum_squares=math.fsum(sums[0]), sum_errors=math.fsum(sums[1]),
            largest=self._largest, clipped=clipped, zero_blocks=zero, lost_blocks=lost,
        )  # fmt: skip

    @property
    def total(self) -> TensorError | None:
        """The error of the weight, or None while rows are missing."""
        return self._total


def _quiet_blocks(x: torch.Tensor, q: QuantizedTensor) -> tuple[int, int]:
    """Return how many blocks hold zeros alone, and how many lost all that they held.

    Only blocks that have the scale of a zero range are looked at, where blocks lie in rows and divide them.
    """
    granularity, scheme = q.scheme.granularity, q.scheme
    if not granularity.extents:
        return 0, 0
    found = _bits(q.scales[0]) == _zero_bits(scheme, q.dtype)
    if not bool(found.any()):
        return 0, 0
    scale = q.params.effective_scale()
    assert scale is not None
    height, width = granularity.block_shape(tuple(x.shape))
    if height == 1 and x.shape[1] % width == 0:
        largest = x.reshape(*found.shape, width)[found].abs().amax(1)
        scale, found = scale[found], found[found]
    else:
        largest = reduce_blocks(x.abs(), granularity, "amax", 0.0)
    # What is at most half the smallest step rounds to zero.
    lost = found & (largest > 0) & (largest.to(scale.dtype) <= scale * _half_step(scheme.element))
    return int((found & (largest == 0)).sum()), int(lost.sum())


@functools.lru_cache(maxsize=64)
def _half_step(element: Format) -> float:
    if isinstance(element, FloatFormat):
        return float(element.smallest) / 2
    return float(largest_gap(element)) / 2


def _bits(scale: torch.Tensor) -> torch.Tensor:
    width = scale.element_size()
    return scale.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])


@functools.lru_cache(maxsize=64)
def _zero_bits(scheme: Scheme, dtype: torch.dtype) -> int:
    """Return the bit pattern of the finest scale of a block of zeros."""
    columns = max(1, *scheme.granularity.extents)
    params = QuantizationParams.from_range(scheme, 0.0, 0.0, shape=(1, columns), dtype=dtype)
    return int(_bits(params.scales[0]).flatten()[0])
