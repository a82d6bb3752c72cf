"""Tables of numbers: each code has a value of its own."""

from __future__ import annotations

import bisect
import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar

from ..errors import FormatError
from .rounding import Number, Overflow, RoundingMode
from .spec import Format, exponent_of, finite


def float32(value: float) -> float:
    """Return ``value`` rounded to float32; OverflowError past its largest."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


@dataclass(frozen=True)
class CodebookFormat(Format):
    """A table of values: code ``i`` means ``values[i]``, kept as float32.

    Of codes with equal values the lowest is written; ``order`` lists the written codes by rising value.
    Encoding takes the nearest value; the boundary between two neighbors is their midpoint rounded to float32,
    and a value on the boundary goes to the lower neighbor. That is bitsandbytes' rule for NF4. Zero has
    no sign: -0.0 is kept as 0.0, so that equal tables are spelled equally.

    Args:
        values: one for each code. Some may be equal, such as the two zeros of bitsandbytes' fp4.

    Raises:
        FormatError: when a value is not finite in float32, the table has not 2 to 256 entries, or all of them
            are equal.
    """

    values: tuple[float, ...]
    # Set for each value, but no field (hence ClassVar): torch.compile (2.13) makes constants anew from all
    # fields, with an argument for each.
    order: ClassVar[tuple[int, ...]]

    kind: ClassVar[str] = "codebook"
    is_table: ClassVar[bool] = True
    mantissa_bits: ClassVar[int] = 0  # rules that round to the precision of elements see none

    def __post_init__(self) -> None:
        try:
            values = tuple(float32(v) + 0.0 for v in self.values)
        except OverflowError:
            values = (math.inf,) * len(self.values)
        except (TypeError, struct.error):
            raise FormatError(f"values (={self.values!r}) of a codebook must be numbers") from None
        if not 2 <= len(values) <= 1 << 8:
            raise FormatError(f"values (length {len(values)}) of a codebook must number 2..256")
        if not all(math.isfinite(v) for v in values):
            raise FormatError("values of a codebook must be finite in float32")
        if len(set(values)) == 1:
            raise FormatError(
                f"values of a codebook must not all be equal (to {values[0]}); give at least two that "
                "float32 keeps apart"
            )
        object.__setattr__(self, "values", values)
        codes = sorted(range(len(values)), key=values.__getitem__)
        first = [code for i, code in enumerate(codes) if i == 0 or values[code] != values[codes[i - 1]]]
        object.__setattr__(self, "order", tuple(first))

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Boundaries between the written codes, rising: midpoints rounded to float32.

        The sum of two float32 in float64 may round, but float64 has the ``2 * 24 + 2`` bits with which
        rounding twice equals rounding once (Figueroa, "When is double rounding innocuous?", 1995).
        """
        ordered = [self.values[code] for code in self.order]
        return tuple(float32((a + b) / 2) for a, b in pairwise(ordered))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return max(1, (len(self.values) - 1).bit_length())

    @property
    def code_count(self) -> int:
        """Number of codes that represent a value."""
        return len(self.values)

    @property
    def max(self) -> Fraction:
        """Largest value."""
        return Fraction(max(self.values))

    @property
    def min(self) -> Fraction:
        """Smallest value."""
        return Fraction(min(self.values))

    @property
    def emax(self) -> int:
        """Exponent of the largest magnitude."""
        return exponent_of(max(abs(self.max), abs(self.min)))

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value, 0 where there is none."""
        return min((Fraction(value) for value in self.values if value > 0), default=Fraction(0))

    @property
    def largest_gap(self) -> Fraction:
        """Largest distance between neighboring values."""
        ordered = [Fraction(self.values[code]) for code in self.order]
        return max((b - a for a, b in pairwise(ordered)), default=Fraction(0))

    @property
    def exponents(self) -> tuple[int, ...] | None:
        """Rising exponents if all values are powers of two, else None."""
        if not all(math.frexp(value)[0] == 0.5 for value in self.values):
            return None
        return tuple(sorted({math.frexp(value)[1] - 1 for value in self.values}))

    @property
    def spelling(self) -> str:
        """Canonical text form: the values in code order."""
        return f"codebook[{','.join(repr(v) for v in self.values)}]"

    @property
    def signed(self) -> bool:
        """Whether it has negative numbers."""
        return self.min < 0

    @property
    def boundary_error(self) -> float:
        """Largest error of a boundary, a midpoint rounded to float32."""
        return float(max(self.max, -self.min)) * 2.0**-24

    def number(self, code: int) -> Number:
        """Return the value of a code."""
        return Fraction(self.values[code])

    def code(self, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:  # noqa: ARG002
        """Return the code of the nearest value."""
        value = finite(self, number, overflow)
        return self.order[bisect.bisect_left([Fraction(t) for t in self.thresholds], value)]
