"""Bit-equal fake quantization of activations in ONNX operators, for tracing.

Fixed parameters become QuantizeLinear and DequantizeLinear. Parameters that follow the data become a formula
in float32; DynamicQuantizeLinear has other rules. Exponents come from a table of powers of two, since ONNX
can read no bits: a logarithm finds the place to within one, and comparing finds it exactly.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...formats import FloatFormat, IntFormat, Overflow, RoundingMode
from ...formats.torch_dtypes import dtype_of, format_of
from ...schemes import Granularity, Scheme, ZeroPoint
from ...schemes.dialects import ZEROPOINT
from ...schemes.scale_rules import CEIL, EVEN, LINEAR, RCEIL
from .types import CodeType, code_type

_LEAST_EXPONENT, _LARGEST_EXPONENT = -149, 127
_CASTS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes to which Cast rounds numbers in range as we do."""


def require_plain(scheme: Scheme) -> None:
    """Raise UnsupportedError for rounding or dialects that ONNX lacks."""
    if scheme.rounding.mode is not RoundingMode.HALF_EVEN or scheme.overflow is not Overflow.SATURATE:
        raise UnsupportedError("ONNX rounds half to even and saturates")
    if scheme.dialect != ZEROPOINT:
        raise UnsupportedError(f"ONNX does not follow dialect {scheme.dialect.name}")
    if scheme.element.is_table or scheme.zero_point is ZeroPoint.REAL:
        raise UnsupportedError("ONNX has no operator that rounds to its codes")


def axis_of(granularity: Granularity) -> int | None:
    """Return the axis with per-index parameters, or None per tensor.

    Raises UnsupportedError for other blocks.
    """
    if granularity == Granularity.tensor():
        return None
    named = len(granularity.extents)
    for axis in (named - 1, -named):
        if granularity == Granularity.channel(axis):
            return axis
    raise UnsupportedError(f"fixed parameters for {granularity} have no axis in ONNX")


def static_type(scheme: Scheme) -> CodeType:
    """Return QuantizeLinear's narrowest whole-byte type for all codes.

    Raises UnsupportedError for a float format that is not the type's own, to which QuantizeLinear would round
    otherwise.
    """
    require_plain(scheme)
    if scheme.element.is_integer:
        name = f"{'' if scheme.element.signed else 'u'}int{8 if scheme.bits <= 8 else 16}"
        from_byte = IntFormat(bits=8 if scheme.bits <= 8 else 16, signed=scheme.element.signed)
        if scheme.bits > 16:
            raise UnsupportedError(f"QuantizeLinear writes no codes wider than {name}")
        return code_type(from_byte, 21)
    kind = code_type(scheme.element, 21)
    if dtype_of(scheme.element) is not kind.carrier:
        raise UnsupportedError(f"QuantizeLinear writes no {scheme.element_name}")
    return kind


def static(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor] | None,
    axis: int | None,
) -> torch.Tensor:
    """Return ``x`` through QuantizeLinear and DequantizeLinear, or 8-bit float casts.

    In its own dtype. ends: values of the smallest and largest code in use, broadcasting against ``x``, where
    the type has more codes than the scheme; the values they clip would round to them.
    """
    wide = x.to(torch.float32)
    if zero_point.is_floating_point():
        # Not QuantizeLinear: onnxruntime 1.31 then leaves out a Relu before it, as if codes were unsigned.
        top = torch.finfo(zero_point.dtype).max
        factor = scale if axis is None else _along(scale, axis, x.ndim)
        return ((wide / factor).clamp(-top, top).to(zero_point.dtype).to(torch.float32) * factor).to(x.dtype)
    if ends is not None:
        # Not minimum and maximum: onnxscript 0.7 fuses them to a Clip without its constants.
        wide = torch.where(wide < ends[0], ends[0], wide)
        wide = torch.where(wide > ends[1], ends[1], wide)
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    symbolic = torch.onnx.ops.symbolic
    codes = symbolic(
        "QuantizeLinear", (wide, scale, zero_point), attributes, dtype=zero_point.dtype, shape=x.shape
    )
    values = symbolic(
        "DequantizeLinear", (codes, scale, zero_point), attributes, dtype=torch.float32, shape=x.shape
    )
    return values.to(x.dtype)


def _along(scale: torch.Tensor, axis: int, rank: int) -> torch.Tensor:
    """Return numbers along an axis, broadcastable to ``rank`` axes."""
    sides = [1] * rank
    sides[axis] = -1
    return scale.reshape(sides)


def dynamic(x: torch.Tensor, text: str) -> torch.Tensor:
    """Return ``x`` quantized with these parameters and dequantized, in its own dtype."""
    scheme = Scheme.parse(text)
    wide = x.to(torch.float32)
    size = group_size(scheme, x)
    blocks = wide if size is None else wide.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    axes = tuple(range(x.ndim)) if scheme.granularity == Granularity.tensor() else (-1,)
    values = _dequantized(blocks, scheme, axes)
    return (values if size is None else values.flatten(-2)).to(x.dtype)


def require_dynamic(x: torch.Tensor, scheme: Scheme) -> None:
    """Raise UnsupportedError where :func:`dynamic` has no formula."""
    require_plain(scheme)
    if len(scheme.scales) != 1:
        raise UnsupportedError(f"scales of {len(scheme.scales)} levels do not follow the data in ONNX")
    (level,) = scheme.scales
    fmt = level.format_for(format_of(x.dtype))
    if level.rule.power_of_two:
        known = fmt.is_float and fmt.mantissa_bits == 0
    else:
        known = level.rule == LINEAR and dtype_of(fmt) in (torch.float32, torch.bfloat16, torch.float16)
    if not known:
        raise UnsupportedError(f"scales of {level} do not follow the data in ONNX")
    group_size(scheme, x)


