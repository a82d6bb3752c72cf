"""Binary floating point up to float64, with any exponent width."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from ..errors import FormatError
from .rounding import Number, Overflow, RoundingMode, Special, round_fraction
from .spec import Format, exponent_of, past_the_ends, power_of_two

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
class FloatFormat(Format):
    """Binary floating point: sign, exponent field, mantissa field, from the highest bit.

    With ``f = mantissa / 2 ** mantissa_bits`` and an exponent field ``E > 0``, or without subnormals:
    ``value = (-1) ** sign * 2 ** (E - bias) * (1 + f)``.
    With ``E = 0`` and subnormals: ``value = (-1) ** sign * 2 ** (1 - bias) * f``.
    ``exponent_bits=0`` leaves only subnormals: a sign-magnitude integer with a binary point, the elements of
    MX9 and MX6. Without subnormals there is no zero; that is for scales, and so for unsigned formats only.

    Args:
        exponent_bits: width of the exponent field, 0 to 11.
        mantissa_bits: width of the mantissa field, 0 to 52.
        bias: what is subtracted from the exponent field.
        specials: which codes are not finite numbers.
        signed: whether the highest bit is a sign.
        subnormals: whether the exponent field 0 means subnormals and zero.

    Raises:
        FormatError: when a width is out of range, the specials leave no finite number, a value does not fit
            float64, or an unsigned format asks for a code at negative zero.

    Example:
        >>> FloatFormat(exponent_bits=4, mantissa_bits=3, bias=7, specials=Specials.FN).max
        Fraction(448, 1)
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    signed: bool = True
    subnormals: bool = True

    kind: ClassVar[str] = "float"
    is_float: ClassVar[bool] = True

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
        """The NaN that encoding writes: all ones, or negative zero under fnuz."""
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
        """Return the finite value of a code without its sign bit.

        Args:
            code: of a finite number, its sign bit cleared.
        """
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
    def smallest_normal(self) -> Fraction:
        """Smallest value with a full mantissa; beyond ``max`` if all are subnormal."""
        return power_of_two(self.emin)

    @property
    def smallest(self) -> Fraction:
        """Smallest positive value."""
        return self.magnitude(1 if self.subnormals else 0)

    @property
    def largest_gap(self) -> Fraction:
        """Largest distance between neighboring values."""
        return self.max - self.magnitude(self.max_code - 1) if self.max_code else Fraction(0)

    @property
    def ceiling(self) -> Fraction:
        """Largest number that rounds to the largest value."""
        return self.max + power_of_two(max(self.emax, self.emin) - self.mantissa_bits - 1)

    @property
    def exponents(self) -> tuple[int, ...] | None:
        """Rising exponents if all values are powers of two, else None."""
        return None if self.mantissa_bits else tuple(range(self.emin, self.emax + 1))

    @property
    def level_bits(self) -> int:
        """Stored bits of a scale or an offset: whole bytes."""
        return -(-self.bits // 8) * 8

    @property
    def spelling(self) -> str:
        """Canonical text form of a format without a name: ``[u]e<E>m<M>b<bias><specials>[ns]``."""
        sign, tail = "" if self.signed else "u", "" if self.subnormals else "ns"
        return f"{sign}e{self.exponent_bits}m{self.mantissa_bits}b{self.bias}{self.specials.value}{tail}"

    @property
    def facts(self) -> dict[str, Any]:
        """What floats have and other kinds have not."""
        return {
            "signed": self.signed,
            "exponent_bits": self.exponent_bits,
            "mantissa_bits": self.mantissa_bits,
            "bias": self.bias,
            "specials": self.specials.value,
            "subnormals": self.subnormals,
            "smallest_normal": float(self.smallest_normal) if self.smallest_normal <= self.max else None,
            "negative_zero": self.has_negative_zero,
            "inf_code": self.inf_code,
            "nan_code": self.nan_code,
        }

    def number(self, code: int) -> Number:
        """Return the number of a code."""
        negative = bool(code & self.sign_bit)
        magnitude = code & ~self.sign_bit
        if self.specials is Specials.FNUZ and code == self.nan_code:
            return Special.NAN
        if magnitude > self.max_code:
            if magnitude == self.inf_code:
                return Special.NEGATIVE_INF if negative else Special.INF
            return Special.NAN
        value = self.magnitude(magnitude)
        if negative and value == 0:
            return Special.NEGATIVE_ZERO
        return -value if negative else value

    def code(self, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:
        """Return the code of ``number``."""
        if number is Special.NAN:
            if self.nan_code is None:
                raise FormatError(f"nan has no code in {self.spelling}")
            return self.nan_code
        if isinstance(number, Special):
            negative = number is not Special.INF
            magnitude_code = 0 if number is Special.NEGATIVE_ZERO else self.max_code + 1
        else:
            negative = number < 0
            magnitude_code = self._nearest_magnitude(abs(number), _mirrored(rounding, negative))
        below_unsigned = negative and not self.signed and magnitude_code > 0
        if magnitude_code > self.max_code or below_unsigned:
            return self._overflowed(negative, overflow)
        if negative and (magnitude_code > 0 or self.has_negative_zero):
            return magnitude_code | self.sign_bit
        return magnitude_code

    def _nearest_magnitude(self, magnitude: Fraction, rounding: RoundingMode) -> int:
        """Round on the unbounded grid; a code beyond ``max_code`` means overflow."""
        if magnitude == 0:
            return 0
        exponent = max(exponent_of(magnitude), self.emin)
        steps = round_fraction(magnitude / power_of_two(exponent - self.mantissa_bits), rounding)
        lead = (1 << self.mantissa_bits) if not self.subnormals else 0
        code = ((exponent - self.emin) << self.mantissa_bits) + steps - lead
        return max(code, 0)

    def _overflowed(self, negative: bool, overflow: Overflow) -> int:
        below_unsigned = negative and not self.signed
        sign = self.sign_bit if negative else 0
        if overflow is Overflow.SATURATE:
            return 0 if below_unsigned else self.max_code | sign
        if overflow is Overflow.SPECIAL:
            if self.inf_code is not None and not below_unsigned:
                return self.inf_code | sign
            if self.nan_code is not None:
                return self.nan_code
        raise past_the_ends(self)


_MIRRORED = {
    RoundingMode.FLOOR: RoundingMode.CEIL,
    RoundingMode.CEIL: RoundingMode.FLOOR,
    RoundingMode.HALF_UP: RoundingMode.HALF_DOWN,
    RoundingMode.HALF_DOWN: RoundingMode.HALF_UP,
}


def _mirrored(rounding: RoundingMode, negative: bool) -> RoundingMode:
    """Return the rounding of magnitudes that gives ``rounding`` of signed values."""
    return _MIRRORED.get(rounding, rounding) if negative else rounding
