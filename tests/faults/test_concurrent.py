"""Several processes on one output: one proceeds, the others say so; no reader sees a part of a file."""

import json
import os
import random
import signal
from dataclasses import replace

import pytest
from safetensors import safe_open
from tests.faults.calls import Fault
from tests.faults.children import Children, Ended
from tests.faults.stage import INDEX, Stage

pytestmark = pytest.mark.rotating

REFUSALS = ("is being written by another run", "choose an empty directory, or add --overwrite")


def together(
    children: Children, stage: Stage, count: int, seed: int, *, plant: str | None = None
) -> list[Ended]:
    """Start processes together, each at its own pace, and read the output all the time until they end."""
    stage.clear()
    pids = [children.start(stage.job(plant=plant, pace=seed * 100 + n)) for n in range(count)]
    for pid in pids:
        children.go(pid)
    while any(children.is_running(pid) for pid in pids):
        read_output(stage)
    stage.tally.points += 1
    return [children.wait(pid) for pid in pids]


def read_output(stage: Stage) -> None:
    """Open what a loader would: what has its final name is whole, and an index points at what is there."""
    index = stage.out / INDEX
    if index.exists():
        for name in set(json.loads(index.read_text())["weight_map"].values()):
            with safe_open(stage.out / name, "pt") as opened:
                assert list(opened.keys())
    for path in stage.out.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            assert list(opened.keys())


def one_proceeds(stage: Stage, ended: list[Ended]) -> None:
    """Assert that one process wrote everything and the others said why not, or found it complete."""
    assert 0 in [e.status for e in ended], [e.err for e in ended]
    for loser in ended:
        if loser.status != 0:
            assert loser.status == 1
            assert any(text in loser.err for text in REFUSALS), loser.err
            assert loser.err.count("\n") == 1
    stage.tally.faults += len(ended) - 1
    stage.check_complete()


def test_of_processes_started_together_one_proceeds(children: Children, stage: Stage) -> None:
    for seed in range(2):
        one_proceeds(stage, together(children, stage, 2 + seed, seed))
    assert stage.tally.points == 2


@pytest.mark.slow
def test_of_many_processes_started_together_one_proceeds(children: Children, stage: Stage) -> None:
    rng = random.Random(6)
    for seed in range(100):
        one_proceeds(stage, together(children, stage, rng.randint(2, 8), seed))
    assert stage.tally.points == 100


def test_without_locks_of_the_kernel_one_proceeds_all_the_same(children: Children, stage: Stage) -> None:
    for seed in range(2):
        one_proceeds(stage, together(children, stage, 3, seed, plant="no flock"))
    assert stage.tally.points == 2


def overtaken(children: Children, stage: Stage, plant: str | None = None) -> list[Ended]:
    """Stop a process halfway, run a second one meanwhile, and let the first continue."""
    stage.clear()
    first = children.start(stage.job(fault=Fault(at=60, kind="signal", code=signal.SIGSTOP), plant=plant))
    children.go(first)
    children.wait_for_stop(first)
    second = children.run(stage.job(plant=plant))
    os.kill(first, signal.SIGCONT)
    stage.tally.points += 1
    return [children.wait(first), second]


def test_a_process_that_stands_still_keeps_its_lock(children: Children, stage: Stage) -> None:
    ended = overtaken(children, stage)
    assert ended[0].status == 0
    one_proceeds(stage, ended)


def test_without_the_lock_a_second_process_would_proceed(children: Children, stage: Stage) -> None:
    ended = overtaken(children, stage, plant="no lock")
    with pytest.raises(AssertionError):
        one_proceeds(stage, ended)


def test_the_lock_of_a_killed_process_is_free(children: Children, stage: Stage) -> None:
    ended = children.run(stage.job(fault=Fault(at=60, kind="kill")))
    assert ended.signal == signal.SIGKILL
    stage.tally.points += 1
    stage.tally.faults += 1
    stage.check_resumed()


def test_a_lock_that_outlives_its_process_is_broken_on_request_only(children: Children, stage: Stage) -> None:
    killed = children.run(stage.job(fault=Fault(at=60, kind="kill"), plant="no flock"))
    assert killed.signal == signal.SIGKILL
    refused = children.run(stage.job(plant="no flock"))
    assert refused.status == 1
    assert "--break-lock" in refused.err
    job = stage.job(plant="no flock")
    broken = children.run(replace(job, arguments=(*job.arguments, "--break-lock")))
    assert (broken.status, broken.err) == (0, "")
    stage.check_complete()
