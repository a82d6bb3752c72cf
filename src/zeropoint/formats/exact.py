"""The executable specification: codes to exact fractions and back, in plain Python.

Everything fast in this library is tested against these functions. They handle one number at a time, and know
formats and rounding, nothing of tensors.
"""

from __future__ import annotations

from ..errors import FormatError
from .rounding import Number, Overflow, RoundingMode, Special
from .spec import Format

__all__ = ["Number", "Special", "decode", "encode"]


def decode(fmt: Format, code: int) -> Number:
    """Return the number that ``code`` represents.

    Integer codes are taken as bit patterns: the code 15 of int4 is -1.

    Raises FormatError for a code without meaning.
    """
    if not 0 <= code < fmt.code_count:
        raise FormatError(f"code (={code}) must lie in 0..{fmt.code_count - 1}")
    return fmt.number(code)


def encode(
    fmt: Format,
    number: Number,
    rounding: RoundingMode = RoundingMode.HALF_EVEN,
    overflow: Overflow = Overflow.SATURATE,
) -> int:
    """Return the code nearest to ``number`` under ``rounding``.

    Without a zero code, zero becomes the smallest value. Raises FormatError for NaN in a format without NaN;
    RangeError on overflow under ``Overflow.ERROR``, or under ``Overflow.SPECIAL`` without a special code.

    >>> from fractions import Fraction
    >>> from .catalog import get_format
    >>> encode(get_format("float4_e2m1fn"), Fraction(5))
    6
    """
    return fmt.code(number, rounding, overflow)
