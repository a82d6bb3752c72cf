"""Train a small network for handwritten digits, then fine-tune it with few-bit weights, and compare.

    python examples/digits.py

The digits come with scikit-learn; nothing is downloaded. Weights have one scale an output channel. "Rounded"
quantizes the trained float network and stops there; "trained" goes on training through the quantizers, with
scales taken from the weights once an epoch (int4), or learned with them (int2, LSQ). The accuracy is that of
a network whose weights were quantized and dequantized, as an engine would do. It takes less than a minute,
and prints the same numbers on every run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

import zeropoint as zp
from zeropoint.training import FakeQuantize, LearnedScale, Quantizer

FLOAT_EPOCHS, QUANTIZED_EPOCHS, BATCH = 30, 15, 64
LAYERS = ("0", "2", "5")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Images (n, 1, 8, 8) in 0..1 and their digits, to train on and to judge by."""

    images: torch.Tensor
    digits: torch.Tensor
    test_images: torch.Tensor
    test_digits: torch.Tensor


def load() -> Data:
    """Return the 1,797 digits of scikit-learn, every fourth to judge by."""
    images, digits = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(digits)
    test = torch.arange(len(y)) % 4 == 0
    return Data(images=x[~test], digits=y[~test], test_images=x[test], test_digits=y[test])


def network() -> torch.nn.Sequential:
    """Return two convolutions and a linear layer, of 3,818 parameters in all."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2, padding=1), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(256, 10),
    )  # fmt: skip


def train(model: torch.nn.Module, data: Data, epochs: int, each_epoch: Callable[[], None]) -> None:
    """Train every parameter of ``model`` with Adam; learning rates fall to zero along a cosine."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        each_epoch()
        for pick in torch.randperm(len(data.digits), generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(data.images[pick]), data.digits[pick]).backward()
            optimizer.step()
        schedule.step()


def accuracy(model: torch.nn.Module, data: Data) -> float:
    """Return the share of test images whose digit is found."""
    with torch.no_grad():
        return (model(data.test_images).argmax(1) == data.test_digits).double().mean().item()


def deployed(model: torch.nn.Sequential, weights: dict[str, zp.QuantizedTensor]) -> torch.nn.Sequential:
    """Return a float network with the biases of ``model`` and the weights that the codes stand for."""
    plain = network()
    for name in LAYERS:
        layer = plain.get_submodule(name)
        layer.bias.data.copy_(model.get_submodule(name).bias.detach())
        layer.weight.data.copy_(weights[name].dequantize())
    return plain


def rounded(trained: torch.nn.Sequential, scheme: str) -> torch.nn.Sequential:
    """Return the trained network with its weights quantized, and no further training."""
    weights = {name: zp.quantize(trained.get_submodule(name).weight, scheme) for name in LAYERS}
    return deployed(trained, weights)


def fine_tuned(
    trained: torch.nn.Sequential, data: Data, make: Callable[[torch.Tensor], Quantizer]
) -> torch.nn.Sequential:
    """Return the network trained on with a quantizer on each weight, as it is deployed."""
    model = copy.deepcopy(trained)
    quantizers = {name: make(model.get_submodule(name).weight.detach()) for name in LAYERS}
    for name, quantizer in quantizers.items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", quantizer)

    def originals() -> dict[str, torch.Tensor]:
        return {n: model.get_submodule(n).parametrizations.weight.original.detach() for n in LAYERS}

    def follow_weights() -> None:
        for name, weight in originals().items():
            quantizer = quantizers[name]
            if isinstance(quantizer, FakeQuantize):
                quantizer.update_params(zp.choose_params(weight, quantizer.scheme))

    train(model, data, QUANTIZED_EPOCHS, follow_weights)
    weights = {name: zp.quantize(weight, quantizers[name].params) for name, weight in originals().items()}
    plain = deployed(model, weights)
    with torch.no_grad():
        assert torch.equal(plain(data.test_images), model(data.test_images)), "training sees what is deployed"
    return plain


def main() -> None:
    """Train, quantize, and print one row a network."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, trained = load(), network()
    train(trained, data, FLOAT_EPOCHS, lambda: None)
    rows = [("float32", "", accuracy(trained, data))]
    for scheme, make in (
        ("int4:channel", lambda w: FakeQuantize.from_tensor(w, "int4:channel")),
        ("int2:channel", lambda w: LearnedScale.from_tensor(w, "int2:channel")),
    ):
        rows.append((scheme, "rounded", accuracy(rounded(trained, scheme), data)))
        model = fine_tuned(trained, data, make)
        rows.append((scheme, f"trained with {type(make(torch.ones(1, 1))).__name__}", accuracy(model, data)))
    table = Table("weights", "how", "accuracy")
    for scheme, how, share in rows:
        table.add_row(scheme, how, f"{share:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
