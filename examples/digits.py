"""Train a small network for handwritten digits, quantize it to few bits, and compare, over several seeds.

    python examples/digits.py [SEEDS [FLOAT_EPOCHS [QUANTIZED_EPOCHS]]]

The digits come with scikit-learn; nothing is downloaded. A network is trained in float; "rounded" quantizes
it, with ranges that calibration saw, and stops there; "LSQ" and "TQT" continue training through the
quantizers, whose scales or thresholds are learned. What is judged is each model as it ships, with weights in
packed codes. Models of the first seed are exported too, and onnxruntime must find the same digits. It all
takes two to three minutes on one core, and the same machine prints the same numbers again. Needs
zeropoint[onnx].
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import dataclass

import onnxruntime
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

import zeropoint as zp
from zeropoint.export.onnx import export_onnx
from zeropoint.models import QAT_CONFIGS, QATConfig, convert, prepare
from zeropoint.recipes import Assignment, Recipe, Rule
from zeropoint.training import LearnedScale, Quantizer

SEEDS, FLOAT_EPOCHS, QUANTIZED_EPOCHS, BATCH = 5, 30, 15, 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: the schemes of weights and inputs, how their scales come about, and who learns.

    rate: learning rate of what quantizers learn. Thresholds move on the scale of log2 and take TQT's 1e-2.
    """

    weight: str
    input: str
    how: str = "rounded"
    qat: QATConfig | None = None
    rate: float = 3e-3

    @property
    def recipe(self) -> Recipe:
        """Give the schemes to every convolution and linear layer."""
        gives = Assignment.of(weight=self.weight, input=f"{self.input} static")
        return Recipe(rules=(Rule(types=("Conv2d", "Linear"), gives=gives),))


# LSQ for the weights, while inputs keep the scales of calibration. Adam moves a scale by its learning rate at
# each step, whatever the gradient, and those of 8-bit inputs are about as small.
LSQ_WEIGHTS = QATConfig(weight=LearnedScale.from_tensor)
CASES = (
    Case(weight="int8:channel", input="uint8:tensor"),
    Case(weight="int4:channel", input="uint4:tensor"),
    Case(weight="int4:channel", input="uint4:tensor", how="LSQ", qat=QAT_CONFIGS["lsq"]),
    Case(weight="int2:channel", input="uint8:tensor"),
    Case(weight="int2:channel", input="uint8:tensor", how="LSQ", qat=LSQ_WEIGHTS),
    Case(weight="int2:channel", input="uint8:tensor", how="TQT", qat=QAT_CONFIGS["tqt"], rate=1e-2),
)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Images (n, 1, 8, 8) in 0..1 and their digits, to train on and to judge by."""

    images: torch.Tensor
    digits: torch.Tensor
    test_images: torch.Tensor
    test_digits: torch.Tensor


def load() -> Data:
    """Return the 1,797 digits of scikit-learn, every fourth to judge by."""
    from sklearn.datasets import load_digits  # which takes seconds, and only the data needs

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


def train(model: torch.nn.Module, data: Data, epochs: int, *, seed: int, rate: float = 0.0) -> None:
    """Train ``model`` with Adam, what quantizers learn at ``rate``; rates fall to zero along a cosine."""
    learned = [p for m in model.modules() if isinstance(m, Quantizer) for p in m.parameters()]
    known = {id(p) for p in learned}
    groups = [{"params": [p for p in model.parameters() if id(p) not in known], "lr": 3e-3}]
    if learned:
        groups.append({"params": learned, "lr": rate})
    optimizer = torch.optim.Adam(groups)
    steps = epochs * -(-len(data.digits) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for pick in torch.randperm(len(data.digits), generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(data.images[pick]), data.digits[pick]).backward()
            optimizer.step()
            schedule.step()


def trained(data: Data, epochs: int, *, seed: int) -> torch.nn.Module:
    """Return a network trained in float."""
    torch.manual_seed(seed)
    model = network()
    train(model, data, epochs, seed=seed)
    return model.eval()


def quantized(model: torch.nn.Module, data: Data, case: Case, epochs: int, *, seed: int) -> torch.nn.Module:
    """Return ``model`` with packed weights, after training through its quantizers where they learn."""
    calibration = zp.calibrate(model, case.recipe, data.images.split(BATCH))
    prepared = prepare(model, case.recipe, qat=case.qat or "fixed", calibration=calibration)
    if case.qat is not None:
        train(prepared, data, epochs, seed=seed, rate=case.rate)
    shipped = convert(prepared).model.eval()
    assert torch.equal(predictions(shipped, data), predictions(prepared, data)), "what trains is what ships"
    return shipped


def predictions(model: torch.nn.Module, data: Data) -> torch.Tensor:
    """Return the digit that ``model`` sees in each image to judge by."""
    with torch.no_grad():
        return model(data.test_images).argmax(1)


def accuracy(model: torch.nn.Module, data: Data) -> float:
    """Return the percentage of digits that are found."""
    return 100 * (predictions(model, data) == data.test_digits).double().mean().item()


def same_in_onnxruntime(model: torch.nn.Module, data: Data) -> int:
    """Return for how many images onnxruntime finds the digit that ``model`` finds."""
    options = onnxruntime.SessionOptions()
    # Otherwise it rounds biases to the product of scales, and takes integer convolutions, whose sums saturate
    # on processors without VNNI; with this it computes what the file says.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    with tempfile.TemporaryDirectory() as folder:
        batch = ({0: torch.export.Dim.DYNAMIC},)
        path = export_onnx(model, (data.test_images,), f"{folder}/digits.onnx", dynamic_shapes=batch)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {session.get_inputs()[0].name: data.test_images.numpy()})
    return int((torch.from_numpy(result).argmax(1) == predictions(model, data)).sum())


def models(data: Data, *, seed: int, float_epochs: int, epochs: int) -> list[torch.nn.Module]:
    """Return a network trained in float, and one for each case."""
    model = trained(data, float_epochs, seed=seed)
    return [model, *(quantized(model, data, case, epochs, seed=seed) for case in CASES)]


def names() -> list[tuple[str, str, str]]:
    """Return weights, inputs and method of each row."""
    return [("float32", "float32", ""), *((case.weight, case.input, case.how) for case in CASES)]


def table(rows: list[list[float]], same: list[str]) -> Table:
    """Return a row for each of :func:`models`: accuracies over the seeds, and how onnxruntime agrees."""
    titles = ("Weights", "Inputs", "How", "Accuracy, %", "Least", "From float", "Same in onnxruntime")
    result = Table(*titles, box=MARKDOWN)
    base = statistics.mean(rows[0])
    for name, row, count in zip(names(), rows, same, strict=True):
        mean, spread = statistics.mean(row), statistics.stdev(row) if len(row) > 1 else 0.0
        result.add_row(*name, f"{mean:.2f} ± {spread:.2f}", f"{min(row):.2f}", f"{mean - base:+.2f}", count)
    return result


def main(seeds: int = SEEDS, float_epochs: int = FLOAT_EPOCHS, epochs: int = QUANTIZED_EPOCHS) -> None:
    """Train and quantize networks of as many seeds, and print one row for each way."""
    torch.set_num_threads(1)
    data, rows, same = load(), [[] for _ in names()], [""]
    for seed in range(seeds):
        made = models(data, seed=seed, float_epochs=float_epochs, epochs=epochs)
        for row, model in zip(rows, made, strict=True):
            row.append(accuracy(model, data))
        if seed == 0:
            total = len(data.test_digits)
            same += [f"{same_in_onnxruntime(model, data)} of {total}" for model in made[1:]]
    Console(width=110).print(table(rows, same))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
