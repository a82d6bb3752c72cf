"""Differentiable quantize and dequantize steps, with code numbers as a tensor."""

from __future__ import annotations

import torch

from ..formats.torch_dtypes import wide_dtype
from ..functional import check_input, fit_params
from ..ops import straight_through
from ..params import QuantizationParams


def quantize_ste(x: torch.Tensor, params: QuantizationParams) -> torch.Tensor:
    """Return the codes' numbers of ``x``, unscaled, in wide dtype.

    For integers these are the codes. Rounding passes gradients straight through: to ``x``, and to scales and
    real zero points that require one; see :mod:`zeropoint.ops.straight_through`.

    Args:
        x: a float tensor of any shape.
        params: scales and zero points of tensors of this shape.

    Example:
        >>> x = torch.tensor([1.0, 90.0], requires_grad=True)
        >>> numbers = quantize_ste(x, QuantizationParams.new(0.5))
        >>> numbers.sum().backward()
        >>> numbers.tolist(), x.grad.tolist()
        ([2.0, 127.0], [2.0, 0.0])
    """
    check_input(x)
    fitted = fit_params(params, tuple(x.shape), x.dtype)
    return straight_through.quantize(x, fitted.scheme, fitted.stored)


def dequantize_ste(
    numbers: torch.Tensor, params: QuantizationParams, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``(numbers - zero_point) * scale``, differentiable in all three.

    Args:
        numbers: as :func:`quantize_ste` gives them, float32 or float64.
        params: scales and zero points of tensors of this shape.
        dtype: of the result, the parameters' dtype unless given.

    Example:
        >>> dequantize_ste(torch.tensor([2.0, 127.0]), QuantizationParams.new(0.5))
        tensor([ 1.0000, 63.5000])
    """
    check_input(numbers)
    fitted = fit_params(params, tuple(numbers.shape), params.dtype)
    wanted = dtype or params.dtype
    wide = numbers.to(wide_dtype(wanted))
    return straight_through.dequantize(
        wide, fitted.scheme, fitted.stored, dtype=wanted, own_dtype=params.dtype
    )
