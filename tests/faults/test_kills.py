"""Kill -9 at each call that changes a file, and in the middle of each write; then the same command again."""

import json
import random
import signal

import pytest
from tests.faults.calls import WRITES, Fault
from tests.faults.children import Children
from tests.faults.stage import INDEX, JOURNAL, Stage

pytestmark = pytest.mark.rotating


def killed(children: Children, stage: Stage, fault: Fault, plant: str | None = None) -> None:
    """Kill a run, and check what stays and what the same command makes of it."""
    stage.clear()
    ended = children.run(stage.job(fault=fault, plant=plant))
    assert ended.signal == signal.SIGKILL, (fault, ended)
    stage.tally.points += 1
    stage.tally.faults += 1
    stage.check_resumed()


def faults(stage: Stage) -> list[Fault]:
    """Return every point at which a run can be killed."""
    ran, layer = stage.run()
    assert ran.status == 0, ran.err
    kills = [Fault(at=call.number, kind="kill") for call in layer.calls]
    tears = [Fault(at=call.number, kind="tear") for call in layer.calls if call.name in WRITES]
    return kills + tears


def test_a_run_killed_at_some_of_its_calls_resumes(children: Children, stage: Stage) -> None:
    some = faults(stage)[::41]
    for fault in some:
        killed(children, stage, fault)
    assert stage.tally.resumes == len(some)


@pytest.mark.slow
def test_a_run_killed_at_any_of_its_calls_resumes(children: Children, stage: Stage) -> None:
    every = faults(stage)
    for fault in every:
        killed(children, stage, fault)
    assert stage.tally.resumes == len(every)


def test_an_index_that_is_named_first_is_found_out(children: Children, stage: Stage) -> None:
    ran, layer = stage.run(plant="index first")
    assert ran.status == 0
    named = next(call.number for call in layer.calls if call.to == f"out/{INDEX}")
    with pytest.raises(AssertionError, match="I4"):
        killed(children, stage, Fault(at=named + 1, kind="kill"), plant="index first")


def again(children: Children, stage: Stage, first: Fault, second: Fault) -> None:
    """Kill a run, kill the one that resumes it, and resume that."""
    stage.clear()
    assert children.run(stage.job(fault=first)).signal == signal.SIGKILL
    stage.check()
    ended = children.run(stage.job(fault=second))
    stage.tally.points += 1
    stage.tally.faults += 1 + (ended.signal == signal.SIGKILL)
    stage.check_resumed()


def pairs(stage: Stage, count: int) -> list[tuple[Fault, Fault]]:
    """Return random pairs of kills."""
    rng, every = random.Random(10), faults(stage)
    return [(rng.choice(every), rng.choice(every)) for _ in range(count)]


def test_a_run_killed_twice_resumes(children: Children, stage: Stage) -> None:
    for first, second in pairs(stage, 10):
        again(children, stage, first, second)
    assert stage.tally.resumes == 10


@pytest.mark.slow
def test_a_run_killed_twice_at_many_pairs_of_calls_resumes(children: Children, stage: Stage) -> None:
    for first, second in pairs(stage, 300):
        again(children, stage, first, second)
    assert stage.tally.resumes == 300


def test_no_unit_in_the_journal_is_done_again(children: Children, stage: Stage) -> None:
    ran, layer = stage.run()
    assert ran.status == 0
    total = sum(len(call.data) for call in layer.calls if ".safetensors.partial" in call.path)
    commits = [c for c in layer.calls if c.name == "fdatasync" and c.path.endswith(JOURNAL)]
    assert len(commits) > 5
    for commit in commits[1:]:
        stage.clear()
        children.run(stage.job(fault=Fault(at=commit.number + 1, kind="kill")))
        records = [json.loads(line[18:]) for line in (stage.out / JOURNAL).read_bytes().splitlines()]
        units = {record["unit"] for record in records if "unit" in record}
        resumed, again = stage.run()
        assert resumed.status == 0, resumed.err
        stage.check_complete()
        written = sum(len(call.data) for call in again.calls if ".safetensors.partial" in call.path)
        done = [c for c in again.calls if c.path.endswith(JOURNAL) and c.name == "pwrite"]
        redone = {
            record["unit"]
            for call in done
            for line in call.data.splitlines()
            if "unit" in (record := json.loads(line[18:]))
        }
        assert not units & redone
        assert written < total or not units
        stage.tally.points += 1
