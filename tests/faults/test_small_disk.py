"""A disk too small by a byte, a page or a half: said before anything is written; and a disk that fills up."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.stage import NEIGHBOR, Stage

pytestmark = pytest.mark.rotating

PAGE = 4096


@pytest.fixture
def small(stage: Stage, tmp_path: Path) -> Iterator[Stage]:
    """A stage on a disk of its own, in memory."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mounted)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    stage.work = mounted / "work"
    stage.clear()
    try:
        yield stage
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def resize(stage: Stage, pages: int) -> None:
    """Give the disk so many pages."""
    options = f"remount,size={pages * PAGE}"
    subprocess.run(["mount", "-o", options, str(stage.work.parent)], check=True)


def pages_needed(stage: Stage) -> tuple[int, int]:
    """Return the pages in use before a run, and those of its output."""
    found = os.statvfs(stage.work)
    before = found.f_blocks - found.f_bfree
    ran, _ = stage.run()
    assert ran.status == 0, ran.err
    found = os.statvfs(stage.work)
    return before, found.f_blocks - found.f_bfree - before


def too_small(stage: Stage, pages: int, *, plant: str | None = None) -> str:
    """Run on a disk of so many pages, check what is said and left, and then run on a larger one."""
    resize(stage, 4 * PAGE)
    stage.clear()
    resize(stage, pages)
    ran, _ = stage.run(plant=plant)
    stage.check_failed(ran)
    stage.tally.points += 1
    stage.tally.faults += 1
    resize(stage, 4 * PAGE)
    stage.check_resumed()
    return ran.err


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(small: Stage) -> None:
    before, output = pages_needed(small)
    for pages in {before + output - 1, before + output // 2, before + 1}:
        error = too_small(small, pages)
        assert " free" in error
        assert "are needed" in error


def test_a_disk_that_fills_up_all_the_same_is_an_error_and_room_resumes(small: Stage) -> None:
    before, output = pages_needed(small)
    for pages in range(before + 1, before + output):
        assert "No space left on device" in too_small(small, pages, plant="no preflight")
    assert small.tally.resumes == output - 1  # and none of them was refused beforehand
    assert (small.work / NEIGHBOR).exists()
