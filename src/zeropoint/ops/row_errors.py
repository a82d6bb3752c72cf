"""Row errors of codes, for reports and progress.

Rows' sums are meant to be added exactly (math.fsum), so that neither tiles nor threads change a digit of the
total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..layout.blocks import spread_blocks
from ..params.effective import effective_offset, effective_scale
from ..params.scale_tables import tables_of
from ..params.tensors import Params, zero_point_of
from ..schemes import Scheme

CLIPPED_STEPS = 0.5 + 1 / 32
"""A value is clipped when it lies so many steps past the last code: half a step is what rounding costs, and
the rest is the rounding of the scale itself."""


@dataclass(frozen=True, kw_only=True)
class RowErrors:
    """One number a row (the last axis), in row order.

    squares, errors: sums of squares of the values and of the errors. largest: largest error. clipped: values
    past the last code.
    """

    squares: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    largest: npt.NDArray[np.float64]
    clipped: npt.NDArray[np.int64]


def code_extent(scheme: Scheme) -> tuple[float, float]:
    """Return the code values' middle, and the distance that counts as clipped."""
    low, high = float(scheme.element.min), float(scheme.element.max)
    return (low + high) / 2, (high - low) / 2 + CLIPPED_STEPS * float(scheme.element.largest_gap)


def row_errors(x: torch.Tensor, decoded: torch.Tensor, scheme: Scheme, params: Params) -> RowErrors:
    """Return the errors of ``decoded`` values against ``x``: the reference, in float64."""
    shape, wide = tuple(x.shape), x.double()
    clipped = _past_tables if scheme.element.per_scale > 1 else _past_codes
    rows = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    off = (wide - decoded.double()).reshape(rows)
    return RowErrors(
        squares=wide.reshape(rows).square().sum(1).cpu().numpy(),
        errors=off.square().sum(1).cpu().numpy(),
        largest=off.abs().amax(1).cpu().numpy() if off.shape[1] else np.zeros(off.shape[0]),
        clipped=clipped(x, scheme, params).expand(shape).reshape(rows).sum(1).cpu().numpy(),
    )


def _past_tables(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return the mask of values clipped by their block's table."""
    shape = tuple(x.shape)
    tables = tables_of(scheme, params, shape=shape, own_dtype=x.dtype, dtype=torch.float64)
    reach = CLIPPED_STEPS * tables.diff(dim=-1).amax(-1)
    ends = tables[..., 0] - reach, tables[..., -1] + reach
    low, high = (spread_blocks(end, scheme.granularity, shape) for end in ends)
    return (x < low) | (x > high)


def _past_codes(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return which values lie past the last code of their sign."""
    shape, wide = tuple(x.shape), x.double()
    middle, reach = code_extent(scheme)
    scale, zero_point = effective_scale(scheme, params, shape, x.dtype), zero_point_of(scheme, params)
    unit = torch.ones((), dtype=torch.float64, device=x.device)
    if scale is not None:
        unit = spread_blocks(scale, scheme.granularity, shape).double()
    zero = 0.0 if zero_point is None else spread_blocks(zero_point, scheme.granularity, shape).double()
    center = (middle - zero) * unit
    offset = effective_offset(scheme, params, shape, x.dtype)
    if offset is not None:
        center = center + spread_blocks(offset, scheme.granularity, shape).double()
    return (wide - center).abs() > reach * unit.abs()
