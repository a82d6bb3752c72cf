"""A check of a table fails where a row fails, and says which."""

import pytest
from tests.tables import each


def test_rows_that_fail_are_listed_and_the_others_run() -> None:
    seen = []

    @each("number, square", [(1, 1), (2, 5), (3, 9), (4, 17)])
    def test_squares(number: int, square: int) -> None:
        seen.append(number)
        assert number**2 == square

    with pytest.raises(AssertionError, match=r"\(2, 5\)") as caught:
        test_squares()
    assert "(4, 17)" in str(caught.value)
    assert "(3, 9)" not in str(caught.value)
    assert seen == [1, 2, 3, 4]
    assert test_squares.__name__ == "test_squares"


def test_another_error_than_a_failed_assertion_is_raised() -> None:
    @each("number", [0])
    def test_quotient(number: int) -> None:
        assert 1 / number

    with pytest.raises(ZeroDivisionError):
        test_quotient()
