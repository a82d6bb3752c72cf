"""Seconds that tests take: recorded by one command, and used to start with the longest files.

    pytest --record-durations            # what `make durations` runs, once kernels are compiled
    pytest --record-durations FILES      # measures files again that a busy machine made slow

writes ``durations.csv``: a row for each file of tests, and one for each item of LISTED seconds and more.
Seconds are those of a worker, with fixtures; an item that is the first to need a shared fixture pays for it.
"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("durations.csv")
LISTED = 0.5
_MOST = 0.5
"""Share of the files in the table from which a run is one of the suite."""


class Duration(NamedTuple):
    """Seconds of a file of tests or of an item, and its number of items."""

    name: str
    seconds: float
    items: int


def file_of(nodeid: str) -> str:
    """File of an item."""
    return nodeid.partition("::")[0]


def recorded(table: Path = TABLE) -> dict[str, Duration]:
    """Rows of the table by name."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = [
            Duration(row["name"], float(row["seconds"]), int(row["items"])) for row in csv.DictReader(file)
        ]
    return {row.name: row for row in rows}


def rows_of(seconds: dict[str, float]) -> list[Duration]:
    """Rows for the seconds of each item: files and long items, by name."""
    files: dict[str, list[float]] = defaultdict(list)
    for nodeid, taken in seconds.items():
        files[file_of(nodeid)].append(taken)
    rows = [Duration(name, sum(each), len(each)) for name, each in files.items()]
    rows += [Duration(nodeid, taken, 1) for nodeid, taken in seconds.items() if taken >= LISTED]
    return sorted(rows)


def renewed(known: dict[str, Duration], rows: list[Duration], *, again: bool) -> list[Duration]:
    """Rows of a run, and those of files that are still there and did not run.

    again: keep the smaller of the seconds of two runs; what else a machine does only adds to them.
    """
    ran = {file_of(row.name) for row in rows}
    if again:
        rows = [min(row, known.get(row.name, row), key=lambda one: one.seconds) for row in rows]
    kept = (row for row in known.values() if file_of(row.name) not in ran)
    return sorted([*rows, *(row for row in kept if (ROOT / file_of(row.name)).is_file())])


def write(rows: list[Duration], table: Path = TABLE) -> None:
    """Write the table."""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Duration._fields)
        writer.writerows((row.name, f"{row.seconds:.1f}", row.items) for row in rows)


class Recorder:
    """Sums the seconds of each item over its phases, and writes the table when all have run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase."""
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the table, unless the run was cut short; a run of some files renews their rows."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            known, rows = recorded() if TABLE.exists() else {}, rows_of(self.seconds)
            some = len({file_of(row.name) for row in rows}) < _MOST * len({*map(file_of, known)})
            write(renewed(known, rows, again=some))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    parser.addoption(
        "--record-durations", action="store_true", help="write the seconds of tests to tests/durations.csv"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that hears of all workers."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that what comes last is short whichever worker takes it."""
    known = recorded() if TABLE.exists() else {}
    new = Duration("", 0.0, 0)
    items.sort(key=lambda item: -known.get(file_of(item.nodeid), new).seconds)
