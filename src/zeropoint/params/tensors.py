"""Parameter tensors of a scheme: names, order, shapes, comparison, printing.

Operators and kernels take the parameters of a tensor as one list: the levels in the order of
:attr:`Scheme.levels`, then the zero point where there is one. A new kind of tensor is another line here.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

from ..errors import ShapeError
from ..formats.torch_dtypes import dtype_of, format_of, storage_dtype, wide_dtype
from ..schemes import Granularity, Scheme, ZeroPoint

Params = Sequence[torch.Tensor]
"""The tensors of one tensor's parameters, in the order of :func:`parameter_tensors`."""


def zero_point_dtype(scheme: Scheme) -> torch.dtype:
    """Return the dtype of integer zero points: int32, int64 for 32-bit codes."""
    return torch.int64 if scheme.bits > 31 else torch.int32


def parameter_names(scheme: Scheme) -> tuple[str, ...]:
    """Return the tensors' names in buffers and files, ``scale1``, ..., ``zero_point``."""
    return scheme.level_names if scheme.zero_point is ZeroPoint.NONE else (*scheme.level_names, "zero_point")


def granularities(scheme: Scheme) -> tuple[Granularity, ...]:
    """Return the blocks of each tensor."""
    levels = tuple(level.granularity for level in scheme.levels)
    return levels if scheme.zero_point is ZeroPoint.NONE else (*levels, scheme.granularity)


def parameter_grids(scheme: Scheme, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return each tensor's shape: the grid, and a table's last axis."""
    table = (scheme.element.per_scale,) if scheme.element.per_scale > 1 else ()
    return tuple((*blocks.grid(shape), *table) for blocks in granularities(scheme))


def parameter_tensors(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of each parameter tensor of a tensor."""
    own = format_of(dtype)
    dtypes = [storage_dtype(level.format_for(own)) for level in scheme.levels]
    if scheme.zero_point is not ZeroPoint.NONE:
        integer = scheme.zero_point is ZeroPoint.INTEGER
        dtypes.append(zero_point_dtype(scheme) if integer else wide_dtype(dtype))
    return tuple(zip(parameter_grids(scheme, shape), dtypes, strict=True))


def parameter_bits(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bits of scales and zero points.

    Integer zero points are as wide as codes, real ones 32 bits.
    """
    widths = []
    for level in scheme.levels:
        fmt = level.format_for(format_of(dtype))
        own = dtype_of(fmt)
        widths.append(fmt.bits if own is None else 8 * own.itemsize)
    if scheme.zero_point is not ZeroPoint.NONE:
        widths.append(scheme.bits if scheme.zero_point is ZeroPoint.INTEGER else 32)
    return sum(map(operator.mul, widths, map(math.prod, parameter_grids(scheme, shape))))


def zero_point_of(scheme: Scheme, params: Params) -> torch.Tensor | None:
    """Return the zero points among parameters, or None."""
    count = len(scheme.levels)
    return params[count] if len(params) > count else None


@functools.lru_cache(maxsize=1024)
def _counts(scheme: Scheme, shape: tuple[int, ...]) -> list[int]:
    return [math.prod(grid) for grid, _ in parameter_tensors(scheme, shape, torch.float32)]


def require_parameters(scheme: Scheme, params: Params, shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless parameters hold a number for each block."""
    wanted = _counts(scheme, shape)
    if [x.numel() for x in params] != wanted:
        found = ", ".join(str(tuple(x.shape)) for x in params) or "none"
        raise ShapeError(
            f"scales and zero points (of shape {found}) must hold {', '.join(map(str, wanted)) or 'no'} "
            f"numbers, as {scheme} has for a tensor of shape {shape}"
        )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether tensors have equal dtype, shape and values; bytes compare bitwise."""
    bits = (
        (a.view(torch.uint8), b.view(torch.uint8)) if a.dtype == b.dtype and a.element_size() == 1 else (a, b)
    )
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(*bits))


def brief(tensor: torch.Tensor) -> str:
    """Return a short text of a tensor: value, or extremes and shape."""
    tensor = tensor.float() if tensor.is_floating_point() else tensor
    if tensor.is_meta or tensor.numel() == 0:
        return f"of shape {tuple(tensor.shape)}"
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    return f"{tensor.min().item():.6g}..{tensor.max().item():.6g} x {tuple(tensor.shape)}"
