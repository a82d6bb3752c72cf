"""Numbers and names are written so that a reader gets back what was meant."""

import re
from fractions import Fraction

import pytest

from zeropoint.errors import count, size_of
from zeropoint.formats import CATALOG, CodebookFormat, Format, get_format
from zeropoint.formats.exact import decode
from zeropoint.report.wording import exact, name, pattern, share, short_scheme

SMALL = [name_ for name_, fmt in CATALOG.items() if fmt.bits <= 8]


def read(text: str) -> Fraction:
    """Read back what ``exact`` writes."""
    match = re.fullmatch(r"(-?)(?:(\d+)\*)?2\^(-?\d+)", text)
    if match is None:
        return Fraction(text)
    return (-1 if match[1] else 1) * Fraction(match[2] or 1) * Fraction(2) ** int(match[3])


@pytest.mark.parametrize("fmt", [get_format(n) for n in SMALL], ids=SMALL)
def test_every_value_of_a_small_format_is_written_exactly(fmt: Format) -> None:
    numbers = [decode(fmt, code) for code in range(fmt.code_count)]
    values = [n for n in numbers if isinstance(n, Fraction)]
    assert values
    if isinstance(fmt, CodebookFormat):  # float32 numbers, which nine digits identify
        assert all(abs(read(exact(v)) - v) <= abs(v) / 2**24 for v in values)
    else:
        assert [read(exact(v)) for v in values] == values
    assert all(len(exact(v)) <= 16 for v in values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(0), "0"),
        (Fraction(-3, 2), "-1.5"),
        (Fraction(2) ** 127, "2^127"),
        (2**31 - 1, "2147483647"),
        (Fraction(2) ** 128 - Fraction(2) ** 104, "2^128 - 2^104"),
        (Fraction(3, 2**20), "3*2^-20"),
    ],
)
def test_values_are_written_as_a_reader_would(value: Fraction, text: str) -> None:
    assert exact(Fraction(value)) == text


def test_sizes_counts_and_shares_are_short() -> None:
    assert [size_of(n) for n in (0, 1023, 1024, 1 << 31, 1 << 60)] == [
        "0 B", "1023 B", "1 KiB", "2 GiB", "1024 PiB",
    ]  # fmt: skip
    assert [count(n, "entry", "entries") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert [share(v) for v in (0.0, 1e-9, 0.5, 1.0)] == ["0", "<0.01%", "50.00%", "100.00%"]
    assert [share(v) for v in (2e-5, 9.9e-5, 1e-4)] == ["<0.01%", "<0.01%", "0.01%"]


def test_a_pattern_replaces_whole_numbers_between_dots_only() -> None:
    assert pattern("h.10.mlp.c_fc.weight") == "h.*.mlp.c_fc.weight"
    assert pattern("layers.0.experts.12.w1") == "layers.*.experts.*.w1"
    assert pattern("0.weight") == "*.weight"
    assert pattern("block2.conv1d.weight") == "block2.conv1d.weight"


def test_a_name_cannot_drive_the_terminal() -> None:
    assert name("model.norm.weight") == "model.norm.weight"
    assert name("a\x1b]0;owned\x07") == "'a\\x1b]0;owned\\x07'"
    assert name("it's") == '"it\'s"'
    assert len(name("x" * 5000)) < 300


def test_a_short_scheme_leaves_out_what_the_layout_implies() -> None:
    assert short_scheme("int8:channel:scale=input:dialect=compressed-tensors") == "int8:channel"
