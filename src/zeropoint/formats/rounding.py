"""How a number becomes a code when it is not one: the direction of rounding, and what is past the largest."""

from __future__ import annotations

import enum


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
    """What a number becomes that is, once rounded, past the largest finite value or below an unsigned format.

    A codebook has no values past its ends for rounding to reach: every finite number has a nearest value.
    """

    SATURATE = "saturate"
    """The largest finite value of its sign."""
    SPECIAL = "special"
    """Inf where the format has it, else NaN, else an error."""
    ERROR = "error"
    """A RangeError."""
