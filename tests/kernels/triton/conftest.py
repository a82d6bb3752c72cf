"""The kernels run in Triton's interpreter where there is no GPU."""

import pytest
from tests.kernels.triton.interpreter import DEVICE

collect_ignore = ["rounding_kernels.py"]
"""Kernels, which are loaded where the interpreter is asked for, and not while tests are collected."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
