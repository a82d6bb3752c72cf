"""A prepared model trained in one process, or in each of several."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeropoint.models import calibrate, prepare
from zeropoint.recipes import Assignment, Recipe, Rule

GIVES = Assignment.of(weight="int4:channel:scale=float64", input="int8:tensor:scale=float64 static")


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(16, 2, 6, 6, generator=generator, dtype=torch.float64),
        torch.randint(0, 5, (16,), generator=generator),
    )


def prepared(seed: int) -> nn.Module:
    """Return a small network in float64 with learned scales of weights and inputs, and tied weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8),
        nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5),
    ).double()  # fmt: skip
    model[7].weight = model[5].weight
    recipe = Recipe(rules=(Rule(types=("Linear", "Conv2d"), gives=GIVES),))
    return prepare(model, recipe, qat="lsq", calibration=calibrate(model, recipe, [images()[0]]))


def train(model: nn.Module, share: slice) -> None:
    """Take three steps on the rows ``share`` of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = images()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[share]), y[share]).backward()
        optimizer.step()


def run_process(rank: int, folder: str) -> None:
    """Train as process ``rank`` of two, from a start of its own, and write the state."""
    torch.set_num_threads(1)
    model = prepared(seed=rank)
    # After calibration, which would merge what the processes saw.
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    train(DistributedDataParallel(model), slice(rank * 8, rank * 8 + 8))
    torch.save(model.state_dict(), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
