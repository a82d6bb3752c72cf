"""One level of scales: which elements share one, which numbers it may be, and the rule that picks it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from ..errors import SchemeError
from ..formats import CodebookFormat, FloatFormat, Format, format_name, get_format
from .granularity import Granularity


class ScaleRule(enum.Enum):
    """How the scale of a block follows from its largest magnitude ``amax``.

    ``emax`` and ``max`` are those of the element format; exponents come from the bits of ``amax``, never from
    a float log2.
    """

    LINEAR = "linear"
    """``amax / divisor``, rounded to nearest in the scale's format; the divisor is the largest element."""
    LINEAR_UP = "linear_up"
    """``amax / divisor``, rounded up in the scale's format, so that nothing is clipped."""
    FLOOR = "floor"
    """``2 ** (floor(log2 amax) - emax)``: OCP MX 1.0, section 6.3. Clips up to a quarter of the largest."""
    EVEN = "even"
    """As floor, after rounding ``amax`` half up to the mantissa width of the elements."""
    CEIL = "ceil"
    """``2 ** (ceil(log2 amax) - emax)``."""
    RCEIL = "rceil"
    """The smallest power of two with ``amax / scale <= max``: nothing is clipped."""

    @property
    def power_of_two(self) -> bool:
        """Whether the rule yields powers of two."""
        return self not in (ScaleRule.LINEAR, ScaleRule.LINEAR_UP)


@dataclass(frozen=True, kw_only=True)
class ScaleLevel:
    """One factor of ``value = (decode(code) - zero_point) * scale_1 * scale_2 * ...``.

    granularity: which elements share the scale.
    format: the numbers it may be; None means those of the quantized tensor's own dtype.
    rule: how it follows from the data.

    Raises SchemeError when the rule yields powers of two that the format cannot hold exactly, and for formats
    that scales cannot be kept in: those of more than a byte but the four of IEEE, and those past float32.
    """

    granularity: Granularity
    format: Format | None
    rule: ScaleRule = ScaleRule.LINEAR

    def __post_init__(self) -> None:
        if self.rule.power_of_two and not _holds_only_powers_of_two(self.format):
            raise SchemeError(
                f"scale format {_name(self.format)} does not fit rule {self.rule.value}; use e8m0, "
                "or a linear rule"
            )
        if not self.rule.power_of_two and not isinstance(self.format, FloatFormat | None):
            raise SchemeError(
                f"rule {self.rule.value} needs a floating-point scale format, got {_name(self.format)}"
            )
        if self.format is not None and self.format not in _WIDE:
            self._check_narrow(self.format)

    def _check_narrow(self, fmt: Format) -> None:
        if fmt.bits > 8:
            known = ", ".join(map(format_name, _WIDE))
            raise SchemeError(
                f"scale format {format_name(fmt)} has {fmt.bits} bits; use one of at most 8, or {known}"
            )
        least = fmt.smallest if isinstance(fmt, FloatFormat) else fmt.min
        if fmt.max > _WIDE[0].max or 0 < least < _WIDE[0].smallest:
            raise SchemeError(f"scale format {format_name(fmt)} has values outside float32; move its bias")

    def format_for(self, input_format: Format) -> Format:
        """Return the format of the scales of a tensor whose own numbers are of ``input_format``."""
        return input_format if self.format is None else self.format

    @property
    def bits(self) -> int:
        """Bits that one scale takes: whole bytes, but for those of a table; 16 for the input's own format."""
        if self.format is None:
            return 16
        bits = self.format.bits
        return bits if isinstance(self.format, CodebookFormat) else -(-bits // 8) * 8

    def __str__(self) -> str:
        return f"{choice_text(self)}@{self.granularity}"


def _holds_only_powers_of_two(fmt: Format | None) -> bool:
    if isinstance(fmt, CodebookFormat):
        return all(math.frexp(value)[0] == 0.5 for value in fmt.values)
    return isinstance(fmt, FloatFormat) and fmt.mantissa_bits == 0


_E8M0 = get_format("e8m0")
_WIDE = [
    fmt
    for name in ("float32", "bfloat16", "float16", "float64")
    if isinstance(fmt := get_format(name), FloatFormat)
]
"""Scale formats of more than a byte."""
INPUT = "input"
"""Spelling of the scale format that is the input's own."""


def _name(fmt: Format | None) -> str:
    return INPUT if fmt is None else format_name(fmt)


def _format(text: str) -> Format | None:
    return None if text == INPUT else get_format(text)


def choice_text(level: ScaleLevel) -> str:
    """Return the text form of a level without its blocks: ``float32``, ``floor``, ``linear_up/bfloat16``."""
    fmt, rule = level.format, level.rule
    if rule.power_of_two and fmt == _E8M0:
        return rule.value
    # e8m0 alone means the floor rule, so its linear rule is spelled out.
    plain = rule is ScaleRule.LINEAR and fmt != _E8M0
    return _name(fmt) if plain else f"{rule.value}/{_name(fmt)}"


def parse_choice(text: str) -> tuple[Format | None, ScaleRule]:
    """Return the format and rule that ``text`` spells.

    >>> parse_choice("even")[1]
    <ScaleRule.EVEN: 'even'>
    """
    rules = {rule.value: rule for rule in ScaleRule}
    rule_text, slash, format_text = text.partition("/")
    if slash:
        if rule_text not in rules:
            raise SchemeError(f"scale rule {rule_text!r} is unknown; known are {', '.join(rules)}")
        return _format(format_text), rules[rule_text]
    if text in rules:
        rule = rules[text]
        return (_E8M0 if rule.power_of_two else get_format("float32")), rule
    fmt = _format(text)
    return fmt, (ScaleRule.FLOOR if fmt == _E8M0 else ScaleRule.LINEAR)
