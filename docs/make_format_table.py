"""Write docs/formats.md: the table of all formats that have a name, every number derived from the catalog.

    python docs/make_format_table.py

A test compares the file with :func:`page`, so that the table cannot differ from the library.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from zeropoint.formats import ALIASES, CATALOG, SOURCES, FloatFormat, Format, Specials
from zeropoint.formats.spec import exponent_of, power_of_two

PAGE = Path(__file__).with_name("formats.md")
COLUMNS = ("Name", "Bits", "Largest", "Smallest normal", "Smallest", "Inf", "NaN", "Also called", "Source")
HEAD = """# Formats

<!-- Made by docs/make_format_table.py from the catalog; edit src/zeropoint/formats/catalog.py instead. -->

Each row is one format that has a name. "Largest" is the largest finite value and "Smallest" the smallest
positive one; signed floating-point formats hold the negative of each, and signed integers reach one step
further below zero than above. "Inf" is the code of the positive one, "NaN" the code that encoding writes.
Integers of every width from 2 to 16 bits, and of 32, have a name; the table shows four widths of each kind.

"""
TAIL = """
## Formats without a name

Any other format is spelled out: `int<bits>[f<fraction bits>]`, `uint<bits>`, `codebook[v0,v1,...]`,
`choice[FLOAT,INTEGER]`, `vector<N>[x0,...]`, `digits<N>[v0,...]`, `table<bits>`, or
`[u]e<E>m<M>[b<bias>][ieee|fn|fnuz|finite][ns]`. The bias defaults to 2^(E-1) - 1 and the special codes to
none (`finite`); `u` leaves out the sign, and `ns` the subnormals and zero. So `e3m4` has three exponent bits
and four mantissa bits, and `ue5m3ieee` is unsigned with Inf and NaN as in IEEE 754. A name in the table comes
first: `e4m3` is `float8_e4m3fn`, and without NaN it is `e4m3finite`.

Of a `choice`, the sign of the scale says which of two grids of as many bits a block uses: floats where it is
positive, and where it is negative integers that are stretched to the same largest value. Each block takes the
grid of less squared error. A code of `vector<N>` represents N neighboring values, a row of its table, and one
of `digits<N>` N values of a table, the digits of a number. A code of `table<bits>` says which of the
`2 ** bits` numbers of its block, which are its scale, the value is.

| Special codes | Meaning |
|---|---|
"""
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


def page() -> str:
    """Return the text of docs/formats.md."""
    rows = [row(name, fmt) for name, fmt in CATALOG.items() if shown(fmt)]
    table = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    specials = [f"| `{special.value}` | {MEANINGS[special]} |" for special in Specials]
    return HEAD + "\n".join(lines) + "\n" + TAIL + "\n".join(specials) + "\n"


MEANINGS = {
    Specials.IEEE: "The largest exponent field holds Inf and NaN.",
    Specials.FN: "No Inf; all ones below the sign is NaN, with either sign.",
    Specials.FNUZ: "No Inf; one NaN in the place of negative zero.",
    Specials.FINITE: "Every code is a finite number.",
}

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(page())
