"""The API reference says what the docstrings say, and each public docstring says what a caller needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from docs.make_api_reference import FOLDER, body, pages

ROOT = Path(__file__).parents[2]


def test_the_files_on_disk_are_those_that_the_docstrings_make() -> None:
    code = "import json; from docs.make_api_reference import pages; print(json.dumps(pages()))"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert on_disk == json.loads(made.stdout)


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
