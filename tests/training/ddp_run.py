"""A small training run with quantizers in it, alone or as one of several processes."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import linear, mse_loss
from torch.nn.parallel import DistributedDataParallel

import zeropoint as zp
from zeropoint.training import FakeQuantize, LearnedScale, LearnedThreshold, Pact

STEPS = 4


class Network(torch.nn.Module):
    """Two linear layers whose weights and activations pass through every kind of quantizer, in float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first, second = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((32, 64), (5, 32))
        )
        self.first, self.second = torch.nn.Parameter(first / 8), torch.nn.Parameter(second / 6)
        self.inputs = LearnedThreshold("int8:tensor:scale=float64", 4.0, dtype=torch.float64)
        self.weights = LearnedScale(zp.choose_params(first / 8, "int4:channel:scale=float64"))
        self.offsets = LearnedScale(zp.choose_params(second / 6, "uint4:g16:asym=real:scale=float64"))
        self.middle = Pact("uint4:tensor:scale=float64", 2.0, dtype=torch.float64)
        self.fixed = torch.nn.ModuleList(
            FakeQuantize.from_tensor(torch.ones(1, 5, dtype=torch.float64) * (8 + seed), scheme)
            for scheme in (
                "uint8:tensor:asym",
                "int8_mx:tensor:scale=floor",
                "int8:tensor:scale=ue4m3:scale2=float32@tensor",
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(linear(self.inputs(x), self.weights(self.first)))
        y = linear(hidden, self.offsets(self.second))
        for quantizer in self.fixed:
            y = quantizer(y)
        return y


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    made = torch.randn((count, 16, 69), generator=generator, dtype=torch.float64)
    return [(part[:, :64], part[:, 64:] * 3 + 2) for part in made]


def train(model: torch.nn.Module, share: slice) -> None:
    """Take STEPS steps on the rows ``share`` of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x[share]), y[share]).backward()
        optimizer.step()


class DyadicNetwork(torch.nn.Module):
    """Numbers of few bits throughout, in float32, so that no sum is rounded, in whatever order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first, second = (
            torch.randint(-40, 41, shape, generator=generator) / 16 for shape in ((12, 8), (3, 12))
        )
        self.first, self.second = torch.nn.Parameter(first), torch.nn.Parameter(second)
        self.weights = LearnedScale(zp.QuantizationParams.new(0.25, 0, "int4:tensor"))
        self.offsets = LearnedScale(
            zp.QuantizationParams(
                scheme=zp.Scheme.parse("uint4:tensor:asym=real"),
                shape=(1,),
                scales=(torch.tensor([0.25]),),
                zero_point=torch.tensor([7.0]),
            )
        )
        self.middle = Pact("uint4:tensor", 7.5)
        self.fixed = FakeQuantize(zp.QuantizationParams.new(0.5, 100, "uint8:tensor:asym"))
        # LSQ's own factors, roots of counts, would round.
        self.weights.factor, self.offsets.factor = 0.25, 0.125

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(linear(x, self.weights(self.first)))
        return self.fixed(linear(hidden, self.offsets(self.second)))


def train_dyadic(model: torch.nn.Module, share: slice) -> None:
    """Take one step on the rows ``share`` of a batch of 16; the loss is a mean over rows."""
    generator = torch.Generator().manual_seed(9)
    x, y = (torch.randint(-8, 9, (16, width), generator=generator)[share] / 4 for width in (8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    ((model(x) * y).sum() / len(y)).backward()
    optimizer.step()


def run_process(rank: int, count: int, folder: str) -> None:
    """Train as process ``rank`` of ``count``, from a start of its own, and write the states of the models."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    share = slice(rank * 16 // count, (rank + 1) * 16 // count)
    # Another seed in each process: the parameters and buffers of the first must reach the others.
    for kind, training in ((Network, train), (DyadicNetwork, train_dyadic)):
        network = kind(seed=rank)
        training(DistributedDataParallel(network), share)
        torch.save(network.state_dict(), Path(folder) / f"{kind.__name__}{rank}.pt")
    dist.destroy_process_group()
