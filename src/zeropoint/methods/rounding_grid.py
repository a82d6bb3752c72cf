"""Rounding grid of a weight: representable values and scales, by column."""

from __future__ import annotations

import functools

import torch

from ..formats import RoundingMode
from ..formats.codes import decode, encode
from ..formats.torch_dtypes import code_dtype, wide_dtype
from ..ops.feedback import Grid
from ..params import QuantizationParams
from ..schemes import Scheme


def grid_of(params: QuantizationParams) -> Grid:
    """Return the rounding grid of parameters; rows lie along the last axis."""
    scheme, shape = params.scheme, params.shape
    *extents, width = scheme.granularity.block_shape(shape)

    def by_row(numbers: torch.Tensor | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        wide = numbers.reshape(scheme.granularity.grid(shape)).to(wide_dtype(params.dtype))
        for axis, extent in enumerate(extents):
            wide = wide.repeat_interleave(extent, axis).narrow(axis, 0, shape[axis])
        return wide.reshape(-1, wide.shape[-1]).contiguous()

    scale = by_row(params.effective_scale())
    assert scale is not None
    levels, ties_up = _levels(scheme)
    device = scale.device
    return Grid(
        levels=levels.to(device),
        ties_up=None if ties_up is None else ties_up.to(device),
        scale=scale,
        offset=by_row(params.effective_offset()),
        zero=by_row(params.zero_point),
        block_of=torch.arange(shape[-1], device=device) // width,
    )


@functools.lru_cache(maxsize=64)
def _levels(scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rising values of codes, and a mask of upward ties.

    The mask is None where values are consecutive integers, whose ties go to the even one.
    """
    element, (low, high) = scheme.element, scheme.ends
    values = decode(torch.arange(element.code_count).to(code_dtype(element.bits)), element, torch.float64)
    levels = torch.unique(values[torch.isfinite(values) & (values >= low) & (values <= high)] + 0.0)
    whole = bool((levels == levels.round()).all()) and bool((levels.diff() == 1).all())
    if whole and scheme.rounding.mode is RoundingMode.HALF_EVEN:
        return levels, None
    between = (levels[:-1] + levels[1:]) / 2
    ties = decode(encode(between, element, scheme.rounding.mode), element, torch.float64) > between
    return levels, ties.to(torch.uint8)
