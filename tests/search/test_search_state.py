"""States of searches: what is taken for one, and what of it is believed."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from zeropoint.checkpoint.run.journal import Journal, journal_bytes
from zeropoint.errors import CheckpointError
from zeropoint.own_files import OwnFile
from zeropoint.search.search_state import FORMAT, STATE, SearchState, number_in, numbers_in

FIELDS = {"search": FORMAT, "model": "a"}
ERROR = {
    "values": 4, "squares": [4.0], "errors": [0.5], "largest": 0.5, "clipped": 0, "zero_blocks": 0,
    "lost_blocks": 0,
}  # fmt: skip


def opened(path: Path) -> SearchState:
    return SearchState(OwnFile(path, STATE), FIELDS)


@pytest.mark.parametrize(
    "content",
    [
        b"short", b"x" * 16, b"x" * 17, b"0" * 18, b"\0" * 100, b"00000000 00000000 my notes",
        b"deadbeef cafebabe precious\n" * 100, STATE.mark, STATE.mark + b"notes of mine",
        STATE.mark + b"00000002 00000000 {}\n", STATE.mark[:-1],
    ],
)  # fmt: skip
def test_a_file_without_a_record_of_a_search_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is no state of zeropoint|holds no record of a search"):
        opened(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["notes"]


def test_an_empty_file_is_a_state_that_knows_nothing_and_a_torn_record_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.touch()
    with opened(path) as state:
        state.add_facts("kind", {"a": 1.5})
    whole = path.read_bytes()
    path.write_bytes(whole + b"0000001f 1234")
    with opened(path) as state:
        assert state.fact("kind", "a", number_in) == 1.5
    assert path.read_bytes() == whole


def crafted(path: Path, record: dict[str, Any]) -> SearchState:
    path.write_bytes(journal_bytes(STATE.mark, {"fields": FIELDS}))
    journal = Journal(path, STATE.mark)
    journal.append([record])
    journal.close()
    return opened(path)


CHANGED = [
    {"squares": [-1.0]}, {"errors": [-1.0]}, {"squares": [math.nan]}, {"errors": [math.inf]},
    {"errors": [1e308, 1e308]}, {"largest": math.nan}, {"largest": -0.5}, {"values": -1}, {"clipped": -1},
    {"errors": [1]}, {"squares": None}, {"lost_blocks": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_errors_that_no_weight_has_are_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"the state of 'w' says .*; pass another state="):
        crafted(tmp_path / "state", {"weight": "w", "errors": {"key": {**ERROR, **changed}}})
    with crafted(tmp_path / "state", {"weight": "w", "errors": {"key": ERROR}}) as state:
        assert state.errors("w")["key"].relative == math.sqrt(0.5 / 4)


@pytest.mark.parametrize("found", [math.nan, math.inf, {"a": math.nan}, ["a", -math.inf]], ids=str)
def test_facts_that_are_no_finite_numbers_are_refused(tmp_path: Path, found: object) -> None:
    with pytest.raises(CheckpointError, match="no record of a search"):
        crafted(tmp_path / "state", {"kind": "noise", "values": {"a": found}})


def test_a_fact_of_another_kind_than_asked_for_is_refused(tmp_path: Path) -> None:
    with crafted(tmp_path / "state", {"kind": "noise", "values": {"a": ["b"]}}) as state:
        for parse in (number_in, numbers_in):
            with pytest.raises(CheckpointError, match=r"the state of 'a' says \"\['b'\]\""):
                state.fact("noise", "a", parse)
