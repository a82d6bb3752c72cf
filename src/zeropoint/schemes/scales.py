"""One level of scales or offsets: its blocks, format and rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import SchemeError
from ..formats import Format, format_name, get_format
from .granularity import Granularity
from .scale_rules import FLOOR, LINEAR, RULES, Linear, Pick, ScaleRule, Search, Store, rule_named


@dataclass(frozen=True, kw_only=True)
class ScaleLevel:
    """One factor of each block's scale or offset, or the center.

    Args:
        granularity: which elements share it.
        format: the numbers it may be, of any kind; None means the quantized tensor's own dtype.
        rule: how it follows from the data.

    Raises:
        SchemeError: when the rule yields powers of two that the format cannot hold exactly, and for formats
            that levels cannot be kept in: more than a byte but for the four of IEEE, and formats past
            float32.
    """

    granularity: Granularity
    format: Format | None
    rule: ScaleRule = LINEAR

    def __post_init__(self) -> None:
        if isinstance(self.rule, Search) and self.format is not None and self.format.exponents is not None:
            object.__setattr__(self, "rule", replace(self.rule, start=FLOOR))
        if self.rule.power_of_two and (self.format is None or self.format.exponents is None):
            raise SchemeError(
                f"scale format {_name(self.format)} does not fit rule {self.rule.text}; use e8m0, "
                "or a linear rule"
            )
        if self.stores(Store.UP) and not self.holds_floats:
            raise SchemeError(
                f"rule {self.rule.text} needs a floating-point scale format, got {_name(self.format)}"
            )
        if self.format is not None and self.format not in _WIDE:
            self._check_narrow(self.format)

    def _check_narrow(self, fmt: Format) -> None:
        if fmt.per_code > 1:
            raise SchemeError(f"scale format {format_name(fmt)} has no codes of single numbers; use a float")
        if fmt.reads_sign or fmt.per_scale > 1:
            raise SchemeError(f"scale format {format_name(fmt)} has no numbers without a scale; use a float")
        if fmt.bits > 8:
            known = ", ".join(map(format_name, _WIDE))
            raise SchemeError(
                f"scale format {format_name(fmt)} has {fmt.bits} bits; use one of at most 8, or {known}"
            )
        if fmt.max > _WIDE[0].max or 0 < fmt.smallest < _WIDE[0].smallest:
            raise SchemeError(f"scale format {format_name(fmt)} has values outside float32; move its bias")

    def format_for(self, input_format: Format) -> Format:
        """Return the format of the scales for an input format.

        Args:
            input_format: the format of the tensor.
        """
        return input_format if self.format is None else self.format

    def stores(self, store: Store) -> bool:
        """Return whether its number is rounded to its format as ``store`` says.

        Args:
            store: a rounding of the scale.
        """
        return isinstance(self.rule, Linear) and self.rule.store is store

    def picks(self, pick: Pick) -> bool:
        """Return whether its rule takes the number that ``pick`` names.

        Args:
            pick: a choice of a number.
        """
        return isinstance(self.rule, Linear) and self.rule.pick is pick

    @property
    def holds_floats(self) -> bool:
        """Whether its numbers are floats, as the tensor's own are."""
        return self.format is None or self.format.is_float

    @property
    def bits(self) -> int:
        """Stored bits of a number; 16 in the input's own format."""
        if self.format is None:
            return 16
        return self.format.level_bits

    def __str__(self) -> str:
        return f"{choice_text(self)}@{self.granularity}"


_E8M0 = get_format("e8m0")
_WIDE = [get_format(name) for name in ("float32", "bfloat16", "float16", "float64")]
"""Scale formats of more than a byte."""
INPUT = "input"
"""Spelling of the scale format that is the input's own."""


def _name(fmt: Format | None) -> str:
    return INPUT if fmt is None else format_name(fmt)


def _format(text: str, rules: Iterable[str] = ()) -> Format | None:
    return None if text == INPUT else get_format(text, others=[INPUT, *rules])


def choice_text(level: ScaleLevel, default: ScaleRule = LINEAR) -> str:
    """Return the text form of a level without its blocks, like ``linear_up/bfloat16``.

    default: the rule that a format alone means.
    """
    fmt, rule = level.format, level.rule
    if isinstance(rule, Search):
        return rule.text if fmt == _WIDE[0] else f"{rule.text}/{_name(fmt)}"
    if rule.power_of_two and fmt == _E8M0:
        return rule.text
    # e8m0 alone means the floor rule, so its linear rule is spelled out.
    plain = rule == default and fmt != _E8M0
    return _name(fmt) if plain else f"{rule.text}/{_name(fmt)}"


def parse_choice(text: str, default: ScaleRule = LINEAR) -> tuple[Format | None, ScaleRule]:
    """Return the format and rule that ``text`` spells.

    default: the rule that a format alone means.

    >>> parse_choice("even")[1]
    PowerOfTwo(exponent=<Exponent.EVEN: 'even'>)
    """
    rule_text, slash, format_text = text.partition("/")
    if slash:
        named = rule_named(rule_text)
        if named is None:
            raise SchemeError(f"scale rule {rule_text!r} is unknown; known are {', '.join(RULES)}")
        return _format(format_text), named
    rule = rule_named(text)
    if rule is not None:
        return (_E8M0 if rule.power_of_two else get_format("float32")), rule
    fmt = _format(text, RULES)
    return fmt, (FLOOR if fmt == _E8M0 else default)
