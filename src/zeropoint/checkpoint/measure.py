"""The error that quantization makes: measured while a tile is in cache, and summed in one fixed order.

Sums are taken a row at a time, and the rows' sums are added exactly (math.fsum), so neither tile sizes nor
threads change a digit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..formats import Format
from ..layout.blocks import reduce_blocks, spread_blocks
from ..params import QuantizationParams
from ..params.bounds import largest_gap
from ..schemes import Granularity, Scheme
from ..tensor import QuantizedTensor

CLIPPED_STEPS = 0.5 + 1 / 32
"""A value is clipped when it lies so many steps past the last code: half a step is what rounding costs,
and the rest is the rounding of the scale itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """What one part of a weight adds: sums of squares a row, of the values and of the errors, and counts."""

    squares: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    largest: float
    clipped: int
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
    decoded = q.dequantize(torch.float32)
    wide = x.to(torch.float32)
    squares = _row_squares(wide)
    zero, lost = _quiet_blocks(wide, decoded, q)
    torch.sub(decoded, wide, out=decoded)
    errors = _row_squares(decoded)
    low, high = torch.aminmax(decoded)
    largest = max(-float(low), float(high))
    clipped = _clipped(wide, q, scratch=decoded)
    return PartError(
        squares=squares, errors=errors, largest=largest, clipped=clipped, zero_blocks=zero, lost_blocks=lost
    )


def total(parts: Sequence[PartError], columns: int) -> TensorError:
    """Return the error of the weight that ``parts`` make up, in the order of its rows."""
    return TensorError(
        values=columns * sum(len(part.squares) for part in parts),
        sum_squares=math.fsum(v for part in parts for v in part.squares),
        sum_errors=math.fsum(v for part in parts for v in part.errors),
        largest=max((part.largest for part in parts), default=0.0),
        clipped=sum(part.clipped for part in parts),
        zero_blocks=sum(part.zero_blocks for part in parts),
        lost_blocks=sum(part.lost_blocks for part in parts),
    )


def _row_squares(x: torch.Tensor) -> npt.NDArray[np.float64]:
    # float32 within a row: a row's norm is off by some 1e-7, and its square cannot overflow in float64.
    norms: npt.NDArray[np.float64] = torch.linalg.vector_norm(x, 2, 1).double().numpy()
    return norms * norms


def _grouped(
    x: torch.Tensor, values: torch.Tensor, granularity: Granularity
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` and one value a block in shapes that broadcast, as views where blocks lie in rows."""
    rows, columns = granularity.block_shape(tuple(x.shape))
    if rows == 1 and columns and x.shape[1] % columns == 0:
        return x.view(x.shape[0], -1, columns), values.reshape(x.shape[0], -1, 1)
    return x, spread_blocks(values, granularity, tuple(x.shape))


@functools.lru_cache(maxsize=64)
def _range(element: Format) -> tuple[float, float, float]:
    """Return the middle of the codes, half of their extent, and the largest step."""
    low, high = float(element.min), float(element.max)
    return (low + high) / 2, (high - low) / 2, float(largest_gap(element))


def _clipped(x: torch.Tensor, q: QuantizedTensor, *, scratch: torch.Tensor) -> int:
    scale = q.params.effective_scale()
    assert scale is not None
    middle, half, step = _range(q.scheme.element)
    center = middle if q.zero_point is None else middle - q.zero_point.to(torch.float32)
    limit = scale * (half + CLIPPED_STEPS * step)
    source, edge = _grouped(x, limit, q.scheme.granularity)
    away = scratch.view(source.shape)
    if q.zero_point is None and middle == 0:
        torch.abs(source, out=away)
    else:
        _, origin = _grouped(x, scale * center, q.scheme.granularity)
        torch.sub(source, origin, out=away).abs_()
    return int(np.count_nonzero((away > edge).numpy()))


def _quiet_blocks(x: torch.Tensor, decoded: torch.Tensor, q: QuantizedTensor) -> tuple[int, int]:
    """Return how many blocks hold zeros alone, and how many lost all that they held.

    Only blocks with the scale that a zero range gives are looked at.
    """
    granularity = q.scheme.granularity
    if not granularity.extents:
        return 0, 0
    found = _bits(q.scales[0]) == _zero_bits(q.scheme, q.dtype)
    if not bool(found.any()):
        return 0, 0
    largest = _magnitudes(x, granularity)
    zero = found & (largest == 0)
    lost = found & (largest > 0) & (_magnitudes(decoded, granularity) == 0)
    return int(zero.sum()), int(lost.sum())


def _magnitudes(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    return reduce_blocks(x.abs(), granularity, "amax", 0.0)


def _bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[scale.element_size()]
    )


@functools.lru_cache(maxsize=64)
def _zero_bits(scheme: Scheme, dtype: torch.dtype) -> int:
    """Return the bit pattern of the finest scale of a block of zeros."""
    columns = max(scheme.granularity.extents)
    params = QuantizationParams.from_range(scheme, 0.0, 0.0, shape=(1, max(1, columns)), dtype=dtype)
    return int(_bits(params.scales[0]).flatten()[0])
