"""Parameters from block statistics: a separate pass, then torch."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from ....errors import NonFiniteError
from ....layout.blocks import reduce_blocks
from ....ops import reference
from ....ops.lowering import needs_range
from ....ops.threads import share
from ....params import arithmetic
from ....params.arithmetic import Ranges
from ....params.tensors import Params
from ....schemes import Granularity, Scheme
from ..encode.rows import amax, range_rows
from . import microexponents
from .arrays import flat_array, rows_of

Ends = tuple[float, float] | None
"""Extremes of the tensor that a tensor is a part of."""


def choose_params(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Params:
    """Parameters of ``x``; for rules comparing errors, their start."""
    if x.numel() == 0 or not scheme.scales:
        return reference.choose_params(x, scheme.start, extremes)
    # Of a part, the scale of the whole tensor does not come from what is there.
    pair = microexponents.pair_of(scheme, tuple(x.shape), x.dtype) if extremes is None else None
    found = None if pair is None else microexponents.quantized(x, scheme, pair, None)
    if found is not None:
        return found
    lows, highs = [], []
    for level in scheme.scales:
        low, high = reference.whole_range(x, level.granularity, extremes) or block_extremes(
            x, level.granularity, ranged=needs_range(scheme)
        )
        lows.append(low)
        highs.append(high)
    ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))
    return arithmetic.scales_from_ranges(scheme, ranges)


class RowExtremes:
    """Extremes of row blocks for ``shape``, in memory of their own.

    ranged: whether smallest numbers are found, or magnitudes alone. low, high: arrays (rows * width,), the
    same one unless ranged.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, granularity: Granularity, *, ranged: bool
    ) -> None:
        self._count, self.ranged = math.prod(shape), ranged
        self.rows, self.width, self._descriptor = rows_of(shape, dtype, granularity)
        self.high: Any = np.empty(self.rows * self.width, np.float32)
        self.low: Any = np.empty_like(self.high) if ranged else self.high
        self.nbytes: int = self.high.nbytes * (1 + ranged)

    def find(self, x: torch.Tensor) -> None:
        """Find the extremes of ``x``; raises NonFiniteError."""
        source = flat_array(x)
        if self.ranged:
            args = source, self._descriptor, self.low, self.high
            share(range_rows, args, self.rows, self._count)
            # A NaN is an end by its bits, the lowest or the highest.
            _require_finite(x, self.low.min())
        else:
            share(amax, (source, self._descriptor, self.high), self.rows, self._count)
        _require_finite(x, self.high.max())


class TensorExtremes:
    """The extremes of whole tensors, found in memory of their own."""

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._rows = RowExtremes(shape, dtype, Granularity.tensor(), ranged=needs_range(scheme))
        self.nbytes = self._rows.nbytes

    def of(self, x: torch.Tensor) -> tuple[float, float]:
        """Extremes for the coarse scale of ``x``, or its magnitude twice."""
        self._rows.find(x)
        low, high = self._rows.low, self._rows.high
        return float(low.min() if self._rows.ranged else high.max()), float(high.max())


def coarse_scale(
    x: torch.Tensor, scheme: Scheme, extremes: Ends, memory: TensorExtremes | None = None
) -> torch.Tensor:
    """Return the tensor's own scale of a scheme with two levels.

    extremes: of the whole tensor, where ``x`` is a part. memory: in which they are found otherwise.
    """
    if extremes is not None:
        return _coarse_scale_of_parts(scheme, extremes, x.dim(), x.dtype).clone()
    found = (memory or TensorExtremes(scheme, tuple(x.shape), x.dtype)).of(x)
    return _coarse_scale_of(scheme, found, x.dim(), x.dtype)


def _coarse_scale_of(
    scheme: Scheme, extremes: tuple[float, float], rank: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the per-tensor scale of a tensor of ``rank`` axes."""
    low, high = extremes
    most = torch.full((1,) * rank, high, dtype=torch.float32, device="cpu")  # whatever the default is
    least = most if low == high else torch.full_like(most, low)
    ranges = Ranges(minimum=(least, least), maximum=(most, most), dtype=dtype, shape=(1,) * rank)
    if not (math.isfinite(low) and math.isfinite(high)):
        arithmetic.require_finite_range(least, most)
    return arithmetic.coarsest_scale(scheme, ranges)


_coarse_scale_of_parts = functools.lru_cache(maxsize=256)(_coarse_scale_of)
"""The same, for the parts of a tensor that is read in parts."""


def _require_finite(x: torch.Tensor, top: Any) -> None:
    """Raise NonFiniteError with its place unless the largest magnitude is finite."""
    if not math.isfinite(top):
        reference.require_finite(x)
        raise NonFiniteError("statistics of a finite tensor are not finite")


def block_extremes(
    x: torch.Tensor, granularity: Granularity, *, ranged: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 extremes of each block for scales, or magnitudes twice."""
    shape = tuple(x.shape)
    found = RowExtremes(shape, x.dtype, granularity, ranged=ranged)
    found.find(x)

    def over_lead(values: Any, kind: str) -> torch.Tensor:
        """Reduce statistics of rows over the leading axes of each block."""
        tensor = torch.from_numpy(values)
        if not shape:
            return tensor.reshape(())
        lead = Granularity.block(*granularity.block_shape(shape)[:-1], 1)
        fill = math.inf if kind == "amin" else -math.inf
        return reduce_blocks(tensor.reshape(*shape[:-1], found.width), lead, kind, fill)

    high = over_lead(found.high, "amax")
    return (over_lead(found.low, "amin") if found.ranged else high), high
