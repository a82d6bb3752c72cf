"""Rounding modes, and the results of overflow."""

from __future__ import annotations

import enum
from collections.abc import Callable
from fractions import Fraction

from ..errors import FormatError


class RoundingMode(enum.Enum):
    """Which neighbor a number between two codes goes to."""

    HALF_EVEN = "half_even"
    """The nearest; a tie goes to the even multiple of the step."""
    HALF_AWAY = "half_away"
    """The nearest; a tie goes away from zero."""
    HALF_UP = "half_up"
    """The nearest; a tie goes toward positive infinity, for either sign."""
    HALF_DOWN = "half_down"
    """The nearest; a tie goes toward negative infinity, for either sign."""
    FLOOR = "floor"
    """The neighbor toward negative infinity."""
    CEIL = "ceil"
    """The neighbor toward positive infinity."""
    TOWARD_ZERO = "toward_zero"
    """The neighbor of smaller magnitude."""
    STOCHASTIC = "stochastic"
    """Either neighbor, the nearer one with the higher probability."""

    @property
    def to_nearest(self) -> bool:
        """Whether the error of rounding is at most half the gap."""
        return self.value.startswith("half_")


class Overflow(enum.Enum):
    """The result of a number that rounds past the format's range.

    A codebook has no values past its ends for rounding to reach: every finite number has a nearest value.
    """

    SATURATE = "saturate"
    """The largest finite value of its sign."""
    SPECIAL = "special"
    """Inf where the format has it, else NaN, else an error."""
    ERROR = "error"
    """A RangeError."""


class Special(enum.Enum):
    """Results of decoding that no fraction can express."""

    NAN = "nan"
    INF = "inf"
    NEGATIVE_INF = "-inf"
    NEGATIVE_ZERO = "-0"


Number = Fraction | Special


_HALF = Fraction(1, 2)


def _floor(value: Fraction) -> int:
    return value.numerator // value.denominator


_ROUNDERS: dict[RoundingMode, Callable[[Fraction], int]] = {
    RoundingMode.HALF_EVEN: round,
    RoundingMode.HALF_AWAY: lambda v: _floor(v + _HALF) if v >= 0 else -_floor(-v + _HALF),
    RoundingMode.HALF_UP: lambda v: _floor(v + _HALF),
    RoundingMode.HALF_DOWN: lambda v: -_floor(-v + _HALF),
    RoundingMode.FLOOR: _floor,
    RoundingMode.CEIL: lambda v: -_floor(-v),
    RoundingMode.TOWARD_ZERO: lambda v: _floor(v) if v >= 0 else -_floor(-v),
}


def round_fraction(value: Fraction, rounding: RoundingMode) -> int:
    """Return the integer that ``value`` becomes; raises FormatError for stochastic rounding."""
    if rounding not in _ROUNDERS:
        raise FormatError(f"rounding (={rounding.value}) needs random bits and has no exact result")
    return _ROUNDERS[rounding](value)
