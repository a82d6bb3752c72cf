"""Tests of this folder judge the reference, but for those that compare other backends with it."""

import pytest
from tests.reference_backend import reference_only

__all__ = ["every_backend", "reference_only"]


@pytest.fixture
def every_backend() -> None:
    """Leave a test the backends that callers get."""
