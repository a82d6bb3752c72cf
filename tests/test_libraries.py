"""The door to libraries: what becomes of each kind of failure."""

import pytest

from zeropoint.errors import CheckpointError, ShapeError, UnsupportedError
from zeropoint.libraries import reading


class PanicException(BaseException):
    """What pyo3 raises for a panic of Rust, by its name."""


@pytest.mark.parametrize(
    "failure",
    [
        Exception("a\nb"),
        KeyError("a"),
        RecursionError("a"),
        AssertionError(),
        PanicException("a"),
        OSError("a"),
    ],
)  # fmt: skip
def test_whatever_a_library_raises_is_a_sentence(failure: BaseException) -> None:
    with (
        pytest.raises(UnsupportedError, match=r"^the file is damaged \(\w+.*\); get another$") as found,
        reading("the file is damaged", "get another", UnsupportedError),
    ):
        raise failure
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is failure


@pytest.mark.parametrize("failure", [ShapeError("a"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_our_errors_and_those_of_the_process_pass(failure: BaseException) -> None:
    with pytest.raises(type(failure)) as found, reading("a", "b"):
        raise failure
    assert found.value is failure


def test_what_the_system_says_passes_where_that_is_asked_for() -> None:
    with pytest.raises(FileNotFoundError), reading("a", "b", system=True):
        raise FileNotFoundError(2, "No such file or directory")


def test_a_message_has_a_bound_and_no_characters_that_drive_a_terminal() -> None:
    with pytest.raises(CheckpointError) as found, reading("a", "b"):
        raise ValueError("\x1b[31m" + "x" * 10_000)
    assert "\x1b" not in str(found.value)
    assert len(str(found.value)) < 500
