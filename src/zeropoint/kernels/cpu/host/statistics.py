"""Parameters from statistics of blocks: a pass of its own over the data, then scales in plain torch."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from ....errors import NonFiniteError
from ....layout.blocks import reduce_blocks
from ....ops import reference
from ....ops.threads import share
from ....params import arithmetic
from ....params.arithmetic import Ranges
from ....params.tensors import Params
from ....schemes import Granularity, Scheme
from .. import entries
from .arrays import flat_array, needs_range, rows_of

Ends = tuple[float, float] | None
"""Extremes of the tensor that a tensor is a part of."""


def choose_params(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> Params:
    """Return the parameters that ``x`` gives."""
    if x.numel() == 0 or not scheme.scales:
        return reference.choose_params(x, scheme, extremes)
    lows, highs = [], []
    for level in scheme.scales:
        given = reference.whole_range(x, level.granularity, extremes)
        low, high = given or _block_extremes(x, level.granularity, scheme)
        lows.append(low)
        highs.append(high)
    require_finite(x, float(highs[0].amax()))
    ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))
    return arithmetic.scales_from_ranges(scheme, ranges)


class TensorExtremes:
    """The extremes of whole tensors, found in memory of their own."""

    def __init__(self, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._count, self._rows = math.prod(shape), rows_of(shape, dtype, Granularity.tensor())
        self._high: Any = np.empty(self._rows.rows, np.float32)
        self._low: Any = np.empty(self._rows.rows if needs_range(scheme) else 0, np.float32)
        self.nbytes: int = self._high.nbytes + self._low.nbytes

    def of(self, x: torch.Tensor) -> tuple[float, float]:
        """Return what the coarse scale of ``x`` follows from: its extremes, or its magnitude for both."""
        source, (rows, _, descriptor), low, high = flat_array(x), self._rows, self._low, self._high
        share(entries.amax, (source, descriptor, high), rows, self._count)
        require_finite(x, high.max())
        if len(low):
            share(entries.extremes, (source, descriptor, low, high), rows, self._count)
        return float(low.min() if len(low) else high.max()), float(high.max())


def coarse_scale(
    x: torch.Tensor, scheme: Scheme, extremes: Ends, memory: TensorExtremes | None = None
) -> torch.Tensor:
    """Return the tensor's own scale of a scheme with two levels.

    extremes: those of the whole tensor, where ``x`` is a part. memory: in which they are found otherwise.
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


def require_finite(x: torch.Tensor, top: Any) -> None:
    """Raise NonFiniteError with the place in ``x`` unless its largest magnitude is finite."""
    if not math.isfinite(top):
        reference.require_finite(x)
        raise NonFiniteError("statistics of a finite tensor are not finite")


def _block_extremes(
    x: torch.Tensor, granularity: Granularity, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what scales follow from: extremes of each block, or its magnitude for both."""
    if needs_range(scheme):
        return _block_range(x, granularity)
    amax = _block_amax(x, granularity)
    return amax, amax


def _block_amax(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Return the largest magnitude of each block, float32; NaN and Inf show as such."""
    rows, width, descriptor = rows_of(tuple(x.shape), x.dtype, granularity)
    out, source = np.empty(rows * width, np.float32), flat_array(x)
    share(entries.amax, (source, descriptor, out), rows, x.numel())
    return _over_lead(torch.from_numpy(out), x, granularity, width, "amax")


def _block_range(x: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest value of each block, float32; raises NonFiniteError for NaN."""
    require_finite(x, float(_block_amax(x, granularity).amax()))
    rows, width, descriptor = rows_of(tuple(x.shape), x.dtype, granularity)
    low, high = np.empty(rows * width, np.float32), np.empty(rows * width, np.float32)
    source = flat_array(x)
    share(entries.extremes, (source, descriptor, low, high), rows, x.numel())
    return (
        _over_lead(torch.from_numpy(low), x, granularity, width, "amin"),
        _over_lead(torch.from_numpy(high), x, granularity, width, "amax"),
    )


def _over_lead(
    values: torch.Tensor, x: torch.Tensor, granularity: Granularity, width: int, kind: str
) -> torch.Tensor:
    """Reduce row-wise statistics over the leading axes of each block."""
    shape = tuple(x.shape)
    if not shape:
        return values.reshape(())
    lead = Granularity.block(*granularity.block_shape(shape)[:-1], 1)
    return reduce_blocks(
        values.reshape(*shape[:-1], width), lead, kind, math.inf if kind == "amin" else -math.inf
    )
