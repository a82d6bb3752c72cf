"""Parameters from statistics of blocks: a pass of its own over the data, then scales in plain torch."""

from __future__ import annotations

import functools
import math

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
    _require(x, highs[0])
    ranges = Ranges(minimum=tuple(lows), maximum=tuple(highs), dtype=x.dtype, shape=tuple(x.shape))
    return arithmetic.scales_from_ranges(scheme, ranges)


def coarse_scale(x: torch.Tensor, scheme: Scheme, extremes: Ends) -> torch.Tensor:
    """Return the tensor's own scale of a scheme with two levels."""
    if extremes is not None:
        return _coarse_scale_of(scheme, extremes, x.dim(), x.dtype).clone()
    low, high = _block_extremes(x, Granularity.tensor(), scheme)
    _require(x, high)
    ranges = Ranges(minimum=(low, low), maximum=(high, high), dtype=x.dtype, shape=tuple(x.shape))
    return arithmetic.coarsest_scale(scheme, ranges)


@functools.lru_cache(maxsize=256)
def _coarse_scale_of(
    scheme: Scheme, extremes: tuple[float, float], rank: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the per-tensor scale for a tensor of a rank; the parts of one that is read in parts share it."""
    part = torch.empty((1,) * rank, dtype=dtype, device="cpu")  # whatever the default is
    given = reference.whole_range(part, Granularity.tensor(), extremes)
    assert given is not None
    low, high = given
    ranges = Ranges(minimum=(low, low), maximum=(high, high), dtype=dtype, shape=tuple(part.shape))
    return arithmetic.coarsest_scale(scheme, ranges)


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
    _require(x, _block_amax(x, granularity))
    rows, width, descriptor = rows_of(tuple(x.shape), x.dtype, granularity)
    low, high = np.empty(rows * width, np.float32), np.empty(rows * width, np.float32)
    source = flat_array(x)
    share(entries.extremes, (source, descriptor, low, high), rows, x.numel())
    return (
        _over_lead(torch.from_numpy(low), x, granularity, width, "amin"),
        _over_lead(torch.from_numpy(high), x, granularity, width, "amax"),
    )


def _require(x: torch.Tensor, amax: torch.Tensor) -> None:
    """Raise NonFiniteError with the place in ``x`` when a block's magnitude is not finite."""
    if not bool(torch.isfinite(amax).all()):
        reference.require_finite(x)
        raise NonFiniteError("statistics of a finite tensor are not finite")


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
