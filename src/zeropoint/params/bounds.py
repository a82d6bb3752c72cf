"""How far a dequantized value can be from the original: bounds that follow from format and scale rule alone.

For a block with effective scale S, a value inside the range of the codes is off by at most ``S * gap``, where
gap is half the largest distance between neighboring codes (the whole distance when rounding is not to
nearest). A value outside is clipped: the scale rule bounds the largest magnitude of the block by
``S * reach``, so it is off by at most ``S * (reach - max)``. Each rounded operation adds its unit roundoff,
and half a subnormal step where its result may be subnormal.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch

from ..formats import CodebookFormat, FloatFormat, Format, IntFormat
from ..formats.spec import power_of_two
from ..formats.torch_dtypes import format_of, wide_dtype
from ..layout.blocks import spread_grid
from ..schemes import ScaleRule, Scheme, TensorScale
from .arithmetic import effective_scale, load_scale, rounder


def largest_gap(fmt: Format) -> Fraction:
    """Return the largest distance between neighboring values of ``fmt``."""
    if isinstance(fmt, IntFormat):
        return fmt.step
    if isinstance(fmt, FloatFormat):
        return power_of_two(max(fmt.emax, fmt.emin) - fmt.mantissa_bits)
    ordered = [Fraction(fmt.values[code]) for code in fmt.order]
    return max(b - a for a, b in pairwise(ordered))


def reach(scheme: Scheme) -> Fraction:
    """Return the largest ``amax / scale`` that the finest rule allows, before the scale is rounded."""
    rule, emax = scheme.scales[0].rule, scheme.element.emax
    if rule in (ScaleRule.FLOOR, ScaleRule.EVEN):
        return power_of_two(emax + 1)
    if rule is ScaleRule.CEIL:
        return power_of_two(emax)
    return Fraction(scheme.divisor)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def underflow(dtype: torch.dtype) -> float:
    """Return the largest absolute error of rounding to a subnormal number of ``dtype``."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 2


def block_bounds(
    scheme: Scheme,
    scales: tuple[torch.Tensor, ...],
    zero_point: torch.Tensor | None,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the bound of each finest block, float64, shaped like the finest grid."""
    gap = float(largest_gap(scheme.element)) * (0.5 if scheme.rounding.mode.to_nearest else 1.0)
    top, low = float(scheme.element.max), float(scheme.element.min)
    largest = max(top, -low)
    compute = rounder(scheme, dtype) or wide_dtype(dtype)
    slack = 4 * unit_roundoff(compute) + 2 * unit_roundoff(out_dtype)
    lost = 4 * underflow(compute) + underflow(out_dtype)
    if not scales:
        return torch.full((1,) * len(shape), gap + slack * largest + lost, dtype=torch.float64)
    scale = effective_scale(scheme, scales, shape, dtype)
    assert scale is not None
    if zero_point is not None:
        # Rounding the zero point moves the range by up to half a step, and the last code may fall short by
        # another half.
        steps = float(scheme.element_step)
        return scale.double() * (gap + steps + slack * (scheme.qmax - scheme.qmin) * steps) + lost
    extent = _extent(scheme, scales, shape, dtype)
    short = min(top, -low) if low < 0 else top
    clipped = (extent - short * scale.double()).clamp(min=0)
    furthest = torch.maximum(extent, largest * scale.double())
    return torch.maximum(scale.double() * gap, clipped) + slack * furthest + lost


def _extent(
    scheme: Scheme, scales: tuple[torch.Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the largest magnitude that a block with these scales can have held."""
    own, first = format_of(dtype), scheme.scales[0]
    values = load_scale(scales[0], first.format_for(own), torch.float64).reshape(
        first.granularity.grid(shape)
    )
    limit = float(reach(scheme))
    if first.rule.power_of_two:
        scale = effective_scale(scheme, scales, shape, dtype)
        assert scale is not None
        return limit * scale.double()
    ceiling = _rounding_ceiling(values, first.format_for(own), exact_up=first.rule is ScaleRule.LINEAR_UP)
    if scheme.dialect.zero_block_scale:
        ceiling = torch.maximum(ceiling, values)
    if len(scales) == 1:
        return limit * ceiling
    rest = effective_scale(_tail(scheme), scales[1:], shape, dtype)
    assert rest is not None
    coarse = spread_grid(rest.double(), scheme.scales[1].granularity, first.granularity, shape)
    inverse = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
    return limit * (ceiling / coarse if inverse else ceiling * coarse)


def _tail(scheme: Scheme) -> Scheme:
    return Scheme(element=scheme.element, scales=scheme.scales[1:], dialect=scheme.dialect)


def _rounding_ceiling(values: torch.Tensor, fmt: Format, *, exact_up: bool) -> torch.Tensor:
    """Return the largest number that rounds to ``values`` in ``fmt``."""
    if exact_up or isinstance(fmt, CodebookFormat | IntFormat):
        return values
    _, exponent = torch.frexp(values)
    exponent = torch.where(values == 0, fmt.emin, (exponent.to(torch.int64) - 1).clamp(min=fmt.emin))
    half = torch.pow(2.0, (exponent - fmt.mantissa_bits - 1).to(torch.float64))
    return values + half * (1 + 2.0**-20)
