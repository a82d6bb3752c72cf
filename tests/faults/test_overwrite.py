"""A checkpoint is written over another one: at any moment a loader sees the old one, the new one, or none."""

import random
import signal
from dataclasses import replace

import pytest
from tests.faults.calls import Fault
from tests.faults.children import Children
from tests.faults.replay import State, make, on_disk
from tests.faults.stage import Stage, digests
from tests.faults.test_power import checked, disk_states, recorded, survived

pytestmark = pytest.mark.rotating


@pytest.fixture
def standing(stage: Stage) -> tuple[Stage, State]:
    """A stage on which another checkpoint stands already, and what that is on disk."""
    ran, _ = replace(stage, scheme="int8:channel").run()
    assert ran.status == 0, ran.err
    stage.old = digests(stage.out)
    assert {name for name in stage.old if stage.old[name] == stage.golden[name]} == {
        "1_Pooling/config.json",
        "tokenizer.json",
    }
    return stage, on_disk(stage.work)


def killed(children: Children, stage: Stage, before: State, count: int) -> None:
    """Kill at so many calls, evenly spread, and run the same command again."""
    ran, layer = stage.run()
    assert ran.status == 0, ran.err
    stage.check_complete()
    for call in layer.calls[:: max(1, len(layer.calls) // count)]:
        make(before, stage.work)
        ended = children.run(stage.job(fault=Fault(at=call.number, kind="kill")))
        assert ended.signal == signal.SIGKILL
        stage.tally.points += 1
        stage.tally.faults += 1
        stage.check_resumed()


def test_a_checkpoint_killed_while_it_replaces_another_is_never_mixed_with_it(
    children: Children, standing: tuple[Stage, State]
) -> None:
    stage, before = standing
    killed(children, stage, before, 20)
    assert stage.tally.resumes >= 20


@pytest.mark.slow
def test_a_checkpoint_killed_anywhere_while_it_replaces_another_is_never_mixed_with_it(
    children: Children, standing: tuple[Stage, State]
) -> None:
    stage, before = standing
    killed(children, stage, before, 10_000)
    assert stage.tally.resumes > 200


def test_power_loss_never_mixes_a_checkpoint_with_the_one_that_it_replaces(
    standing: tuple[Stage, State],
) -> None:
    stage, before = standing
    checked(stage)
    assert stage.tally.points > 100
    make(before, stage.work)
    calls, start = recorded(stage)
    states = list(disk_states(calls, start, mixes=1))
    assert survived(stage, random.Random(11).sample(states, 15)) == 15
