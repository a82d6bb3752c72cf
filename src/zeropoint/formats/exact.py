"""The executable specification: codes to exact fractions and back, one number at a time, in plain Python.

Everything fast in this library is tested against these functions. They know formats and rounding, nothing of
tensors.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable
from fractions import Fraction

from ..errors import FormatError, RangeError
from .rounding import Overflow, RoundingMode
from .spec import CodebookFormat, FloatFormat, Format, IntFormat, Specials, exponent_of, power_of_two


class Special(enum.Enum):
    """Results of decoding that no fraction can express."""

    NAN = "nan"
    INF = "inf"
    NEGATIVE_INF = "-inf"
    NEGATIVE_ZERO = "-0"


Number = Fraction | Special


def decode(fmt: Format, code: int) -> Number:
    """Return the number that ``code`` represents.

    Integer codes are taken as bit patterns: the code 15 of int4 is -1.

    Raises FormatError for a code without meaning.
    """
    if not 0 <= code < fmt.code_count:
        raise FormatError(f"code (={code}) must lie in 0..{fmt.code_count - 1}")
    if isinstance(fmt, IntFormat):
        return (code - fmt.code_count if fmt.signed and code > fmt.qmax else code) * fmt.step
    if isinstance(fmt, CodebookFormat):
        return Fraction(fmt.values[code])
    return _decode_float(fmt, code)


def _decode_float(fmt: FloatFormat, code: int) -> Number:
    negative = bool(code & fmt.sign_bit)
    magnitude = code & ~fmt.sign_bit
    if fmt.specials is Specials.FNUZ and code == fmt.nan_code:
        return Special.NAN
    if magnitude > fmt.max_code:
        if magnitude == fmt.inf_code:
            return Special.NEGATIVE_INF if negative else Special.INF
        return Special.NAN
    value = fmt.magnitude(magnitude)
    if negative and value == 0:
        return Special.NEGATIVE_ZERO
    return -value if negative else value


def encode(
    fmt: Format,
    number: Number,
    rounding: RoundingMode = RoundingMode.HALF_EVEN,
    overflow: Overflow = Overflow.SATURATE,
) -> int:
    """Return the code nearest to ``number`` under ``rounding``.

    Without a zero code, zero becomes the smallest value. Raises FormatError for NaN in a format without NaN;
    RangeError on overflow under ``Overflow.ERROR``, or under ``Overflow.SPECIAL`` without a special code.

    >>> from .catalog import get_format
    >>> encode(get_format("float4_e2m1fn"), Fraction(5))
    6
    """
    if isinstance(fmt, CodebookFormat):
        return _encode_codebook(fmt, _finite(fmt, number, overflow))
    if isinstance(fmt, IntFormat):
        steps = _round_fraction(_finite(fmt, number, overflow) / fmt.step, rounding)
        if not fmt.qmin <= steps <= fmt.qmax and overflow is not Overflow.SATURATE:
            raise _range_error(fmt)
        return min(max(steps, fmt.qmin), fmt.qmax) % fmt.code_count
    return _encode_float(fmt, number, rounding, overflow)


def _finite(fmt: Format, number: Number, overflow: Overflow) -> Fraction:
    """Replace what a format without special codes cannot hold."""
    if isinstance(number, Fraction):
        return number
    if number is Special.NEGATIVE_ZERO:
        return Fraction(0)
    if number is Special.NAN:
        raise FormatError(f"nan has no code in {fmt.spelling}")
    if overflow is not Overflow.SATURATE:
        raise _range_error(fmt)
    return fmt.max if number is Special.INF else fmt.min


def _encode_float(fmt: FloatFormat, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:
    if number is Special.NAN:
        if fmt.nan_code is None:
            raise FormatError(f"nan has no code in {fmt.spelling}")
        return fmt.nan_code
    if isinstance(number, Special):
        negative = number is not Special.INF
        magnitude_code = 0 if number is Special.NEGATIVE_ZERO else fmt.max_code + 1
    else:
        negative = number < 0
        magnitude_code = _nearest_magnitude(fmt, abs(number), _mirrored(rounding, negative))
    below_unsigned = negative and not fmt.signed and magnitude_code > 0
    if magnitude_code > fmt.max_code or below_unsigned:
        return _overflowed(fmt, negative, overflow)
    if negative and (magnitude_code > 0 or fmt.has_negative_zero):
        return magnitude_code | fmt.sign_bit
    return magnitude_code


def _nearest_magnitude(fmt: FloatFormat, magnitude: Fraction, rounding: RoundingMode) -> int:
    """Round on the grid that the format would have if it never ended; past ``max_code`` means overflow."""
    if magnitude == 0:
        return 0
    exponent = max(exponent_of(magnitude), fmt.emin)
    steps = _round_fraction(magnitude / power_of_two(exponent - fmt.mantissa_bits), rounding)
    lead = (1 << fmt.mantissa_bits) if not fmt.subnormals else 0
    code = ((exponent - fmt.emin) << fmt.mantissa_bits) + steps - lead
    return max(code, 0)


def _overflowed(fmt: FloatFormat, negative: bool, overflow: Overflow) -> int:
    below_unsigned = negative and not fmt.signed
    sign = fmt.sign_bit if negative else 0
    if overflow is Overflow.SATURATE:
        return 0 if below_unsigned else fmt.max_code | sign
    if overflow is Overflow.SPECIAL:
        if fmt.inf_code is not None and not below_unsigned:
            return fmt.inf_code | sign
        if fmt.nan_code is not None:
            return fmt.nan_code
    raise _range_error(fmt)


def _range_error(fmt: Format) -> RangeError:
    return RangeError(
        f"a value lies outside {fmt.spelling}, {float(fmt.min)} to {float(fmt.max)}; use overflow=saturate"
    )


def _encode_codebook(fmt: CodebookFormat, value: Fraction) -> int:
    return fmt.order[bisect.bisect_left([Fraction(t) for t in fmt.thresholds], value)]


def _mirrored(rounding: RoundingMode, negative: bool) -> RoundingMode:
    """Return the rounding of a magnitude that does to the signed value what ``rounding`` says."""
    if not negative:
        return rounding
    swap = {
        RoundingMode.FLOOR: RoundingMode.CEIL,
        RoundingMode.CEIL: RoundingMode.FLOOR,
        RoundingMode.HALF_UP: RoundingMode.HALF_DOWN,
        RoundingMode.HALF_DOWN: RoundingMode.HALF_UP,
    }
    return swap.get(rounding, rounding)


_HALF = Fraction(1, 2)


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


_ROUNDERS: dict[RoundingMode, Callable[[Fraction], int]] = {
    RoundingMode.HALF_EVEN: round,
    RoundingMode.HALF_AWAY: lambda v: _floor(v + _HALF) if v >= 0 else -_floor(-v + _HALF),
    RoundingMode.HALF_UP: lambda v: _floor(v + _HALF),
    RoundingMode.HALF_DOWN: lambda v: -_floor(-v + _HALF),
    RoundingMode.FLOOR: _floor,
    RoundingMode.CEIL: lambda v: -_floor(-v),
    RoundingMode.TOWARD_ZERO: lambda v: _floor(v) if v >= 0 else -_floor(-v),
}


def _round_fraction(value: Fraction, rounding: RoundingMode) -> int:
    if rounding not in _ROUNDERS:
        raise FormatError(f"rounding (={rounding.value}) needs random bits and has no exact result")
    return _ROUNDERS[rounding](value)