def group_size(scheme: Scheme, x: torch.Tensor) -> int | None:
    """Return scales' group size along the last axis, None for all."""
    if scheme.granularity in (Granularity.tensor(), Granularity.token()):
        return None
    (size, *more), length = scheme.granularity.extents or (0,), x.shape[-1]
    if more or size < 1 or scheme.granularity != Granularity.group(size):
        raise UnsupportedError(f"blocks of {scheme.granularity} do not follow the data in ONNX")
    if type(length) is not int or length % size:
        raise UnsupportedError(f"groups of {size} do not divide the last axis ({length})")
    return size


def _dequantized(blocks: torch.Tensor, scheme: Scheme, axes: tuple[int, ...]) -> torch.Tensor:
    low, high = blocks.amin(axes, keepdim=True), blocks.amax(axes, keepdim=True)
    if scheme.zero_point is ZeroPoint.INTEGER:
        return _affine(blocks, scheme, low.clamp(max=0), high.clamp(min=0))
    signed = scheme.element.signed
    amax = torch.maximum(low.abs(), high.abs()) if signed else high.clamp(min=0)
    (level,) = scheme.scales
    power = level.rule.power_of_two
    scale = _power(amax, scheme) if power else _linear(amax / scheme.divisor, scheme, blocks.dtype)
    return _rounded(blocks / scale, scheme) * scale


def _linear(ideal: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored scale: at least the dialect's smallest, rounded."""
    fmt = scheme.scales[0].format_for(format_of(dtype))
    small = scheme.dialect.small_scales
    least = small.least if small.least >= float(fmt.smallest) else 0.0
    native = dtype_of(fmt)
    assert native is not None
    empty = small.of_zeros
    assert empty is not None
    return torch.where(ideal == 0, empty, ideal.clamp(min=least).to(native).to(torch.float32))


def _affine(blocks: torch.Tensor, scheme: Scheme, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    unit = float(scheme.element_step)
    steps = (scheme.qmax - scheme.qmin) * unit
    width = high - low
    # The width of a range that spans nearly all of float32 overflows; its two halves do not.
    ideal = torch.where(torch.isinf(width), high / steps - low / steps, width / steps)
    scale = _linear(ideal, scheme, blocks.dtype)
    offset = (scheme.qmin * unit - low / scale) / unit
    offset = torch.where(ideal == 0, float(max(scheme.qmin, 0)), offset)
    zero = torch.round(offset).clamp(scheme.qmin, scheme.qmax)
    codes = (torch.round(blocks / scale / unit) + zero).clamp(scheme.qmin, scheme.qmax)
    return (codes - zero) * unit * scale


def _rounded(ratio: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the nearest format value of each number, ties to even."""
    element = scheme.element
    if element.is_integer:
        unit = float(element.step)
        # Adding zero makes a negative zero positive, as integers have only one.
        return (torch.round(ratio / unit).clamp(scheme.qmin, scheme.qmax) + 0.0) * unit
    assert isinstance(element, FloatFormat)
    top = float(element.max)
    native = dtype_of(element)
    if native in _CASTS:
        return ratio.clamp(-top, top).to(native).to(torch.float32)
    # The exponent of the spacing; below the normal numbers it is the smallest normal one's.
    quantum = _exponent(ratio.abs()).clamp(min=element.emin) - element.mantissa_bits
    step = _powers()[quantum - _LEAST_EXPONENT]
    return (torch.round(ratio / step) * step).clamp(-top if element.signed else 0.0, top)


def _powers() -> torch.Tensor:
    """Return the powers of two of float32, from the smallest on."""
    return torch.tensor([2.0**e for e in range(_LEAST_EXPONENT, _LARGEST_EXPONENT + 1)])


def _exponent(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the int64 floor of log2, the least exponent for 0."""
    powers = _powers()
    near = torch.log2(magnitude).floor().clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT).to(torch.int64)
    power = powers[near - _LEAST_EXPONENT]
    down = (magnitude < power).to(torch.int64)
    up = (magnitude >= power * 2).to(torch.int64)
    return (near - down + up).clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT)


def _power(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the power-of-two scale of each amax, by the rule."""
    (level,), element = scheme.scales, scheme.element
    fmt = level.format_for(format_of(amax.dtype))
    assert isinstance(fmt, FloatFormat)
    exponent = _exponent(amax)
    lead = amax / _powers()[exponent - _LEAST_EXPONENT]
    if level.rule == EVEN:
        exponent = exponent + (lead + 2.0 ** -(scheme.even_bits + 1) >= 2).to(torch.int64)
    elif level.rule == CEIL:
        exponent = exponent + (lead > 1).to(torch.int64)
    elif level.rule == RCEIL:
        exponent = exponent + (lead > scheme.divisor / 2.0**element.emax).to(torch.int64)
    fitted = (exponent - element.emax).clamp(max(fmt.emin, _LEAST_EXPONENT), fmt.emax)
    fitted = torch.where(amax == 0, max(fmt.emin, _LEAST_EXPONENT), fitted)
    return _powers()[fitted - _LEAST_EXPONENT]


def ends(
    scheme: Scheme, kind: CodeType, scale: torch.Tensor, zero_point: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return values of the end codes, None if the type is full."""
    if not scheme.element.is_integer:
        return None
    full = IntFormat(bits=kind.bits, signed=scheme.element.signed)
    if (scheme.qmin, scheme.qmax) == (full.qmin, full.qmax):
        return None
    low, high = ((code - zero_point.float()) * scale for code in (scheme.qmin, scheme.qmax))
    return low, high
