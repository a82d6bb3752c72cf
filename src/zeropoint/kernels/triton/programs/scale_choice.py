"""Block scales in Triton: :mod:`zeropoint.params.arithmetic`, bit for bit."""

import triton
import triton.language as tl

from ....ops.lowering import How, Offset
from .element_codes import bits_of, float_of, fused, rounded

_POWER, _MINIFLOAT, _AFFINE = (
    tl.constexpr(int(How.POWER)),
    tl.constexpr(int(How.MINIFLOAT)),
    tl.constexpr(int(How.AFFINE)),
)
_REAL, _TRUNCATED, _OF_ROUNDED = (
    tl.constexpr(int(Offset.REAL)),
    tl.constexpr(int(Offset.TRUNCATED)),
    tl.constexpr(int(Offset.OF_ROUNDED)),
)
_INFINITE = tl.constexpr(float("inf"))
_LEAST_FACTOR, _MOST_FACTOR = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)
_LEAST_NORMAL, _LEAST_POWER = tl.constexpr(0x00800000), tl.constexpr(0x00400000)


@triton.jit
def scales_fit_fusing(amax, coarse, k: tl.constexpr):
    """Whether quotients of :func:`scales_of` may be fused: no remainder underflows."""
    fit = (amax == 0.0) | ((amax >= _LEAST_FACTOR) & (amax <= _MOST_FACTOR))
    found = tl.min(fit.to(tl.int32), axis=0) > 0
    if k.rule.how == _MINIFLOAT:
        outer = tl.load(coarse)
        found = found & (outer >= _LEAST_FACTOR) & (outer <= _MOST_FACTOR)
    return found


@triton.jit
def _over(a, b, inverse, fast: tl.constexpr):
    """Return IEEE quotients; inverse: ``RN(1 / b)``."""
    if fast:
        return fused(a, b, inverse)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return tl.div_rn(a, b + tl.zeros_like(a))


@triton.jit
def scales_of(amax, low, high, coarse, fast: tl.constexpr, k: tl.constexpr):
    """Choose the scales of blocks from their extremes, float32.

    amax, low, high: largest magnitude, smallest and largest number. coarse: where the scale of the whole
    tensor lies, float32. fast: whether quotients may be fused, see :func:`scales_fit_fusing`.

    Returns (scale, factor, zero, fits). scale: float32, or the code of a byte, int32. factor: what elements
    are divided by or multiplied by, Inf where the scale was lost. fits: whether the scale fits its format.
    """
    rule: tl.constexpr = k.rule
    zero = tl.zeros_like(amax)
    if rule.how == _POWER:
        byte = _power_code(amax, rule)
        fits = byte < 255
        byte = tl.minimum(byte, 254)
        scale = byte.to(tl.int32)
        factor = power(254 - byte) if k.multiply else power(byte) * rule.unit
    elif rule.how == _MINIFLOAT:
        scale, factor = _minifloat(amax, tl.load(coarse), fast, k)
        fits = amax == amax
    elif rule.how == _AFFINE:
        scale, zero, fits = _affine(low, high, rule)
        factor = scale
    else:
        scale, fits = _linear(rounded(_over(amax, rule.divisor, k.inverse_divisor, fast), rule.narrow), rule)
        factor = scale * rule.unit
    if rule.unsigned:
        fits &= low >= 0.0
    return scale, factor, zero, fits


@triton.jit
def _linear(ideal, rule: tl.constexpr):
    """Return the stored value of a scale and whether it fits."""
    scale = rounded(tl.maximum(ideal, rule.least).to(tl.float32), rule.stored)
    fits = (ideal == 0.0) | ((scale > 0.0) & (scale < _INFINITE))
    empty = rounded(tl.zeros_like(ideal) + rule.zero_scale, rule.stored)
    return tl.where(ideal == 0.0, empty, scale), fits


@triton.jit
def power(byte):
    """Return ``2**(byte - 127)``, built from bits: 2**-127 is a subnormal float32."""
    return float_of(tl.where(byte > 0, byte << 23, _LEAST_POWER))


