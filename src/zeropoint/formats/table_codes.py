"""Codes that point into a table which each block has for itself."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from ..errors import FormatError
from .rounding import Number, Overflow, RoundingMode
from .spec import Format

_MOST_BITS = 8


@dataclass(frozen=True)
class TableFormat(Format):
    """Codes into a table per block, which is its scale.

    ``value = scale[b][code]``, where each scale is a table of ``2 ** bits`` rising numbers; of equal ones the
    lowest code is written. Encoding takes the nearest number of the block's table, as :class:`CodebookFormat`
    does. Without a table, codes have no numbers; limits are in units of the table's largest magnitude.

    Args:
        bits: of a code, 1 to 8.

    Raises:
        FormatError: for other bits, and for the number of a code.

    Example:
        >>> TableFormat(4).spelling, TableFormat(4).per_scale
        ('table4', 16)
    """

    bits: int

    kind: ClassVar[str] = "table"
    is_table: ClassVar[bool] = True
    signed: ClassVar[bool] = True
    mantissa_bits: ClassVar[int] = 0
    emax: ClassVar[int] = 0
    max: ClassVar[Fraction] = Fraction(1)
    min: ClassVar[Fraction] = Fraction(-1)
    ceiling: ClassVar[Fraction] = Fraction(1)
    smallest: ClassVar[Fraction] = Fraction(0)
    largest_gap: ClassVar[Fraction] = Fraction(2)

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= _MOST_BITS:
            raise FormatError(f"bits (={self.bits}) of a table must lie in 1..{_MOST_BITS}")

    @property
    def per_scale(self) -> int:
        """Numbers of a table, one for each code."""
        return self.code_count

    @property
    def facts(self) -> dict[str, Any]:
        """How many numbers each block has."""
        return {"numbers_per_scale": self.per_scale}

    @property
    def spelling(self) -> str:
        """Canonical text form: ``table4``."""
        return f"table{self.bits}"

    def number(self, code: int) -> Number:
        """Raise FormatError: the number of a code depends on its block's table."""
        raise FormatError(f"code {code} of {self.spelling} means what the table of its block says")

    def code(self, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:  # noqa: ARG002
        """Raise FormatError: the nearest number is one of the block's table."""
        raise FormatError(f"{number} has no code in {self.spelling} without the table of its block")
