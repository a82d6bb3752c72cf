"""The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
from tests.kernels.triton.interpreter import DEVICE


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
