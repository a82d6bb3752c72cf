"""Checks of constant tables: one item runs all rows and lists those that fail."""

from collections.abc import Callable, Iterable
from typing import Any

Check = Callable[..., None]


def each(names: str, rows: Iterable[Any]) -> Callable[[Check], Callable[[], None]]:
    """Make a test of a check of one row, as ``pytest.mark.parametrize`` does, but a single item.

    names: of the parameters that a row gives, divided by commas. An item takes some milliseconds more than a
    row, which matters for hundreds of rows of nothing but comparisons.
    """
    parameters = [name.strip() for name in names.split(",")]

    def test_of(check: Check) -> Callable[[], None]:
        def test() -> None:
            failed = {}
            for row in rows:
                values = row if len(parameters) > 1 else (row,)
                try:
                    check(**dict(zip(parameters, values, strict=True)))
                except AssertionError as error:
                    failed[str(row)] = str(error)
            assert not failed, failed

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return test_of
