"""Rules for the scale, offset or center of a block, as values.

    linear, signed, edge, minimum, mean a number of the block over a divisor:  Linear
    floor, even, ceil, rceil            a power of two:                        PowerOfTwo
    ceil<LIMIT>                         the same, from a given limit:          Ceiling
    search, search<P>                   the scale of least error:              Search
    four_over_six                       the better one of two:                 Search

A linear rule may end in ``_up`` or ``_late``, which say how its number is stored. This module owns the rules
and their names; :mod:`zeropoint.params` computes them, and :mod:`zeropoint.ops.scale_search` computes the
rules that compare errors.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import SchemeError


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
    """A number of the block over the elements' and finer levels' maxima.

    Args:
        pick: which number of the block.
        store: how the scale is rounded to its format.
        room: by what factor scales may grow afterwards; coarser levels leave it free.
    """

    pick: Pick = Pick.LARGEST
    store: Store = Store.NEAREST
    room: float = 1.0

    @property
    def power_of_two(self) -> bool:
        """Linear rules give any number."""
        return False

    @property
    def text(self) -> str:
        """The name of the rule."""
        return self.pick.value + self.store.value


class Exponent(enum.Enum):
    """Exponent of a power-of-two scale from the largest magnitude ``amax``.

    ``emax`` and ``max`` belong to the element format; exponents come from the bits of ``amax``, never from a
    float log2.
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


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The smallest power of two with ``amax / scale <= limit``.

    ``ceil7.25`` for float4_e2m1fn: a quarter of the octave above its largest value is clipped, for a finer
    step. limit: at least the power of two in the element's largest magnitude, and less than twice that.
    """

    limit: float

    @property
    def power_of_two(self) -> bool:
        """It gives powers of two."""
        return True

    @property
    def text(self) -> str:
        """The name of the rule."""
        return f"ceil{_brief(self.limit)}"


LINEAR = Linear()
FLOOR, EVEN, CEIL, RCEIL = map(PowerOfTwo, Exponent)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Scale of least error: a sum of powers of magnitudes.

        argmin over s of  sum_i |x_i - dequantize(quantize(x_i; s))| ** power

    Args:
        start: the rule whose scale wins ties, and which parameters from ranges alone follow.
        power: from 1 to 8; it counts in steps of 2 ** -10.
        factor: multiple of the start that is the other candidate; 0 means every scale of the format.
    """

    start: Linear | PowerOfTwo = LINEAR
    power: float = 2.0
    factor: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.power <= _MOST_POWER:
            raise SchemeError(f"power (={self.power:g}) of rule search must lie in 1..{_MOST_POWER}")

    @property
    def power_of_two(self) -> bool:
        """Whether the start is a power of two, like all its candidates."""
        return self.start.power_of_two

    @property
    def text(self) -> str:
        """The name of the rule."""
        if self.factor:
            return FOUR_OVER_SIX_NAME
        return SEARCH_NAME + ("" if self.power == 2.0 else _brief(self.power))


def _brief(number: float) -> str:
    """Return the shortest decimals that are read as ``number``."""
    return f"{number:.0f}" if number == round(number) else repr(number)


_MOST_POWER = 8
SEARCH_NAME, FOUR_OVER_SIX_NAME = "search", "four_over_six"
ScaleRule = Linear | PowerOfTwo | Ceiling | Search

LINEAR_UP = Linear(store=Store.UP)
SIGNED = Linear(pick=Pick.SIGNED)
EDGE = Linear(pick=Pick.EDGE)
MINIMUM = Linear(pick=Pick.MINIMUM)
MEAN = Linear(pick=Pick.MEAN)
SEARCH = Search()
FOUR_OVER_SIX = Search(start=Linear(room=1.5), factor=1.5)
"""arXiv:2512.02010: of NVFP4 scales from ``amax / 6`` and ``amax / 4``, the one of less squared error."""

_ALL: tuple[ScaleRule, ...] = (
    LINEAR, LINEAR_UP, Linear(store=Store.LATE), SIGNED, Linear(pick=Pick.SIGNED, store=Store.LATE),
    EDGE, Linear(pick=Pick.EDGE, store=Store.LATE),
    FLOOR, EVEN, CEIL, RCEIL, MINIMUM, Linear(pick=Pick.MINIMUM, store=Store.LATE), MEAN,
    SEARCH, FOUR_OVER_SIX,
)  # fmt: skip
RULES: MappingProxyType[str, ScaleRule] = MappingProxyType({rule.text: rule for rule in _ALL})
"""Name to rule, of those without a number in their name."""
_NUMBERED: tuple[tuple[str, Callable[[float], ScaleRule]], ...] = (
    (SEARCH_NAME, lambda number: Search(power=number)),
    (CEIL.text, lambda number: Ceiling(limit=number)),
)


def rule_named(text: str) -> ScaleRule | None:
    """Return a rule by text, or None; SchemeError for bad numbers.

    >>> rule_named("ceil7.25"), rule_named("highest")
    (Ceiling(limit=7.25), None)
    """
    if text in RULES:
        return RULES[text]
    for name, made in _NUMBERED:
        number = re.fullmatch(rf"{name}([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)", text)
        if number is not None and math.isfinite(value := float(number.group(1))):
            return made(value)
    return None


def any_format(text: str) -> bool:
    """Return whether a rule keeps the format of the scales it replaces.

    >>> any_format("search2.4"), any_format("signed"), any_format("search/float32"), any_format("even")
    (True, True, False, False)
    """
    return "/" not in text and (isinstance(rule_named(text), Search) or signs(text))


def signs(text: str) -> bool:
    """Return whether the text of a level names a signed rule.

    >>> signs("signed"), signs("signed/float16"), signs("float16")
    (True, True, False)
    """
    rule = rule_named(text.partition("/")[0])
    return isinstance(rule, Linear) and rule.pick is Pick.SIGNED
