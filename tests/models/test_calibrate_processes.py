"""Two processes that share each batch learn the parameters of one, exactly."""

from pathlib import Path

import pytest
import torch
from tests.models.calibrate_two_processes import RECIPE, STATISTICS, batches, model, work
from tests.processes import run_two

from zeropoint.models import Calibration, calibrate

pytestmark = pytest.mark.rotating

Saved = list[dict[str, dict[str, Calibration]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("together")
    run_two(work, str(folder))
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", STATISTICS)
def test_two_processes_give_the_parameters_of_one(saved: Saved, name: str) -> None:
    alone = calibrate(model(), RECIPE, batches(), statistic=name)
    assert len(alone.params) == 6
    for process in saved:
        assert process["whole"][name] == alone


@pytest.mark.parametrize("name", STATISTICS)
def test_so_do_they_block_by_block(saved: Saved, name: str) -> None:
    for process in saved:
        assert process["steps"][name] == process["whole"][name]


def test_one_share_alone_gives_others() -> None:
    part = [batch[:3] for batch in batches()]
    alone = calibrate(model(), RECIPE, batches())
    assert calibrate(model(), RECIPE, part).params["0.input"] != alone.params["0.input"]
