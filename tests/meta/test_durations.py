"""The quick suite stays quick: no item and no file takes long, but for named exceptions."""

import re
from pathlib import Path

import pytest
from tests.durations import Duration, file_of, recorded, renewed, rows_of, write
from tests.our_files import files_below
from tests.selection import PARTS

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
ITEM, FILE, EXCEPTIONS, SUITE = 3.0, 30.0, 60.0, 400.0
"""Most seconds of an item, of a file, of all exceptions together, and of the suite, for two workers."""
COMPILES = {
    "tests/test_warmup.py::test_the_first_compilation_is_said_once_and_a_cached_kernel_is_silent": "a kernel"
}
"""Items that compile in each run, with what."""
LONG = {
    "tests/checkpoint/model/test_models_on_devices.py": "whichever item is first imports transformers",
    "tests/architectures/test_loaded_layers.py": "whichever item is first imports transformers",
    "tests/checkpoint/cluster/test_executor.py": "starts Ray and ends its workers, whichever item is first",
    "tests/docs/test_site.py::test_every_page_of_the_repository_is_built_and_in_the_navigation": (
        "builds the site"
    ),
    "tests/cli/test_processes.py::"
    "test_an_interrupted_quantize_publishes_nothing_and_resumes[2-130-interrupted]": "waits to interrupt",
    "tests/stores/test_command.py::test_a_command_from_store_to_store_gives_the_bytes_of_directories": (
        "starts the server of S3"
    ),
    "tests/cli/test_processes.py::test_commands_that_run_the_model_find_what_transformers_needs": (
        "a process imports transformers"
    ),
    "tests/hostile/test_limits.py::test_the_whole_corpus_takes_little_memory_and_processor_time": (
        "a process under limits reads all hostile files"
    ),
    "tests/hostile/test_fuzz_commands.py::"
    "test_commands_finish_or_refuse_in_a_line_whatever_a_file_holds": "two files of each command",
    "tests/checkpoint/run/test_many_tensors.py::test_a_run_keeps_little_of_each_weight": "traces memory",
    "tests/checkpoint/run/test_memory.py::"
    "test_memory_stays_below_the_limit[larger-than-the-limit-w4a16]": "a process under a limit reads 400 MiB",
    "tests/stores/test_command.py::test_a_killed_command_resumes_in_the_store": "waits for work to kill",
    "tests/faults/test_conversions.py::test_a_conversion_killed_at_some_of_its_calls_resumes[gptq]": (
        "starts the processes that the others of the file use"
    ),
    "tests/stats/test_processes.py::test_two_processes_learn_what_one_learns_from_the_same_data": (
        "starts the server of processes"
    ),
    "tests/training/test_survival.py::test_two_processes_learn_what_one_learns_from_the_same_data": (
        "starts the server of processes"
    ),
}
"""Items, or all items of a file, that may take longer, with the reason: on an idle machine some take less."""


def too_long(rows: list[Duration]) -> dict[str, float]:
    """Items and files past their limits."""
    return {row.name: row.seconds for row in rows if row.seconds > (ITEM if "::" in row.name else FILE)}


def test_no_item_and_no_file_takes_long() -> None:
    rows, excused = recorded(), COMPILES.keys() | LONG.keys()
    long = too_long(list(rows.values()))
    assert {name: taken for name, taken in long.items() if not {name, file_of(name)} & excused} == {}
    assert [name for name in excused if name not in rows] == [], "an exception that is not needed"
    excepted = (row for row in rows.values() if "::" in row.name and row.seconds > ITEM)
    assert sum(row.seconds for row in excepted if {row.name, file_of(row.name)} & LONG.keys()) < EXCEPTIONS


def test_the_suite_takes_minutes() -> None:
    files = {row.name: row.seconds for row in recorded().values() if "::" not in row.name}
    rotates = re.compile(r"^pytestmark = .*\bpytest\.mark\.rotating\b", re.MULTILINE)
    rotating = {name for name in files if rotates.search((ROOT / name).read_text(encoding="utf-8"))}
    assert rotating
    assert sum(taken / (PARTS if name in rotating else 1) for name, taken in files.items()) < SUITE


def test_the_table_is_of_this_tree() -> None:
    files = {name for name in recorded() if "::" not in name}
    assert [name for name in files if not (ROOT / name).is_file()] == []
    below = (path for path in files_below(ROOT / "tests") if path.match("test_*.py"))
    present = {path.relative_to(ROOT).as_posix() for path in below}
    assert len(files & present) > 0.9 * len(present), "record durations anew: `make durations`"


def test_files_and_long_items_are_written_and_read_again(tmp_path: Path) -> None:
    rows = rows_of({"tests/a.py::test_x[1]": 0.4, "tests/a.py::test_x[2]": 3.5, "tests/b.py::test_y": 31.0})
    assert rows == [
        Duration("tests/a.py", 3.9, 2),
        Duration("tests/a.py::test_x[2]", 3.5, 1),
        Duration("tests/b.py", 31.0, 1),
        Duration("tests/b.py::test_y", 31.0, 1),
    ]
    write(rows, tmp_path / "table.csv")
    assert list(recorded(tmp_path / "table.csv").values()) == rows
    assert too_long(rows) == {"tests/a.py::test_x[2]": 3.5, "tests/b.py": 31.0, "tests/b.py::test_y": 31.0}


def test_a_run_of_some_files_renews_their_rows() -> None:
    here = "tests/meta/test_durations.py"
    other = Duration("tests/conftest.py", 2.0, 3)
    known = {row.name: row for row in [Duration("tests/gone.py", 1.0, 1), Duration(here, 1.0, 2), other]}
    slower, faster = Duration(here, 9.0, 1), Duration(here, 0.5, 1)
    assert renewed(known, [slower], again=False) == [other, slower]
    assert renewed(known, [slower], again=True) == [other, known[here]]
    assert renewed(known, [faster], again=True) == [other, faster]


def test_a_run_that_is_asked_to_records_what_it_ran(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests import durations

    monkeypatch.setattr(durations, "write", lambda rows: write(rows, tmp_path / "table.csv"))
    monkeypatch.setattr(durations, "TABLE", tmp_path / "none.csv")
    pytester.makepyfile("def test_a(): pass\ndef test_b(): pass\n")
    done = pytester.inline_run("--record-durations", plugins=[durations])
    assert done.ret == 0
    (row,) = recorded(tmp_path / "table.csv").values()
    assert row.items == 2
