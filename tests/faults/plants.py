"""Bugs, each planted on purpose: a suite that does not fail with its bug proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run the block with the bug of that name; without any for None."""
    if name is None:
        yield
        return
    with PLANTS[name]():
        yield


PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}
