"""Parameter tensors from given numbers, or flat vectors of them.

This module knows which block a number belongs to and in which dtype it is kept. Whether the values are
allowed is a question for ``validate``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import RangeError, SchemeError, ShapeError
from ..formats.torch_dtypes import format_of, wide_dtype
from ..layout.blocks import blocks_of_blocks, reduce_blocks
from ..schemes import Granularity, Scheme, ZeroPoint
from .arithmetic import Ranges
from .stored import store
from .tensors import zero_point_dtype

Numbers = float | Sequence[float] | torch.Tensor


def with_blocks(scheme: Scheme, blocks: Granularity) -> Scheme:
    """Return the scheme with other finest blocks; SchemeError without scales."""
    if not scheme.scales:
        raise SchemeError(f"scheme (={scheme}) must have scales, which a cast has not")
    finest, *rest = scheme.scales
    return replace(scheme, scales=(replace(finest, granularity=blocks), *rest))


def middle_code(scheme: Scheme) -> int:
    """Return the middle code of an affine scheme, else 0."""
    return 0 if scheme.zero_point is ZeroPoint.NONE else (scheme.qmin + scheme.qmax + 1) // 2


def given_scheme(scheme: Scheme, zero_point: torch.Tensor, axis: int | None) -> Scheme:
    """Return the scheme with channels of ``axis``, affine for nonzero zero points."""
    if axis is not None:
        scheme = with_blocks(scheme, Granularity.channel(axis))
    if scheme.element.per_scale > 1:
        raise SchemeError(
            f"scheme (={scheme}) has a table for each block, not a number; pass tables as scales of "
            "QuantizationParams"
        )
    if len(scheme.scales) != 1:
        raise SchemeError(f"scheme (={scheme}) must have one scale level, for which numbers are given")
    if scheme.zero_point is ZeroPoint.NONE and bool((zero_point.detach() != 0).any()):
        return replace(scheme, zero_point=ZeroPoint.INTEGER)
    return scheme


def given_shape(scheme: Scheme, count: int) -> tuple[int, ...]:
    """Return a shape with ``count`` channels, or one block."""
    axis = scheme.granularity.channel_axis
    if axis is None:
        if count != 1:
            raise ShapeError(
                f"scale and zero_point ({count} numbers) must be one number for {scheme}; or pass axis or "
                "shape"
            )
        return (1,) * max(1, len(scheme.granularity.extents))
    return (*(1,) * axis, count) if axis >= 0 else (count, *(1,) * (-axis - 1))


def given_scales(scheme: Scheme, scale: Numbers, grid: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return scales on the grid, rounded to their format; gradients pass."""
    fmt = scheme.scales[0].format_for(format_of(dtype))
    values = _on_grid("scale", scale, grid)
    if not fmt.is_float:
        return store(values.double(), fmt)
    # Narrow formats are encoded, where a number that is negative or too large would silently saturate.
    least, most = float(fmt.smallest) / 2, float(fmt.max)
    if fmt.bits <= 8 and bool((~((values > least) & (values <= most))).any()):
        found, level = f"{float(values.min())}..{float(values.max())}", scheme.scales[0]
        raise RangeError(f"scale ({found}) must lie in {float(fmt.smallest)}..{most}, the range of {level}")
    return store(values, fmt)


def given_zero_points(
    scheme: Scheme, zero_point: Numbers, grid: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return zero points on the grid, or None if symmetric; gradients pass."""
    if scheme.zero_point is ZeroPoint.NONE:
        return None
    values = _on_grid("zero_point", zero_point, grid)
    if scheme.zero_point is ZeroPoint.REAL:
        return values.to(wide_dtype(dtype))
    wide = values.detach().double()
    whole, inside = wide == wide.round(), (wide >= scheme.qmin) & (wide <= scheme.qmax)
    for good, rule in (
        (whole, "a whole number, or pass a scheme of asym=real"),
        (inside, f"in {scheme.qmin}..{scheme.qmax}"),
    ):
        if not bool(good.all()):
            where = tuple(torch.nonzero(~good)[0].tolist())
            must = "must be" if good is whole else "must lie"
            raise RangeError(f"zero_point (={wide[where].item():g}) of block {where} {must} {rule}")
    return values.detach().to(zero_point_dtype(scheme))


def as_numbers(name: str, value: Numbers) -> torch.Tensor:
    """Return a tensor of real numbers with its gradient, or raise RangeError."""
    try:
        numbers = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RangeError(f"{name} (={value!r}) must be a number, or a vector of numbers") from error
    if numbers.is_complex() or numbers.dtype is torch.bool:
        raise RangeError(f"{name} (dtype {numbers.dtype}) must be of real numbers")
    return numbers


def _on_grid(name: str, value: Numbers, grid: tuple[int, ...]) -> torch.Tensor:
    numbers = as_numbers(name, value)
    if numbers.numel() == 1:
        return numbers.reshape(()).repeat(grid)
    flat = numbers.dim() == 1 and numbers.numel() == math.prod(grid)
    if not flat and tuple(numbers.shape) != grid:
        raise ShapeError(
            f"{name} (shape {tuple(numbers.shape)}) must be one number, or a vector of {math.prod(grid)}, "
            f"one for each block of grid {grid}"
        )
    return numbers.reshape(grid)


def given_ranges(
    scheme: Scheme,
    minimum: float | torch.Tensor,
    maximum: float | torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Ranges:
    """Return each level's extremes by block.

    Raises RangeError for a minimum above its maximum.
    """
    grid = scheme.granularity.grid(shape)
    low, high = (_extremes_on_grid(value, grid, wide_dtype(dtype)) for value in (minimum, maximum))
    if bool((low > high).any()):
        where = tuple(torch.nonzero(low > high)[0].tolist())
        raise RangeError(
            f"minimum (={float(low[where])}) must not exceed maximum (={float(high[where])}) of block {where}"
        )
    coarse = [blocks_of_blocks(level.granularity, scheme.granularity, shape) for level in scheme.scales[1:]]
    lows = (low, *(reduce_blocks(low, blocks, "amin", math.inf) for blocks in coarse))
    highs = (high, *(reduce_blocks(high, blocks, "amax", -math.inf) for blocks in coarse))
    return Ranges(minimum=lows, maximum=highs, dtype=dtype, shape=shape)


def _extremes_on_grid(value: float | torch.Tensor, grid: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return one or per-block numbers on the grid, or raise ShapeError."""
    tensor = torch.as_tensor(value, dtype=dtype)
    if tensor.numel() == 1:
        return tensor.reshape(()).expand(grid)
    if tensor.numel() != math.prod(grid):
        raise ShapeError(
            f"range (shape {tuple(tensor.shape)}) must hold one number for each block of grid {grid}"
        )
    return tensor.reshape(grid)
