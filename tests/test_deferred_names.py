"""Names that modules import on first use."""

import sys
from pathlib import Path

import pytest

from zeropoint.deferred_names import deferred_names, imported

SOURCE = """
from typing import TYPE_CHECKING

from os import path as own

if TYPE_CHECKING:
    from collections import OrderedDict as Ordered

    from .near import value
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "deferring"
    folder.mkdir()
    (folder / "__init__.py").write_text(SOURCE, encoding="utf-8")
    (folder / "near.py").write_text("value = 5\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("deferring")
    return "deferring"


def test_names_below_type_checking_are_imported_and_kept(package: str) -> None:
    assert deferred_names(package) == {"Ordered": ("collections", "OrderedDict"), "value": (".near", "value")}
    assert imported(package, "value") == 5
    assert imported(package, "Ordered") is sys.modules["collections"].OrderedDict
    assert vars(sys.modules[package])["value"] == 5


def test_other_names_are_none_of_the_module(package: str) -> None:
    with pytest.raises(AttributeError, match="module 'deferring' has no attribute 'own_name'"):
        imported(package, "own_name")
