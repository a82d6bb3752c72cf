"""The glossary is a table in order, with one meaning a term."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contributing" / "glossary.md"


def test_terms_are_in_order_and_each_stands_once() -> None:
    terms = re.findall(r"^\| (.+?) \| .+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)
