"""Bars are shown where somebody can see them: on a terminal, and in a notebook."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from zeropoint import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_batches_have_a_bar_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    monkeypatch.setattr(progress, "_console", lambda: console)
    assert list(progress.counted([1, 2], "Calibrating", shown=True)) == [1, 2]
    assert ("Calibrating" in written.getvalue()) == terminal


def test_batches_have_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Bar:
        def __init__(self, **options: object) -> None:
            shown.append(options)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *failure: object) -> None: ...

        def track(self, batches: list[int], *, total: int, description: str) -> list[int]:
            shown.append((total, description))
            return batches

    notebook = SimpleNamespace(is_terminal=False, is_jupyter=True)
    monkeypatch.setattr(progress, "_console", lambda: notebook)
    monkeypatch.setattr(progress.importlib, "import_module", lambda name: SimpleNamespace(Progress=Bar))  # noqa: ARG005
    assert list(progress.counted([1, 2], "Calibrating", shown=True)) == [1, 2]
    assert shown[1] == (2, "Calibrating")


def test_nobody_who_did_not_ask_pays_for_a_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_console", lambda: pytest.fail("it was made"))
    assert list(progress.counted([1, 2], "Calibrating", shown=False)) == [1, 2]