@triton.jit
def _power_code(amax, rule: tl.constexpr):
    """E8M0 byte of magnitudes, uint32; 255 and more do not fit."""
    bits = bits_of(amax)
    # From 2**-127 on, the significand of a subnormal without its first bit; below, nothing rounds up.
    small = tl.maximum(bits << 1, _LEAST_NORMAL) - _LEAST_NORMAL
    bits = tl.where(bits < _LEAST_NORMAL, small, bits)
    exponent = (bits + rule.addend) >> 23
    byte = tl.maximum(tl.maximum(exponent, rule.emax) - rule.emax, rule.least_byte)
    return tl.where(amax < rule.quiet, rule.quiet_byte, byte).to(tl.uint32)


@triton.jit
def _minifloat(amax, coarse, fast: tl.constexpr, k: tl.constexpr):
    """Codes of scales relative to ``coarse``, and factors of elements."""
    rule: tl.constexpr = k.rule
    ideal = rounded(_over(amax, rule.divisor, k.inverse_divisor, fast), rule.narrow)
    if rule.by_product:
        relative = _over(amax, coarse * rule.divisor, tl.div_rn(1.0, coarse * rule.divisor), fast)
    elif rule.inverse:
        relative = ideal * coarse
    else:
        relative = _over(ideal, coarse, tl.div_rn(1.0, coarse), fast)
    code = _minifloat_code(relative, rule)
    value = _minifloat_value(code, rule)
    if rule.zero_scale > 0.0:
        empty = tl.where(relative > 0.0, rule.zero_scale, rule.empty_scale).to(tl.float32)
        lost = value == 0.0
        value = tl.where(lost, empty, value)
        code = tl.where(lost, _minifloat_code(empty, rule), code)
    factor = (
        _over(value, coarse, tl.div_rn(1.0, coarse), fast) if rule.inverse else value * coarse
    ) * rule.unit
    return code.to(tl.int32), tl.where(factor > 0.0, factor, _INFINITE)


@triton.jit
def _minifloat_code(x, rule: tl.constexpr):
    """Return the codes of non-negative float32, half to even; see :func:`.element_codes._float`."""
    a = tl.minimum(x, rule.maximum)
    exponent = tl.maximum(bits_of(a) & 0x7F800000, rule.emin << 23)
    c = exponent + ((23 - rule.mantissa) << 23)
    return bits_of(a + float_of(c)) - c + ((exponent - (rule.emin << 23)) >> (23 - rule.mantissa))


@triton.jit
def _minifloat_value(code, rule: tl.constexpr):
    """Return the values of the codes of finite numbers."""
    return float_of(code << (23 - rule.mantissa)) * float_of(tl.zeros_like(code) + ((rule.emin + 126) << 23))


@triton.jit
def _affine(low, high, rule: tl.constexpr):
    """Scales, zero points, and whether both fit, from block extremes."""
    if rule.widen:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    steps = (rule.high - rule.low) * 1.0
    width = rounded(high - low, rule.narrow)
    ideal = rounded(tl.div_rn(width, steps), rule.narrow)
    ideal = tl.where(width == _INFINITE, tl.div_rn(high, steps) - tl.div_rn(low, steps), ideal)
    scale, fits = _linear(ideal, rule)
    quotient = rounded(tl.div_rn(low, scale), rule.narrow)
    if rule.offset == _OF_ROUNDED:
        quotient = _nearest(quotient)
    zero = rounded(rule.low - quotient, rule.narrow)
    if not rule.formula:
        zero = tl.where(ideal == 0.0, max(rule.low, 0) * 1.0, zero)
    if rule.offset != _REAL:
        zero = _toward_zero(zero) if rule.offset == _TRUNCATED else _nearest(zero)
        zero = tl.minimum(tl.maximum(zero, rule.low * 1.0), rule.high * 1.0)
    return scale, zero, fits & (tl.abs(zero) < _INFINITE)


@triton.jit
def _nearest(x):
    """Nearest integers, ties to even; float32 from 2**23 are integers."""
    a = tl.abs(x)
    near = (a + 8388608.0) - 8388608.0
    return tl.where(a < 8388608.0, tl.where(x < 0.0, -near, near), x)


@triton.jit
def _toward_zero(x):
    """Return integers without their fraction."""
    small = tl.abs(x) < 8388608.0
    return tl.where(small, tl.where(small, x, 0.0).to(tl.int32).to(tl.float32), x)
