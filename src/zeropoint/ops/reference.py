"""The operators in plain torch, on any device: the yardstick, to which others are equal byte for byte.

quantize     code = encode(x / S + zero_point),   S = scale_1 * scale_2 * ...
dequantize   value = (decode(code) - zero_point) * S
"""

from __future__ import annotations

import math

import torch

from ..errors import NonFiniteError, RangeError, UnsupportedError
from ..formats import CodebookFormat, FloatFormat, IntFormat, Overflow, RoundingMode
from ..formats.torch_dtypes import wide_dtype
from ..layout import packing
from ..layout.blocks import reduce_blocks, spread_blocks
from ..params import arithmetic
from ..params.arithmetic import Ranges, effective_scale, rounder, through
from ..params.codes import (
    decode,
    encode_codebook,
    encode_float,
    int_patterns,
    magnitude_codes,
    round_steps,
    uniform_noise,
)
from ..schemes import Scaling, Scheme, ZeroPoint, ZeroPointPlace

CHUNK = 1 << 22
"""Elements that temporaries of the encoder hold at once, so that a large tensor needs little extra memory."""


def require_finite(x: torch.Tensor) -> None:
    """Raise NonFiniteError, with the first place and the count, unless every element of ``x`` is finite."""
    good = torch.isfinite(x)
    if not bool(good.all()):
        where = tuple(torch.nonzero(~good)[0].tolist()) if x.ndim else ()
        count = int((~good).sum())
        raise NonFiniteError(
            f"tensor (shape {tuple(x.shape)}, {x.dtype}) holds {float(x[where])} at index {where} and "
            f"{count} non-finite values in all; replace them before quantizing"
        )


def ranges(x: torch.Tensor, scheme: Scheme) -> Ranges:
    """Return the extremes of each block of each scale level of ``x``, in the wide dtype."""
    wide = wide_dtype(x.dtype)
    levels = [level.granularity for level in scheme.scales]
    low = tuple(reduce_blocks(x, g, "amin", math.inf).to(wide) for g in levels)
    high = tuple(reduce_blocks(x, g, "amax", -math.inf).to(wide) for g in levels)
    return Ranges(minimum=low, maximum=high, dtype=x.dtype, shape=tuple(x.shape))


def choose_params(x: torch.Tensor, scheme: Scheme) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return scales, finest first, and the zero point that ``x`` gives.

    Raises NonFiniteError for NaN and Inf, RangeError for a scale that its format cannot hold.
    """
    require_finite(x)
    return arithmetic.scales_from_ranges(scheme, ranges(x, scheme))


def quantize(
    x: torch.Tensor, scheme: Scheme, scales: tuple[torch.Tensor, ...], zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Return the packed codes of finite ``x`` under given parameters: uint8, rows padded to bytes."""
    require_finite(x)
    return packing.pack(codes(x, scheme, scales, zero_point), scheme.bits)


