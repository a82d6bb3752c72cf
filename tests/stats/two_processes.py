"""What each of two processes does in the tests of distributed calibration."""

from pathlib import Path

import torch
from tests.stats.every_statistic import ALL, CHANNELS
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from zeropoint.stats import Observer

STATISTICS = (*ALL, *CHANNELS)


def batches() -> list[torch.Tensor]:
    """Return the whole data in batches of an odd size, one of which holds numbers that are not finite."""
    x = torch.randn(4, 11, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6)
    x[2, 3] = torch.nan
    return list(x)


def share(batch: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of a batch that a process sees: the first gets 3 rows, the second the others."""
    return batch[:3] if rank == 0 else batch[3:]


def calibrate(rank: int, folder: str) -> None:
    """Observe one share of each batch and save the states."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        every = [Observer(statistic) for statistic in STATISTICS]
        for observer in every:
            first, *others = (share(batch, rank) for batch in batches())
            observer(first)
            observer.update_all(others)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), Observer(STATISTICS[0]))
        torch.manual_seed(1)
        torch.nn.init.normal_(model[0].weight)
        parallel = DistributedDataParallel(model)
        for batch in batches()[:2]:
            parallel(share(batch, rank)).sum().backward()
        torch.save(
            {"states": [o.state() for o in every], "model": model.state_dict()}, Path(folder) / f"{rank}.pt"
        )
    finally:
        distributed.destroy_process_group()


def calibrate_apart(rank: int, folder: str) -> None:
    """Observe shares without the other process, then gather."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        every = [Observer(statistic, shared=False) for statistic in STATISTICS]
        for observer in every:
            # One process alone sees the last batch, as in a pipeline.
            for batch in batches()[: 3 + rank]:
                observer(share(batch, rank))
        states = [observer.gathered().state() for observer in every]
        torch.save({"states": states, "own": [o.state() for o in every]}, Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()
