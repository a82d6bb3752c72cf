"""Two grids of one width, selected by the sign of the scale."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from ..errors import FormatError
from .floats import FloatFormat
from .integers import IntFormat
from .rounding import Number, Overflow, RoundingMode
from .spec import Format


@dataclass(frozen=True)
class ChoiceFormat(Format):
    """Floats under positive scales, integers of equal width under negative ones.

    With the stretch ``f = first.max / second.qmax`` and a block of scale S:
    ``value = decode(first, code) * S`` where ``S >= 0``, ``value = code * f * |S|`` where ``S < 0``.
    Both grids end at the same magnitude, and integer codes represent ``-f * code`` in units of the scale. The
    most negative integer is never written, so both grids are symmetric.

    Args:
        first: a signed float format without NaN and Inf.
        second: a signed integer format of the same width.

    Raises:
        FormatError: for other formats.

    Example:
        >>> from zeropoint.formats import Specials
        >>> ChoiceFormat(
        ...     FloatFormat(exponent_bits=2, mantissa_bits=1, bias=1, specials=Specials.FINITE),
        ...     IntFormat(bits=4, signed=True),
        ... ).stretch
        Fraction(6, 7)
    """

    first: FloatFormat
    second: IntFormat

    kind: ClassVar[str] = "choice"
    signed: ClassVar[bool] = True
    reads_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        first, second = self.first, self.second
        if not first.signed or first.has_nan or first.has_inf:
            raise FormatError(f"first (={first.spelling}) must be a signed float format of finite numbers")
        if not second.signed or second.fraction_bits:
            raise FormatError(f"second (={second.spelling}) must be a signed integer format")
        if first.bits != second.bits:
            raise FormatError(f"{first.spelling} and {second.spelling} must have as many bits as each other")

    @cached_property
    def stretch(self) -> Fraction:
        """Distance between the values of integers, in units of the scale's magnitude."""
        return self.first.max / self.second.qmax

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.first.bits

    @property
    def code_count(self) -> int:
        """Number of codes."""
        return self.first.code_count

    @property
    def max(self) -> Fraction:
        """Largest value of either grid."""
        return self.first.max

    @property
    def min(self) -> Fraction:
        """Smallest value of either grid."""
        return self.first.min

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value of either grid."""
        return min(self.first.smallest, self.stretch)

    @property
    def largest_gap(self) -> Fraction:
        """Largest distance between neighboring values of either grid."""
        return max(self.first.largest_gap, self.stretch)

    @property
    def ceiling(self) -> Fraction:
        """Largest number that rounds to the largest value in both grids."""
        return min(self.first.ceiling, self.max + self.stretch / 2)

    @property
    def boundary_error(self) -> float:
        """Float32 rounding error of the stretched grid's values, at most."""
        return float(self.max) * 2.0**-24

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return self.first.emax

    @property
    def mantissa_bits(self) -> int:
        """Mantissa bits of the float grid."""
        return self.first.mantissa_bits

    @property
    def facts(self) -> dict[str, Any]:
        """The two grids, and how far apart the integers are."""
        return {"grids": [self.first.spelling, self.second.spelling], "integer_step": float(self.stretch)}

    @property
    def spelling(self) -> str:
        """Canonical text form: ``choice[e2m1b1finite,int4]``."""
        return f"choice[{self.first.spelling},{self.second.spelling}]"

    def number(self, code: int) -> Number:
        """Return the number of a code under a positive scale."""
        return self.first.number(code)

    def code(self, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:
        """Return the code of ``number`` under a positive scale."""
        return self.first.code(number, rounding, overflow)
