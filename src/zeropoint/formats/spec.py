"""What a number format is: three kinds of value objects from which every other fact is derived.

Each kind answers the same questions, so that callers need not know which kind it is: ``max``, ``min``,
``smallest``, ``largest_gap``, ``ceiling``, ``exponents``, ``level_bits``, ``is_integer``, ``is_table``.

A format maps codes (integers below ``2 ** bits``) to numbers. This module owns the parameters that define
such a map and what follows from them: largest value, smallest value, special codes. It knows nothing of
tensors; :mod:`.exact` turns codes into fractions and back, :mod:`.catalog` lists the formats with a name.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from ..errors import FormatError

MAX_INT_BITS = 32
MAX_EXPONENT_BITS = 11
MAX_MANTISSA_BITS = 52


class Specials(enum.Enum):
    """Which codes of a floating-point format are not finite numbers."""

    IEEE = "ieee"
    """The largest exponent field holds Inf and NaN, as in IEEE 754."""
    FN = "fn"
    """No Inf; the all-ones magnitude is NaN, with either sign."""
    FNUZ = "fnuz"
    """No Inf; one NaN in the place of negative zero; zero is unsigned."""
    FINITE = "finite"
    """Every code is a finite number."""


@dataclass(frozen=True, kw_only=True)
class IntFormat:
    """Integers in two's complement, or unsigned, optionally with a fixed binary point.

    ``value = code * 2 ** -fraction_bits``. The fixed point makes OCP MXINT8 (``fraction_bits=6``) an ordinary
    row.

    Raises FormatError unless ``1 <= bits <= 32`` (2 when signed) and ``0 <= fraction_bits < bits``.

    >>> IntFormat(bits=4, signed=True).qmin, IntFormat(bits=4, signed=True).qmax
    (-8, 7)
    """

    bits: int
    signed: bool
    fraction_bits: int = 0

    def __post_init__(self) -> None:
        lowest = 2 if self.signed else 1
        if not lowest <= self.bits <= MAX_INT_BITS:
            raise FormatError(
                f"bits (={self.bits}) of an integer format must lie in {lowest}..{MAX_INT_BITS}"
            )
        if not 0 <= self.fraction_bits < self.bits:
            raise FormatError(f"fraction_bits (={self.fraction_bits}) must lie in 0..{self.bits - 1}")

    @property
    def code_count(self) -> int:
        """Number of codes."""
        return 1 << self.bits

    @property
    def qmin(self) -> int:
        """Smallest code, read as an integer."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        """Largest code, read as an integer."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def step(self) -> Fraction:
        """Distance between neighboring values."""
        return Fraction(1, 1 << self.fraction_bits)

    @property
    def max(self) -> Fraction:
        """Largest value."""
        return self.qmax * self.step

    @property
    def min(self) -> Fraction:
        """Smallest value."""
        return self.qmin * self.step

    @property
    def emax(self) -> int:
        """Exponent of the largest value, ``floor(log2(max))``."""
        return exponent_of(self.max)

    @property
    def mantissa_bits(self) -> int:
        """Bits after the leading one in the largest value."""
        return max(0, self.bits - (2 if self.signed else 1))

    @property
    def has_nan(self) -> bool:
        """Integer formats have no NaN."""
        return False

    @property
    def has_inf(self) -> bool:
        """Integer formats have no Inf."""
        return False

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers with one step between neighbors, which zero points need."""
        return True

    @property
    def is_table(self) -> bool:
        """Whether numbers take the nearest value of a table, which leaves no choice of rounding."""
        return False

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value."""
        return self.step

    @property
    def largest_gap(self) -> Fraction:
        """Largest distance between neighboring values."""
        return self.step

    @property
    def ceiling(self) -> Fraction:
        """Largest number that rounds to the largest value."""
        return self.max + self.step / 2

    @property
    def exponents(self) -> tuple[int, ...] | None:
        """Exponents of the values, rising, where all are powers of two, else None."""
        return None

    @property
    def level_bits(self) -> int:
        """Bits that a scale or an offset takes in a file."""
        return self.bits

    @property
    def spelling(self) -> str:
        """Canonical text form: ``int4``, ``uint8``, ``int8f6``."""
        fraction = f"f{self.fraction_bits}" if self.fraction_bits else ""
        return f"{'' if self.signed else 'u'}int{self.bits}{fraction}"


