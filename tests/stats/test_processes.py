from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.processes import run_two
from tests.stats import two_processes
from tests.stats.states import assert_same
from tests.stats.two_processes import STATISTICS, batches, share

from zeropoint.stats import MovingAverage, Observer, State

pytestmark = pytest.mark.rotating

Saved = list[dict[str, list[State]]]


def run(work: Callable[[int, str], None], folder: Path) -> Saved:
    """Return what each of two processes saved."""
    run_two(work, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return run(two_processes.calibrate, tmp_path_factory.mktemp("together"))


def test_two_processes_learn_what_one_learns_from_the_same_data(together: Saved) -> None:
    for index, statistic in enumerate(STATISTICS):
        alone = Observer(statistic)
        for batch in batches():
            alone(batch)
        scheme = "int8" if statistic.grid == (1,) else "int8:channel-1"
        for process in together:
            state = process["states"][index]
            assert_same(state, alone.state())
            assert statistic.params(state, scheme) == alone.params(scheme)


def test_an_observer_in_a_parallel_model_is_the_same_in_every_process(together: Saved) -> None:
    models: list[State] = [process["model"] for process in together]  # type: ignore[misc]
    assert_same(*models)
    assert int(models[0]["1.seen"]) == 2 * 11 * 6


def test_states_that_were_taken_apart_are_gathered_once(tmp_path: Path) -> None:
    saved = run(two_processes.calibrate_apart, tmp_path)
    for index, statistic in enumerate(STATISTICS):
        whole = statistic.start()
        for rank in (0, 1):
            own = statistic.start()
            for batch in batches()[: 3 + rank]:
                own = statistic.update(own, share(batch, rank))
            assert_same(saved[rank]["own"][index], own)
            whole = statistic.merge(whole, own)
        for process in saved:
            assert_same(process["states"][index], whole)
        if not isinstance(statistic, MovingAverage):
            alone = statistic.start()
            for batch in (*batches()[:3], share(batches()[3], 1)):
                alone = statistic.update(alone, batch)
            assert_same(whole, alone)
