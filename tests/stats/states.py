"""States of statistics, compared."""

from tests.tensors import same_bytes

from zeropoint.stats import State


def assert_same(a: State, b: State) -> None:
    """Compare names, dtypes, shapes and every byte."""
    assert a.keys() == b.keys()
    for name in a:
        assert same_bytes(a[name], b[name]), name
