"""Values to codes and back: :mod:`zeropoint.formats.codes` again, in Triton, bit for bit.

Quotients are IEEE's and nothing is contracted: kernels are launched with ``enable_fp_fusion=False``. ``k`` is
what they are compiled for, see :class:`..specialization.Constants`.

On the host a bfloat16 tensor is passed as its int16 bits and converted here: Triton's interpreter (3.7) cuts
float32 off instead of rounding it, and its ``fma`` rounds twice.
"""

import triton
import triton.language as tl

from ....ops.lowering import Kind, Narrow, Rounded, ScaleBy, ZeroPlace
from ..specialization import Hardware
from .rounding_modes import rounded_to

_INTEGER, _FLOAT = tl.constexpr(int(Kind.INTEGER)), tl.constexpr(int(Kind.FLOAT))
_BFLOAT16, _FLOAT16 = tl.constexpr(int(Narrow.BFLOAT16)), tl.constexpr(int(Narrow.FLOAT16))
_AFTER, _INSIDE = tl.constexpr(int(ZeroPlace.AFTER)), tl.constexpr(int(ZeroPlace.INSIDE))
_PRODUCT = tl.constexpr(int(ZeroPlace.PRODUCT))
_MULTIPLY, _RECIPROCAL = tl.constexpr(int(ScaleBy.MULTIPLY)), tl.constexpr(int(ScaleBy.RECIPROCAL))
_E4M3, _E5M2 = tl.constexpr(int(Hardware.E4M3)), tl.constexpr(int(Hardware.E5M2))
_HALF_EVEN = tl.constexpr(int(Rounded.HALF_EVEN))
# 1.5 * 2**23: added to a float32 below 2**22, it leaves the nearest integer, ties to even, in the low bits.
_WHOLE = tl.constexpr(12582912.0)
_EXPONENT = tl.constexpr(0x7F800000)
_IN_ORDER = tl.constexpr(0xFEDCBA9876543210 - (1 << 64))
_SIGNIFICAND = tl.constexpr(0x7FFFFF)
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
    """Round float32 half to even to ``like``, int16 for bfloat16 bits."""
    if like == tl.int16:
        return bfloat16_bits(value).to(tl.int16)
    else:  # noqa: RET505
        return value.to(like)


