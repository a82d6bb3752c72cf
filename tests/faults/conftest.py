"""What the fault suites share: a server of children, a stage, and the counts at the end."""

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.children import Children
from tests.faults.children import children as start_server
from tests.faults.stage import Stage, Tally

MEMORY_DISK = Path("/dev/shm")


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """A folder on a disk in memory where there is one: making writes durable takes no time there."""
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="session")
def children(disk: Path) -> Iterator[Children]:
    """The server of children."""
    (disk / "logs").mkdir()
    with start_server(disk / "logs") as server:
        yield server


@pytest.fixture(scope="session")
def built(disk: Path) -> Stage:
    """The stage with its golden run."""
    return Stage.built(disk / "stage")


@pytest.fixture
def stage(built: Stage, record_property: Any) -> Iterator[Stage]:
    """A clear stage with counts of its own."""
    fresh = copy.copy(built)
    fresh.tally = Tally()
    fresh.clear()
    yield fresh
    if fresh.tally.points:
        record_property("faults", str(fresh.tally))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what each suite tried."""
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {value}"
        for report in terminalreporter.stats.get("", [])
        if report.when == "teardown"
        for name, value in report.user_properties
        if name == "faults"
    ]
    if lines:
        terminalreporter.section("faults")
        for line in lines:
            terminalreporter.write_line(line)
