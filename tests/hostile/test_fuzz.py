"""A few seconds of fuzzing; the script tests/hostile/fuzz.py does it for as long as one likes."""

import random
from pathlib import Path

import pytest
from tests.hostile import fuzz
from tests.hostile.fuzz import SLOW_TARGETS, TARGETS, Hang
from tests.hostile.target import Target, in_directory

from zeropoint.errors import CheckpointError

pytestmark = pytest.mark.rotating


@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_a_parser_refuses_or_accepts_whatever_it_is_given(make: object, tmp_path: Path) -> None:
    target = make(tmp_path)  # type: ignore[operator]
    rounds = 150 if make in SLOW_TARGETS else 1500
    tally = fuzz.fuzz(target, random.Random(20), iter(range(rounds)))
    assert tally.total() > rounds * 2 // 3
    assert tally["refused"] > rounds // 15
    assert tally["accepted"] > 0, tally
    if target.name == "header":
        assert min(tally.values()) > 20, tally


@pytest.mark.slow
@pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)
def test_a_parser_stands_many_more_inputs(make: object, tmp_path: Path) -> None:
    rounds = 6000 if make in SLOW_TARGETS else 60_000
    tally = fuzz.fuzz(make(tmp_path), random.Random(21), iter(range(rounds)))  # type: ignore[operator]
    assert tally.total() > rounds * 5 // 6


def _crash(content: bytes) -> str:
    raise KeyError(content[:1])


def _hang(content: bytes) -> str:
    while True:
        content = content[1:] + content[:1]


def _wrong(content: bytes) -> str:
    assert content == b"", "the library accepts it"
    return "accepted"


@pytest.mark.parametrize(("decide", "error"), [(_crash, KeyError), (_hang, Hang), (_wrong, AssertionError)])
def test_a_planted_bug_ends_the_fuzzing_with_its_input(
    decide: object, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.05)
    target = Target(name="planted", seeds=[b"abcdefgh" * 9], decide=decide)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        fuzz.fuzz(target, random.Random(1), iter(range(99)))
    assert caught.value.__notes__[0].startswith("planted: b'")


def test_an_error_of_zeropoint_is_no_crash(tmp_path: Path) -> None:
    def refuse(place: Path) -> None:
        raise CheckpointError("no")

    assert in_directory(tmp_path, "x", refuse)(b"") == "refused"