@triton.jit
def rounded(x, to: tl.constexpr):
    """Round a float32 to bfloat16 or float16 and widen it, if asked."""
    if to == _BFLOAT16:
        return float_of(bfloat16_bits(x) << 16)
    elif to == _FLOAT16:  # noqa: RET505
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def larger(a, b):
    """Return the larger of two numbers, NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(value, k: tl.constexpr):
    """Largest magnitude of each row of (many, size), NaN if any.

    The interpreter takes long for a reduction of its own, and finds the largest bits.
    """
    if k.native:
        return tl.reduce(tl.abs(value), 1, larger)
    else:  # noqa: RET505
        return float_of(tl.max((bits_of(value) & 0x7FFFFFFF).to(tl.int32), axis=1))


@triton.jit
def usual(amax, factor, k: tl.constexpr):
    """Whether quotients up to ``amax`` may be fused: see :func:`fused`.

    Both broadcast against each other; false where one is NaN.
    """
    found = (factor >= _LEAST_FACTOR) & (factor <= k.most) & (amax <= _MOST)
    if k.short:
        found &= (bits_of(factor) & _SIGNIFICAND) != _SIGNIFICAND
    return tl.min(tl.min(found.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def fused(value, factor, inverse):
    """Return IEEE quotients, of fused multiplications and additions; inverse: ``RN(1 / factor)``.

    With ``y = RN(1 / b)`` and a ``q`` within one unit in the last place of ``a / b``, ``fma(fma(-b, q, a),
    y, q)`` is ``RN(a / b)`` (Markstein 1990), but for the sign of zero. ``a y`` is within 1.5 units, and
    within one after a first correction. Where a remainder underflows, ``a`` is below 2**-100 and the quotient
    below 2**-40, which is less than any boundary between codes.
    """
    inverse += tl.zeros_like(value)
    divisor = tl.zeros_like(value) - factor
    ratio = value * inverse
    ratio = tl.fma(tl.fma(divisor, ratio, value), inverse, ratio)
    return tl.fma(tl.fma(divisor, ratio, value), inverse, ratio)


@triton.jit
def reciprocals(factor):
    """Compute ``RN(1 / b)`` and its error term, for :func:`_short` quotients.

    The latter is ``(1 - b y) y``.
    """
    inverse = tl.div_rn(1.0, factor)
    return inverse, tl.fma(0.0 - factor, inverse, 1.0) * inverse


@triton.jit
def _short(value, inverse, rest):
    """Quotients by two operations, on IEEE's side; never negative zero.

    For short numbers. With ``y = RN(1 / b)``, ``1 - b y`` is a float32, so that ``y + (1 - b y) y`` is ``1 /
    b`` to 2**-47. For all values of up to 11 bits and all factors, 2**33 pairs of significands, the quotient
    is IEEE's but for 28 pairs, and of these one alone has a quotient of up to 13 bits: that of 1 and the
    largest significand. Boundaries between codes are shorter than that.
    tests/kernels/triton/short_quotients.c counts them.
    """
    return tl.fma(value, inverse + tl.zeros_like(value), tl.fma(value, rest, 0.0))


@triton.jit
def ratio_of(value, factor, inverse, rest, fast: tl.constexpr, k: tl.constexpr):
    """Return :func:`ratios`; fast: whether factors and values are :func:`usual`."""
    if k.element.scaling == _MULTIPLY:
        ratio = value * factor
    elif k.element.scaling == _RECIPROCAL:
        ratio = value * tl.div_rn(1.0, factor)
    elif fast and k.short:
        ratio = _short(value, inverse, rest)
    elif fast:
        ratio = fused(value, factor, inverse)
    else:
        ratio = tl.div_rn(value, factor + tl.zeros_like(value))
    ratio = rounded(ratio, k.element.quotient)
    if k.element.kind == _FLOAT:
        if k.element.unsigned_below < 0 and fast:
            ratio = _signed(ratio, value)
        elif k.element.unsigned_below == 0 and not (fast and k.short and k.element.quotient == 0):
            ratio += 0.0  # makes negative zero positive
    return ratio


@triton.jit
def ratios(value, factor, inverse, rest, amax, k: tl.constexpr):
    """Float32 values over or times factors, rounded like the scheme's.

    factor: what values are divided by, or multiplied by under ScaleBy.MULTIPLY; Inf where a scale was lost.
    inverse, rest: its :func:`reciprocals`. amax: largest magnitudes. All float32, broadcast against values.
    Quotients that round to zero have the signs of values, but for those that ``unsigned_below`` drops.

    Codes of eight bits are made of them after the two branches have met: ptxas 12.8 loses some of those that
    meet there.
    """
    if k.fused:
        if usual(amax, factor, k):
            ratio = ratio_of(value, factor, inverse, rest, True, k)
        else:
            ratio = ratio_of(value, factor, inverse, rest, False, k)
        return ratio
    else:  # noqa: RET505 (Triton compiles one of the two)
        return ratio_of(value, factor, inverse, rest, False, k)


@triton.jit
def on_the_grid(ratio, bounded: tl.constexpr, noise, k: tl.constexpr):
    """Magnitudes of floats, clamped unless ``bounded``, and powers below them.

    Powers are of two. But for half to even, magnitudes are rounded, and powers of two are those below them
    before.
    """
    a, binade = _binades(ratio, bounded, k)
    if k.element.rounding != _HALF_EVEN:
        mantissa: tl.constexpr = k.element.mantissa
        inverse = float_of((254 + mantissa << 23) - bits_of(binade))
        a = tl.abs(rounded_to(_signed(a, ratio), binade * 2.0**-mantissa, inverse, noise, k))
    return a, binade


@triton.jit
def codes_of(ratio, zero, noise, bounded: tl.constexpr, k: tl.constexpr):
    """Return the codes of :func:`ratios`, int32, of whose bits ``k.width`` count.

    Of floats, the low byte is the code. zero: zero points, float32, broadcast against quotients. noise: see
    :func:`noise_of`. bounded: whether floats need no clamping, see :func:`below_the_end`.
    """
    if k.element.kind == _INTEGER:
        return _integer(ratio, zero, noise, k)
    elif k.element.kind == _FLOAT:  # noqa: RET505
        return _float(ratio, noise, bounded and k.element.rounding == _HALF_EVEN, k)
    else:
        rank = _rank(ratio, k)
        if k.order == _IN_ORDER:
            return rank
        else:  # noqa: RET505
            return ((k.order >> (rank.to(tl.int64) * 4)) & 15).to(tl.int32)


@triton.jit
def encoded(value, factor, zero, amax, k: tl.constexpr, noise=0):
    """Encode values, (many, size); factors, zero points and magnitudes are (many,)."""
    factor = factor[:, None]
    inverse, rest = factor, factor
    if k.fused:
        inverse, rest = reciprocals(factor)
    return codes_of(ratios(value, factor, inverse, rest, amax[:, None], k), zero[:, None], noise, False, k)


@triton.jit
def rounded_values(ratio, zero, noise, table, k: tl.constexpr):
    """Values of codes of :func:`ratios`, less zero points, in scale units.

    Numbers without zero points, and floats that have negative zero, are rounded without their codes. noise:
    see :func:`noise_of`.
    """
    element: tl.constexpr = k.element
    if element.kind == _INTEGER and (not element.zero_place or element.zero_place == _PRODUCT):
        steps = _steps(ratio, element.low * 1.0, element.high * 1.0, noise, k)
        return (steps + _WHOLE) - _WHOLE
    elif (  # noqa: RET505
        element.kind == _FLOAT and not element.negative_nan and not k.hardware
    ):
        a, binade = on_the_grid(ratio, False, noise, k)
        high = binade * (2.0 ** (23 - element.mantissa))
        return _signed((a + high) - high, _sign_source(ratio, k))
    else:
        result = decoded(codes_of(ratio, zero, noise, False, k) & ((1 << k.width) - 1), table, k)
        if element.zero_place and element.zero_place != _PRODUCT:
            result -= zero
        return result


@triton.jit
def _signed(number, sign):
    """Copy signs to numbers, which are positive or have them."""
    return float_of(bits_of(number) | (bits_of(sign) & 0x80000000))


@triton.jit
def _steps(ratio, low, high, noise, k: tl.constexpr):
    """Clamp to integers, exact before rounding, and round unless half to even."""
    steps = tl.minimum(tl.maximum(ratio, low), high)
    return steps if k.element.rounding == _HALF_EVEN else rounded_to(steps, 1.0, 1.0, noise, k)


@triton.jit
def _integer(ratio, zero, noise, k: tl.constexpr):
    """Return ``clamp(rint(ratio) + zero)``; clamping first keeps the sum's bits in range."""
    element: tl.constexpr = k.element
    if element.zero_place == _AFTER:
        whole = (_steps(ratio, element.low - zero, element.high - zero, noise, k) + _WHOLE) + zero
    else:
        if element.zero_place == _INSIDE:
            ratio = rounded(ratio + zero, element.quotient)
        whole = _steps(ratio, element.low * 1.0, element.high * 1.0, noise, k) + _WHOLE
    return whole.to(tl.int32, bitcast=True)


