"""A fixture that leaves the reference alone as the backend of each test of a folder."""

from collections.abc import Iterator

import pytest

from zeropoint import only_backend


@pytest.fixture(autouse=True)
def reference_only(request: pytest.FixtureRequest) -> Iterator[None]:
    """Test the reference, except in tests that ask for ``every_backend``."""
    if "every_backend" in request.fixturenames:
        yield
        return
    with only_backend("reference"):
        yield
