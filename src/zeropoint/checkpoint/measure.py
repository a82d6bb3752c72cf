"""The error that quantization makes: measured while a tile is in cache, and summed in one fixed order.

Sums are taken a row at a time, and the rows' sums are added exactly (math.fsum), so neither tile sizes nor
threads change a digit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..formats import FloatFormat, Format
from ..functional import row_errors
from ..layout.blocks import reduce_blocks
from ..ops.row_errors import RowErrors
from ..params import QuantizationParams
from ..params.bounds import largest_gap
from ..schemes import Scheme
from ..tensor import QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """What one part of a weight adds: figures a row, and counts of blocks."""

    rows: RowErrors
    zero_blocks: int
    lost_blocks: int


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


def measure(x: torch.Tensor, q: QuantizedTensor) -> PartError:
    """Return the error of ``q``, some rows of a matrix, against the rows ``x`` themselves."""
    zero, lost = _quiet_blocks(x, q)
    return PartError(rows=row_errors(x, q), zero_blocks=zero, lost_blocks=lost)


def total(parts: Sequence[PartError], columns: int) -> TensorError:
    """Return the error of the weight that ``parts`` make up, in the order of its rows."""
    return TensorError(
        values=columns * sum(len(part.rows.squares) for part in parts),
        sum_squares=math.fsum(v for part in parts for v in part.rows.squares),
        sum_errors=math.fsum(v for part in parts for v in part.rows.errors),
        largest=max((float(part.rows.largest.max()) for part in parts), default=0.0),
        clipped=sum(int(part.rows.clipped.sum()) for part in parts),
        zero_blocks=sum(part.zero_blocks for part in parts),
        lost_blocks=sum(part.lost_blocks for part in parts),
    )


def _quiet_blocks(x: torch.Tensor, q: QuantizedTensor) -> tuple[int, int]:
    """Return how many blocks hold zeros alone, and how many lost all that they held.

    Only rows with a block that has the scale of a zero range are looked at.
    """
    granularity, scheme = q.scheme.granularity, q.scheme
    if not granularity.extents:
        return 0, 0
    found = _bits(q.scales[0]) == _zero_bits(scheme, q.dtype)
    if not bool(found.any()):
        return 0, 0
    scale = q.params.effective_scale()
    assert scale is not None
    if granularity.block_shape(tuple(x.shape))[0] == 1:
        some = found.any(1).nonzero()[:, 0]
        x, found, scale = x[some], found[some], scale[some]
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
