"""Sizes and schemes on the command line mean what they say."""

import pytest
import typer

from zeropoint.cli.arguments import parse_memory, require_scheme
from zeropoint.codecs.registry import DEFAULT


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1", 1), ("1B", 1), ("1K", 1024), ("512M", 512 << 20), ("2G", 2 << 30), ("2g", 2 << 30),
     ("2GiB", 2 << 30), ("2 GB", 2 << 30), ("0.5G", 512 << 20), ("1T", 1 << 40), (" 3k ", 3072)],
)  # fmt: skip
def test_sizes_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "G", "2X", "-1", "0", "0.0001", "1e9", "nan", "inf", "2GG", "1,5G", "0x10", "٢G"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="for example 2G or 512M"):
        parse_memory(text)


def test_an_unknown_scheme_is_compared_with_presets_and_formats() -> None:
    with pytest.raises(typer.BadParameter, match="did you mean nvfp4"):
        require_scheme("nvpf4a16", DEFAULT)
