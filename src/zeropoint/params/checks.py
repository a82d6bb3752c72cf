"""Validation of parameter tensors: shapes, dtypes and values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..errors import DtypeError, RangeError, SchemeError, ShapeError
from ..formats import Format, format_name
from ..formats.torch_dtypes import format_of, storage_dtype, wide_dtype
from ..schemes import Granularity, ScaleLevel, ZeroPoint
from .stored import load_scale
from .tensors import zero_point_dtype

if TYPE_CHECKING:
    from .parameters import QuantizationParams


def check(params: QuantizationParams, *, negative_scales: bool = False) -> None:
    """Raise what :meth:`QuantizationParams.validate` raises."""
    scheme = params.scheme
    for name, tensors, levels in (
        ("scales", params.scales, scheme.scales),
        ("offsets", params.offsets, scheme.offsets),
    ):
        if len(tensors) != len(levels):
            raise SchemeError(
                f"{name} (length {len(tensors)}) must number {len(levels)}, as many as {scheme} has"
            )
    if (params.center is None) != (scheme.center is None):
        raise SchemeError(f"center must be {'absent' if scheme.center is None else 'given'} for {scheme}")
    for name, tensor, level in zip(scheme.level_names, params.levels, scheme.levels, strict=True):
        _check_level(params, name, tensor, level, negative=negative_scales)
    _check_zero_point(params)


def float_dtype(dtype: object, default: torch.dtype) -> torch.dtype:
    """Return a float dtype, ``default`` for None; DtypeError for others."""
    if dtype is None:
        return default
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    what = f"a tensor of shape {tuple(dtype.shape)}" if isinstance(dtype, torch.Tensor) else f"={dtype!r}"
    raise DtypeError(
        f"dtype ({what}) must be a dtype of floats, such as torch.bfloat16; "
        "QuantizedTensor.error_bound takes tensors"
    )


def _check_level(
    params: QuantizationParams, name: str, tensor: torch.Tensor, level: ScaleLevel, *, negative: bool
) -> None:
    """Check one level's tensor, saved as ``name``; ``negative`` permits negative values."""
    kind, number = name.rstrip("123"), name[-1]
    words = name if kind == "center" else f"{kind} {number}"
    _check_grid(words, tensor, level.granularity, params.shape, params.scheme.element.per_scale)
    fmt = level.format_for(format_of(params.dtype))
    if tensor.dtype != storage_dtype(fmt):
        raise SchemeError(f"{words} (dtype {tensor.dtype}) must be {storage_dtype(fmt)} for level {level}")
    if tensor.is_meta:
        return
    _check_codes(words, tensor, fmt)
    values = load_scale(tensor, fmt, torch.float64)
    if kind != "scale" or params.scheme.center is not None or params.scheme.element.per_scale > 1:
        if not bool(torch.isfinite(values).all()):
            raise RangeError(f"{words} must be finite in every block")
        if params.scheme.element.per_scale > 1 and bool((values.diff(dim=-1) < 0).any()):
            raise RangeError(f"{words} must rise in every block, as the numbers of a table do")
        return
    scheme = params.scheme
    zero_allowed = level is not scheme.scales[-1] or scheme.dialect.small_scales.of_zeros == 0.0
    # llama.cpp writes zero for a super-block of zeros.
    zero_allowed |= len(scheme.scales) > 1 and scheme.chained is not None
    negative = fmt.min < 0 and (negative or params.scheme.chained is not None)
    _check_scale(words, values, _least_scale(params), zero_allowed=zero_allowed, negative=negative)


def _least_scale(params: QuantizationParams) -> float:
    """Return the smallest valid scale: its reciprocal is finite, or 0."""
    if not params.scheme.dialect.small_scales.least or len(params.scales) > 1:
        return 0.0
    return 2.0**-128 if wide_dtype(params.dtype) is torch.float32 else 2.0**-1024


def _check_zero_point(params: QuantizationParams) -> None:
    wanted = params.scheme.zero_point
    if (params.zero_point is None) != (wanted is ZeroPoint.NONE):
        rule = "absent" if wanted is ZeroPoint.NONE else "given"
        raise SchemeError(f"zero_point must be {rule} for scheme {params.scheme}")
    if params.zero_point is None:
        return
    _check_grid("zero_point", params.zero_point, params.scheme.granularity, params.shape)
    real = wanted is ZeroPoint.REAL
    dtype = wide_dtype(params.dtype) if real else zero_point_dtype(params.scheme)
    if params.zero_point.dtype != dtype:
        raise SchemeError(
            f"zero_point (dtype {params.zero_point.dtype}) must be {dtype} for scheme {params.scheme}"
        )
    if params.zero_point.is_meta:
        return
    low, high = params.scheme.qmin, params.scheme.qmax
    values = params.zero_point.double()
    if real:
        if not bool(torch.isfinite(values).all()):
            raise RangeError("zero_point must be finite in every block")
        return
    outside = ~((values >= low) & (values <= high))
    if bool(outside.any()):
        where = tuple(torch.nonzero(outside)[0].tolist())
        raise RangeError(
            f"zero_point (={params.zero_point[where].item()}) of block {where} must lie in {low}..{high}"
        )


def _check_grid(
    what: str, tensor: torch.Tensor, granularity: Granularity, shape: tuple[int, ...], per_scale: int = 1
) -> None:
    grid = (*granularity.grid(shape), *((per_scale,) if per_scale > 1 else ()))
    if tuple(tensor.shape) != grid:
        raise ShapeError(
            f"{what} (shape {tuple(tensor.shape)}) must have shape {grid} for {granularity} "
            f"of a tensor {shape}"
        )


def _check_codes(name: str, scale: torch.Tensor, fmt: Format) -> None:
    """Refuse bytes that are no codes of a narrow scale format."""
    if scale.element_size() > 1:
        return
    codes = scale.view(torch.uint8)
    if codes.numel() and int(codes.amax()) >= fmt.code_count:
        where = tuple(torch.nonzero(codes >= fmt.code_count)[0].tolist())
        raise RangeError(
            f"{name} (byte {int(codes[where])}) of block {where} must be one of the {fmt.code_count} "
            f"codes of {format_name(fmt)}"
        )


def _check_scale(
    name: str, stored: torch.Tensor, least: float, *, zero_allowed: bool, negative: bool
) -> None:
    values = stored.abs() if negative else stored
    if values.numel():
        low, high = (float(end) for end in torch.aminmax(values.detach()))  # both are NaN where one number is
        if low > 0 and low >= least and math.isfinite(high):
            return
    good = torch.isfinite(values) & (values > 0) & (values >= least) | (zero_allowed & (values == 0))
    if not bool(good.all()):
        where = tuple(torch.nonzero(~good)[0].tolist())
        wanted = f"at least 2**{math.frexp(least)[1] - 1}" if least else "not 0" if negative else "positive"
        size = " in magnitude" if least and negative else ""
        raise RangeError(
            f"{name} (={float(stored[where])}) of block {where} must be finite and {wanted}{size}"
        )
