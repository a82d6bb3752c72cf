"""Integer codes in a range that the caller chooses: ``clamp(round(x / scale) + zero_point, low, high)``.

A limit within the codes of a scheme may be applied after the scheme's own: clamping twice is clamping to the
smaller range. Plain torch, any device; kernels take the limits as parameters and are compared with this.
"""

from __future__ import annotations

import torch

from ..formats import RoundingMode
from ..formats.codes import uniform_noise
from ..formats.torch_dtypes import wide_dtype
from ..layout import packing
from ..params.tensors import Params
from ..schemes import Scheme
from . import reference


def clamp_codes(data: torch.Tensor, scheme: Scheme, shape: tuple[int, ...], limits: tuple[int, int]) -> None:
    """Limit the packed codes of a tensor of ``shape`` to ``limits``, in place."""
    patterns = packing.unpack(data, scheme.bits, packing.row_length(shape))
    codes = packing.as_values(patterns, scheme.element)
    data.copy_(packing.pack(codes.clamp(*limits), scheme.bits))


def fake_quantize(x: torch.Tensor, scheme: Scheme, params: Params, limits: tuple[int, int]) -> torch.Tensor:
    """Return the values of the limited codes of ``x``; NaN takes the lowest, Inf an end."""
    shape = tuple(x.shape)
    parts = list(reference.code_parts(x, scheme, params))
    if not parts:
        return torch.empty_like(x)
    patterns = torch.cat(parts) if len(parts) > 1 else parts[0]
    limited = packing.as_values(patterns, scheme.element).clamp(*limits)
    return reference.dequantize(
        packing.pack(limited, scheme.bits), scheme, params, shape=shape, dtype=x.dtype, own_dtype=x.dtype
    )


def gate(
    grad: torch.Tensor, x: torch.Tensor, scheme: Scheme, params: Params, limits: tuple[int, int]
) -> None:
    """Make zero, with its sign, the gradient where the rounded ``x`` lies outside ``limits``."""
    steps = rounded_steps(x, scheme, params)
    keep = (steps >= limits[0]) & (steps <= limits[1])
    grad.copy_(torch.where(keep, grad, torch.copysign(torch.zeros_like(grad), grad)))


def rounded_steps(x: torch.Tensor, scheme: Scheme, params: Params) -> torch.Tensor:
    """Return ``round(x / scale) + zero_point`` before any clamping, float64; NaN for NaN and Inf."""
    shape, wide = tuple(x.shape), wide_dtype(x.dtype)
    scale, zero, offset = reference.spread_parameters(scheme, params, shape=shape, dtype=x.dtype)
    noise = None
    if scheme.rounding.mode is RoundingMode.STOCHASTIC:
        noise = uniform_noise(scheme.rounding.seed, 0, x.numel(), x.device).reshape(shape)
    near = x if offset is None else x.to(wide) - offset
    ratio = torch.where(torch.isfinite(x), reference.scaled(near, scheme, scale), torch.nan)
    return reference.integer_steps(ratio.to(wide), scheme, zero, noise, x.dtype)
