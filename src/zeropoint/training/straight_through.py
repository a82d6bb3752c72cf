"""Straight-through autograd functions in plain torch, with their formulas.

With v = x / s, z the zero point, Q the codes and m the mask (1 where round(v) + z lies in qmin..qmax, ends
included, else 0), fake quantization and the straight-through estimator are

    y    = (Q - z) * s,     Q = clamp(round(v) + z, qmin, qmax)
    dx   = m dy
    ds   = sum_block dy (Q - z - m v)  =  (sum_block dy (y - m x)) / s
    dz   = sum_block dy (m - 1) s

The second form of ``ds`` needs only the result and the mask, which kernels give, and one division a block.
It is LSQ's equation 3 (arXiv:1902.08153) for z = 0: round(v) - v inside, -Q_N or Q_P outside. A real zero
point comes as offset beta = -z s, of which LSQ+ (arXiv:2004.09576) has

    ds      = sum_block dy (m (y - x) / s + (1 - m) Q)
    d beta  = sum_block dy (1 - m)
"""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..errors import ShapeError
from ..formats.codes import times_power_of_two
from ..formats.torch_dtypes import format_of, wide_dtype
from ..functional import check_input, fit_params
from ..layout.blocks import spread_blocks, sum_blocks
from ..ops import library, straight_through
from ..params import QuantizationParams
from ..params.stored import load_scale, store
from ..params.tensors import zero_point_dtype
from ..params.tracing import traced_as_constant
from ..schemes import Granularity, Scheme, ZeroPoint


def on_grid(values: torch.Tensor, granularity: Granularity, shape: tuple[int, ...]) -> torch.Tensor:
    """Return block values on the grid of a tensor of ``shape``.

    One value serves any shape. Raises ShapeError when the grids differ in more than axes of length 1.
    """
    grid = granularity.grid(shape)
    if tuple(values.shape) == grid:
        return values
    if [side for side in values.shape if side != 1] != [side for side in grid if side != 1]:
        raise ShapeError(
            f"x (shape {shape}) must have a grid of blocks like that of the parameters, "
            f"{tuple(values.shape)}, got {grid}"
        )
    return values.reshape(grid)


class AtLeast(torch.autograd.Function):
    """``max(x, least)`` with the gradient of ``x``, so values can recover."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, least: float) -> torch.Tensor:
        """Return ``x`` where it exceeds ``least``, else ``least``."""
        return x.clamp(min=least)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ``grad``."""
        return grad, None


class PowerOfTwoScale(torch.autograd.Function):
    """Exact powers of two with a straight-through ceiling.

    ``s = 2 ** (ceil(e) - shift)``, ``ds / de = s ln 2``. Exponents are limited to ``lowest..highest``, which
    changes no gradient.
    """

    @staticmethod
    def forward(ctx: Any, exponent: torch.Tensor, shift: int, lowest: int, highest: int) -> torch.Tensor:
        """Return the powers, in the dtype of ``exponent``; NaN stays NaN."""
        whole = (torch.ceil(exponent.double()) - shift).clamp(lowest, highest)
        steps = torch.nan_to_num(whole).to(torch.int64)
        powers = times_power_of_two(torch.ones_like(exponent, dtype=torch.float64), steps)
        result = torch.where(torch.isnan(exponent), torch.nan, powers).to(exponent.dtype)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return ``grad * s * ln 2``."""
        (result,) = ctx.saved_tensors
        return grad * result * math.log(2.0), None, None, None


def settled(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    """Return the scheme with an ``input`` scale format resolved."""
    (level,) = scheme.scales
    return replace(scheme, scales=(replace(level, format=level.format_for(format_of(dtype))),))


@functools.lru_cache(maxsize=1024)
def _settled_text(scheme: Scheme, dtype: torch.dtype) -> str:
    return str(settled(scheme, dtype))


@traced_as_constant
def settled_text(scheme: Scheme, dtype: torch.dtype) -> str:
    """Return the text of :func:`settled`, the spelling that operators take."""
    return _settled_text(scheme, dtype)


@traced_as_constant
def _scheme_of(text: str) -> Scheme:
    return Scheme.parse(text)


def stored_params(
    scheme: Scheme, scale: torch.Tensor, shift: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return deployed scale and zero point: rounded to format and integer.

    scheme: one whose scale format is named, see :func:`settled`.
    shift: the zero point, or the offset beta = -z s of a scheme with a real one.
    """
    fmt = scheme.scales[0].format
    assert fmt is not None
    stored = store(scale.detach(), fmt)
    if shift is None:
        return stored, None
    if scheme.zero_point is ZeroPoint.REAL:
        step = load_scale(stored, fmt, shift.dtype) * float(scheme.element_step)
        # The offset may be past the largest float of steps from 0 when the scale was driven to its least.
        limit = torch.finfo(shift.dtype).max
        return stored, (-shift.detach() / step).clamp(-limit, limit)
    codes = torch.round(shift.detach()).clamp(scheme.qmin, scheme.qmax)
    return stored, codes.nan_to_num(nan=float(scheme.qmin)).to(zero_point_dtype(scheme))