def codes(
    x: torch.Tensor, scheme: Scheme, scales: tuple[torch.Tensor, ...], zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Return unpacked code patterns of ``x``."""
    shape = tuple(x.shape)
    scale = effective_scale(scheme, scales, shape, x.dtype)
    spread = None if scale is None else spread_blocks(scale, scheme.granularity, shape).expand(shape)
    zero = None if zero_point is None else spread_blocks(zero_point, scheme.granularity, shape).expand(shape)
    first = 0
    parts = []
    rows = max(1, CHUNK // max(1, math.prod(shape[1:]))) if shape else 1
    for begin in range(0, shape[0] if shape else 1, rows):
        pick = slice(begin, begin + rows) if shape else ()
        part = x[pick]
        ratio = scaled(part, scheme, None if spread is None else spread[pick])
        parts.append(_encode(ratio, scheme, None if zero is None else zero[pick], first, x.dtype))
        first += part.numel()
    if not parts:
        return torch.empty(shape, dtype=torch.uint8, device=x.device)
    return torch.cat(parts) if shape else parts[0]


def scaled(x: torch.Tensor, scheme: Scheme, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` in units of its scale, in the wide dtype; where the scale is zero, a zero of its sign."""
    wide = x.to(wide_dtype(x.dtype))
    if scale is None:
        return wide
    # A block whose scale was lost holds zeros, with the signs of its values.
    divisor = torch.where(scale == 0, torch.inf, scale)
    ratio = wide * (1.0 / divisor) if scheme.dialect.scaling is Scaling.RECIPROCAL else wide / divisor
    return through(ratio, scaled_rounder(scheme, x.dtype))


def scaled_rounder(scheme: Scheme, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that ``x / scale`` is rounded to, or None.

    A scheme with several levels has a float32 tensor scale, to which torch promotes, so nothing is rounded
    there.
    """
    return rounder(scheme, dtype) if len(scheme.scales) == 1 else None


def _encode(
    ratio: torch.Tensor, scheme: Scheme, zero_point: torch.Tensor | None, first: int, dtype: torch.dtype
) -> torch.Tensor:
    noise = None
    if scheme.rounding.mode is RoundingMode.STOCHASTIC:
        noise = uniform_noise(scheme.rounding.seed, first, ratio.numel(), ratio.device).reshape(ratio.shape)
    element, mode = scheme.element, scheme.rounding.mode
    if isinstance(element, CodebookFormat):
        return encode_codebook(ratio, element)
    if isinstance(element, FloatFormat):
        patterns = encode_float(ratio, element, mode, scheme.overflow, noise)
        if element.bits <= scheme.dialect.positive_zero_bits:
            patterns = torch.where(ratio == 0, 0, patterns).to(patterns.dtype)
        return patterns
    steps = integer_steps(ratio, scheme, zero_point, noise, dtype)
    if scheme.overflow is not Overflow.SATURATE:
        _refuse_overflow(steps, scheme)
    # A NaN takes the lowest code, as in torch.fake_quantize; converting it to an integer would be undefined.
    clamped = steps.clamp(scheme.qmin, scheme.qmax).nan_to_num(nan=float(scheme.qmin))
    return int_patterns(clamped, element)


def _refuse_overflow(steps: torch.Tensor, scheme: Scheme) -> None:
    if scheme.overflow is Overflow.SPECIAL:
        raise UnsupportedError(
            f"overflow=special needs a format with Inf or NaN, got {scheme.element_name}; use saturate"
        )
    past = (steps < scheme.qmin) | (steps > scheme.qmax)
    if bool(past.any()):
        raise RangeError(
            f"{int(past.sum())} values exceed the range of {scheme.element_name}; use overflow=saturate"
        )


def integer_steps(
    ratio: torch.Tensor,
    scheme: Scheme,
    zero_point: torch.Tensor | None,
    noise: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return rounded steps plus zero point, float64, before they are clamped to the codes in use."""
    assert isinstance(scheme.element, IntFormat)
    steps = ratio * 2.0**scheme.element.fraction_bits
    if zero_point is None:
        return round_steps(steps.double(), scheme.rounding.mode, noise)
    inside = (
        scheme.zero_point is ZeroPoint.REAL
        or scheme.dialect.zero_point_place is ZeroPointPlace.INSIDE_ROUNDING
    )
    if inside:
        shifted = through(steps + zero_point.to(steps.dtype), scaled_rounder(scheme, dtype))
        return round_steps(shifted.double(), scheme.rounding.mode, noise)
    return round_steps(steps.double(), scheme.rounding.mode, noise) + zero_point.double()


def dequantize(
    data: torch.Tensor,
    scheme: Scheme,
    scales: tuple[torch.Tensor, ...],
    zero_point: torch.Tensor | None,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    own_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the values of packed codes in ``dtype``; ``own_dtype`` is that of the tensor quantized."""
    patterns = packing.unpack(data, scheme.bits, packing.row_length(shape)).reshape(shape)
    wide = torch.float64 if torch.float64 in (dtype, own_dtype) else torch.float32
    values = decode(patterns, scheme.element, torch.float64 if zero_point is not None else wide)
    if zero_point is not None:
        offset = spread_blocks(zero_point, scheme.granularity, shape).double() * float(scheme.element_step)
        values = (values - offset).to(wide)
    scale = effective_scale(scheme, scales, shape, own_dtype)
    if scale is not None:
        values = values * spread_blocks(scale, scheme.granularity, shape).to(wide)
    return values.to(dtype)


def fake_quantize(
    x: torch.Tensor, scheme: Scheme, scales: tuple[torch.Tensor, ...], zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Return ``dequantize(quantize(x))`` in the dtype of ``x``."""
    shape = tuple(x.shape)
    data = packing.pack(codes(x, scheme, scales, zero_point), scheme.bits)
    return dequantize(data, scheme, scales, zero_point, shape=shape, dtype=x.dtype, own_dtype=x.dtype)


def inside(
    x: torch.Tensor, scheme: Scheme, scales: tuple[torch.Tensor, ...], zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Return where ``x``, rounded, needs no clipping: the mask of the gradient, bounds included.

    NaN and Inf are outside.
    """
    shape = tuple(x.shape)
    scale = effective_scale(scheme, scales, shape, x.dtype)
    spread = None if scale is None else spread_blocks(scale, scheme.granularity, shape)
    # Where the scale is zero the ratio is zero too, also that of Inf.
    ratio = torch.where(torch.isfinite(x), scaled(x, scheme, spread), torch.nan).double()
    element, mode = scheme.element, scheme.rounding.mode
    noise = None
    if mode is RoundingMode.STOCHASTIC:
        noise = uniform_noise(scheme.rounding.seed, 0, x.numel(), x.device).reshape(shape)
    if isinstance(element, IntFormat):
        zero = None if zero_point is None else spread_blocks(zero_point, scheme.granularity, shape)
        steps = integer_steps(ratio.to(wide_dtype(x.dtype)), scheme, zero, noise, x.dtype)
        return (steps >= scheme.qmin) & (steps <= scheme.qmax)
    if isinstance(element, CodebookFormat):
        return (ratio >= float(element.min)) & (ratio <= float(element.max))
    magnitude, negative = magnitude_codes(ratio, element, mode, noise)
    fits = (magnitude <= element.max_code) & ~torch.isnan(ratio)
    return fits if element.signed else fits & ~(negative & (magnitude > 0))


def float_bounds(scheme: Scheme) -> tuple[float, float, bool]:
    """Return the interval of scaled values that need no clipping, and whether its ends belong to it.

    A codebook ends at its extremes. A float format ends half a step past its largest value; a tie there rounds to that value
    only when its code is even. Rounding is to nearest even.
    """
    element = scheme.element
    if not isinstance(element, FloatFormat):
        return float(element.min), float(element.max), True
    high = float(element.max) + 2.0 ** (max(element.emax, element.emin) - element.mantissa_bits - 1)
    return (-high if element.signed else 0.0), high, element.max_code % 2 == 0