@dataclass(frozen=True, kw_only=True)
class FloatFormat:
    """Binary floating point: sign, exponent field, mantissa field, from the highest bit to the lowest.

    With ``f = mantissa / 2 ** mantissa_bits`` and an exponent field ``E > 0``, or without subnormals:
    ``value = (-1) ** sign * 2 ** (E - bias) * (1 + f)``.
    With ``E = 0`` and subnormals: ``value = (-1) ** sign * 2 ** (1 - bias) * f``.
    ``exponent_bits=0`` leaves only subnormals: a sign-magnitude integer with a binary point, the elements of
    MX9 and MX6. Without subnormals there is no zero; that is for scales, and so for unsigned formats only.

    Raises FormatError when a width is out of range, the specials leave no finite number, a value does not fit
    float64, or an unsigned format asks for a code at negative zero.

    >>> FloatFormat(exponent_bits=4, mantissa_bits=3, bias=7, specials=Specials.FN).max
    Fraction(448, 1)
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    signed: bool = True
    subnormals: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.exponent_bits <= MAX_EXPONENT_BITS:
            raise FormatError(f"exponent_bits (={self.exponent_bits}) must lie in 0..{MAX_EXPONENT_BITS}")
        if not 0 <= self.mantissa_bits <= MAX_MANTISSA_BITS:
            raise FormatError(f"mantissa_bits (={self.mantissa_bits}) must lie in 0..{MAX_MANTISSA_BITS}")
        if self.magnitude_bits == 0 or self.max_code < (1 if self.subnormals else 0):
            raise FormatError(
                f"{self.spelling} has no finite value other than zero; add exponent or mantissa bits"
            )
        if self.specials is Specials.FNUZ and not self.signed:
            raise FormatError(
                "specials (=fnuz) puts NaN at negative zero, which an unsigned format lacks; use fn or finite"
            )
        if not self.subnormals and self.exponent_bits == 0:
            raise FormatError("exponent_bits (=0) leaves only subnormals; subnormals must be True")
        if not self.subnormals and self.signed:
            raise FormatError(
                "subnormals (=False) leaves no zero, which a signed format needs; use signed=False"
            )
        # Everything tensor-sized computes in float64 at most; a value outside it would decode to 0 or Inf.
        if self.emin - self.mantissa_bits < -1074 or self.emax > 1023:
            raise FormatError(f"bias (={self.bias}) of {self.spelling} puts values outside float64")

    @property
    def magnitude_bits(self) -> int:
        """Bits below the sign."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.magnitude_bits + int(self.signed)

    @property
    def code_count(self) -> int:
        """Number of codes."""
        return 1 << self.bits

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value, which subnormals share."""
        return 1 - self.bias if self.subnormals else -self.bias

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        ones = (1 << self.magnitude_bits) - 1
        if self.specials is Specials.IEEE:
            return ones - (1 << self.mantissa_bits)
        return ones - 1 if self.specials is Specials.FN else ones

    @property
    def sign_bit(self) -> int:
        """Value of the sign bit in a code, 0 when unsigned."""
        return 1 << self.magnitude_bits if self.signed else 0

    @property
    def nan_code(self) -> int | None:
        """The one NaN that encoding produces: all ones below the sign, or negative zero's code for fnuz."""
        # Without mantissa bits the largest exponent field of ieee has one code, and that is Inf.
        if self.specials is Specials.FINITE or (self.specials is Specials.IEEE and not self.mantissa_bits):
            return None
        return self.sign_bit if self.specials is Specials.FNUZ else (1 << self.magnitude_bits) - 1

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, when there is one."""
        return self.max_code + 1 if self.specials is Specials.IEEE else None

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.nan_code is not None

    @property
    def has_inf(self) -> bool:
        """Whether some code is Inf."""
        return self.inf_code is not None

    @property
    def has_negative_zero(self) -> bool:
        """Whether the sign of zero is kept."""
        return self.signed and self.subnormals and self.specials is not Specials.FNUZ

    def magnitude(self, code: int) -> Fraction:
        """Return the finite value of a code without its sign bit."""
        field_, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if field_ == 0 and self.subnormals:
            return power_of_two(self.emin - self.mantissa_bits) * mantissa
        lead = 1 << self.mantissa_bits
        return power_of_two(field_ - self.bias - self.mantissa_bits) * (lead + mantissa)

    @cached_property
    def max(self) -> Fraction:
        """Largest finite value."""
        return self.magnitude(self.max_code)

    @property
    def min(self) -> Fraction:
        """Smallest finite value."""
        return -self.max if self.signed else self.magnitude(0)

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value, ``floor(log2(max))``."""
        return exponent_of(self.max)

    @property
    def smallest_normal(self) -> Fraction:
        """Smallest value with a full mantissa; past ``max`` when the format is all subnormals."""
        return power_of_two(self.emin)

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value."""
        return self.magnitude(1 if self.subnormals else 0)

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers with one step between neighbors, which zero points need."""
        return False

    @property
    def is_table(self) -> bool:
        """Whether numbers take the nearest value of a table, which leaves no choice of rounding."""
        return False

    @property
    def largest_gap(self) -> Fraction:
        """Largest distance between neighboring values."""
        return self.max - self.magnitude(self.max_code - 1) if self.max_code else Fraction(0)

    @property
    def ceiling(self) -> Fraction:
        """Largest number that rounds to the largest value."""
        return self.max + power_of_two(self.emax - self.mantissa_bits - 1)

    @property
    def exponents(self) -> tuple[int, ...] | None:
        """Exponents of the values, rising, where all are powers of two, else None."""
        return None if self.mantissa_bits else tuple(range(self.emin, self.emax + 1))

    @property
    def level_bits(self) -> int:
        """Bits that a scale or an offset takes in a file: whole bytes."""
        return -(-self.bits // 8) * 8

    @property
    def spelling(self) -> str:
        """Canonical text form of a format without a name: ``[u]e<E>m<M>b<bias><specials>[ns]``."""
        sign, tail = "" if self.signed else "u", "" if self.subnormals else "ns"
        return f"{sign}e{self.exponent_bits}m{self.mantissa_bits}b{self.bias}{self.specials.value}{tail}"


@dataclass(frozen=True)
class CodebookFormat:
    """A table: code ``i`` means ``values[i]``, kept as float32. It need not be sorted.

    Of codes with equal values the lowest is written; ``order`` lists the written codes by rising value.
    Encoding takes the nearest value; the boundary between two neighbors is their midpoint rounded to float32,
    and a value on the boundary goes to the lower neighbor. That is bitsandbytes' rule for NF4. Zero has
    no sign: -0.0 is kept as 0.0, so that equal tables are spelled equally.

    Raises FormatError when a value is not finite in float32, the table has not 2 to 256 entries, or all of
    them are equal. Some may be, such as the two zeros of bitsandbytes' fp4.
    """

    values: tuple[float, ...]
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 2 <= len(self.values) <= 1 << 8:
            raise FormatError(f"values (length {len(self.values)}) of a codebook must number 2..256")
        try:
            values = tuple(float32(v) + 0.0 for v in self.values)
        except OverflowError:
            values = (math.inf,)
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
    def mantissa_bits(self) -> int:
        """A table has no mantissa; scale rules that round to element precision see 0."""
        return 0

    @property
    def has_nan(self) -> bool:
        """Tables have no NaN."""
        return False

    @property
    def has_inf(self) -> bool:
        """Tables have no Inf."""
        return False

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers with one step between neighbors, which zero points need."""
        return False

    @property
    def is_table(self) -> bool:
        """Whether numbers take the nearest value of a table, which leaves no choice of rounding."""
        return True

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
    def ceiling(self) -> Fraction:
        """Largest number that is kept: every larger one has the same nearest value."""
        return self.max

    @property
    def exponents(self) -> tuple[int, ...] | None:
        """Exponents of the values, rising, where all are powers of two, else None."""
        if not all(math.frexp(value)[0] == 0.5 for value in self.values):
            return None
        return tuple(sorted({math.frexp(value)[1] - 1 for value in self.values}))

    @property
    def level_bits(self) -> int:
        """Bits that a scale or an offset takes in a file."""
        return self.bits

    @property
    def spelling(self) -> str:
        """Canonical text form: the values in code order."""
        return f"codebook[{','.join(repr(v) for v in self.values)}]"


Format = IntFormat | FloatFormat | CodebookFormat


def float32(value: float) -> float:
    """Return ``value`` rounded to float32; OverflowError past its largest."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def power_of_two(exponent: int) -> Fraction:
    """Return ``2 ** exponent`` as a fraction."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def exponent_of(value: Fraction) -> int:
    """Return ``floor(log2(value))`` of a positive fraction, exactly.

    >>> exponent_of(Fraction(7)), exponent_of(Fraction(1, 8)), exponent_of(Fraction(3, 16))
    (2, -3, -3)
    """
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if power_of_two(guess) <= value else guess - 1
