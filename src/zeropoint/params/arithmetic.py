"""From the range of each block to its scales and zero point: the reference arithmetic, in plain torch.

    linear         scale = round_F(amax / divisor)
    power of two   scale = 2 ** (e(amax) - emax), e by the rule, from the bits of amax
    asymmetric     scale = round_F((max - min) / (qmax - qmin)),  zero_point = round(qmin - min / scale)

This module owns the order of the operations and where each is rounded. Kernels repeat it fused and are
compared with it bit for bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ..errors import NonFiniteError, RangeError, ShapeError
from ..formats import CodebookFormat, FloatFormat, Format, IntFormat, RoundingMode
from ..formats.spec import power_of_two
from ..formats.torch_dtypes import dtype_of, format_of, storage_dtype, wide_dtype
from ..layout.blocks import spread_grid
from ..schemes import Arithmetic, ScaleLevel, ScaleRule, Scaling, Scheme, TensorScale, ZeroPoint
from .codes import decode, encode_nearest, round_steps, times_power_of_two

_IEEE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LEAST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What is known of the data: the extremes of each block of each level, finest first, in the wide dtype.

    minimum, maximum: one tensor a level, shaped like the level's grid. Symmetric schemes use the larger
        magnitude.
    dtype: dtype of the data itself, which the compressed-tensors dialect computes in.
    """

    minimum: tuple[torch.Tensor, ...]
    maximum: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    def magnitude(self, level: int, scheme: Scheme) -> torch.Tensor:
        """Return the largest magnitude that the element format must hold, a block."""
        if isinstance(scheme.element, IntFormat) and not scheme.element.signed:
            return self.maximum[level].clamp(min=0)
        if isinstance(scheme.element, FloatFormat) and not scheme.element.signed:
            return self.maximum[level].clamp(min=0)
        return torch.maximum(self.maximum[level].abs(), self.minimum[level].abs())


