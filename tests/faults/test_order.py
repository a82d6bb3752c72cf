"""Neither the number of threads, nor their pace, nor the size of units and tiles changes a byte."""

import time
from typing import Any

import pytest
from tests.faults.calls import Layer, pauses
from tests.faults.stage import Stage, digests

from zeropoint.checkpoint.run.commit import Commit
from zeropoint.cli.main import main

pytestmark = pytest.mark.rotating


def delayed(stage: Stage, workers: int, seed: int, *, plant: str | None = None) -> None:
    """Run with a random pause in front of each call."""
    stage.clear()
    stage.options = ("--workers", str(workers))
    ran = stage.run_under(Layer(root=stage.work, before=pauses(seed)), plant=plant)
    assert ran.status == 0, ran.err
    stage.tally.points += 1
    stage.check_complete()


@pytest.mark.parametrize("workers", [1, 2, 7, 8])
def test_threads_at_any_pace_write_the_same_bytes(stage: Stage, workers: int) -> None:
    delayed(stage, workers, seed=workers)
    assert stage.tally.compared == stage.golden_bytes


def test_a_scale_that_does_not_wait_for_its_set_is_found_out(stage: Stage) -> None:
    with pytest.raises(AssertionError, match="I3"):
        delayed(stage, 2, seed=1, plant="hasty")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8])
def test_threads_at_many_paces_write_the_same_bytes(stage: Stage, workers: int) -> None:
    for seed in range(20):
        delayed(stage, workers, seed=100 * workers + seed)
    assert stage.tally.compared == 20 * stage.golden_bytes


def test_a_disk_that_takes_its_time_leaves_the_number_of_calls_as_it_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or suites that count the calls of one run, and disturb one of another, would miss the last ones."""
    _, quick = stage.run()
    write = Commit._write

    def slow(self: Commit, *given: Any) -> None:
        time.sleep(0.05)
        write(self, *given)

    monkeypatch.setattr(Commit, "_write", slow)
    stage.clear()
    assert len(stage.run()[1].calls) == len(quick.calls) > 300


def test_units_and_tiles_of_any_size_write_the_same_weights(stage: Stage) -> None:
    assert main([*stage.arguments, "--json"]) == 0
    written = digests(stage.out)
    same = {name for name in written if written[name] == stage.golden[name]}
    # The manifest says which parts were written as one.
    assert written.keys() - same == {"zeropoint_manifest.json"}
