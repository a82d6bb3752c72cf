"""Values to codes and back: :mod:`zeropoint.formats.codes` again, in Triton, bit for bit.

Quotients are IEEE's and nothing is contracted: kernels are launched with ``enable_fp_fusion=False``. ``k`` is
what they are compiled for, see :class:`.specialization.Constants`.

On the host a bfloat16 tensor is passed as its int16 bits and converted here: Triton's interpreter (3.7) cuts
float32 off instead of rounding it, and its ``fma`` rounds twice.
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
_IN_ORDER = tl.constexpr(0xFEDCBA9876543210 - (1 << 64))
_LEAST_FACTOR, _MOST = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


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
    """Return float32 from float32, float16, bfloat16, or the bits of bfloat16."""
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
    """Return float32 rounded half to even to ``like``, int16 for bits of bfloat16."""
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
def quotient(value, factor, amax, k: tl.constexpr):
    """Return IEEE quotients of values, (many, size), and the factors of their segments, (many,).

    With ``y = RN(1 / b)`` and a ``q`` within one unit in the last place of ``a / b``, ``fma(fma(-b, q, a),
    y, q)`` is ``RN(a / b)`` (Markstein 1990), but for the sign of zero. ``a y`` is within 1.5 units, and
    within one after a first correction. Where a remainder underflows, ``a`` is below 2**-100 and the quotient
    below 2**-40, which is less than any boundary between codes. Programs with other factors or values divide.
    """
    if k.fused:
        usual = (factor >= _LEAST_FACTOR) & (factor <= _MOST) & (amax <= _MOST)
        if tl.min(usual.to(tl.int32)) > 0:
            inverse = tl.div_rn(1.0, factor)[:, None] + tl.zeros_like(value)
            divisor = tl.zeros_like(value) - factor[:, None]
            ratio = value * inverse
            ratio = tl.fma(tl.fma(divisor, ratio, value), inverse, ratio)
            ratio = tl.fma(tl.fma(divisor, ratio, value), inverse, ratio)
        else:
            ratio = tl.div_rn(value, factor[:, None])
        return ratio
    else:  # noqa: RET505
        return tl.div_rn(value, factor[:, None])


@triton.jit
def encoded(value, factor, zero, amax, k: tl.constexpr):
    """Return the codes of float32 values, (many, size), as int32, of whose bits ``k.width`` count.

    factor: what values are divided by, or multiplied by under ScaleBy.MULTIPLY; Inf where a scale was lost.
    zero: zero point. amax: largest magnitude. All three (many,) float32.
    """
    if k.element.scaling == _MULTIPLY:
        ratio = value * factor[:, None]
    elif k.element.scaling == _RECIPROCAL:
        ratio = value * tl.div_rn(1.0, factor)[:, None]
    else:
        ratio = quotient(value, factor, amax, k)
    ratio = rounded(ratio, k.element.quotient)
    if k.element.kind == _INTEGER:
        return _integer(ratio, zero[:, None], k)
    elif k.element.kind == _FLOAT:  # noqa: RET505
        return _float(ratio, value, k)
    else:
        rank = _rank(ratio, k)
        if k.order == _IN_ORDER:
            return rank
        else:  # noqa: RET505
            return ((k.order >> (rank.to(tl.int64) * 4)) & 15).to(tl.int32)


@triton.jit
def _integer(ratio, zero, k: tl.constexpr):
    """Return ``clamp(rint(ratio) + zero)``; clamping first is exact, and keeps the sum's bits in range."""
    element: tl.constexpr = k.element
    if element.zero_place == _AFTER:
        steps = tl.minimum(tl.maximum(ratio, element.low - zero), element.high - zero)
        whole = (steps + _WHOLE) + zero
    else:
        if element.zero_place == _INSIDE:
            ratio = rounded(ratio + zero, element.quotient)
        whole = tl.minimum(tl.maximum(ratio, element.low * 1.0), element.high * 1.0) + _WHOLE
    return whole.to(tl.int32, bitcast=True)


@triton.jit
def _float(ratio, value, k: tl.constexpr):
    """Round quotients to the format, saturating; the signs are those of ``value``.

    For a magnitude ``a`` with exponent ``e = max(exponent(a), emin)``, adding ``c = 2**(e + 23 - m)`` leaves
    the integer significand of m bits in the low bits of the sum, and a carry moves into the exponent field by
    itself. ``-(emin << m)`` rides along in the mantissa of c, which keeps ties right because it is even (but
    for m = 0, put right after); of the rest of c no bit is in the low byte.
    """
    element: tl.constexpr = k.element
    a = tl.abs(ratio)
    sign = bits_of(value) & 0x80000000
    if element.unsigned_below >= 0:  # negative, and so with the sign bit, where ``a`` is larger
        sign &= element.unsigned_below - bits_of(a)
    a = tl.minimum(a, element.maximum)
    exponent = tl.maximum(bits_of(a) & _EXPONENT, element.emin << 23)
    lift: tl.constexpr = ((23 - element.mantissa) << 23) + 256 - ((element.emin << element.mantissa) & 0xFE)
    code = bits_of(a + float_of(exponent + lift)) + (exponent >> (23 - element.mantissa))
    if (element.emin << element.mantissa) & 1:
        code -= 1
    code = (code & element.magnitude) | (sign >> element.sign_shift)
    if element.negative_nan:  # the format has no negative zero
        code = tl.where(code == element.magnitude + 1, 0, code)
    return code.to(tl.int32)


@triton.jit
def _rank(x, k: tl.constexpr):
    """Return how many of 15 ascending numbers lie below ``x``, int32, by halves."""
    ends: tl.constexpr = k.element.thresholds
    a = x > ends[7]
    b = x > tl.where(a, ends[11], ends[3])
    c = x > tl.where(a, tl.where(b, ends[13], ends[9]), tl.where(b, ends[5], ends[1]))
    above = tl.where(b, tl.where(c, ends[14], ends[12]), tl.where(c, ends[10], ends[8]))
    below = tl.where(b, tl.where(c, ends[6], ends[4]), tl.where(c, ends[2], ends[0]))
    d = x > tl.where(a, above, below)
    return a.to(tl.int32) * 8 + b.to(tl.int32) * 4 + c.to(tl.int32) * 2 + d.to(tl.int32)


@triton.jit
def decoded(code, table, k: tl.constexpr):
    """Return the float32 values of codes, int32; table: (256,) float32, those of all codes."""
    element: tl.constexpr = k.element
    if element.kind == _INTEGER:
        # In the low bits of 2**23 a code adds itself; with its sign bit flipped, that bit's value more.
        whole = (code ^ element.sign) | 0x4B000000
        return whole.to(tl.float32, bitcast=True) - (8388608.0 + element.sign)
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
