"""Solve a checkpoint on the CPU and on a GPU, and compare: `python benchmarks/gpu_methods.py MODEL DATA`.

MODEL is a folder of Hugging Face, DATA token ids in .safetensors. Each method quantizes the model on both
devices; codes are compared, and both results with the model itself on the tokens of --eval. A forward
pass on a GPU adds in another order, and the CPU rounds factors of float32 to bfloat16 where it multiplies
these, so that inputs of layers differ a little, and codes next to the middle of two numbers with them.

Prints a line for each method: seconds on both, how many codes differ, the largest difference, the loss of
outputs on held-out windows, and the KL divergence of both. `--layers 8` runs the first blocks alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import zeropoint as zp
from zeropoint.checkpoint.plan.limits import available_cores


@dataclass(frozen=True, kw_only=True)
class Side:
    """What a method made on one device: seconds, loss of outputs, KL divergence of the model."""

    device: str
    seconds: float
    loss: float
    kl: float | None

    def __str__(self) -> str:
        kl = "" if self.kl is None else f", KL divergence {self.kl:.5f}"
        return f"{self.device} {self.seconds:.1f} s, loss {self.loss:.4%}{kl}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two devices under one method: how many codes there are, how many differ, and by how much at most."""

    method: str
    sides: tuple[Side, ...]
    codes: int
    different: int
    largest: int

    def __str__(self) -> str:
        differ = f"{self.different:,} of {self.codes:,} codes differ ({self.different / self.codes:.3%})"
        return f"{self.method}: {differ}, by {self.largest} at most; " + "; ".join(map(str, self.sides))


def shortened(model: Path, layers: int, out: Path) -> Path:
    """Return a copy of a model that has its first blocks alone; the model itself for 0."""
    if not layers:
        return model
    out.mkdir()
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    kept = {
        name: tensor
        for shard in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
        if not (".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= layers)
    }
    kept = {name: tensor for name, tensor in kept.items() if tensor.is_floating_point()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def ids_of(file: Path) -> torch.Tensor:
    """Return the token ids of a .safetensors file with one tensor, in a row."""
    (ids,) = load_file(file).values()
    return ids.reshape(-1)


def windows_of(file: Path, windows: int, length: int) -> torch.Tensor:
    """Return the first windows of a file of token ids."""
    ids = ids_of(file)
    count = min(windows, len(ids) // length)
    return ids[: count * length].reshape(count, length)


def codes(folder: Path) -> dict[str, torch.Tensor]:
    """Return the codes of all quantized weights as integers, by name."""
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, words in load_file(shard).items():
            if name.endswith("weight_packed"):
                spread = words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)
                found[name] = spread.bitwise_and(15)
    return found


def losses(result: zp.RunResult) -> float:
    """Return the mean loss of outputs on held-out windows, a share of their squares."""
    found = [weight["loss"]["held_out"] for weight in result.to_dict()["weights"] if "loss" in weight]
    return statistics.fmean(loss for loss in found if loss is not None)


def quantized(model: Path, out: Path, asked: argparse.Namespace, *, device: str, method: str) -> Side:
    """Return what a method takes on a device, and makes there."""
    start = time.perf_counter()
    result = zp.quantize_checkpoint(
        model, out, asked.to, method=method, device=device, max_memory="32G",
        calibration=windows_of(asked.data, asked.windows, asked.length),
    )  # fmt: skip
    return Side(device=device, seconds=time.perf_counter() - start, loss=losses(result), kl=None)


def compare(model: Path, folder: Path, asked: argparse.Namespace, method: str) -> Comparison:
    """Return what a method makes on both devices, and how far that is apart."""
    outs = [folder / f"{method} {side}" for side in ("first", "second")]
    sides = [
        quantized(model, out, asked, device=device, method=method)
        for out, device in zip(outs, ("cpu", asked.device), strict=True)
    ]
    own, other = map(codes, outs)
    apart = [(x - other[name]).abs() for name, x in own.items()]
    if asked.eval is not None:
        text = folder / "eval.safetensors"
        save_file({"input_ids": ids_of(asked.eval)}, text)
        measured = zp.evaluate_checkpoint(
            outs, model, text, context=asked.length, windows=asked.scored, continuations=0,
            noise_floor=False, device=asked.device, max_memory="32G",
        )  # fmt: skip
        found = [each.statistics["Mean KLD"].value for each in measured.models]
        sides = [replace(side, kl=kl) for side, kl in zip(sides, found, strict=True)]
    return Comparison(
        method=method, sides=tuple(sides), codes=sum(x.numel() for x in apart),
        different=sum(int((x != 0).sum()) for x in apart), largest=max(int(x.max()) for x in apart),
    )  # fmt: skip


def main() -> None:
    """Run all methods."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--eval", type=Path, help="token ids to measure both results on")
    parser.add_argument("--methods", default="gptq,shift+gptq")
    parser.add_argument("--to", default="int4:g64", help="a scheme of four bits")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=0, help="the first blocks of the model; 0 for all")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--scored", type=int, default=8, help="windows of --eval")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.device != "cpu" and not torch.cuda.is_available():
        sys.exit("no GPU; --device cpu compares the processor with itself")
    print(f"{available_cores()} cores, {asked.device}", end="")
    print(f" ({torch.cuda.get_device_name(asked.device)})" if asked.device.startswith("cuda") else "")
    with tempfile.TemporaryDirectory() as folder:
        model = shortened(asked.model, asked.layers, Path(folder) / "model")
        rows = []
        for method in asked.methods.split(","):
            rows.append(compare(model, Path(folder), asked, method))
            print(rows[-1], flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