class FakeQuantizeLearned(torch.autograd.Function):
    """Fake quantization, differentiable in scale and zero point.

    The module gives the formulas. The scale is rounded to its format and an integer zero point to a code,
    both straight through. Gradients of scale and zero point are multiplied by ``factor``; they are computed
    in the wide dtype of ``x``. NaN and Inf in ``x`` are clipped, so that they have no gradient and the
    scale's stays finite.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, text: str, factor: float
    ) -> torch.Tensor:
        """Return fake-quantized ``x``; scale and shift lie on the grid."""
        stored, zeros = stored_params(_scheme_of(text), scale, shift)
        params = [stored] if zeros is None else [stored, zeros]
        ctx.text, ctx.factor = text, factor
        ctx.save_for_backward(x, shift, *params)
        result: torch.Tensor = library.fake_quantize(x.detach(), params, text)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``x``, scale and shift."""
        x, shift, *params = ctx.saved_tensors
        scheme, wide = _scheme_of(ctx.text), wide_dtype(x.dtype)
        fmt, granularity = scheme.scales[0].format, scheme.granularity
        assert fmt is not None
        dx = library.fake_quantize_backward(grad, x, params, ctx.text)
        mask = library.fake_quantize_backward(torch.ones_like(x), x, params, ctx.text) != 0
        values = library.fake_quantize(x.to(wide), params, ctx.text)
        scale, upstream = load_scale(params[0], fmt, wide), grad.to(wide)
        outer = values
        if shift is not None and scheme.zero_point is ZeroPoint.REAL:
            outer = _clipped_steps(x.to(wide), scale, shift.to(wide), scheme)
        error = torch.where(mask, values - x.to(wide), outer)
        ds = sum_blocks(upstream * error, granularity) / scale * ctx.factor
        if shift is None:
            return dx, ds, None, None, None
        lost = sum_blocks(torch.where(mask, 0.0, upstream), granularity) * ctx.factor
        unit = float(scheme.element_step)
        dshift = lost if scheme.zero_point is ZeroPoint.REAL else -lost * scale * unit
        return dx, ds, dshift, None, None


def _clipped_steps(
    x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Return the end of each clipped ``x``, without offset."""
    factor, origin = (spread_blocks(t, scheme.granularity, tuple(x.shape)) for t in (scale, offset))
    unit = float(scheme.element_step)
    return torch.where(x > origin, scheme.qmax * unit, scheme.qmin * unit) * factor


class ClipLearned(torch.autograd.Function):
    """Fake quantization with a learned end alpha, and PACT's gradients.

        y = s clamp(round(x / s), 0, qmax),  s = alpha / qmax;   dx = dy [0 <= x < alpha];
        d alpha = sum dy [x >= alpha]

    NaN and Inf have no gradient; Inf counts for alpha.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, alpha: torch.Tensor, scale: torch.Tensor, text: str
    ) -> torch.Tensor:
        """Return fake-quantized ``x``; ``alpha`` is scalar, ``scale`` on the grid."""
        ctx.save_for_backward(x, alpha)
        result: torch.Tensor = library.fake_quantize(x.detach(), [scale.detach()], text)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of ``x`` and ``alpha``."""
        x, alpha = ctx.saved_tensors
        value = x.to(alpha.dtype)
        end = alpha.reshape(())
        dx = torch.where((value >= 0) & (value < end), grad, 0.0)
        dalpha = torch.where(value >= end, grad.to(alpha.dtype), 0.0).sum().reshape(alpha.shape)
        return dx, dalpha, None, None


def at_least(x: torch.Tensor, least: float) -> torch.Tensor:
    """Return :class:`AtLeast` of ``x``."""
    result: torch.Tensor = AtLeast.apply(x, least)  # type: ignore[no-untyped-call]
    return result


def power_of_two(exponent: torch.Tensor, shift: int, *, lowest: int, highest: int) -> torch.Tensor:
    """Return :class:`PowerOfTwoScale` of ``exponent``."""
    result: torch.Tensor = PowerOfTwoScale.apply(exponent, shift, lowest, highest)  # type: ignore[no-untyped-call]
    return result


def fake_quantize_learned(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, text: str, factor: float
) -> torch.Tensor:
    """Return :class:`FakeQuantizeLearned` of ``x``."""
    result: torch.Tensor = FakeQuantizeLearned.apply(  # type: ignore[no-untyped-call]
        x, scale, shift, text, factor
    )
    return result


def clip_learned(x: torch.Tensor, alpha: torch.Tensor, scale: torch.Tensor, text: str) -> torch.Tensor:
    """Return :class:`ClipLearned` of ``x``."""
    result: torch.Tensor = ClipLearned.apply(x, alpha, scale, text)  # type: ignore[no-untyped-call]
    return result


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
