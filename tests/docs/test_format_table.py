"""The page of formats says what the catalog says."""

import re
from fractions import Fraction

import pytest
from docs.make_format_table import code, format_table, number

from zeropoint.formats import ALIASES, CATALOG, IntFormat, get_format


def test_every_format_but_plain_integers_has_a_row_and_every_alias_is_named() -> None:
    names = set(re.findall(r"^\| `(\w+)` \| \d", format_table(), flags=re.MULTILINE))
    plain = {name for name, fmt in CATALOG.items() if isinstance(fmt, IntFormat) and not fmt.fraction_bits}
    assert names | plain == set(CATALOG)
    assert names & plain == {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16)}
    assert all(f"`{alias}`" in format_table() for alias in ALIASES)


def test_spellings_on_the_page_are_formats() -> None:
    assert [get_format(text).bits for text in ("e3m4", "ue5m3ieee", "e4m3finite")] == [8, 8, 8]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(448), "448"),
        (Fraction(1, 64), "2^-6"),
        (Fraction(1, 8), "0.125"),
        (Fraction(1), "1"),
        (Fraction(2**127), "2^127"),
        (Fraction(127, 64), "1.984375"),
        (Fraction(2**128 - 2**104), "2^128 - 2^104"),
        (Fraction(2**31 - 1), "2^31 - 1"),
        (Fraction(0.1), "0.1"),
    ],
)
def test_numbers_are_written_as_a_reader_would(value: Fraction, text: str) -> None:
    assert number(value) == text


def test_codes_are_written_in_full_width() -> None:
    assert [code(0x7F, 8), code(5, 6), code(0x7C00, 16), code(None, 8)] == ["0x7F", "0x05", "0x7C00", ""]
