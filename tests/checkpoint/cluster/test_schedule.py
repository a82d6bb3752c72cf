"""The order in which a cluster is handed its work: everything once, nothing before what it needs."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.tiny import write_tiny

from zeropoint.checkpoint.cluster.ray import Schedule, steps
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.directory import Partials
from zeropoint.checkpoint.run.executor import Job
from zeropoint.checkpoint.run.unit_results import ScanResult
from zeropoint.checkpoint.run.units import Groups, Units


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """All the work of a plan whose sets share a scale across shards."""
    folder: Path = tmp_path_factory.mktemp("schedule")
    plan = make_plan(open_source(write_tiny(folder / "model")), "nvfp4a16", limits=Limits(workers=1))
    found = Units(plan)
    partials = Partials(path=folder, needed=0)
    return Job(plan=plan, partials=partials, todo=found, groups=Groups(found), scanned={})


def remaining(job: Job, skipped: set[int], scanned: set[int]) -> Job:
    """Return a job of which some units were done, and some scanned."""
    known = {number: ScanResult(number=number, low=-1.0, high=1.0) for number in scanned}
    todo = tuple(unit for unit in job.todo if unit.number not in skipped)
    return Job(plan=job.plan, partials=job.partials, todo=todo, groups=job.groups, scanned=known)


NUMBERS = st.sets(st.integers(0, 13))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(skipped=NUMBERS, scanned=NUMBERS, cpus=st.integers(1, 9))
def test_every_unit_is_handed_out_once_and_never_before_its_set_is_scanned(
    job: Job, skipped: set[int], scanned: set[int], cpus: int
) -> None:
    left = remaining(job, skipped, scanned)
    if not left.todo:
        return
    schedule = Schedule(left, cpus=cpus)
    known, done, scans = dict(left.scanned), [], []
    waiting: list[int] = []
    while not schedule.empty:
        batch = schedule.next()
        if batch is None:
            assert waiting, "no scan is under way, and yet nothing can be handed out"
            number = waiting.pop(0)
            known[number] = ScanResult(number=number, low=-1.0, high=float(number))
            schedule.add(known[number])
        elif batch.scans:
            waiting += batch.numbers
            scans += batch.numbers
        else:
            done += batch.numbers
            for group, (low, high) in batch.extremes.items():
                members = [known[member.number] for member in left.groups[group]]
                assert (low, high) == (min(m.low for m in members), max(m.high for m in members))
    assert done == [unit.number for unit in left.todo]
    needed = {m.number for unit in left.todo if unit.group is not None for m in left.groups[unit.group]}
    assert sorted(scans) == sorted(needed - scanned)


def test_with_more_ahead_more_is_scanned_before_the_first_unit_that_needs_it(job: Job) -> None:
    def scanned_first(ahead: int) -> int:
        order = [scan for scan, unit in steps(job, ahead=ahead) if scan or unit.group is not None]
        return order.index(False)

    assert scanned_first(0) < scanned_first(1 << 13) < scanned_first(1 << 30)
