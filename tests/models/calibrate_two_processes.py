"""What each of two processes runs in test_calibrate_processes.py."""

from pathlib import Path

import torch
from torch import distributed, nn

from zeropoint.models import calibrate
from zeropoint.models.sequential import calibrate_sequential
from zeropoint.recipes import parse_recipe

RECIPE = parse_recipe(
    "rules: [{type: Linear, weight: int8:channel:narrow, input: 'int8:channel-1 static', "
    "output: uint8:tensor:asym static}]"
)
STATISTICS = ("minmax", "moving_average:0.25", "percentile:99", "mse", "absolute_mean")


def model() -> nn.Sequential:
    """Return a model whose weights are small whole numbers, so that its products are exact in any order."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    )
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -3, 3)
        parameter.data.round_()
    return net


def batches() -> list[torch.Tensor]:
    """Return the whole data, in whole numbers, of which one is no number."""
    x = torch.randn(5, 7, 8, generator=torch.Generator().manual_seed(1)).mul(4).round()
    x[3, 5, 0] = torch.nan
    return list(x)


def share(batch: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the rows of a batch that a process sees."""
    return batch[:3] if rank == 0 else batch[3:]


def work(rank: int, folder: str) -> None:
    """Calibrate on one share of each batch and save what was learned, for each statistic."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        data = [share(batch, rank) for batch in batches()]
        found = {name: calibrate(model(), RECIPE, data, statistic=name) for name in STATISTICS}
        steps = {name: calibrate_sequential(model(), RECIPE, data, statistic=name) for name in STATISTICS}
        torch.save({"whole": found, "steps": steps}, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()
