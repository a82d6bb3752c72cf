"""Tables of vectors: a code represents several neighboring values, a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

from ..errors import FormatError
from .codebooks import float32
from .rounding import Number
from .spec import Format

_MOST_VALUES, _MOST_ROWS = 16, 1 << 12
_WORK = 1 << 18
"""Most distances that are computed to bound the largest."""


@dataclass(frozen=True)
class VectorFormat(Format):
    """A vector codebook: code ``i`` means the neighbors ``rows[i]``, kept as float32.

    Encoding takes the row of least squared distance, summed in float64 in column order, and the first of
    equal ones. A short last vector of a block is padded with zeros. Between the ends, which are the largest
    magnitude and its negative (or 0 where no value is negative), a vector is at most ``largest_gap / 2`` away
    from its row.

    Args:
        rows: 2 to 4096 vectors of 2 to 16 values.

    Raises:
        FormatError: for other tables, rows of unequal lengths, values that are not finite in float32, or all
            zero.

    Example:
        >>> VectorFormat(((0.0, 0.0), (1.0, -1.0))).nearest((0.9, -0.2))
        1
    """

    rows: tuple[tuple[float, ...], ...]

    kind: ClassVar[str] = "vector"
    is_table: ClassVar[bool] = True
    mantissa_bits: ClassVar[int] = 0

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.rows}
        if not 2 <= len(self.rows) <= _MOST_ROWS:
            raise FormatError(
                f"rows (length {len(self.rows)}) of a vector codebook must number 2..{_MOST_ROWS}"
            )
        if len(lengths) != 1 or not 2 <= min(lengths) <= _MOST_VALUES:
            raise FormatError(
                f"rows (of {', '.join(map(str, sorted(lengths)))} values) of a vector codebook must all have "
                f"as many, 2..{_MOST_VALUES}"
            )
        try:
            rows = tuple(tuple(float32(value) + 0.0 for value in row) for row in self.rows)
        except OverflowError:
            rows = ((math.inf,),)
        if not all(math.isfinite(value) for row in rows for value in row):
            raise FormatError("values of a vector codebook must be finite in float32")
        if not any(value for row in rows for value in row):
            raise FormatError("values of a vector codebook must not all be zero")
        object.__setattr__(self, "rows", rows)

    @property
    def per_code(self) -> int:
        """Values of a row."""
        return len(self.rows[0])

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.rows) - 1).bit_length()

    @property
    def code_count(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def signed(self) -> bool:
        """Whether it has negative numbers."""
        return any(value < 0 for row in self.rows for value in row)

    @cached_property
    def max(self) -> Fraction:
        """Largest magnitude of a value."""
        return Fraction(max(abs(value) for row in self.rows for value in row))

    @property
    def min(self) -> Fraction:
        """Its negative, or 0 where no value is negative."""
        return -self.max if self.signed else Fraction(0)

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value, 0 where there is none."""
        return min((Fraction(v) for row in self.rows for v in row if v > 0), default=Fraction(0))

    @cached_property
    def largest_gap(self) -> Fraction:
        """Twice a bound on the distance of a vector from its row."""
        low, high, count = float(self.min), float(self.max), self.per_code
        cells = max(1, int((_WORK / len(self.rows)) ** (1 / count)))
        width = (high - low) / cells
        middles = [low + width * (cell + 0.5) for cell in range(cells)]
        # Without numpy, which the command line does not load to answer a slip.
        cell_middles = product(middles, repeat=count)
        far = max(min(math.dist(middle, row) for row in self.rows) for middle in cell_middles)
        # A vector of a cell is at most half its diagonal from its middle.
        reach = far + width / 2 * math.sqrt(count)
        return Fraction(2 * reach * (1 + 2.0**-30))

    @property
    def boundary_error(self) -> float:
        """Excess distance of the chosen row over the nearest, from float64 rounding."""
        return float(self.max) * 2.0**-24

    @property
    def facts(self) -> dict[str, Any]:
        """How many values a code represents."""
        return {"run_length": self.per_code}

    @property
    def spelling(self) -> str:
        """Canonical text form: the values, row after row."""
        return f"vector{self.per_code}[{','.join(repr(value) for row in self.rows for value in row)}]"

    def numbers(self, code: int) -> tuple[Number, ...]:
        """Return the values of a row."""
        return tuple(map(Fraction, self.rows[code]))

    def nearest(self, numbers: tuple[float, ...]) -> int:
        """Return the code of the row nearest to as many numbers.

        Args:
            numbers: float64.
        """
        distances = []
        for row in self.rows:
            total = 0.0
            for number, value in zip(numbers, row, strict=True):
                total += (number - value) * (number - value)
            distances.append(total)
        return distances.index(min(distances))


def rows_of(values: tuple[float, ...], count: int) -> tuple[tuple[float, ...], ...]:
    """Return values as rows of ``count``; raises FormatError for a rest."""
    if count < 1 or len(values) % count:
        raise FormatError(f"values (length {len(values)}) of vector{count} must be whole rows of {count}")
    return tuple(values[start : start + count] for start in range(0, len(values), count))
