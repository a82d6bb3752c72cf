"""Integers, two's complement or unsigned, optionally with a binary point."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from ..errors import FormatError
from .rounding import Number, Overflow, RoundingMode, round_fraction
from .spec import Format, finite, past_the_ends

MAX_INT_BITS = 32


@dataclass(frozen=True, kw_only=True)
class IntFormat(Format):
    """Integers in two's complement, or unsigned, optionally with a fixed binary point.

    ``value = code * 2 ** -fraction_bits``. The fixed point makes OCP MXINT8 (``fraction_bits=6``) an ordinary
    row.

    Args:
        bits: of a code, 1 to 32; at least 2 when signed.
        signed: two's complement, or unsigned.
        fraction_bits: bits after the binary point, fewer than ``bits``.

    Raises:
        FormatError: for another number of bits.

    Example:
        >>> IntFormat(bits=4, signed=True).qmin, IntFormat(bits=4, signed=True).qmax
        (-8, 7)
    """

    bits: int
    signed: bool
    fraction_bits: int = 0

    kind: ClassVar[str] = "integer"
    is_integer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        lowest = 2 if self.signed else 1
        if not lowest <= self.bits <= MAX_INT_BITS:
            raise FormatError(
                f"bits (={self.bits}) of an integer format must lie in {lowest}..{MAX_INT_BITS}"
            )
        if not 0 <= self.fraction_bits < self.bits:
            raise FormatError(f"fraction_bits (={self.fraction_bits}) must lie in 0..{self.bits - 1}")

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
    def mantissa_bits(self) -> int:
        """Bits after the leading one in the largest value."""
        return max(0, self.bits - (2 if self.signed else 1))

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
    def spelling(self) -> str:
        """Canonical text form: ``int4``, ``uint8``, ``int8f6``."""
        fraction = f"f{self.fraction_bits}" if self.fraction_bits else ""
        return f"{'' if self.signed else 'u'}int{self.bits}{fraction}"

    @property
    def is_whole(self) -> bool:
        """Whether values are the integers that codes are read as."""
        return not self.fraction_bits

    @property
    def facts(self) -> dict[str, Any]:
        """What integers have and other kinds have not."""
        return {"signed": self.signed, "fraction_bits": self.fraction_bits, "step": float(self.step)}

    def ends(self, *, narrow: bool = False) -> tuple[Fraction, Fraction]:
        """Return the smallest and the largest value in use."""
        return -self.max if narrow else self.min, self.max

    def divisor(self, *, narrow: bool = False) -> Fraction:
        """Return half the range in steps; unsigned: the full range."""
        half_steps = self.qmax - self.qmin if self.signed else 2 * self.qmax
        return (2 * self.qmax if narrow else half_steps) * self.step / 2

    def number(self, code: int) -> Number:
        """Return the number of a bit pattern: int4 code 15 is -1."""
        return (code - self.code_count if self.signed and code > self.qmax else code) * self.step

    def code(self, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:
        """Return the bit pattern of ``number``."""
        steps = round_fraction(finite(self, number, overflow) / self.step, rounding)
        if not self.qmin <= steps <= self.qmax and overflow is not Overflow.SATURATE:
            raise past_the_ends(self)
        return min(max(steps, self.qmin), self.qmax) % self.code_count
