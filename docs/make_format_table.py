"""The table of all formats that have a name, every number derived from the catalog."""

from __future__ import annotations

from fractions import Fraction

from docs.make_tables import table

from zeropoint.formats import ALIASES, CATALOG, SOURCES, FloatFormat, Format, Specials
from zeropoint.formats.spec import exponent_of, power_of_two

COLUMNS = ("Name", "Bits", "Largest", "Smallest normal", "Smallest", "Inf", "NaN", "Also called", "Source")
SHOWN_INTEGERS = (2, 4, 8, 16)
MOST_DIGITS = 1 << 20


def number(value: Fraction) -> str:
    """Return a value as a reader would write it: a short decimal, or powers of two.

    >>> number(Fraction(448)), number(Fraction(1, 64)), number(Fraction(2**127)), number(Fraction(127, 64))
    ('448', '2^-6', '2^127', '1.984375')
    """
    exponent = exponent_of(value)
    if value == power_of_two(exponent) and exponent not in range(-3, 16):
        return f"2^{exponent}"
    if value.denominator > MOST_DIGITS:  # a table's float32
        return f"{float(value):.9g}"
    if value < MOST_DIGITS:
        return f"{float(value):.12g}"
    # The largest of a wide format: all bits of the significand are ones.
    width = (value.numerator & -value.numerator).bit_length() - 1
    return f"2^{exponent + 1} - 2^{width}" if width else f"2^{exponent + 1} - 1"


def code(value: int | None, bits: int) -> str:
    """Return a code in hexadecimal, or nothing.

    >>> code(127, 8), code(None, 8)
    ('0x7F', '')
    """
    return "" if value is None else f"0x{value:0{-(-bits // 4)}X}"


def row(name: str, fmt: Format) -> list[str]:
    """Return the cells of one format."""
    normal = inf = nan = ""
    if isinstance(fmt, FloatFormat):
        inf, nan = code(fmt.inf_code, fmt.bits), code(fmt.nan_code, fmt.bits)
        normal = number(fmt.smallest_normal) if fmt.smallest_normal <= fmt.max else ""
    aliases = ", ".join(f"`{alias}`" for alias, target in ALIASES.items() if target == name)
    numbers = [number(fmt.max), normal, number(fmt.smallest), inf, nan]
    return [f"`{name}`", str(fmt.bits), *numbers, aliases, SOURCES[name]]


def shown(fmt: Format) -> bool:
    """Tell whether a format has a row: all but most widths of plain integers."""
    return not fmt.is_whole or fmt.bits in SHOWN_INTEGERS


def format_table() -> str:
    """Return a row for each format that has a name."""
    return table(COLUMNS, [row(name, fmt) for name, fmt in CATALOG.items() if shown(fmt)])


def specials_table() -> str:
    """Return the meaning of the endings ``ieee``, ``fn``, ``fnuz`` and ``finite``."""
    return table(
        ("Special codes", "Meaning"), [(f"`{special.value}`", MEANINGS[special]) for special in Specials]
    )


MEANINGS = {
    Specials.IEEE: "The largest exponent field holds Inf and NaN.",
    Specials.FN: "No Inf; all ones below the sign is NaN, with either sign.",
    Specials.FNUZ: "No Inf; one NaN in the place of negative zero.",
    Specials.FINITE: "Every code is a finite number.",
}
