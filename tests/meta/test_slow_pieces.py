"""Every test file is in one piece of the slow suite, and what a run counts is what the table shows."""

import dataclasses
from pathlib import Path

import pytest
from tests import slow_pieces
from tests.slow_pieces import Environment, Piece, Run, Table

TABLE = Table.read()
RUN = Run(date="2026-03-01", commit="aaaa", passed=3, skipped=0, failed=0, minutes=1.0)
SMALL = Table(
    environments={"base": Environment(make="make base", python="bin/python")},
    pieces={
        "rest": Piece(tests=("tests",), environment="base", runs=(RUN,)),
        "ops": Piece(tests=("tests/ops",), environment="base", runs=(RUN, None)),
        "one": Piece(tests=("tests/ops/test_one.py",), environment="base"),
    },
)


def test_every_test_file_is_in_one_piece() -> None:
    files = [file for name in TABLE.pieces for file in TABLE.files(name)]
    assert sorted(files) == slow_pieces.files_of_tests()
    assert Path(__file__).relative_to(slow_pieces.ROOT).as_posix() in TABLE.files("rest")


@pytest.mark.parametrize("name", TABLE.pieces)
def test_a_piece_has_files_that_exist_and_an_environment(name: str) -> None:
    piece = TABLE.pieces[name]
    assert TABLE.files(name)
    assert all((slow_pieces.ROOT / path).exists() for path in piece.tests)
    assert piece.environment in TABLE.environments
    assert piece.runs


def test_no_path_is_that_of_two_pieces() -> None:
    paths = [path for piece in TABLE.pieces.values() for path in piece.tests]
    assert len(paths) == len(set(paths))


def test_environments_are_made_by_scripts_of_the_tree() -> None:
    for environment in TABLE.environments.values():
        program, *arguments = environment.make.split()
        assert program == "make" or (slow_pieces.ROOT / arguments[0]).exists()


def test_the_file_is_as_the_command_writes_it() -> None:
    assert slow_pieces.TABLE.read_text(encoding="utf-8") == TABLE.text()


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("tests/test_x.py", "rest"),
        ("tests/opsx/test_x.py", "rest"),
        ("tests/ops/test_x.py", "ops"),
        ("tests/ops/test_one.py", "one"),
        ("src/x.py", None),
    ],
)
def test_the_longest_path_that_leads_to_a_file_owns_it(file: str, owner: str | None) -> None:
    assert SMALL.owner(file) == owner


def test_a_run_is_recorded_in_its_shard(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(SMALL.recorded("ops", 1, RUN).text(), encoding="utf-8")
    found = Table.read(path)
    assert found.pieces["ops"].runs == (RUN, RUN)
    assert found.pieces["one"] == SMALL.pieces["one"]
    assert found.environments == SMALL.environments


def test_counts_are_those_of_the_report() -> None:
    suite = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="2"/></testsuites>'
    assert slow_pieces.counts(suite) == {"passed": 4, "skipped": 2, "failed": 3}


LOG = [f"{number:04x} 2026-{4 - number // 100:02d}-01" for number in range(slow_pieces.FRESH)]
"""Commits of April and March, from the last backwards."""


@pytest.mark.parametrize(
    ("changes", "late"),
    [
        ({"commit": "0001"}, False),
        ({"commit": "0001+"}, False),
        ({"date": "2026-03-02"}, False),  # its commit was rebased away
        ({"date": "2026-02"}, True),
        ({"commit": "0001", "failed": 1}, True),
    ],
)
def test_a_piece_is_due_that_failed_or_ran_before_the_last_200_commits(
    changes: dict[str, str], late: bool
) -> None:
    table = SMALL.recorded("rest", 0, dataclasses.replace(RUN, **changes))
    assert (("rest", 0) in slow_pieces.due(table, LOG)) == late
    assert ("one", 0) in slow_pieces.due(table, LOG)


def test_a_short_history_makes_no_run_late() -> None:
    assert slow_pieces.due(SMALL, LOG[:3]) == [("ops", 1), ("one", 0)]


def test_without_git_nothing_is_due(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slow_pieces.due_now(SMALL) is None
    assert slow_pieces.commit() == "no repository"


def test_a_piece_of_which_all_shards_are_named_is_named_once() -> None:
    assert slow_pieces.titles(SMALL, [("ops", 0), ("ops", 1), ("one", 0)]) == ["ops", "one"]
    assert slow_pieces.titles(SMALL, [("ops", 1), ("one", 0)]) == ["ops/2", "one"]


def test_names_on_the_command_line_choose_pieces_and_shards() -> None:
    assert slow_pieces.chosen(SMALL, ["ops/2", "rest", "ops"]) == [("ops", 1), ("rest", 0), ("ops", 0)]
    assert len(slow_pieces.chosen(SMALL, ["all"])) == 4
    with pytest.raises(SystemExit, match="there is no piece 'opz'"):
        slow_pieces.chosen(SMALL, ["opz"])


def test_the_command_names_files_marks_and_shard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        slow_pieces, "files_of_tests", lambda: ["tests/ops/test_one.py", "tests/ops/test_two.py"]
    )
    words = slow_pieces.command(SMALL, "ops", 1, tmp_path / "report.xml", 3)
    assert words[0].endswith("/bin/python")
    assert {"slow or crossed or rotating", "-n", "3", "--shard=2/2"} <= set(words)
    assert words[-1:] == ["tests/ops/test_two.py"]


def test_shards_hold_every_chosen_test_once(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["tests.slow_plugin"]')
    pytester.makepyfile(
        "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(7))\ndef test_slow(n): ...\n"
        "def test_quick(): ...\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n slow: s\n")
    ran: list[str] = []
    for number in (1, 2, 3):
        passed, _, _ = pytester.inline_run("-m", "slow", f"--shard={number}/3").listoutcomes()
        ran += [report.nodeid.partition("::")[2] for report in passed]
    assert sorted(ran) == [f"test_slow[{n}]" for n in range(7)]


pytest_plugins = ["pytester"]
