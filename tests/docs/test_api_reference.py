"""The API reference says what the docstrings say, and each public docstring says what a caller needs."""

import re

from docs.make_api_reference import MODULES, body, pages

import zeropoint as zp


def test_every_public_name_is_described_once_and_referred_to_elsewhere() -> None:
    made = pages()
    assert made.keys() == {"README.md", *(f"{name}.md" for name in MODULES)}
    described = re.findall(r"^## (\w+)$", made["zeropoint.md"], flags=re.MULTILINE)
    assert described == sorted(name for name in zp.__all__ if not name.startswith("_"))
    assert "See [zeropoint.Scheme](zeropoint.md#scheme)." in made["zeropoint.schemes.md"]


def test_sections_become_lists_and_examples_blocks() -> None:
    docstring = (
        "Return ``x``.\n\n    y = x\n\nArgs:\n    x: a number\n        of any size.\n\n"
        "Raises:\n    RangeError: for NaN.\n\nExample:\n    >>> 1\n    1\n"
    )
    assert body(docstring) == [
        "Return `x`.", "", "```text", "y = x", "```", "", "**Arguments**", "",
        "- `x`: a number of any size.", "", "**Raises**", "", "- `RangeError`: for NaN.", "",
        "```pycon", ">>> 1", "1", "```", "",
    ]  # fmt: skip


def test_signatures_hold_nothing_of_a_process() -> None:
    assert not any(" at 0x" in text or "<function" in text for text in pages().values())
