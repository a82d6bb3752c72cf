"""The power goes: what was not made durable may be lost, in any combination; then the same command again."""

import errno
import random
from collections.abc import Iterator, Sequence

import pytest
from tests.faults.calls import Call, Fault, Layer
from tests.faults.replay import Disk, State, fingerprint, make, on_disk
from tests.faults.stage import LOCK, Stage

pytestmark = pytest.mark.rotating


def disk_states(
    calls: Sequence[Call], start: State, *, mixes: int, seed: int = 0
) -> Iterator[tuple[int, State]]:
    """Yield each state that power loss can leave, once, with the number of calls before it."""
    rng = random.Random(seed)
    disk, known = Disk(start), set()
    for number, call in enumerate(calls, start=1):
        disk.play([call])
        for state in disk.after_power_loss(rng, mixes=mixes):
            name = fingerprint(state)
            if name not in known:
                known.add(name)
                yield number, state


def recorded(stage: Stage, plant: str | None = None) -> tuple[list[Call], State]:
    """Return the calls of an undisturbed run, and what was on disk before it."""
    start = on_disk(stage.work)
    ran, layer = stage.run(plant=plant)
    assert ran.status == 0, ran.err
    return layer.calls, start


def survived(stage: Stage, states: Sequence[tuple[int, State]]) -> int:
    """Check each state, and what the same command makes of it."""
    for _, state in states:
        make(state, stage.work)
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_resumed()
    return stage.tally.resumes


def test_the_disk_in_memory_holds_what_the_real_one_does(stage: Stage) -> None:
    calls, start = recorded(stage)
    disk = Disk(start)
    disk.play(calls)
    assert disk.now() == on_disk(stage.work)


def test_nothing_that_was_reported_done_can_be_lost(stage: Stage) -> None:
    calls, start = recorded(stage)
    disk = Disk(start)
    disk.play(calls)
    make(disk.state([], {}), stage.work)
    (stage.out / LOCK).unlink(missing_ok=True)  # which nobody holds
    stage.check_complete()
    assert stage.tally.compared == stage.golden_bytes


def checked(stage: Stage, plant: str | None = None) -> None:
    """Check each state that power loss can leave of a run."""
    calls, start = recorded(stage, plant)
    for _, state in disk_states(calls, start, mixes=1):
        make(state, stage.work)
        stage.tally.points += 1
        stage.check()


def test_no_state_after_power_loss_shows_a_loader_half_a_checkpoint(stage: Stage) -> None:
    checked(stage)
    assert stage.tally.points > 100


@pytest.mark.parametrize("plant", ["no sync", "no directory sync", "index first"])
def test_what_is_not_made_durable_in_order_is_found_out(stage: Stage, plant: str) -> None:
    with pytest.raises(AssertionError, match=r"I3|I4"):
        checked(stage, plant)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_bytes_that_could_not_be_made_durable_are_written_again(stage: Stage, step: int) -> None:
    """After a failure of any call that makes them durable, or (quick) of one in four."""
    calls, start = recorded(stage)
    syncs = [call for call in calls if call.name in ("fsync", "fdatasync")]
    assert len(syncs) > 10
    for sync in syncs[::step]:
        stage.clear()
        layer = Layer(root=stage.work, fault=Fault(at=sync.number, kind="error", code=errno.EIO))
        failed = stage.run_under(layer)
        layer.fault = None
        assert failed.status == 1
        stage.check()
        ran = stage.run_under(layer)
        disk = Disk(start)
        disk.play(layer.calls)
        make(disk.state([], {}), stage.work)
        assert stage.is_complete, ran.err
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_resumed()
    assert stage.tally.points == len(syncs[::step])


def test_a_run_resumes_after_some_power_losses(stage: Stage) -> None:
    calls, start = recorded(stage)
    states = list(disk_states(calls, start, mixes=1))
    assert survived(stage, random.Random(1).sample(states, 12)) == 12


@pytest.mark.slow
def test_a_run_resumes_after_every_power_loss(stage: Stage) -> None:
    calls, start = recorded(stage)
    states = list(disk_states(calls, start, mixes=20))
    assert survived(stage, states) == len(states) > 1000