def scales_from_ranges(
    scheme: Scheme, ranges: Ranges
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return the scales of each level (in their storage dtype, finest first) and the zero point or None.

    Raises NonFiniteError when a range is not finite, RangeError when a scale does not fit its format.
    """
    for low, high in zip(ranges.minimum, ranges.maximum, strict=True):
        require_finite_range(low, high)
    if not scheme.scales:
        return (), None
    if scheme.zero_point is not ZeroPoint.NONE:
        return _affine(scheme, ranges)
    scales: list[torch.Tensor] = []
    coarser: torch.Tensor | None = None
    for index in reversed(range(len(scheme.scales))):
        level = scheme.scales[index]
        if coarser is not None:
            coarser = spread_grid(
                coarser, scheme.scales[index + 1].granularity, level.granularity, ranges.shape
            )
        amax = ranges.magnitude(index, scheme)
        if level.rule.power_of_two:
            values = _power_of_two(scheme, level, amax, coarser, ranges.dtype)
            coarser = values if coarser is None else coarser * values
        elif coarser is None:
            values = _coarsest(scheme, index, amax, ranges)
            coarser = values
        else:
            values = _fine_linear(scheme, level, amax, coarser, ranges.dtype)
        scales.append(store(values, level.format_for(format_of(ranges.dtype))))
    return tuple(reversed(scales)), None


def coarsest_scale(scheme: Scheme, ranges: Ranges) -> torch.Tensor:
    """Return the coarsest linear scale alone, in its storage dtype: it alone needs the whole tensor."""
    index = len(scheme.scales) - 1
    values = _coarsest(scheme, index, ranges.magnitude(index, scheme), ranges)
    return store(values, scheme.scales[index].format_for(format_of(ranges.dtype)))


def require_finite_range(low: torch.Tensor, high: torch.Tensor) -> None:
    """Raise NonFiniteError unless every extreme is finite."""
    good = torch.isfinite(low) & torch.isfinite(high)
    if not bool(good.all()):
        where = tuple(torch.nonzero(~good)[0].tolist())
        raise NonFiniteError(
            f"range of block {where} is {float(low[where])}..{float(high[where])}; it must be finite"
        )


def rounder(scheme: Scheme, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that each intermediate is rounded to, or None when the wide dtype is kept."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return dtype if scheme.dialect.arithmetic is Arithmetic.INPUT and narrow else None


def through(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Round ``x`` to ``dtype`` and widen it again."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


def multiplies(scheme: Scheme) -> bool:
    """Whether values are multiplied by the rounded reciprocal of their scale.

    Programs that do so have one level of linear scales; dividing by a power of two is exact either way.
    """
    single = len(scheme.scales) == 1 and not scheme.scales[0].rule.power_of_two
    return single and scheme.dialect.scaling is Scaling.RECIPROCAL


def zero_scale(scheme: Scheme, dtype: torch.dtype) -> float:
    """Return the linear scale of a block whose range is zero."""
    value = scheme.dialect.zero_scale
    return torch.finfo(dtype).eps if value is None else value


def _linear(ideal: torch.Tensor, scheme: Scheme, level: ScaleLevel, dtype: torch.dtype) -> torch.Tensor:
    """Apply the zero rule and the floor to ``amax / divisor``, and round it to the level's format."""
    fmt = level.format_for(format_of(dtype))
    raised = ideal.clamp(min=_least(scheme, fmt))
    values = _round_to(raised, fmt, up=level.rule is ScaleRule.LINEAR_UP)
    bad = ~torch.isfinite(values) | (values == 0) & (ideal > 0) | (ideal > _top(fmt))
    if bool(bad.any()):
        where = tuple(torch.nonzero(bad)[0].tolist())
        raise RangeError(
            f"scale of block {where} (={float(ideal[where])}) does not fit {level}; "
            "use scale=float32 or a coarser block"
        )
    return torch.where(
        ideal == 0, _round_to(torch.full_like(ideal, zero_scale(scheme, dtype)), fmt, up=False), values
    )


def _top(fmt: Format) -> float:
    """Return the middle between the largest value of a minifloat and the one that would follow it."""
    if dtype_of(fmt) in _IEEE:
        return math.inf  # torch's own casts yield Inf past that point
    return float(fmt.max + power_of_two(fmt.emax - fmt.mantissa_bits - 1))


def _least(scheme: Scheme, fmt: Format) -> float:
    """Return the smallest scale written: that of the dialect, where the format reaches it."""
    assert isinstance(fmt, FloatFormat)
    least = scheme.dialect.minimum_scale
    return least if least >= float(fmt.smallest) else 0.0


def _round_to(values: torch.Tensor, fmt: Format, *, up: bool) -> torch.Tensor:
    """Round positive ``values`` to ``fmt``, saturating, without leaving the wide dtype."""
    native = dtype_of(fmt)
    if native in _IEEE and not up:
        return values.to(native).to(values.dtype)
    mode = RoundingMode.CEIL if up else RoundingMode.HALF_EVEN
    return decode(encode_nearest(values, fmt, mode), fmt, values.dtype)


def _coarsest(scheme: Scheme, index: int, amax: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Return the coarsest linear scale; with finer levels, the one that lets them use their whole format."""
    level, narrow = scheme.scales[index], rounder(scheme, ranges.dtype)
    if index == 0:
        return _linear(through(amax / scheme.divisor, narrow), scheme, level, ranges.dtype)
    span = scheme.divisor
    for finer in scheme.scales[:index]:
        span *= float(finer.format_for(format_of(ranges.dtype)).max)
    if scheme.dialect.tensor_scale is TensorScale.RECIPROCAL:
        # torch computes `number / tensor` as reciprocal, then product: two roundings in the tensor's dtype.
        least = torch.finfo(ranges.dtype).tiny
        inverse = through(through(1.0 / amax.clamp(min=least), narrow) * span, narrow)
        return torch.where(torch.isfinite(inverse), inverse, 1.0)
    shared = torch.where(amax == 0, 1.0, (amax / span).clamp(min=LEAST_NORMAL))
    return _round_to(shared, level.format_for(format_of(ranges.dtype)), up=False)


def _fine_linear(
    scheme: Scheme, level: ScaleLevel, amax: torch.Tensor, coarser: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a linear scale relative to a coarser one; where it rounds to zero, the block becomes zeros."""
    ideal = through(amax / scheme.divisor, rounder(scheme, dtype))
    inverse = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
    relative = ideal * coarser if inverse else ideal / coarser
    values = _round_to(relative, level.format_for(format_of(dtype)), up=level.rule is ScaleRule.LINEAR_UP)
    return torch.where(values == 0, scheme.dialect.zero_block_scale, values)


def _power_of_two(
    scheme: Scheme, level: ScaleLevel, amax: torch.Tensor, coarser: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    fmt = level.format_for(format_of(dtype))
    low, high = _exponents(fmt)
    exponent = scale_exponent(amax, scheme, level.rule)
    if coarser is None:
        # compressed-tensors reads exponents from the bits of the input's dtype: a float16 block below the
        # normal numbers has scale 0 there, which it replaces by 1.
        lost = rounder(scheme, dtype) is torch.float16
        quiet = _is_quiet(amax, dtype) if lost else torch.zeros_like(amax, dtype=torch.bool)
        least = -14 - scheme.element.emax if lost else -(1 << 14)
        exponent = torch.where(quiet, 0, exponent.clamp(min=least))
    else:
        exponent = exponent.clamp(min=-127 - scheme.element.emax)
        _, shift = torch.frexp(coarser)
        exponent = exponent - (shift.to(torch.int64) - 1).clamp(min=-127)
    if coarser is None and bool((exponent > high).any()):
        raise RangeError(
            f"a block needs scale 2**{int(exponent.max())}, past the largest of {level}; "
            "scale the tensor down"
        )
    return times_power_of_two(torch.ones_like(amax, dtype=torch.float64), exponent.clamp(low, high)).to(
        amax.dtype
    )


def _exponents(fmt: Format) -> tuple[int, int]:
    if isinstance(fmt, CodebookFormat):
        exponents = [math.frexp(value)[1] - 1 for value in fmt.values]
        return min(exponents), max(exponents)
    assert isinstance(fmt, FloatFormat)
    return fmt.emin, fmt.emax


def _is_quiet(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether ``amax``, rounded as the even rule does in ``dtype``, has an exponent field of zero."""
    return amax + 2.0**-16 < torch.finfo(dtype).tiny


def scale_exponent(amax: torch.Tensor, scheme: Scheme, rule: ScaleRule) -> torch.Tensor:
    """Return the exponent of the power-of-two scale of each ``amax``, int64, before it is fitted to a format.

    Zero gives a number below every exponent that a format has.
    """
    element = scheme.element
    mantissa, exponent = torch.frexp(amax)
    floor = exponent.to(torch.int64) - 1
    lead = 2 * mantissa
    if rule is ScaleRule.EVEN:
        width = scheme.dialect.even_mantissa_bits
        bits = element.mantissa_bits if width is None else width
        floor = floor + (lead + 2.0 ** -(bits + 1) >= 2).to(torch.int64)
    elif rule is ScaleRule.CEIL:
        floor = floor + (lead > 1).to(torch.int64)
    elif rule is ScaleRule.RCEIL:
        top = scheme.divisor / 2.0**element.emax
        floor = floor + (lead > top).to(torch.int64)
    return torch.where(amax == 0, -(1 << 14), floor - element.emax)


def _affine(scheme: Scheme, ranges: Ranges) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    level, narrow = scheme.scales[0], rounder(scheme, ranges.dtype)
    low, high = ranges.minimum[0], ranges.maximum[0]
    if scheme.dialect.widen_to_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    steps = float((scheme.qmax - scheme.qmin) * scheme.element_step)
    width = through(high - low, narrow)
    ideal = through(width / steps, narrow)
    # The width of a range that spans nearly all of float32 overflows; its two halves do not.
    ideal = torch.where(torch.isinf(width), high / steps - low / steps, ideal)
    scale = _linear(ideal, scheme, level, ranges.dtype)
    unit = float(scheme.element_step)
    quotient = through(low / scale, narrow)
    if scheme.dialect.rounds_quotient and scheme.zero_point is ZeroPoint.INTEGER:
        quotient = unit * round_steps(quotient / unit, scheme.dialect.zero_point_rounding)
    offset = through(scheme.qmin * unit - quotient, narrow) / unit
    if not scheme.dialect.formula_zero_point:
        offset = torch.where(ideal == 0, float(max(scheme.qmin, 0)), offset)
    stored = store(scale, level.format_for(format_of(ranges.dtype)))
    if scheme.zero_point is ZeroPoint.REAL:
        return (stored,), offset.to(wide_dtype(ranges.dtype))
    rounded = round_steps(offset, scheme.dialect.zero_point_rounding)
    return (stored,), rounded.clamp(scheme.qmin, scheme.qmax).to(zero_point_dtype(scheme))


def zero_point_dtype(scheme: Scheme) -> torch.dtype:
    """Return the dtype of integer zero points: int32, as torch takes them, or int64 for 32-bit codes."""
    return torch.int64 if scheme.bits > 31 else torch.int32


def parameter_tensors(
    scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of each scale, finest first, and of the zero point, if there is one.

    shape, dtype: of the tensor that is quantized.
    """
    own = format_of(dtype)
    scales = [
        (level.granularity.grid(shape), storage_dtype(level.format_for(own))) for level in scheme.scales
    ]
    if scheme.zero_point is ZeroPoint.NONE:
        return tuple(scales)
    zeros = zero_point_dtype(scheme) if scheme.zero_point is ZeroPoint.INTEGER else wide_dtype(dtype)
    return (*scales, (scheme.granularity.grid(shape), zeros))


@functools.lru_cache(maxsize=1024)
def _parameter_counts(scheme: Scheme, shape: tuple[int, ...]) -> list[int]:
    return [math.prod(grid) for grid, _ in parameter_tensors(scheme, shape, torch.float32)]


def require_parameters(
    scheme: Scheme, params: tuple[tuple[torch.Tensor, ...], torch.Tensor | None], shape: tuple[int, ...]
) -> None:
    """Raise ShapeError unless scales and zero point hold a number for each block of a tensor of ``shape``."""
    scales, zero_point = params
    wanted = _parameter_counts(scheme, shape)
    given = scales if zero_point is None else (*scales, zero_point)
    if [x.numel() for x in given] != wanted:
        found = ", ".join(str(tuple(x.shape)) for x in given) or "none"
        raise ShapeError(
            f"scales and zero points (of shape {found}) must hold {', '.join(map(str, wanted)) or 'no'} "
            f"numbers, as {scheme} has for a tensor of shape {shape}"
        )


def store(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return values that ``fmt`` holds exactly in the dtype in which its codes are kept."""
    dtype = storage_dtype(fmt)
    if dtype in _IEEE:
        return values.to(dtype)
    return encode_nearest(values, fmt, RoundingMode.HALF_EVEN).to(torch.uint8).view(dtype)


def load_scale(stored: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of stored scales in ``dtype``; the inverse of :func:`store`."""
    if stored.dtype in _IEEE:
        return stored.to(dtype)
    return decode(stored.view(torch.uint8), fmt, dtype)


def effective_scale(
    scheme: Scheme, scales: tuple[torch.Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return the one factor of each finest block, in the wide dtype of ``dtype``; None without scales.

    Levels are combined coarse to fine: ``scale_1 * scale_2``, or ``scale_1 / scale_2`` where the dialect
    keeps the coarsest as its reciprocal.
    """
    if not scales:
        return None
    own, wide = format_of(dtype), wide_dtype(dtype)
    values = [load_scale(s, lv.format_for(own), wide) for s, lv in zip(scales, scheme.scales, strict=True)]
    result = values[-1].reshape(scheme.scales[-1].granularity.grid(shape))
    for index in reversed(range(len(values) - 1)):
        level = scheme.scales[index]
        coarse = spread_grid(result, scheme.scales[index + 1].granularity, level.granularity, shape)
        fine = values[index].reshape(level.granularity.grid(shape))
        inverse = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL and not level.rule.power_of_two
        result = fine / coarse if inverse else fine * coarse
    return result