@triton.jit
def _sign_source(ratio, k: tl.constexpr):
    """Return float32 with the signs of codes."""
    if k.element.unsigned_below > 0:  # of quotients at most that far below zero, the sum has no sign
        return ratio + float_of(tl.zeros_like(bits_of(ratio)) + k.element.unsigned_below)
    else:  # noqa: RET505
        return ratio


@triton.jit
def below_the_end(amax, inverse, k: tl.constexpr):
    """Whether quotients up to ``amax`` round within the float format.

    True within 2**-20 below the middle between that number and the one that would follow.
    """
    element: tl.constexpr = k.element
    last: tl.constexpr = (element.max_code >> element.mantissa) + element.emin - 128
    middle: tl.constexpr = element.maximum + 2.0 ** (last - element.mantissa - 1)
    found = amax * inverse < middle * (1 - 2.0**-20)
    return tl.min(tl.min(found.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _binades(ratio, bounded: tl.constexpr, k: tl.constexpr):
    """Clamped magnitudes and the powers of two below, from 2**emin."""
    a = tl.abs(ratio)
    if not bounded:
        a = tl.minimum(a, k.element.maximum)
    least = float_of(tl.zeros_like(bits_of(a)) + (k.element.emin << 23))
    return a, float_of(bits_of(tl.maximum(a, least)) & _EXPONENT)


@triton.jit
def _float(ratio, noise, bounded: tl.constexpr, k: tl.constexpr):
    """Round quotients to the format, saturating; signs are kept.

    For a magnitude ``a`` with exponent ``e = max(exponent(a), emin)``, adding ``c = 2**(e + 23 - m)`` leaves
    the integer significand of m bits in the low bits of the sum, and a carry moves into the exponent field by
    itself. ``-(emin << m)`` rides along in the mantissa of c, which keeps ties right because it is even (but
    for m = 0, put right after); of the rest of c no bit is in the low byte. ``c`` is the power of two of
    ``a`` times a constant, exactly, so that a fused multiplication and addition rounds once.
    """
    element: tl.constexpr = k.element
    if k.hardware == _E4M3:
        return ratio.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif k.hardware == _E5M2:  # noqa: RET505
        return ratio.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        a, binade = on_the_grid(ratio, bounded, noise, k)
        sign = bits_of(_sign_source(ratio, k))
        rides: tl.constexpr = 256 - ((element.emin << element.mantissa) & 0xFE)
        lift = float_of(tl.zeros_like(bits_of(a)) + (((150 - element.mantissa) << 23) + rides))
        code = bits_of(tl.fma(binade, lift, a)) + (bits_of(binade) >> (23 - element.mantissa))
        if (element.emin << element.mantissa) & 1:
            code -= 1
        code |= (sign & 0x80000000) >> element.sign_shift
        if element.negative_nan:  # the format has no negative zero
            code = tl.where((code & 0xFF) == element.magnitude + 1, 0, code)
        return code.to(tl.int32)


@triton.jit
def _rank(x, k: tl.constexpr):
    """Count which of 15 ascending numbers lie below ``x``, by bisection; int32."""
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
    """Decode int32 codes to float32; table: (256,) float32, all codes' values."""
    element: tl.constexpr = k.element
    if element.kind == _INTEGER:
        # In the low bits of 2**23 a code adds itself; with its sign bit flipped, that bit's value more.
        whole = (code ^ element.sign) | 0x4B000000
        return whole.to(tl.float32, bitcast=True) - (8388608.0 + element.sign)
    elif element.kind == _FLOAT:  # noqa: RET505
        if k.hardware == _E4M3:
            return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if k.hardware == _E5M2:
            return code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(tl.float32)
        # Under the exponent of float32, subnormals included, the bits are the number over a power of two.
        magnitude = code & element.magnitude
        power = float_of(tl.zeros_like(magnitude) + ((element.emin + 126) << 23))
        number = float_of(magnitude << (23 - element.mantissa)) * power
        sign = (code & (element.magnitude + 1)).to(tl.uint32) << element.sign_shift
        number = float_of(bits_of(number) | sign)
        if element.max_code < element.magnitude or element.negative_nan:
            special = magnitude > element.max_code
            if element.negative_nan:
                special |= code == element.magnitude + 1
            number = tl.where(special, tl.load(table + code, mask=special, other=0.0), number)
        return number
    else:
        return tl.load(table + code)
