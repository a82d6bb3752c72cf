"""Effective scale and offset of each block from their stored levels.

    scale  = scale_1 * scale_2 * ... + center          offset = offset_1 * offset_2 * ...

Where the dialect keeps the coarsest scale as its reciprocal, the level above it is divided by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..formats import Format
from ..formats.torch_dtypes import format_of, wide_dtype
from ..layout.blocks import spread_grid
from ..schemes import ScaleLevel, Scheme, TensorScale
from ..schemes.scale_rules import Linear, Pick
from .stored import load_scale
from .tensors import Params

_TALLEST = 2.0**64
"""Largest span that a level gives to finer ones: wide formats need no more to keep small blocks apart."""


def effective_scale(
    scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return each finest block's factor in wide dtype, or None."""
    if not scheme.scales or scheme.element.per_scale > 1:
        return None
    if scheme.chained is not None and 0 in shape:
        return _nothing(scheme, params, shape, dtype)
    inverse = over_reciprocal(scheme, len(scheme.scales) - 2)
    scale = _product(scheme.scales, params, shape, dtype, inverse=inverse)
    if scheme.center is None:
        return scale
    middle = load_scale(
        params[len(scheme.levels) - 1], scheme.center.format_for(format_of(dtype)), scale.dtype
    )
    return scale + spread_grid(middle, scheme.center.granularity, scheme.granularity, shape)


def effective_offset(
    scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return each finest block's offset in wide dtype, or None."""
    if not scheme.offsets:
        return None
    if 0 in shape:
        return _nothing(scheme, params, shape, dtype)
    return _product(scheme.offsets, params[len(scheme.scales) :], shape, dtype, inverse=False)


def _product(
    levels: Sequence[ScaleLevel],
    tensors: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    inverse: bool,
) -> torch.Tensor:
    """Return the product of levels per finest block, in wide dtype.

    inverse: whether the level above the coarsest is divided by it.
    """
    own, wide, fine = format_of(dtype), wide_dtype(dtype), levels[0].granularity
    result: torch.Tensor | None = None
    for index in reversed(range(len(levels))):
        level = levels[index]
        grid = level.granularity.grid(shape)
        values = load_scale(tensors[index], level.format_for(own), wide).reshape(grid)
        if index > 0:
            values = spread_grid(values, level.granularity, fine, shape)
        if result is None:
            result = values
        else:
            result = values / result if inverse and index == len(levels) - 2 else values * result
    assert result is not None
    return result


def _nothing(scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty grid; coarse levels may come from a larger tensor."""
    return torch.empty(scheme.granularity.grid(shape), dtype=wide_dtype(dtype), device=params[0].device)


def combined(scheme: Scheme, index: int, fine: torch.Tensor, coarse: torch.Tensor) -> torch.Tensor:
    """Return the factor of blocks from a level and the coarser factor."""
    return fine / coarse if over_reciprocal(scheme, index) else fine * coarse


def over_reciprocal(scheme: Scheme, index: int) -> bool:
    """Return whether the next coarser level is stored as its reciprocal."""
    kept = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
    return kept and index == len(scheme.scales) - 2 and not scheme.scales[-1].rule.power_of_two


def span(finer: Sequence[ScaleLevel], own: Format, *, signed: bool = False) -> float:
    """Return the largest product of finer levels, signed or in both signs.

    Powers of two count downwards, so that their product is at most 1.
    """
    result = 1.0
    for index, level in enumerate(finer):
        fmt = level.format_for(own)
        # Integers have one negative number more; a table's largest magnitude may have one sign alone.
        most = max if fmt.is_table else min
        end = float(most(fmt.max, -fmt.min) if fmt.min < 0 else fmt.max)
        if signed and (index == 0 or level.picks(Pick.SIGNED)):
            end = signed_end(float(fmt.min), float(fmt.max))
        if isinstance(level.rule, Linear) and level.rule.room > 1:
            # A power of two, as arXiv:2512.02010 takes 256 of e4m3.
            end = 2.0 ** math.floor(math.log2(end / level.rule.room))
        result *= min(1.0 if level.rule.power_of_two else _TALLEST, end, key=abs)
    return result


def signed_end(low: float, high: float) -> float:
    """Return the end of the larger magnitude: -8 of int4."""
    return low if -low > high else high
