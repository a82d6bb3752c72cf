"""The base of number formats: what all kinds answer.

A format maps codes (integers below ``2 ** bits``) to numbers. Kinds own the parameters that define such a
map and what follows from them: :mod:`.integers`, :mod:`.floats`, :mod:`.codebooks`, :mod:`.choices`,
:mod:`.vectors`, :mod:`.digits`, :mod:`.table_codes`. Callers need not know the kind. Kinds know nothing of
tensors, which :mod:`.codes` turns into codes and back; :mod:`.catalog` lists the named formats.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import FormatError, RangeError
from ..shown import plot, repr_html
from .rounding import Number, Overflow, RoundingMode, Special

_ONE = Fraction(1)


_MOST_LISTED_BITS = 16
"""Bits up to which the values of all codes are a list."""


def as_float(number: Number) -> float:
    """Return a number as a float: NaN, infinities and negative zero included."""
    if number is Special.NEGATIVE_ZERO:
        return -0.0
    return float(number.value) if isinstance(number, Special) else float(number)


class Format:
    """The base of all kinds, which can be hashed and compared.

    By default, numbers are finite and in any spacing.
    """

    is_integer: ClassVar[bool] = False
    """Whether codes are integers of constant step, as zero points need."""
    is_float: ClassVar[bool] = False
    """Whether codes are a sign, an exponent and a mantissa."""
    is_table: ClassVar[bool] = False
    """Whether encoding takes the nearest table value, without a rounding mode."""
    reads_sign: ClassVar[bool] = False
    """Whether the sign of the scale says what codes represent."""

    _repr_html_ = repr_html
    plot = plot

    if TYPE_CHECKING:  # a field of a kind would take what it finds here for its default

        @property
        @abstractmethod
        def kind(self) -> str:
            """The word for the kind, such as ``integer``, ``float`` or ``codebook``."""

        @property
        @abstractmethod
        def bits(self) -> int:
            """Bits of a code."""

        @property
        @abstractmethod
        def signed(self) -> bool:
            """Whether it has negative numbers."""

        @property
        @abstractmethod
        def max(self) -> Fraction:
            """Largest finite value."""

        @property
        @abstractmethod
        def min(self) -> Fraction:
            """Smallest finite value."""

        @property
        @abstractmethod
        def smallest(self) -> Fraction:
            """Smallest positive value, 0 where there is none."""

        @property
        @abstractmethod
        def largest_gap(self) -> Fraction:
            """Largest distance between neighboring values."""

        @property
        @abstractmethod
        def mantissa_bits(self) -> int:
            """Bits after the leading one in the largest value."""

        @property
        @abstractmethod
        def spelling(self) -> str:
            """Canonical text form, which :func:`zeropoint.formats.get_format` reads."""

    @property
    def code_count(self) -> int:
        """Number of codes with a meaning, which are 0 and on."""
        return 1 << self.bits

    @property
    def ceiling(self) -> Fraction:
        """Largest number that rounds to the largest value."""
        return self.max

    @property
    def emax(self) -> int:
        """Exponent of the largest value, ``floor(log2(max))``."""
        return exponent_of(self.max)

    @property
    def facts(self) -> dict[str, Any]:
        """What only its kind has, by name."""
        return {}

    @property
    def per_code(self) -> int:
        """How many neighboring values a code represents."""
        return 1

    @property
    def per_scale(self) -> int:
        """How many numbers the scale of a block has."""
        return 1

    def number(self, code: int) -> Number:
        """Return the number of a code.

        Args:
            code: a code, as a bit pattern.

        Raises:
            FormatError: where codes represent several numbers; see :meth:`numbers`.
        """
        raise _single_value(self, code)

    def all_values(self) -> tuple[float, ...]:
        """Return the values of all codes in order, NaN and infinities included.

        A code that represents several neighboring numbers contributes them one after another.

        Raises:
            FormatError: for a format of more than 16 bits; :meth:`numbers` takes one code at a time.
        """
        if self.bits > _MOST_LISTED_BITS:
            raise FormatError(
                f"a format of {self.bits} bits has {self.code_count:,} codes; ask for numbers(code) of each"
            )
        return tuple(map(as_float, itertools.chain.from_iterable(map(self.numbers, range(self.code_count)))))

    def numbers(self, code: int) -> tuple[Number, ...]:
        """Return the neighboring numbers that a code represents, usually one.

        Args:
            code: a code, as a bit pattern.
        """
        return (self.number(code),)

    def code(self, number: Number, rounding: RoundingMode, overflow: Overflow) -> int:  # noqa: ARG002
        """Return the code nearest to ``number``; see :func:`zeropoint.formats.exact.encode`.

        Args:
            number: a fraction, or what no fraction expresses.
            rounding: which neighbor a number between two codes goes to.
            overflow: what becomes of numbers past the ends.

        Raises:
            FormatError: for NaN in a format without it, and where codes represent several numbers.
            RangeError: for numbers past the ends that are not saturated.
        """
        raise _single_value(self, number)

    @property
    def is_whole(self) -> bool:
        """Whether values are the integers that codes are read as."""
        return False

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return False

    @property
    def has_inf(self) -> bool:
        """Whether some code is Inf."""
        return False

    @property
    def step(self) -> Fraction:
        """Distance between the values of neighboring integer codes; 1 of other kinds."""
        return _ONE

    @property
    def exponents(self) -> tuple[int, ...] | None:
        """Rising exponents if all values are powers of two, else None."""
        return None

    @property
    def boundary_error(self) -> float:
        """How far the boundary between two values may be from their middle."""
        return 0.0

    @property
    def level_bits(self) -> int:
        """Stored bits of a scale or an offset: one code."""
        return self.bits

    def ends(self, *, narrow: bool = False) -> tuple[Fraction, Fraction]:  # noqa: ARG002  # of integers
        """Return the smallest and the largest value in use.

        Args:
            narrow: whether the most negative integer is left out; other kinds have none.
        """
        return self.min, self.max

    def divisor(self, *, narrow: bool = False) -> Fraction:  # noqa: ARG002  # of integers
        """Return the divisor of a block's amax that gives its symmetric scale.

        Args:
            narrow: whether the most negative integer is left out; other kinds have none.
        """
        return max(self.max, -self.min)


def finite(fmt: Format, number: Number, overflow: Overflow) -> Fraction:
    """Return ``number``, or the replacement of Inf without special codes."""
    if isinstance(number, Fraction):
        return number
    if number is Special.NEGATIVE_ZERO:
        return Fraction(0)
    if number is Special.NAN:
        raise FormatError(f"nan has no code in {fmt.spelling}")
    if overflow is not Overflow.SATURATE:
        raise past_the_ends(fmt)
    return fmt.max if number is Special.INF else fmt.min


def _single_value(fmt: Format, found: object) -> FormatError:
    """Return the error of asking for one number where codes represent several."""
    return FormatError(
        f"{found} of {fmt.kind} codes belongs to {fmt.per_code} values together, not to one; "
        "take whole tensors"
    )


def past_the_ends(fmt: Format) -> RangeError:
    """Return the error of a number that the format does not hold."""
    return RangeError(
        f"a value lies outside {fmt.spelling}, {float(fmt.min)} to {float(fmt.max)}; use overflow=saturate"
    )


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
