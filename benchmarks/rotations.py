"""What block Hadamard rotations of weights are worth: `python benchmarks/rotations.py [--model FOLDER]`.

Each scheme quantizes 256 rows of 1,536 numbers of a normal distribution, Laplace's and Student's t (5 degrees
of freedom), eight times from other seeds, without and with rotations of several sizes; printed is the squared
error over the squares, times 1000, with the standard error of the mean.

With `--model` (a folder of float weights with a tokenizer) and `--text`, all matrices of its blocks are
replaced by what their codes decode to, rotated back, and the result is compared with the model by
`zp.evaluate_checkpoint`: what a layer that rotates its inputs computes, up to rounding in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from facts import machine, record
from safetensors.torch import load_file, save_file

import zeropoint as zp
from zeropoint.methods import method_named

SCHEMES = ("int4:g128", "int3:g64", "nvfp4", "mxfp4")
METHODS = ("nearest", "hadamard32", "hadamard", "hadamard512", "mse", "hadamard+mse")
OF_MODELS = ("nearest", "hadamard", "mse", "hadamard+mse")
DRAWS, SHAPE = 8, (256, 1536)
STATISTICS = ("Mean KLD", "Mean ln(PPL(Q)/PPL(base))", "99.9% KLD", "Same top p")


def drawn(name: str, seed: int) -> torch.Tensor:
    """Return numbers of a distribution."""
    torch.manual_seed(seed)
    if name == "normal":
        return torch.randn(SHAPE)
    if name == "Laplace":
        return torch.distributions.Laplace(0.0, 1.0).sample(SHAPE)
    return torch.distributions.StudentT(5.0).sample(SHAPE)


def error(x: torch.Tensor, scheme: str, method: str) -> float:
    """Return the squared error over the squares, times 1000."""
    values = method_named(method).quantize(x, zp.Scheme.parse(scheme)).dequantize().double()
    return float((values - x.double()).square().sum() / x.double().square().sum()) * 1000


def of_numbers() -> list[dict[str, object]]:
    """Return mean errors and their standard errors."""
    rows: list[dict[str, object]] = []
    for scheme in SCHEMES:
        for method in METHODS:
            row: dict[str, object] = {"scheme": scheme, "method": method}
            for name in ("normal", "Laplace", "t(5)"):
                found = torch.tensor([error(drawn(name, seed), scheme, method) for seed in range(DRAWS)])
                row[name] = {"value": float(found.mean()), "error": float(found.std() / DRAWS**0.5)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def replaced(source: Path, folder: Path, scheme: str, method: str) -> float:
    """Write a model with the matrices of its blocks decoded from codes; return their squared error."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "zeropoint_manifest.json"))
    parsed, chosen, off, size = zp.Scheme.parse(scheme), method_named(method), 0.0, 0.0
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and ".layers." in name:
                weight = tensor.float()
                values = chosen.quantize(weight, parsed).dequantize()
                off += float((values.double() - weight.double()).square().sum())
                size += float(weight.double().square().sum())
                tensors[name] = values
            else:
                tensors[name] = tensor.float()
        save_file(tensors, folder / path.name, {"format": "pt"})
    return 1000 * off / size


def of_model(source: Path, text: Path, windows: int, work: Path) -> list[dict[str, object]]:
    """Return divergences from the float model."""
    rows: list[dict[str, object]] = []
    for scheme in SCHEMES:
        for method in OF_MODELS:
            if scheme == "mxfp4" and method.endswith("mse"):
                continue
            squares = replaced(source, work / "out", scheme, method)
            found = zp.evaluate_checkpoint(
                work / "out", source, text, context=512, windows=windows, continuations=0,
                cache=work / "reference.safetensors", noise_floor=False, max_memory=4 << 30,
            )  # fmt: skip
            statistics = found.models[-1].statistics
            row: dict[str, object] = {"scheme": scheme, "method": method, "squared error": squares}
            for name in STATISTICS:
                row[name] = {"value": statistics[name].value, "error": statistics[name].error}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=None, help="folder of float weights")
    parser.add_argument("--text", type=Path, default=None, help="text to evaluate on, UTF-8")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--work", type=Path, default=None, help="folder for models, kept")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.model is None:
        record(args.json, machine(), rows=of_numbers())
        return
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        record(args.json, machine(), rows=of_model(args.model, args.text, args.windows, work))


if __name__ == "__main__":
    main()
