"""How far codes are from the values they came from, a row at a time: what reports and progress are made of.

Rows' sums are meant to be added exactly (math.fsum), so that neither tiles nor threads change a digit of the
total.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..layout.blocks import spread_blocks
from ..params.effective import effective_offset, effective_scale
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
    """Return the middle of the code values and the distance past which a value counts as clipped."""
    low, high = float(scheme.element.min), float(scheme.element.max)
    return (low + high) / 2, (high - low) / 2 + CLIPPED_STEPS * float(scheme.element.largest_gap)


def row_errors(
    x: torch.Tensor,
    decoded: torch.Tensor,
    scheme: Scheme,
    params: Params,
) -> RowErrors:
    """Return the errors of ``decoded`` values against ``x``: the reference, in float64."""
    shape = tuple(x.shape)
    middle, reach = code_extent(scheme)
    wide = x.double()
    scale, zero_point = effective_scale(scheme, params, shape, x.dtype), zero_point_of(scheme, params)
    unit = torch.ones((), dtype=torch.float64, device=x.device)
    if scale is not None:
        unit = spread_blocks(scale, scheme.granularity, shape).double()
    zero = 0.0 if zero_point is None else spread_blocks(zero_point, scheme.granularity, shape).double()
    center = (middle - zero) * unit
    offset = effective_offset(scheme, params, shape, x.dtype)
    if offset is not None:
        center = center + spread_blocks(offset, scheme.granularity, shape).double()
    clipped = (wide - center).abs() > reach * unit.abs()
    rows = (-1, shape[-1]) if shape else (1, 1)
    off = (wide - decoded.double()).reshape(rows)
    return RowErrors(
        squares=wide.reshape(rows).square().sum(1).cpu().numpy(),
        errors=off.square().sum(1).cpu().numpy(),
        largest=off.abs().amax(1).cpu().numpy() if off.shape[1] else np.zeros(off.shape[0]),
        clipped=clipped.expand(shape).reshape(rows).sum(1).cpu().numpy(),
    )
