"""Several values in one code: digits whose base is the table's size.

One of three values is 1.58 bits, and two bits have room for four; five digits of base 3 fit a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from ..errors import FormatError
from .codebooks import CodebookFormat
from .rounding import Number
from .spec import Format

_MOST_BITS = 16


@dataclass(frozen=True)
class DigitsFormat(Format):
    """Codes that join ``count`` neighbors as digits, highest digit first.

    Each value is rounded on its own to the nearest entry of the table. A short last code of a block is padded
    with zeros.

    Args:
        digit: the table; its size is the base.
        count: digits of a code.

    Raises:
        FormatError: for a table with equal values, and for codes of more than 16 bits or fewer than 2 digits.

    Example:
        >>> DigitsFormat(CodebookFormat((-1.0, 0.0, 1.0)), 5).bits
        8
    """

    digit: CodebookFormat
    count: int

    kind: ClassVar[str] = "digits"
    is_table: ClassVar[bool] = True
    mantissa_bits: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if len(self.digit.order) != self.digit.code_count:
            raise FormatError(f"digits of {self.digit.spelling} must have values that all differ")
        if self.count < 2 or self.bits > _MOST_BITS:
            raise FormatError(
                f"count (={self.count}) of digits of base {self.base} must be at least 2, and codes have at "
                f"most {_MOST_BITS} bits, not {self.bits}"
            )

    @property
    def base(self) -> int:
        """The base of the digits."""
        return self.digit.code_count

    @property
    def per_code(self) -> int:
        """Digits of a code."""
        return self.count

    @cached_property
    def code_count(self) -> int:
        """Number of codes."""
        return int(self.base**self.count)

    @cached_property
    def bits(self) -> int:
        """Bits of a code."""
        return (self.code_count - 1).bit_length()

    @property
    def signed(self) -> bool:
        """Whether it has negative numbers."""
        return self.digit.signed

    @property
    def max(self) -> Fraction:
        """Largest value."""
        return self.digit.max

    @property
    def min(self) -> Fraction:
        """Smallest value."""
        return self.digit.min

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value, 0 where there is none."""
        return self.digit.smallest

    @property
    def largest_gap(self) -> Fraction:
        """Largest distance between neighboring values."""
        return self.digit.largest_gap

    @property
    def ceiling(self) -> Fraction:
        """Largest number that is kept."""
        return self.digit.ceiling

    @property
    def boundary_error(self) -> float:
        """How far the boundary between two values may be from their middle."""
        return self.digit.boundary_error

    @property
    def emax(self) -> int:
        """Exponent of the largest magnitude."""
        return self.digit.emax

    @property
    def facts(self) -> dict[str, Any]:
        """How many values a code represents, and the base."""
        return {"run_length": self.count, "base": self.base}

    @property
    def spelling(self) -> str:
        """Canonical text form: the values of the digits."""
        return f"digits{self.count}[{','.join(map(repr, self.digit.values))}]"

    def digits(self, code: int) -> tuple[int, ...]:
        """Return the digits of a code, the highest first.

        Args:
            code: a code, as a bit pattern.
        """
        return tuple(code // self.base**place % self.base for place in reversed(range(self.count)))

    def numbers(self, code: int) -> tuple[Number, ...]:
        """Return the values of the digits."""
        return tuple(map(self.digit.number, self.digits(code)))
