"""The quick suite stays quick: no item and no file takes long, but for named exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.durations import Duration, recorded, rows_of, write

ROOT = Path(__file__).resolve().parents[2]
ITEM, FILE, EXCEPTIONS = 3.0, 30.0, 60.0
"""Most seconds of an item, of a file, and of all exceptions together."""
LONG: dict[str, str] = {}
"""Items that may take longer, with the reason."""


def too_long(rows: list[Duration]) -> dict[str, float]:
    """Items and files past their limits."""
    return {row.name: row.seconds for row in rows if row.seconds > (ITEM if "::" in row.name else FILE)}


def test_no_item_and_no_file_takes_long() -> None:
    rows = recorded()
    assert {
        name: seconds for name, seconds in too_long(list(rows.values())).items() if name not in LONG
    } == {}
    assert [name for name in LONG if name not in rows] == [], "an exception that is not needed"
    assert sum(rows[name].seconds for name in LONG) < EXCEPTIONS


def test_the_table_is_of_this_tree() -> None:
    files = {name for name in recorded() if "::" not in name}
    assert [name for name in files if not (ROOT / name).is_file()] == []
    present = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(files & present) > 0.9 * len(present), "record durations anew: `make durations`"


def test_files_and_long_items_are_written_and_read_again(tmp_path: Path) -> None:
    rows = rows_of({"tests/a.py::test_x[1]": 0.4, "tests/a.py::test_x[2]": 3.5, "tests/b.py::test_y": 31.0})
    assert rows == [
        Duration("tests/a.py", 3.9, 2),
        Duration("tests/a.py::test_x[2]", 3.5, 1),
        Duration("tests/b.py", 31.0, 1),
        Duration("tests/b.py::test_y", 31.0, 1),
    ]
    write(rows, tmp_path / "table.csv")
    assert list(recorded(tmp_path / "table.csv").values()) == rows
    assert too_long(rows) == {"tests/a.py::test_x[2]": 3.5, "tests/b.py": 31.0, "tests/b.py::test_y": 31.0}


def test_a_run_that_is_asked_to_records_what_it_ran(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests import durations

    monkeypatch.setattr(durations, "write", lambda rows: write(rows, tmp_path / "table.csv"))
    pytester.makepyfile("def test_a(): pass\ndef test_b(): pass\n")
    done = pytester.inline_run("--record-durations", plugins=[durations])
    assert done.ret == 0
    (row,) = recorded(tmp_path / "table.csv").values()
    assert row.items == 2
