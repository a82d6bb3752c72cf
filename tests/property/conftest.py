"""Every test of this folder judges the reference; other backends are compared with it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeropoint import only_backend


@pytest.fixture(autouse=True)
def reference_only() -> Iterator[None]:
    with only_backend("reference"):
        yield
