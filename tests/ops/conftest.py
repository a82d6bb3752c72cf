"""Tests of this folder judge the reference, but for those that compare other backends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeropoint import only_backend


@pytest.fixture
def every_backend() -> None:
    """Leave a test the backends that callers get."""


@pytest.fixture(autouse=True)
def reference_only(request: pytest.FixtureRequest) -> Iterator[None]:
    if "every_backend" in request.fixturenames:
        yield
        return
    with only_backend("reference"):
        yield
