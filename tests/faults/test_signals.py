"""Signals at any moment: a clean stop, and the same command resumes."""

import json
import os
import random
import signal
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.faults.calls import Fault
from tests.faults.children import Children
from tests.faults.stage import Stage

pytestmark = pytest.mark.rotating

CAUGHT = {signal.SIGINT: 130, signal.SIGTERM: 143}
DEADLY = (signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
# Python leaves these to the call that meets the condition, which then fails.
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


def signaled(
    children: Children, stage: Stage, at: int, number: signal.Signals, *, plant: str | None = None
) -> None:
    """Send one signal in front of a call, check how the run ends, and run the same command."""
    stage.clear()
    pid = children.start(stage.job(fault=Fault(at=at, kind="signal", code=number), plant=plant))
    children.go(pid)
    if number == signal.SIGSTOP:
        children.wait_for_stop(pid)
        os.kill(pid, signal.SIGCONT)
    ended = children.wait(pid)
    stage.tally.points += 1
    stage.tally.faults += 1
    if number in DEADLY:
        assert ended.signal == number
    elif number in CAUGHT and ended.status != 0:  # else it came when all was done
        assert ended.status == CAUGHT[number], ended
        assert ended.err.startswith("error: interrupted")
        assert ended.err.count("\n") == 1
        assert ended.out == "" or json.loads(ended.out).keys() == {"error"}  # of a command with --json
    else:
        assert (ended.status, ended.err) == (0, "")
        if number not in CAUGHT:
            stage.check_complete()
            return
    stage.check_resumed()


def moments(stage: Stage, count: int, seed: int) -> list[tuple[int, signal.Signals]]:
    """Return random calls, each with a signal."""
    ran, layer = stage.run()
    assert ran.status == 0, ran.err
    rng = random.Random(seed)
    numbers = (*CAUGHT, *DEADLY, *IGNORED, signal.SIGSTOP)
    return [(rng.choice(layer.calls).number, numbers[i % len(numbers)]) for i in range(count)]


def test_a_run_that_gets_a_signal_ends_cleanly_and_resumes(children: Children, stage: Stage) -> None:
    for at, number in moments(stage, 16, seed=4):
        signaled(children, stage, at, number)
    assert stage.tally.points == 16


@pytest.mark.slow
def test_a_run_that_gets_any_signal_at_any_moment_ends_cleanly_and_resumes(
    children: Children, stage: Stage
) -> None:
    for at, number in moments(stage, 500, seed=5):
        signaled(children, stage, at, number)
    assert stage.tally.points == 500


def interrupted_twice(children: Children, stage: Stage, moments: Iterable[int]) -> None:
    """Interrupt runs so many calls from the middle, and again at the next write; run the same command."""
    ran, layer = stage.run()
    assert ran.status == 0
    middle = layer.calls[len(layer.calls) // 2].number
    fault = Fault(at=0, kind="signal", code=signal.SIGINT, lasting=True, names=("pwrite", "fdatasync"))
    for moment in moments:
        stage.clear()
        ended = children.run(stage.job(fault=replace(fault, at=middle + moment)))
        assert ended.signal == signal.SIGINT or ended.status in (0, 130), ended
        stage.tally.points += 1
        stage.check_resumed()


def test_a_second_interrupt_ends_the_run_at_once_and_it_resumes(children: Children, stage: Stage) -> None:
    interrupted_twice(children, stage, (-20, 0, 20))
    assert stage.tally.resumes == 3


def test_signals_that_are_left_to_python_are_found_out(children: Children, stage: Stage) -> None:
    with pytest.raises(AssertionError):
        signaled(children, stage, 60, signal.SIGTERM, plant="uninterruptible")
