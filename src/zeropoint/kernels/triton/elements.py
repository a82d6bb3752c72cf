"""Values to codes and back: :mod:`zeropoint.formats.codes` again, in Triton, bit for bit.

Quotients are IEEE's (``div_rn``) and nothing is contracted: kernels are launched with
``enable_fp_fusion=False``. Formats are constants of compilation, the records of
:mod:`zeropoint.ops.lowering`.

A bfloat16 tensor is passed as its int16 bits and converted here: Triton's interpreter (3.7) cuts float32 off
instead of rounding it.
"""

import triton
import triton.language as tl

from ...ops.lowering import Kind, Narrow, ScaleBy, ZeroPlace

_INTEGER, _FLOAT = tl.constexpr(int(Kind.INTEGER)), tl.constexpr(int(Kind.FLOAT))
_BFLOAT16, _FLOAT16 = tl.constexpr(int(Narrow.BFLOAT16)), tl.constexpr(int(Narrow.FLOAT16))
_AFTER, _INSIDE = tl.constexpr(int(ZeroPlace.AFTER)), tl.constexpr(int(ZeroPlace.INSIDE))
_MULTIPLY, _RECIPROCAL = tl.constexpr(int(ScaleBy.MULTIPLY)), tl.constexpr(int(ScaleBy.RECIPROCAL))
# 1.5 * 2**23: added to a float32 below 2**22, it leaves the nearest integer, ties to even, in the low bits.
_WHOLE = tl.constexpr(12582912.0)
_EXPONENT = tl.constexpr(0x7F800000)
_LARGER = tl.constexpr(2.0**100)


@triton.jit
def bits_of(x):
    """Return the bits of float32 as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 of bits."""
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def float32(value):
    """Return float32 from float32, float16, or the bits of bfloat16."""
    if value.dtype == tl.int16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return value.to(tl.float32)


@triton.jit
def bfloat16_bits(value):
    """Return float32 rounded half to even to the bits of bfloat16, int32."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, nearest)


@triton.jit
def stored(value, like: tl.constexpr):
    """Return float32 rounded half to even to ``like``: float32, float16, or int16 for bits of bfloat16."""
    if like == tl.int16:
        return bfloat16_bits(value).to(tl.int16)
    else:  # noqa: RET505
        return value.to(like)


@triton.jit
def rounded(x, to: tl.constexpr):
    """Return a float32 rounded to bfloat16 or float16 and widened again, or as it is."""
    if to == _BFLOAT16:
        return float_of(bfloat16_bits(x) << 16)
    elif to == _FLOAT16:  # noqa: RET505
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def encoded(value, factor, zero, element: tl.constexpr, order: tl.constexpr):
    """Return the codes of float32 values as int32, of whose bits those of the format count.

    factor: what values are divided by, or multiplied by under ScaleBy.MULTIPLY; Inf where a scale was lost.
    zero: zero point, float32. order: of a codebook the codes of all ranks, four bits each, int64.
    """
    if element.scaling == _MULTIPLY:
        ratio = value * factor
    elif element.scaling == _RECIPROCAL:
        ratio = value * tl.div_rn(1.0, factor)
    else:
        ratio = tl.div_rn(value, factor)
    ratio = rounded(ratio, element.quotient)
    if element.kind == _INTEGER:
        return _integer(ratio, zero, element)
    elif element.kind == _FLOAT:  # noqa: RET505
        return _float(ratio, element)
    else:
        rank = tl.zeros_like(ratio).to(tl.int64)
        for place in tl.static_range(len(element.thresholds)):
            rank += (ratio > element.thresholds[place]).to(tl.int64)
        return ((order >> (rank * 4)) & 15).to(tl.int32)


@triton.jit
def _integer(ratio, zero, element: tl.constexpr):
    """Return ``clamp(rint(ratio) + zero)``; clamping first is exact, and keeps the sum's bits in range."""
    if element.zero_place == _AFTER:
        steps = tl.minimum(tl.maximum(ratio, element.low - zero), element.high - zero)
        whole = (steps + _WHOLE) + zero
    else:
        if element.zero_place == _INSIDE:
            ratio = rounded(ratio + zero, element.quotient)
        whole = tl.minimum(tl.maximum(ratio, element.low * 1.0), element.high * 1.0) + _WHOLE
    return whole.to(tl.int32, bitcast=True)


@triton.jit
def _float(ratio, element: tl.constexpr):
    """Round to the format, saturating.

    For a magnitude ``a`` with exponent ``e = max(exponent(a), emin)``, adding ``c = 2**(e + 23 - m)`` leaves
    the integer significand of m bits in the low bits of the sum. What lies above them is the exponent field,
    into which a carry moves by itself; the part of c itself is taken away again.
    """
    a = tl.abs(ratio)
    sign = bits_of(ratio) & 0x80000000
    if element.unsigned_below >= 0.0:  # compared as larger numbers: a subnormal constant would be float64
        sign = tl.where(a * _LARGER > element.unsigned_below * _LARGER, sign, 0)
    a = tl.minimum(a, element.maximum)
    exponent = tl.maximum(bits_of(a) & _EXPONENT, element.emin << 23)
    c = exponent + ((23 - element.mantissa) << 23)
    significand = bits_of(a + float_of(c)) - c
    code = significand + ((exponent - (element.emin << 23)) >> (23 - element.mantissa))
    code += sign >> element.sign_shift
    if element.negative_nan:  # the format has no negative zero
        code = tl.where(code == element.magnitude + 1, 0, code)
    return code.to(tl.int32)


@triton.jit
def decoded(code, element: tl.constexpr, table, width: tl.constexpr):
    """Return the float32 values of codes, int32; table: (256,) float32, those of all codes."""
    if element.kind == _INTEGER:
        if element.sign:
            code = code - ((code >> (width - 1)) << width)
        return code.to(tl.float32)
    elif element.kind == _FLOAT:  # noqa: RET505
        # Under the exponent of float32, subnormals included, the bits are the number over a power of two.
        magnitude = code & element.magnitude
        power = float_of(tl.zeros_like(magnitude) + ((element.emin + 126) << 23))
        number = float_of(magnitude << (23 - element.mantissa)) * power
        sign = (code & (element.magnitude + 1)).to(tl.uint32) << element.sign_shift
        number = float_of(bits_of(number) | sign)
        special = magnitude > element.max_code
        if element.negative_nan:
            special |= code == element.magnitude + 1
        return tl.where(special, tl.load(table + code, mask=special, other=0.0), number)
    else:
        return tl.load(table + code)
