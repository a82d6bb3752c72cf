"""Rules that pick a number for each block: a scale, an offset, or the mean of scales. Each is a value.

    linear, signed, edge, minimum, mean a number of the block over a divisor:  Linear
    floor, even, ceil, rceil            a power of two:                        PowerOfTwo

A linear rule may end in ``_up`` or ``_late``, which say how its number is stored. This module owns which
rules there are and their names; :mod:`zeropoint.params` computes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import MappingProxyType


class Pick(enum.Enum):
    """Which number of a block a linear rule takes."""

    LARGEST = "linear"
    """The largest magnitude, or ``maximum - minimum`` in schemes with a zero point or an offset."""
    SIGNED = "signed"
    """The number of the largest magnitude with its sign, the first of equals."""
    EDGE = "edge"
    """``maximum - minimum`` with the sign that leads from the end of larger magnitude to the other one, then
    changed so that this end is a multiple of it, and 0 a code: for scales with an offset."""
    MINIMUM = "minimum"
    """The smallest number, or under a scale of rule ``edge`` the end of larger magnitude, the maximum of
    equals: to it the smallest code is moved, so this is for offsets."""
    MEAN = "mean"
    """The mean: for the center of scales."""


class Store(enum.Enum):
    """How a number is rounded to its format."""

    NEAREST = ""
    """To the nearest value, with which elements are then encoded."""
    UP = "_up"
    """Up, so that nothing is clipped."""
    LATE = "_late"
    """To the nearest value, after elements were encoded with the number before it was rounded."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A number of the block over a divisor: that of the elements, and the largest values of finer levels.

    Args:
        pick: which number of the block.
        store: how the scale is rounded to its format.
    """

    pick: Pick = Pick.LARGEST
    store: Store = Store.NEAREST

    @property
    def power_of_two(self) -> bool:
        """Linear rules give any number."""
        return False

    @property
    def text(self) -> str:
        """The name of the rule."""
        return self.pick.value + self.store.value


class Exponent(enum.Enum):
    """How the exponent of a power of two follows from the largest magnitude ``amax``.

    ``emax`` and ``max`` are those of the element format; exponents come from the bits of ``amax``, never from
    a float log2.
    """

    FLOOR = "floor"
    """``2 ** (floor(log2 amax) - emax)``: OCP MX 1.0, section 6.3. Clips up to a quarter of the largest."""
    EVEN = "even"
    """As floor, after rounding ``amax`` half up to the mantissa width of the elements."""
    CEIL = "ceil"
    """``2 ** (ceil(log2 amax) - emax)``."""
    RCEIL = "rceil"
    """The smallest power of two with ``amax / scale <= max``: nothing is clipped."""


@dataclass(frozen=True)
class PowerOfTwo:
    """A power of two from the largest magnitude.

    Args:
        exponent: how the exponent is rounded.
    """

    exponent: Exponent

    @property
    def power_of_two(self) -> bool:
        """These rules give powers of two."""
        return True

    @property
    def text(self) -> str:
        """The name of the rule."""
        return self.exponent.value


ScaleRule = Linear | PowerOfTwo

LINEAR = Linear()
LINEAR_UP = Linear(store=Store.UP)
SIGNED = Linear(pick=Pick.SIGNED)
EDGE = Linear(pick=Pick.EDGE)
MINIMUM = Linear(pick=Pick.MINIMUM)
MEAN = Linear(pick=Pick.MEAN)
FLOOR, EVEN, CEIL, RCEIL = map(PowerOfTwo, Exponent)

_ALL: tuple[ScaleRule, ...] = (
    LINEAR, LINEAR_UP, Linear(store=Store.LATE), SIGNED, Linear(pick=Pick.SIGNED, store=Store.LATE),
    EDGE, Linear(pick=Pick.EDGE, store=Store.LATE),
    FLOOR, EVEN, CEIL, RCEIL, MINIMUM, Linear(pick=Pick.MINIMUM, store=Store.LATE), MEAN,
)  # fmt: skip
RULES: MappingProxyType[str, ScaleRule] = MappingProxyType({rule.text: rule for rule in _ALL})
"""Name to rule."""
