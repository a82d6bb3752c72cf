"""Straight-through gradients of quantizing and dequantizing, to values and parameters.

With u = x / S + z, v the number that a code represents and m the mask (1 where the rounded u lies within the
codes, ends included, else 0), rounding passes gradients straight through:

    quantize     v = clamp(round(u)),   dx = m dv / S,   dS = -sum_block m dv x / S^2,   dz = sum_block m dv
    dequantize   y = (v - z) * S,       dv = dy S,       dS = sum_block dy (v - z),      dz = -sum_block dy S

An offset is subtracted before the one and added after the other. With tables of blocks, the gradient of a
number is the sum over the values equal to it, and the gradient of ``x`` is ``m dy``.

The two together are fake quantization, with LSQ's gradient of the scale. Numbers come from the operators, bit
for bit; only plain torch is differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..formats.codes import second_grid
from ..formats.torch_dtypes import wide_dtype
from ..layout import code_rows
from ..params.scale_tables import tables_of
from ..params.tensors import Params
from ..schemes import Scheme
from . import block_tables, library
from .reference import spread_parameters


class PassWhere(torch.autograd.Function):
    """A constant with the masked gradient of ``x``: ``dx = dy m``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return ``y``."""
        ctx.save_for_backward(mask)
        return y.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return ``grad`` where the mask is true, else 0."""
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grad, 0.0), None, None


def pass_where(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return :class:`PassWhere` of ``x``."""
    result: torch.Tensor = PassWhere.apply(x, y, mask)  # type: ignore[no-untyped-call]
    return result


def learns(params: Params) -> bool:
    """Return whether a gradient of scales or zero points is required."""
    return _tracked(params) and torch.is_grad_enabled()


def _tracked(params: Params) -> bool:
    return any(each.requires_grad for each in params)


def detached(params: Params) -> Params:
    """Return parameters without gradients, sharing memory."""
    return [each.detach() for each in params] if _tracked(params) else params


def quantize(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return the codes' numbers of ``x``, unscaled, wide dtype."""
    shape, wide, text = tuple(x.shape), wide_dtype(x.dtype), str(scheme)
    plain, source = list(detached(params)), x.detach()
    data = library.quantize(source, plain, text)
    numbers = _decoded(data, scheme, params, shape, (wide, x.dtype))
    ones = torch.ones_like(source)
    mask = library.fake_quantize_backward(ones, source, plain, text) != 0
    scale, origin, offset = _spread(scheme, params, shape, x.dtype)
    steps = x.to(wide) if offset is None else x.to(wide) - offset
    if scale is not None:
        steps = steps / torch.where(scale == 0, torch.inf, scale)
    return pass_where(steps if origin is None else steps + origin, numbers, mask)


def dequantize(
    numbers: torch.Tensor, scheme: Scheme, params: Params, *, dtype: torch.dtype, own_dtype: torch.dtype
) -> torch.Tensor:
    """Return dequantized numbers in ``dtype``; ``own_dtype`` is the source's."""
    scale, origin, offset = _spread(scheme, params, tuple(numbers.shape), own_dtype)
    wide = torch.float64 if torch.float64 in (dtype, own_dtype) else torch.float32
    steps = numbers.to(wide)
    if origin is not None:
        steps = (numbers.double() - origin.double()).to(wide)
    values = steps if scale is None else steps * scale.to(wide)
    return (values if offset is None else values + offset.to(wide)).to(dtype)


def dequantize_codes(
    data: torch.Tensor, scheme: Scheme, params: Params, *, shape: tuple[int, ...], dtype: torch.dtype,
    own_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the values of packed codes, differentiable in scales and zero points."""
    wide = torch.float64 if torch.float64 in (dtype, own_dtype) else torch.float32
    if scheme.element.per_scale > 1:
        tables = tables_of(scheme, params, shape=shape, own_dtype=own_dtype, dtype=wide)
        return block_tables.decoded(code_rows.unpack(data, scheme, shape), scheme, tables).to(dtype)
    numbers = _decoded(data, scheme, params, shape, (wide, own_dtype))
    return dequantize(numbers, scheme, params, dtype=dtype, own_dtype=own_dtype)


def fake_quantize(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return fake-quantized ``x``, differentiable in ``x``, scales and zero points."""
    source, plain, text = x.detach(), list(detached(params)), str(scheme)
    if scheme.element.per_scale > 1:
        data, shape = library.quantize(source, plain, text), tuple(x.shape)
        values = dequantize_codes(data, scheme, params, shape=shape, dtype=x.dtype, own_dtype=x.dtype)
        mask = library.fake_quantize_backward(torch.ones_like(source), source, plain, text) != 0
        return values + pass_where(x, torch.zeros_like(source), mask)
    values = library.fake_quantize(source, plain, text)
    smooth = dequantize(quantize(x, scheme, params), scheme, params, dtype=x.dtype, own_dtype=x.dtype)
    return pass_where(smooth, values, torch.ones_like(values, dtype=torch.bool))


def _decoded(
    data: torch.Tensor,
    scheme: Scheme,
    params: Params,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> torch.Tensor:
    """Return decoded codes in ``dtypes[0]``; ``dtypes[1]`` is the quantized tensor's."""
    negative = None
    if scheme.element.reads_sign:
        scale = spread_parameters(scheme, detached(params), shape=shape, dtype=dtypes[1]).scale
        negative = second_grid(scale, scheme.element)
    return code_rows.decoded(code_rows.unpack(data, scheme, shape), scheme, shape, dtypes[0], negative)


def _spread(
    scheme: Scheme, params: Params, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return each element's scale, zero point number and offset."""
    scale, zero_point, offset = spread_parameters(scheme, params, shape=shape, dtype=dtype)
    origin = None if zero_point is None else zero_point * float(scheme.element_step)
    return scale, origin, offset
