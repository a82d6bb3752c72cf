"""Quantize some rows of a weight so that the bytes are those of the whole weight, whatever the rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..formats.torch_dtypes import wide_dtype
from ..functional import quantize
from ..layout.blocks import reduce_blocks
from ..params import QuantizationParams
from ..params.arithmetic import Ranges, scales_from_ranges
from ..schemes import Granularity, Scheme
from ..tensor import QuantizedTensor


def needs_extremes(scheme: Scheme) -> bool:
    """Return whether some scale is one for the whole tensor, all of which must be seen first."""
    return any(level.granularity == Granularity.tensor() for level in scheme.scales)


def extremes_of(x: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of ``x``; both are NaN where it holds one.

    Quantizing that part will say where the NaN is.
    """
    low, high = torch.aminmax(x)
    return float(low), float(high)


def widest(found: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the extremes of all parts, in any order, whose extremes are given.

    >>> widest([(-1.0, 2.0), (-3.0, 0.5)])
    (-3.0, 2.0)
    """
    lows, highs = zip(*found, strict=True)
    if any(map(math.isnan, lows)):
        return math.nan, math.nan
    return min(lows), max(highs)


@dataclass(slots=True)
class Scratch:
    """A thread's own memory, used again for each tile.

    buffer: bytes of the source. result: the codes and parameters of the last tile, which the next one of the
    same kind overwrites.
    """

    buffer: bytearray
    result: QuantizedTensor | None = None

    def quantize(self, x: torch.Tensor, scheme: Scheme) -> QuantizedTensor:
        """Return ``x`` in codes, in the memory of the last result where that fits."""
        last, shape = self.result, tuple(x.shape)
        fits = last is not None and (last.scheme, last.shape, last.dtype) == (scheme, shape, x.dtype)
        self.result = quantize(x, scheme, out=last if fits else None)
        return self.result


def sentinel_rows(columns: int) -> int:
    """Return the rows that :func:`quantize_part` adds to a part so that it has the extremes of the whole."""
    return -(-2 // columns)


def quantize_part(
    x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float] | None, scratch: Scratch
) -> QuantizedTensor:
    """Return rows of a matrix in codes; ``extremes`` are those of the whole tensor, where they are needed.

    x: the rows; with ``extremes``, and :func:`sentinel_rows` more at the end, which are overwritten with
    them. The whole tensor's scale then follows from the part by the same arithmetic, and the same fast path,
    as from the whole. Raises NonFiniteError, RangeError.
    """
    if extremes is None:
        return scratch.quantize(x, scheme)
    extra = sentinel_rows(x.shape[1])
    rows = x.shape[0] - extra
    tail = x[rows:].view(-1)
    tail.zero_()
    tail[0], tail[1] = extremes
    if (float(tail[0]), float(tail[1])) != extremes and not any(map(math.isnan, extremes)):
        return _from_extremes(x[:rows], scheme, extremes)
    whole = scratch.quantize(x, scheme)
    shape = (rows, x.shape[1])
    scales = tuple(
        scale if level.granularity == Granularity.tensor() else scale[:rows]
        for scale, level in zip(whole.scales, scheme.scales, strict=True)
    )
    params = QuantizationParams(scheme=scheme, shape=shape, scales=scales, dtype=x.dtype)
    return QuantizedTensor(data=whole.data[:rows], params=params, shape=shape, dtype=x.dtype)


def _from_extremes(x: torch.Tensor, scheme: Scheme, extremes: tuple[float, float]) -> QuantizedTensor:
    """Return rows in codes for extremes that their dtype does not hold, as when a partner has a wider one."""
    shape, wide = tuple(x.shape), wide_dtype(x.dtype)
    lows, highs = [], []
    for level in scheme.scales:
        if level.granularity == Granularity.tensor():
            grid = level.granularity.grid(shape)
            lows.append(torch.full(grid, extremes[0], dtype=wide))
            highs.append(torch.full(grid, extremes[1], dtype=wide))
        else:
            lows.append(reduce_blocks(x, level.granularity, "amin", math.inf).to(wide))
            highs.append(reduce_blocks(x, level.granularity, "amax", -math.inf).to(wide))
    ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=shape)
    scales, zero_point = scales_from_ranges(scheme, ranges)
    params = QuantizationParams(
        scheme=scheme, shape=shape, scales=scales, zero_point=zero_point, dtype=x.dtype
    )
    return quantize(x, params)
