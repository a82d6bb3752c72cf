"""Killed behind any byte that it writes: the disk as of that byte, and the same command again."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import pytest
from tests.faults.calls import Call
from tests.faults.replay import Disk, State, make, on_disk, until_byte
from tests.faults.stage import Stage

pytestmark = pytest.mark.rotating


def survived(stage: Stage, calls: Sequence[Call], start: State, counts: Iterable[int]) -> int:
    """Put the disk to how it was when so many bytes were written, and run the same command."""
    for count in counts:
        disk = Disk(start)
        disk.play(until_byte(calls, count))
        make(disk.now(), stage.work)
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_resumed()
    return stage.tally.resumes


def recorded(stage: Stage) -> tuple[list[Call], State, int]:
    """Return the calls of an undisturbed run, what was there before it, and the bytes that it writes."""
    start = on_disk(stage.work)
    ran, layer = stage.run()
    assert ran.status == 0, ran.err
    return layer.calls, start, sum(len(call.data) for call in layer.calls)


def test_a_run_killed_behind_some_bytes_resumes(stage: Stage) -> None:
    calls, start, total = recorded(stage)
    counts = range(0, total, total // 30)
    assert survived(stage, calls, start, counts) == len(counts)


@pytest.mark.slow
def test_a_run_killed_behind_every_fifth_byte_and_around_every_write_resumes(stage: Stage) -> None:
    calls, start, total = recorded(stage)
    ends = accumulate(len(call.data) for call in calls)
    around = {end + step for end in ends for step in (-1, 0, 1) if 0 <= end + step < total}
    counts = sorted(around | set(range(0, total, 5)))
    assert survived(stage, calls, start, counts) == len(counts)
