"""The glossary is a table in order, with one meaning a term."""

import csv
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "docs" / "contributing" / "tables" / "glossary.csv"


def test_terms_are_in_order_and_each_stands_once() -> None:
    rows = list(csv.reader(TABLE.read_text(encoding="utf-8").splitlines()))[1:]
    terms = [term for term, meaning in rows if meaning]
    assert len(terms) == len(rows)
    assert len(terms) > 40
    assert terms == sorted(set(terms), key=str.lower)
